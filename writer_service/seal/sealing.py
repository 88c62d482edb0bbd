"""Sealing: a journal file becomes the shard of a Zarr v3 array, its bytes where they are.

Steps, each of which can be done again after a crash:
 1. the small arrays and all metadata are written into blocks/.building-…       (a crash: the folder is thrown away)
 2. the shard index is appended to the journal file and synced                  (a crash: recovery cuts it off)
 3. the journal file is renamed into the folder                                 (a crash: recovery goes on with 4)
 4. the folder is renamed to its final name; then the catalog is told
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
from google_crc32c import value as crc32c

from schemas import codecs, limits
from schemas.codecs import Stream
from schemas.errors import StoreError
from schemas.store.block import MISSING, ROW_COLUMNS
from schemas.store.frame_hashes import prove_frame
from schemas.store.map_file import map_file
from schemas.store.paths import WRITER, array_metadata, block_name, building_name, group_metadata, main_chunk, open_name
from schemas.store.segment import FLAG_REDACTED, SEGMENT_VERSION, FrameView, frames_end, whole_frames
from schemas.wire.row_table import FLAG_ERASED, joined_steps, steps_of
from writer_service import fs, log
from writer_service.journal.checksum_cache import FrameChecksums

Array = npt.NDArray[Any]
U64 = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Columns:
    """Arrays of a segment's frames; R rows, L layers (sorted union)."""

    layers: list[int]
    captures: list[str]
    row: dict[str, npt.NDArray[np.uint32]]  # by ROW_COLUMNS, [R]
    step: npt.NDArray[np.uint64] | None  # that computed each, [R], where a sender told it
    present: npt.NDArray[np.bool_]  # [R, L]
    index: npt.NDArray[np.uint64]  # [R, L, 2]: offset and bytes of the main piece
    checksum: npt.NDArray[np.uint64]  # [R, L]: see schemas.store.row_checksums
    sides: dict[str, Array]  # [L, R, *shape]: a layer lies together, as its chunk will
    frames: npt.NDArray[np.uint64]  # byte offset of each frame
    first_rows: npt.NDArray[np.uint64]  # and its first row


def fill_of(stream: Stream) -> Any:
    """A stream's fill value as NumPy takes it."""
    return float("nan") if stream.fill == "NaN" else stream.fill


def _aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """An empty array that lies as direct writes want it."""
    nbytes = math.prod(shape) * dtype.itemsize
    room = np.empty(nbytes + fs.direct_align, np.uint8)
    start = -room.ctypes.data % fs.direct_align
    return room[start : start + nbytes].view(dtype).reshape(shape)


def gather(
    frames: Sequence[FrameView], checksums: Sequence[U64], declared: tuple[Stream, ...],
    layers: list[int] | None = None,
) -> Columns:
    """Columns of a segment's frames and their pieces' checksums (schemas.store.frame_hashes), in the order of the file;
    ``layers`` where they are not all of the frames'.
    """
    layers = layers or sorted({layer for view in frames for layer in view.frame.layers})
    rows, width = sum(view.rows for view in frames), len(layers)
    captures: dict[str, int] = {}
    row = {name: np.empty(rows, np.uint32) for name in ROW_COLUMNS}
    present = np.zeros((rows, width), bool)
    index = _aligned((rows, width, 2), np.dtype(np.uint64))
    index[:] = MISSING
    checksum = np.zeros((rows, width), np.uint64)
    # A piece is one element, copied at once.
    sides = {s.name: _aligned((width, rows), np.dtype(f"V{s.nbytes}")) for s in declared[1:]}
    start = 0
    for view, digests in zip(frames, checksums, strict=True):
        stop = start + view.rows
        has = view.frame.layers
        at = slice(None) if has == layers else np.searchsorted(layers, has)  # a slice is cheaper by far
        known = np.array([captures.setdefault(name, len(captures)) for name in view.frame.captures], np.uint32)
        row["capture"][start:stop] = known[view.table.capture]
        row["position"][start:stop] = view.table.position
        row["token_id"][start:stop] = view.table.token_id
        row["flags"][start:stop] = view.table.flags
        present[start:stop, at] = True
        pieces = view.pieces(np.arange(len(has)), np.arange(view.rows))  # [layers, rows]
        index[start:stop, at, 0] = (view.offset + view.layout.parts[0] + pieces * declared[0].nbytes).T
        index[start:stop, at, 1] = declared[0].nbytes
        checksum[start:stop, at] = digests[pieces.T]
        for number, side in enumerate(declared[1:], 1):
            stored = view.section(number).view(f"V{side.nbytes}")[:, 0]
            in_order = len(view.frame.runs) == 1  # then what indexing would copy first lies as it is wanted
            sides[side.name][at, start:stop] = stored.reshape(pieces.shape) if in_order else stored[pieces]
        if view.flags & FLAG_REDACTED:
            erased = start + np.flatnonzero(view.table.flags & FLAG_ERASED)
            present[erased], index[erased], checksum[erased] = False, MISSING, 0
        start = stop
    typed = {s.name: sides[s.name].view(s.dtype).reshape(width, rows, *s.shape) for s in declared[1:]}
    if not present.all():
        for side in declared[1:]:
            typed[side.name][~present.T] = fill_of(side)
    offsets = np.array([view.offset for view in frames], np.uint64)
    counts = np.array([view.rows for view in frames], np.uint64)
    step = joined_steps([steps_of(view.frame) for view in frames], [view.rows for view in frames])
    first_rows = np.cumsum(counts) - counts
    return Columns(layers, list(captures), row, step, present, index, checksum, typed, offsets, first_rows)


def seal(
    store: Path, uuid: bytes, number: int, fd: int, epoch: int, engines: Mapping[str, Mapping[str, Any]],
    known: Sequence[tuple[int, int]] = (), cached: Mapping[int, FrameChecksums] = MappingProxyType({}),
) -> bool:
    """Make a block of journal file ``number``, open as ``fd`` and wholly on the disk; False where it has no frame.

    ``epoch`` is the writer's; ``engines`` maps streams to what is known of them; ``known``: (offset, bytes) of frames
    that the catalog has; ``cached``: checksums by offset, made when frames came. Of other frames every byte is read. A
    damaged one is left out of the arrays and stays in the file. OSError leaves the journal file readable;
    sealing can be tried again. StoreError where no frame is whole: nothing is touched.
    """
    path = store / open_name(number)
    data = map_file(path)
    frames, checksums = list[FrameView](), list[U64]()

    def prove(view: FrameView, path: object) -> None:
        mine = cached.get(view.offset)
        checksums.append(mine.prove(view, path) if mine and mine.matches(view.frame) else prove_frame(view, path))

    for found in whole_frames(data, uuid, number, path, known, prove):
        if isinstance(found, FrameView):
            frames.append(found)
        else:
            log.warn("frame_damaged", f"sealing leaves out a frame: {found}", segment=number, error=str(found))
    end = frames_end(frames, known)
    if not frames and known:
        raise StoreError("seal", path, f"none of its {len(known)} frames is whole", "put a good copy in its place")
    if not frames:
        fs.remove(path)
        return False
    first = frames[0].frame
    declared = frames[0].declared
    columns = gather(frames, checksums, declared)
    building = store / building_name(number)
    if building.exists():
        fs.remove_tree(building)
    fs.make_dirs(building)
    attributes = _attributes(number, frames, end, columns, uuid, epoch, engines)
    _write_arrays(building, declared, columns)
    _new_array(building / declared[0].name, 3)
    shape = (*columns.present.shape, *declared[0].shape)
    inner = (1, 1, *declared[0].shape)
    fs.write_new(building / declared[0].name / "zarr.json",
                 array_metadata(shape, declared[0].dtype, declared[0].fill, inner, stream_attributes(declared[0]),
                                stream_axes(declared[0])))
    fs.write_new(building / "zarr.json", group_metadata(attributes))
    sync_tree(building)
    del frames, data, first
    footer = _little(columns.index).tobytes()  # crc32c takes bytes alone
    fs.truncate(fd, end)
    fs.write_direct(fd, [footer, crc32c(footer).to_bytes(4, "little")], end)
    fs.datasync(fd)
    fs.rename(path, building / main_chunk(declared[0].name))
    finish(store, number)
    return True


def finish(store: Path, number: int) -> None:
    """The last step: the folder gets its name."""
    fs.rename(store / building_name(number), store / block_name(number))


def finish_cut(store: Path, number: int) -> bool:
    """Go on with a seal that failed or was cut after step 2; False where there is none: it begins anew."""
    building, block = store / building_name(number), store / block_name(number)
    if (store / open_name(number)).exists():
        return False
    if block.exists():
        fs.sync_dir(block.parent)
        return True
    if not any(building.glob(main_chunk("*"))):
        return False
    sync_tree(building)
    fs.sync_dir((store / open_name(number)).parent)  # else the file may come back there, and be sealed once more
    finish(store, number)
    return True


def stream_axes(stream: Stream) -> tuple[str, ...]:
    """Names of the axes of a stream's array. Those of a row's piece are its own: to xarray an axis has one length in a
    group.
    """
    own = (f"{stream.name}_item", *(f"{stream.name}_item{number}" for number in range(2, len(stream.shape) + 1)))
    return "row", "layer", *own[:len(stream.shape)]


def stream_attributes(stream: Stream) -> dict[str, Any]:
    return {"view": stream.view} if stream.view else {}


def _write_arrays(building: Path, declared: tuple[Stream, ...], columns: Columns) -> None:
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


def _new_array(folder: Path, axes: int) -> Path:
    """The folders of an array, made from the top (pathlib's ``parents`` fails its way up); the path of its chunk."""
    place = folder
    for name in ("", "c", *["0"] * (axes - 1)):
        place /= name
        place.mkdir()
    return place / "0"


def write_whole(folder: Path, array: Array, names: tuple[str, ...]) -> None:
    """An array in one chunk."""
    fs.write_new(_new_array(folder, array.ndim), _little(array))
    fs.write_new(folder / "zarr.json", array_metadata(array.shape, array.dtype.name, _zero(array), names=names))


def _little(array: Array) -> memoryview:
    """An array's bytes, little-endian, where they lie."""
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1).view(np.uint8).data


def _zero(array: Array) -> Any:
    return False if array.dtype == bool else 0


def _write_layered(folder: Path, array: Array, stream: Stream) -> None:
    """A side array, given as ``[layers, rows, *shape]``, as a shard of one chunk a layer: one layer is one read."""
    layers, rows, *rest = array.shape
    chunk = _new_array(folder, array.ndim)
    step = array.nbytes // layers
    index = np.array([[layer * step, step] for layer in range(layers)], "<u8").tobytes()
    fs.write_new(chunk, _little(array), index, crc32c(index).to_bytes(4, "little"), direct=True)
    inner = (rows, 1, *rest)
    fs.write_new(folder / "zarr.json",
                 array_metadata((rows, layers, *rest), stream.dtype, stream.fill, inner, stream_attributes(stream),
                                stream_axes(stream)))


def sync_tree(folder: Path) -> None:
    """A folder, its name and all that is below it are on the disk."""
    files, folders = list[Path](), [folder.parent]
    for name, _, names in os.walk(folder):
        folders.append(Path(name))
        files += [folders[-1] / file for file in names]
    fs.sync_files(files)
    for place in reversed(folders):
        fs.sync_dir(place)


def _attributes(
    number: int, frames: list[FrameView], end: int, columns: Columns, uuid: bytes, epoch: int,
    engines: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """Attributes by which a stranger reads the block without this project's code."""
    frame = frames[0].frame
    streams: dict[tuple[str, int], list[int]] = {}
    ranks: dict[str, dict[str, int]] = {}  # of the streams that are of a group
    for view in frames:
        streams.setdefault((view.header.stream, view.header.epoch), []).append(view.frame.seq)
        if steps_of(view.frame) is not None:
            ranks[view.header.stream] = {"rank": view.frame.rank}
    return {
        "format": "vllm-tap block",
        "store_version": limits.STORE_VERSION,
        "segment_version": SEGMENT_VERSION,
        "store": uuid.hex(),
        "writer": WRITER,
        "writer_epoch": epoch,
        "segment": number,
        "streams": [
            {"stream": stream, "epoch": began, "first_seq": min(seqs), "last_seq": max(seqs),
             **ranks.get(stream, {}), "engine": dict(engines.get(stream, {}))}
            for (stream, began), seqs in streams.items()
        ],
        "site": frame.site,
        "width": frame.width,
        "model_dtype": frame.dtype,
        "fingerprint": frame.fingerprint,
        "layers": columns.layers,
        "captures": columns.captures,
        "codec": {
            **codecs.identified(frame.codec).about(),
            "streams": [stream.about() for stream in frames[0].declared],
        },
        "axes": "row r, layer l: layers[l] is the model's layer, captures[capture[r]] the capture",
        "frames_end": end,
    }
