"""A sealed block as somebody reads it who has never heard of this project: zarr-python and NumPy, nothing else.

Only what the block's own attributes say is used: where the rows of a capture are, which codec, how it is undone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr

__all__ = ["read_rows", "sealed_blocks"]


def sealed_blocks(store: Path, capture: str, site: str) -> list[Path]:
    """The blocks that hold rows of a capture's site."""
    found = []
    for path in sorted((store / "blocks").glob("*.zarr")):
        about = zarr.open_group(str(path), mode="r").attrs
        if about["site"] == site and capture in about["captures"]:
            found.append(path)
    return found


def read_rows(block: Path, capture: str, layer: int) -> tuple[npt.NDArray[Any], npt.NDArray[np.float32]]:
    """Positions and values of one layer of a capture, in the order of positions."""
    group = zarr.open_group(str(block), mode="r")
    about: dict[str, Any] = dict(group.attrs)
    column = about["layers"].index(layer)
    rows = np.flatnonzero(_array(group, "capture") == about["captures"].index(capture))
    rows = rows[_array(group, "present")[rows, column]]
    if about["codec"]["name"] == "int8b64":
        values = _array(group, "q")[rows, column].astype(np.float32)
        values *= np.repeat(_bfloat16(_array(group, "scale")[rows, column]), 64, axis=1)[:, :values.shape[1]]
        kept = _array(group, "outlier_index")[rows, column].astype(np.int64)
        np.put_along_axis(values, kept, _bfloat16(_array(group, "outlier_value")[rows, column]), axis=1)
    else:
        stored = _array(group, "x")[rows, column]
        values = _bfloat16(stored) if stored.dtype == np.uint16 else stored.astype(np.float32)
    positions = _array(group, "position")[rows]
    order = np.argsort(positions)
    return positions[order], values[order]


def _array(group: zarr.Group, name: str) -> npt.NDArray[Any]:
    return np.asarray(group[name][...])


def _bfloat16(bits: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)
