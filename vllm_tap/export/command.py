"""A capture as files that other tools read: decoded float32, written in blocks, so that its size never matters.

The arrays are named as in slices over HTTP: ``site.layer`` float32 ``[rows, width]`` for each, and ``positions`` and
``token_ids`` uint32 ``[rows]``. Rows are the positions that every chosen site and layer has; the manifest that goes
with them names the others. npz and safetensors hold all of it in one file, npy is a folder with a file for each array.
Rows of codecs that project are ``[rows, k]``. npz of a legacy codec is the layout of legacy_export instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from schemas.bucket.reader import Source, open_reader
from schemas.errors import ArgumentError, NotFoundError, TapError
from schemas.manifest import Manifest
from schemas.sites import ask_site, names_of, site_meant
from vllm_tap.export.array_files import FileArray, plain, replacing, write_npy, write_npz
from vllm_tap.export.export_rows import ExportRows
from vllm_tap.export.legacy_export import is_legacy, write_legacy

__all__ = ["FORMATS", "choose", "choose_layers", "export"]

_SAFETENSORS: Final = {"float32": "F32", "uint32": "U32"}
_SLICE: Final = re.compile(r"(-?[0-9]{0,5}):(-?[0-9]{0,5})(?::(-?[0-9]{1,5}))?", re.ASCII)


def export(store: Source, ref: str, format: str = "npz", out: Path | None = None, sites: str | None = None,
           layers: str = "all", force: bool = False) -> list[Path]:
    """Writes the capture and returns the paths written.

    ``sites`` is comma-separated, ``layers`` is "all", "0,4" or "::4". Raises NotFoundError or SpecError for a capture,
    site or layer that is not there, TapError where ``out`` exists and not ``force``.
    """
    if format not in FORMATS:
        raise TapError(f"--format = {format!r}: valid are {', '.join(FORMATS)}")
    with open_reader(store) as reader:
        manifest = reader.manifest(ref)
        chosen = choose(manifest, sites, layers)
        if not chosen:
            raise NotFoundError(f"capture {manifest.id} is {manifest.status} and holds no rows to export")
        rows = ExportRows(reader, manifest, chosen)
        legacy = format == "npz" and is_legacy(rows)
        target = out or Path(manifest.id if format == "npy" or legacy else f"{manifest.id}.{format}")
        if target.is_symlink():  # what it stands for is written, and it stays
            target = target.resolve()
        if target.exists() and not (target.is_file() or target.is_dir()):
            raise TapError(f"--out = {str(target)!r}: is no regular file")
        if target.exists() and not force:
            raise TapError(f"--out = {str(target)!r}: exists already; name another or add --force")
        try:
            if legacy:
                return write_legacy(target, rows)
            return FORMATS[format](target, _arrays(rows), msgspec.json.encode(manifest))
        except OSError as error:
            raise TapError(f"--out = {str(target)!r}: {error}") from None


def choose_layers(text: str, captured: list[int]) -> list[int]:
    """The layers of "all", "0,4,8" or "start:stop:step" that were captured; SpecError where one was not."""
    if text.strip() == "all":
        return captured
    if match := _SLICE.fullmatch(text.strip()):
        if match[3] is not None and int(match[3]) == 0:
            raise ArgumentError("--layers", text, "a step of 0 goes nowhere")
        start, stop, step = (int(part) if part else None for part in match.groups())
        wanted = list(range(max(captured, default=0) + 1)[slice(start, stop, step)])
        if not any(layer in captured for layer in wanted):
            raise ArgumentError("--layers", text, f"none of them was captured; captured: {captured}")
        return [layer for layer in wanted if layer in captured]
    try:
        wanted = [int(part) for part in text.split(",")]
    except ValueError:
        raise ArgumentError("--layers", text, 'valid: "all", "0,4,8" or "start:stop:step"') from None
    if absent := [layer for layer in wanted if layer not in captured]:
        raise ArgumentError("--layers", absent, f"not captured; captured: {captured}")
    return wanted


def choose(manifest: Manifest, sites: str | None, layers: str) -> dict[str, list[int]]:
    """The layers of a capture by site, of those that were asked for; SpecError where one was not captured."""
    captured: dict[str, list[int]] = {}
    for row in manifest.rows:
        captured.setdefault(row.site, []).append(row.layer)
    chosen: dict[str, list[int]] = {}
    for name in captured if sites is None else [part.strip() for part in sites.split(",")]:
        site, fixed = ask_site(name, "--sites", ArgumentError)
        site = site_meant(site, names_of(manifest.engine), name, "--sites", ArgumentError)
        if site not in captured:
            raise ArgumentError("--sites", name, f"not captured; captured: {', '.join(captured) or 'nothing'}")
        more = choose_layers(layers if fixed is None else str(fixed), captured[site])
        chosen[site] = sorted({*chosen.get(site, []), *more})
    return {site: found for site, found in chosen.items() if found}


def _arrays(rows: ExportRows) -> list[FileArray]:
    def layer_array(site: str, layer: int) -> FileArray:
        def blocks() -> Iterator[npt.NDArray[Any]]:
            for part, kept in rows.parts(site, layer):
                yield np.ascontiguousarray(part.values()[0, kept], "<f4")

        shape = (len(rows.positions), rows.site(site).decoded_width)
        return FileArray(f"{site}.{layer}", np.dtype("<f4"), shape, blocks)

    return [
        *(layer_array(site, layer) for site, layers in rows.chosen.items() for layer in layers),
        plain("positions", rows.positions.astype("<u4")),
        plain("token_ids", rows.token_ids.astype("<u4")),
    ]


# ── the formats ─────────────────────────────────────────────────────────────────────────────────────────────────


def _write_npz(path: Path, arrays: list[FileArray], manifest: bytes) -> list[Path]:
    # A string without pickle: str(np.load(path)["manifest"]).
    write_npz(path, [*arrays, plain("manifest", np.array(manifest.decode()))])
    return [path]


def _write_safetensors(path: Path, arrays: list[FileArray], manifest: bytes) -> list[Path]:
    header: dict[str, Any] = {"__metadata__": {"manifest": manifest.decode()}}
    offset = 0
    for array in arrays:
        header[array.name] = {"dtype": _SAFETENSORS[array.dtype.name], "shape": array.shape,
                              "data_offsets": [offset, offset := offset + array.nbytes]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with replacing(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays:
            for block in array.blocks():
                file.write(block.tobytes())
    return [path]


def _write_npy(folder: Path, arrays: list[FileArray], manifest: bytes) -> list[Path]:
    if folder.exists() and not folder.is_dir():
        raise TapError(f"--out = {str(folder)!r}: npy writes a folder, and this is a file")
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for array in arrays:
        paths.append(folder / f"{array.name}.npy")
        with replacing(paths[-1]) as file:
            write_npy(file, array)
    with replacing(folder / "manifest.json") as file:
        file.write(manifest)
    return [*paths, folder / "manifest.json"]


FORMATS: Final[dict[str, Callable[[Path, list[FileArray], bytes], list[Path]]]] = {
    "npz": _write_npz,
    "safetensors": _write_safetensors,
    "npy": _write_npy,
}
