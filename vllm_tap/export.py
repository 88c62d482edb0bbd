"""A capture as files that other tools read: decoded float32, written in blocks, so that its size never matters.

The arrays are named as in slices over HTTP: ``site.layer`` float32 ``[rows, width]`` for each, and ``positions`` and
``token_ids`` uint32 ``[rows]``. Rows are the positions that every chosen site and layer has; the manifest that goes
with them names the others. npz and safetensors hold all of it in one file, npy is a folder with a file for each array.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from schemas.errors import NotFoundError, SpecError, StoreError, TapError
from schemas.manifest import Manifest
from schemas.reader import Slice, StoreReader
from schemas.sites import parse_site
from schemas.spec import intervals

__all__ = ["FORMATS", "export"]

_BLOCK_BYTES: Final = 64 << 20
_SAFETENSORS: Final = {"float32": "F32", "uint32": "U32"}
_SLICE: Final = re.compile(r"(-?[0-9]*):(-?[0-9]*)(?::(-?[0-9]+))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class _Array:
    """One array of the export: its bytes come in C order from ``blocks()``."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    blocks: Callable[[], Iterator[npt.NDArray[Any]]]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def export(store: Path, ref: str, format: str = "npz", out: Path | None = None, sites: str | None = None,
           layers: str = "all", force: bool = False) -> list[Path]:
    """Writes the capture and returns the paths written.

    ``sites`` is comma-separated, ``layers`` is "all", "0,4" or "::4". Raises NotFoundError or SpecError for a capture,
    site or layer that is not there, TapError where ``out`` exists and not ``force``.
    """
    if format not in FORMATS:
        raise TapError(f"--format = {format!r}: valid are {', '.join(FORMATS)}")
    with StoreReader(store) as reader:
        manifest = reader.manifest(ref)
        target = out if out is not None else Path(manifest.id if format == "npy" else f"{manifest.id}.{format}")
        if target.exists() and not force:
            raise TapError(f"--out = {str(target)!r}: exists already; name another or add --force")
        chosen = _choose(manifest, sites, layers)
        if not chosen:
            raise NotFoundError(f"capture {manifest.id} is {manifest.status} and holds no rows to export")
        try:
            return FORMATS[format](target, _arrays(reader, manifest, chosen), msgspec.json.encode(manifest))
        except OSError as error:
            raise TapError(f"--out = {str(target)!r}: {error}") from None


def choose_layers(text: str, captured: list[int]) -> list[int]:
    """The layers of "all", "0,4,8" or "start:stop:step" that were captured; SpecError where one was not."""
    if text.strip() == "all":
        return captured
    if match := _SLICE.fullmatch(text.strip()):
        if match[3] is not None and int(match[3]) == 0:
            raise SpecError("layers", text, "a step of 0 goes nowhere")
        start, stop, step = (int(part) if part else None for part in match.groups())
        wanted = list(range(max(captured, default=0) + 1)[slice(start, stop, step)])
        return [layer for layer in wanted if layer in captured]
    try:
        wanted = [int(part) for part in text.split(",")]
    except ValueError:
        raise SpecError("layers", text, 'valid: "all", "0,4,8" or "start:stop:step"') from None
    if absent := [layer for layer in wanted if layer not in captured]:
        raise SpecError("layers", absent, f"not captured; captured: {captured}")
    return wanted


def _choose(manifest: Manifest, sites: str | None, layers: str) -> dict[str, list[int]]:
    captured: dict[str, list[int]] = {}
    for row in manifest.rows:
        captured.setdefault(row.site, []).append(row.layer)
    chosen: dict[str, list[int]] = {}
    for name in captured if sites is None else [part.strip() for part in sites.split(",")]:
        site, fixed = parse_site(name)
        if site not in captured:
            raise SpecError("sites", name, f"not captured; captured: {', '.join(captured) or 'nothing'}")
        more = choose_layers(layers if fixed is None else str(fixed), captured[site])
        chosen[site] = sorted({*chosen.get(site, []), *more})
    return {site: found for site, found in chosen.items() if found}


def _arrays(reader: StoreReader, manifest: Manifest, chosen: dict[str, list[int]]) -> list[_Array]:
    positions = _common_positions(manifest, chosen)
    widths = {info.site: info.decoded_width for info in manifest.sites}

    def parts(site: str, layer: int) -> Iterator[tuple[Slice, npt.NDArray[np.bool_]]]:
        """Slices that hold the positions, a block at a time, and which of their rows those are."""
        rows = max(1, _BLOCK_BYTES // max(1, 4 * widths[site]))
        for first in range(0, len(positions), rows):
            block = positions[first:first + rows]
            part = reader.slice(manifest.id, site, [layer], int(block[0]), int(block[-1]) + 1)
            kept = np.isin(part.positions, block)
            if int(kept.sum()) != len(block):
                raise StoreError("export", reader.path, f"rows of {site}.{layer} went away while they were read",
                                 "was the capture deleted?")
            yield part, kept

    def layer_array(site: str, layer: int) -> _Array:
        def blocks() -> Iterator[npt.NDArray[Any]]:
            for part, kept in parts(site, layer):
                yield np.ascontiguousarray(part.values()[0, kept], "<f4")

        return _Array(f"{site}.{layer}", np.dtype("<f4"), (len(positions), widths[site]), blocks)

    tokens = np.array(manifest.prompt_token_ids + manifest.output_token_ids, np.uint32)
    if len(positions) and positions[-1] >= len(tokens):
        # A capture without a finish: only its rows know what was generated.
        site, layers = next(iter(chosen.items()))
        tokens = np.concatenate([part.token_ids[kept] for part, kept in parts(site, layers[0])])
    else:
        tokens = tokens[positions]

    def plain(name: str, values: npt.NDArray[Any]) -> _Array:
        return _Array(name, values.dtype, values.shape, lambda: iter([values]))

    return [
        *(layer_array(site, layer) for site, layers in chosen.items() for layer in layers),
        plain("positions", positions.astype("<u4")),
        plain("token_ids", tokens.astype("<u4")),
    ]


def _common_positions(manifest: Manifest, chosen: dict[str, list[int]]) -> npt.NDArray[np.int64]:
    """Positions that every chosen site and layer has."""
    asked = manifest.resolved["positions"]
    ranges = intervals(asked if isinstance(asked, str) else [(a, b) for a, b in asked], manifest.prompt_len)
    there = np.zeros(manifest.end, bool)
    for start, stop in ranges:
        there[max(start, 0):min(stop, manifest.end)] = True
    for row in manifest.rows:
        if row.layer in chosen.get(row.site, ()):
            for gap in row.missing:
                there[gap.start:gap.stop] = False
    return np.flatnonzero(there)


# ── the formats ─────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file that appears under its name only when it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            yield file
            file.flush()
            Path(file.name).chmod(0o644)
            os.replace(file.name, path)  # noqa: PTH105
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def _npy_header(array: _Array) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array_header_2_0(  # type: ignore[no-untyped-call]
        buffer, {"descr": array.dtype.str, "fortran_order": False, "shape": array.shape})
    return buffer.getvalue()


def _write_npz(path: Path, arrays: list[_Array], manifest: bytes) -> list[Path]:
    text = np.array(manifest.decode())  # a string without pickle: str(np.load(path)["manifest"])
    whole = [*arrays, _Array("manifest", text.dtype, (), lambda: iter([text]))]
    with _replacing(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for array in whole:
            with archive.open(f"{array.name}.npy", "w", force_zip64=True) as member:
                member.write(_npy_header(array))
                for block in array.blocks():
                    member.write(block.tobytes())
    return [path]


def _write_safetensors(path: Path, arrays: list[_Array], manifest: bytes) -> list[Path]:
    header: dict[str, Any] = {"__metadata__": {"manifest": manifest.decode()}}
    offset = 0
    for array in arrays:
        header[array.name] = {"dtype": _SAFETENSORS[array.dtype.name], "shape": array.shape,
                              "data_offsets": [offset, offset := offset + array.nbytes]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with _replacing(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays:
            for block in array.blocks():
                file.write(block.tobytes())
    return [path]


def _write_npy(folder: Path, arrays: list[_Array], manifest: bytes) -> list[Path]:
    if folder.exists() and not folder.is_dir():
        raise TapError(f"--out = {str(folder)!r}: npy writes a folder, and this is a file")
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for array in arrays:
        paths.append(folder / f"{array.name}.npy")
        with _replacing(paths[-1]) as file:
            file.write(_npy_header(array))
            for block in array.blocks():
                shutil.copyfileobj(io.BytesIO(block.tobytes()), file)
    with _replacing(folder / "manifest.json") as file:
        file.write(manifest)
    return [*paths, folder / "manifest.json"]


FORMATS: Final[dict[str, Callable[[Path, list[_Array], bytes], list[Path]]]] = {
    "npz": _write_npz,
    "safetensors": _write_safetensors,
    "npy": _write_npy,
}
