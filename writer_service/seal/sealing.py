"""Sealing: a journal file becomes the shard of a Zarr v3 array, its bytes where they are.

Steps, each of which can be done again after a crash:
 1. the small arrays and all metadata are written into blocks/.building-…       (a crash: the folder is thrown away)
 2. the shard index is appended to the journal file and synced                  (a crash: recovery cuts it off)
 3. the journal file is renamed into the folder                                 (a crash: recovery goes on with 4)
 4. the folder is renamed to its final name; then the catalog is told
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from google_crc32c import value as crc32c

from schemas import codecs, limits
from schemas.errors import StoreError
from schemas.store.frame_hashes import prove_frame
from schemas.store.map_file import map_file
from schemas.store.paths import WRITER, array_metadata, block_name, building_name, group_metadata, main_chunk, open_name
from schemas.store.segment import SEGMENT_VERSION, FrameView, frames_end, whole_frames
from schemas.wire.row_table import steps_of
from writer_service import fs, log
from writer_service.journal.checksum_cache import FrameChecksums
from writer_service.seal.arrays import little, new_array, stream_attributes, stream_axes, write_arrays
from writer_service.seal.columns import U64, Columns, gather


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
    write_arrays(building, declared, columns)
    new_array(building / declared[0].name, 3)
    shape = (*columns.present.shape, *declared[0].shape)
    inner = (1, 1, *declared[0].shape)
    fs.write_new(building / declared[0].name / "zarr.json",
                 array_metadata(shape, declared[0].dtype, declared[0].fill, inner, stream_attributes(declared[0]),
                                stream_axes(declared[0])))
    fs.write_new(building / "zarr.json", group_metadata(attributes))
    sync_tree(building)
    del frames, data, first
    footer = little(columns.index).tobytes()  # crc32c takes bytes alone
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
