"""``export --format npz`` of the legacy codecs: a folder with one NPZ of codes a layer, and a manifest of that layout.

``seq0_layer3_rank0.npz`` holds ``q`` uint8 ``[tokens, dims]``, and ``scale`` float32 and ``zero`` int32, both
``[tokens, 1]``. They give ``(q - zero.astype(float)) * scale``: the row; of rp8 its projection; of topk8 its entries at
``index``. For topk8 there are ``index``, uint16 or uint32 ``[tokens, dims]``, and ``kept``, the share of the row's
energy in these entries. ``positions`` and ``token_ids`` are uint32 ``[tokens]``. The codec and its parameters are
arrays of one number or text. All load with ``allow_pickle=False``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from schemas.codecs import CODECS
from schemas.codecs.declare import bfloat16_to_float32
from schemas.errors import ArgumentError, TapError
from schemas.manifest import SiteInfo
from schemas.read.reader import Slice
from vllm_tap.export.array_files import plain, replacing, write_npz
from vllm_tap.export.export_rows import ExportRows

__all__ = ["is_legacy", "write_legacy"]

_BITS: Final = 8


def is_legacy(rows: ExportRows) -> bool:
    """Whether every chosen site is stored in a legacy codec, whole rows of it."""
    return all(CODECS[rows.site(site).family].legacy and not rows.site(site).shared_out for site in rows.chosen)


def write_legacy(folder: Path, rows: ExportRows) -> list[Path]:
    """Writes the folder and returns the paths written; SpecError where several sites would have the same names."""
    if len(rows.chosen) > 1:
        raise ArgumentError("--sites", list(rows.chosen), "the layout of the legacy codecs has no place for a site's "
                            "name: export one at a time, or as safetensors")
    if folder.exists() and not folder.is_dir():
        raise TapError(f"--out = {str(folder)!r}: a legacy codec is written as a folder, and this is a file")
    folder.mkdir(parents=True, exist_ok=True)
    (site, layers), = rows.chosen.items()
    paths, described = [], {}
    for layer in layers:
        arrays = _arrays(rows, site, layer)
        paths.append(folder / f"seq0_layer{layer}_rank0.npz")
        write_npz(paths[-1], [plain(name, array) for name, array in arrays.items()])
        described[str(layer)] = {"path": paths[-1].name, "shape": list(arrays["q"].shape)}
    for old in folder.glob("seq0_layer*_rank0.npz"):  # of an export that this one replaces
        if old not in paths:
            old.unlink()
    with replacing(folder / "manifest.json") as file:
        file.write(json.dumps(_manifest(rows, site, described), indent=1).encode())
    return [*paths, folder / "manifest.json"]


def _arrays(rows: ExportRows, site: str, layer: int) -> dict[str, npt.NDArray[Any]]:
    info = rows.site(site)
    stored: dict[str, list[npt.NDArray[Any]]] = {stream["name"]: [] for stream in info.streams}
    for part, kept in rows.parts(site, layer):
        for name, pieces in _numbers(part).items():
            stored[name].append(pieces[0, kept])
    shapes = {stream["name"]: (0, *stream["shape"]) for stream in info.streams}
    arrays = {name: np.concatenate(parts) if parts else np.zeros(shapes[name], np.uint8)
              for name, parts in stored.items()}
    about = {"mode": info.family, "site": site, "layer": layer, "width": info.width, "quant_bits": _BITS,
             **{f"{_prefix(info.family)}{name}": value for name, value in info.parameters.items()}, **_used(info)}
    return {**arrays, "positions": rows.positions.astype("<u4"), "token_ids": rows.token_ids.astype("<u4"),
            **{name: np.array(value) for name, value in about.items()}}


def _numbers(part: Slice) -> dict[str, npt.NDArray[Any]]:
    """The stored streams, scales and zero points in dtypes that NumPy reckons with."""
    pieces: dict[str, npt.NDArray[Any]] = dict(part.pieces)
    return {**pieces, "scale": bfloat16_to_float32(pieces["scale"]),
            "zero": pieces["zero"].astype(np.int32)}


def _prefix(family: str) -> str:
    """The prefix that a codec's parameters had."""
    return {"rp8": "rp_", "topk8": "topk_"}.get(family, "")


def _used(info: SiteInfo) -> dict[str, int]:
    """The ``k`` that a projection was made with, where more was asked for: it has no more columns than the row."""
    return {"rp_k": info.decoded_width} if info.family == "rp8" else {}


def _manifest(rows: ExportRows, site: str, layers: dict[str, Any]) -> dict[str, Any]:
    manifest, info = rows.manifest, rows.site(site)
    named = {f"{_prefix(info.family)}{name}": value for name, value in info.parameters.items()}
    return {
        "request_id": manifest.aliases[0] if manifest.aliases else manifest.id,
        "capture": manifest.id,
        # Rows are whole: what several ranks held in part was put together when it was captured.
        "tp_rank": 0,
        "tp_world_size": 1,
        "mode": info.family,
        "site": site,
        "compression": {"rp_k": None, "quant_bits": _BITS, **named, **_used(info)},
        "sequences": {"0": {"prompt_len": manifest.prompt_len, "total_len": manifest.total_len, "layers": layers}},
    }
