"""Arrays of a block being built: small ones in one chunk, side streams in one chunk a layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from google_crc32c import value as crc32c

from schemas.codecs import Stream
from schemas.store.block import ROW_COLUMNS
from schemas.store.paths import array_metadata
from writer_service import fs
from writer_service.seal.columns import Array, Columns


def stream_axes(stream: Stream) -> tuple[str, ...]:
    """Names of the axes of a stream's array. Those of a row's piece are its own: to xarray an axis has one length in a
    group.
    """
    own = (f"{stream.name}_item", *(f"{stream.name}_item{number}" for number in range(2, len(stream.shape) + 1)))
    return "row", "layer", *own[:len(stream.shape)]


def stream_attributes(stream: Stream) -> dict[str, Any]:
    """Attributes of a stream's array: how its numbers are to be seen."""
    return {"view": stream.view} if stream.view else {}


def write_arrays(building: Path, declared: tuple[Stream, ...], columns: Columns) -> None:
    """Write all arrays of a block but the main one."""
    for side in declared[1:]:
        _write_layered(building / side.name, columns.sides[side.name], side)
    for name in ROW_COLUMNS:
        write_whole(building / name, columns.row[name], ("row",))
    if columns.step is not None:
        write_whole(building / "step", columns.step, ("row",))
    write_whole(building / "present", columns.present, ("row", "layer"))
    write_whole(building / "checksum", columns.checksum, ("row", "layer"))
    write_whole(building / "frame", columns.frames, ("frame",))
    write_whole(building / "frame_row", columns.first_rows, ("frame",))


def new_array(folder: Path, axes: int) -> Path:
    """The folders of an array, made from the top (pathlib's ``parents`` fails its way up); the path of its chunk."""
    place = folder
    for name in ("", "c", *["0"] * (axes - 1)):
        place /= name
        place.mkdir()
    return place / "0"


def write_whole(folder: Path, array: Array, names: tuple[str, ...]) -> None:
    """An array in one chunk."""
    fs.write_new(new_array(folder, array.ndim), little(array))
    fs.write_new(folder / "zarr.json", array_metadata(array.shape, array.dtype.name, _zero(array), names=names))


def little(array: Array) -> memoryview:
    """An array's bytes, little-endian, where they lie."""
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1).view(np.uint8).data


def _zero(array: Array) -> Any:
    return False if array.dtype == bool else 0


def _write_layered(folder: Path, array: Array, stream: Stream) -> None:
    """A side array, given as ``[layers, rows, *shape]``, as a shard of one chunk a layer: one layer is one read."""
    layers, rows, *rest = array.shape
    chunk = new_array(folder, array.ndim)
    step = array.nbytes // layers
    index = np.array([[layer * step, step] for layer in range(layers)], "<u8").tobytes()
    fs.write_new(chunk, little(array), index, crc32c(index).to_bytes(4, "little"), direct=True)
    inner = (rows, 1, *rest)
    fs.write_new(folder / "zarr.json",
                 array_metadata((rows, layers, *rest), stream.dtype, stream.fill, inner, stream_attributes(stream),
                                stream_axes(stream)))
