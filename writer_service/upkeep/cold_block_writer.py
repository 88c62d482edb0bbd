"""Writer of a cold block (schemas/store/cold_block.py): rows of other blocks, ordered by capture, a layer together.

The shards are written here and not by zarr-python. That writes the chunks of a shard in Morton order instead of layer
by layer, and leaves out chunks of rows that are all zero. It holds the whole shard in memory twice and takes a second
to import. It also writes past ``fs``, where syncs are ordered and faults are tried.
"""

from __future__ import annotations

import itertools
import json
import sqlite3
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
from google_crc32c import value as crc32c

from schemas import codecs, limits
from schemas.catalog.records import Extent, Segment, load_drops, load_extents, load_segment
from schemas.codecs import Stream
from schemas.errors import CorruptError, StoreError
from schemas.read.segment_maps import SegmentMaps, View
from schemas.store.block import MISSING, Block
from schemas.store.cold_block import CHUNK_ROWS, FORMAT, ColdFrame, frame_digest
from schemas.store.compressed import CompressedChunks, compressor, pack
from schemas.store.paths import array_metadata, block_name, group_metadata
from schemas.store.segment import FrameHeader
from schemas.wire.messages import Frame
from schemas.wire.row_table import NO_STEP, RowTable, joined_steps, steps_of
from writer_service import fs
from writer_service.seal.arrays import stream_attributes, stream_axes, write_whole
from writer_service.seal.columns import fill_of

KEPT: Final = ("store_version", "segment_version", "writer", "writer_epoch", "site", "width", "model_dtype",
               "fingerprint", "codec", "axes")  # of the attributes, as the newest old block has them
gather_bytes: Final = 32 * 1024 * 1024  # of a stream in memory at once

I64 = npt.NDArray[np.int64]


def is_compressible(declared: Sequence[Stream]) -> bool:
    """Whether compressing is worth it: rows as they are, in one stream."""
    return len(declared) == 1


@dataclass(slots=True)
class RowSource:
    """Rows of a frame of an old block; ``start`` is the row of the new one that they begin at."""

    view: View
    rows: I64
    block: Block
    start: int = 0

    @property
    def stop(self) -> int:
        """Row after the last, in the new block."""
        return self.start + len(self.rows)


@dataclass(slots=True)
class FramePlan:
    """Rows of a capture that become one frame: extents that follow each other, in the same layers."""

    capture: str
    created_ms: int
    stream: str
    epoch: int
    layers: tuple[int, ...]
    era: int  # how many drops came before it
    seqs: list[int] = field(default_factory=list)
    sources: list[RowSource] = field(default_factory=list)
    rows: int = 0

    @property
    def seq(self) -> int:
        """Sequence number of the newest rows: no other extent of the capture lies between."""
        return self.seqs[-1]


class ColdBlockWriter:
    """Writer of one cold block: its plan is made first, then its arrays are written."""

    def __init__(self, store: Path, maps: SegmentMaps, db: sqlite3.Connection, segment: Segment,
                 replaces: Sequence[int], strict: bool, compress: bool) -> None:
        self.segment, self.replaces = segment, list(replaces)
        self.declared = codecs.streams(segment.codec, segment.width, segment.dtype)
        self.olds = [json.loads((store / block_name(old) / "zarr.json").read_text())["attributes"] for old in replaces]
        self.compressor = None
        if is_compressible(self.declared) and (compress or any(old.get("compression") for old in self.olds)):
            self.compressor = compressor(self.declared[0])
        self.damaged = False
        self.parts = self._plan(maps, db, strict)
        self.layers = sorted({layer for part in self.parts for layer in part.layers})
        self.sources = [source for part in self.parts for source in part.sources]
        rows = 0
        for source in self.sources:
            source.start, rows = rows, rows + len(source.rows)
        if not rows:
            raise StoreError("compact", store / block_name(replaces[0]), "nothing in it can be read",
                             "vllm-tap fsck names what is damaged")
        chunks = -(-rows // CHUNK_ROWS)
        self.present = np.zeros((rows, len(self.layers)), bool)
        self.checksum = np.zeros((rows, len(self.layers)), np.uint64)
        for source in self.sources:
            at, layers = slice(source.start, source.stop), source.view.frame.layers
            columns = np.searchsorted(self.layers, layers)
            self.present[at, columns] = True
            self.checksum[at, columns] = source.block.checksums_of(
                source.block.start(source.view.offset) + source.rows, layers).T
        padded = np.zeros((chunks * CHUNK_ROWS, len(self.layers)), bool)
        padded[:rows] = self.present
        self.needed: npt.NDArray[np.bool_] = np.asarray(padded.reshape(chunks, CHUNK_ROWS, -1).any(1)).T  # [L, chunks]

    def _plan(self, maps: SegmentMaps, db: sqlite3.Connection, strict: bool) -> list[FramePlan]:
        """The rows as frames. What is joined follows each other among all rows of its capture, with no drop between:
        then nothing that is said of the capture changes.
        """
        segments = {number: load_segment(db, number) for number in self.replaces}
        row_bytes = sum(stream.nbytes for stream in self.declared)
        query = ("SELECT DISTINCT e.capture AS id, e.site AS site, e.part AS part, c.created_ms AS created_ms, "
                 "coalesce(p.stream, c.stream) AS stream, coalesce(p.epoch, c.epoch) AS epoch "
                 "FROM extents e JOIN captures c ON c.id = e.capture "
                 "LEFT JOIN parts p ON p.capture = e.capture AND p.part = e.part "
                 f"WHERE e.segment IN ({', '.join('?' * len(self.replaces))})")
        parts: list[FramePlan] = []
        for row in db.execute(query, self.replaces).fetchall():
            drops = [drop.seq for drop in load_drops(db, row["id"])
                     if drop.site == row["site"] and drop.part == row["part"]]
            part: FramePlan | None = None
            for extent in load_extents(db, row["id"], row["site"]):
                if extent.part != row["part"]:
                    continue
                segment = segments.get(extent.segment)
                source = None if segment is None else self._source(maps, segment, extent, row["id"], strict)
                if source is None:
                    part = None
                    continue
                era, most = bisect_left(drops, extent.seq), limits.frame_bytes_target // row_bytes
                if part is None or (part.layers, part.era) != (extent.layers, era) \
                        or (part.rows + len(extent.rows)) * len(part.layers) > most:
                    part = FramePlan(row["id"], row["created_ms"], row["stream"], row["epoch"], extent.layers, era)
                    parts.append(part)
                part.seqs.append(extent.seq)
                part.sources.append(source)
                part.rows += len(extent.rows)
        return sorted(parts, key=lambda part: (part.layers, part.created_ms, part.capture, part.stream, part.seq))

    def _source(self, maps: SegmentMaps, segment: Segment, extent: Extent, capture: str, strict: bool
                ) -> RowSource | None:
        """Source of an extent's rows; CorruptError where the block does not bear out the catalog, or then None."""
        place = f"{block_name(segment.number)} at {extent.offset}"
        rows = extent.rows[:, 1].astype(np.int64)
        try:
            view, block = maps.frame(segment, extent.offset), maps.block(segment)
            if block is None:
                raise CorruptError("compact", place, "the block is of an early version, without checksums by frame")
            table = view.table
            told = np.stack([table.position[rows], extent.rows[:, 1], table.token_id[rows], table.flags[rows]], 1)
            if tuple(view.frame.layers) != extent.layers or not np.array_equal(told, extent.rows) or any(
                    view.frame.captures[index] != capture for index in set(table.capture[rows].tolist())):
                raise CorruptError("compact", place, "the catalog does not match the frame",
                                   "vllm-tap rebuild makes the catalog again")
        except CorruptError:
            if strict:
                raise
            return None
        self.damaged |= not strict and isinstance(view, ColdFrame) and bool(view.wrong().any())
        return RowSource(view, rows, block)

    def write(self, folder: Path, uuid: bytes, number: int) -> None:
        """Write all files of the block below ``folder``."""
        for index, stream in enumerate(self.declared):
            self._write_stream(folder / stream.name, index, stream)
        ids = list(dict.fromkeys(part.capture for part in self.parts))
        streams = self._streams()
        known = {(entry["stream"], entry["epoch"]): at for at, entry in enumerate(streams)}
        capture_at = {capture: at for at, capture in enumerate(ids)}
        sizes = [part.rows for part in self.parts]
        first = np.cumsum([0, *sizes])[:-1].astype(np.uint64)
        row = {name: np.concatenate([getattr(source.view.table, name)[source.rows] for source in self.sources]).astype(
            "<u4") for name in ("position", "token_id", "flags")}
        row["capture"] = np.repeat([capture_at[part.capture] for part in self.parts], sizes).astype("<u4")
        for name, column in row.items():
            write_whole(folder / name, column, ("row",))
        row_steps = self._steps()
        if row_steps is not None:
            write_whole(folder / "step", row_steps, ("row",))
        write_whole(folder / "present", self.present, ("row", "layer"))
        write_whole(folder / "checksum", self.checksum, ("row", "layer"))
        frames = {"frame_row": first, "frame_seq": np.array([part.seq for part in self.parts], np.uint64),
                  "frame_stream": np.array([known[part.stream, part.epoch] for part in self.parts], np.uint64),
                  "frame_xxh3": self._digests(row, first.astype(np.int64), row_steps)}
        for name, column in frames.items():
            write_whole(folder / name, column, ("frame",))
        newest = self.olds[-1]
        attributes = {
            **{key: newest[key] for key in KEPT}, "format": FORMAT, "store": uuid.hex(), "segment": number,
            "streams": streams, "layers": self.layers, "captures": ids, "replaces": self.replaces,
            **({} if self.compressor is None else {"compression": self.compressor["name"]}),
        }
        fs.write_new(folder / "zarr.json", group_metadata(attributes))

    def _streams(self) -> list[dict[str, Any]]:
        """The senders of the rows, as the old blocks name them, with the numbers that are left of each."""
        told = {(entry["stream"], entry["epoch"]): entry for old in self.olds for entry in old["streams"]}
        seqs: dict[tuple[str, int], list[int]] = {}
        for part in self.parts:
            seqs.setdefault((part.stream, part.epoch), []).extend(part.seqs)
        return [{**told.get(key, {"stream": key[0], "epoch": key[1], "engine": {}}),
                 "first_seq": min(numbers), "last_seq": max(numbers)} for key, numbers in seqs.items()]

    def _steps(self) -> npt.NDArray[np.uint64] | None:
        """The step that computed each row, NO_STEP where its sender told none; None where none did."""
        told = [(steps_of(source.view.frame), source.rows) for source in self.sources]
        return joined_steps([None if steps is None else steps[rows] for steps, rows in told],
                            [len(rows) for _, rows in told])

    def _digests(self, row: dict[str, npt.NDArray[np.uint32]], first: I64, steps: npt.NDArray[np.uint64] | None
                 ) -> npt.NDArray[np.uint64]:
        found = np.empty(len(self.parts), np.uint64)
        for number, (part, start) in enumerate(zip(self.parts, first.tolist(), strict=True)):
            rows, segment = slice(start, start + part.rows), self.segment
            frame = Frame(part.seq, segment.site, segment.codec, segment.dtype, segment.width, list(part.layers),
                          [part.capture], [part.rows], 0, [], self.olds[-1]["fingerprint"])
            if steps is not None and steps[start] != NO_STEP:
                frame = msgspec.structs.replace(frame, runs=[1] * part.rows, steps=steps[rows].tolist())
            table = RowTable(np.zeros(part.rows, np.uint32), row["position"][rows], row["token_id"][rows],
                             row["flags"][rows])
            columns = np.searchsorted(self.layers, part.layers)
            found[number] = frame_digest(FrameHeader(part.stream, part.epoch, 0, frame), table,
                                         self.checksum[rows][:, columns])
        return found

    # ── streams ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _write_stream(self, folder: Path, index: int, stream: Stream) -> None:
        """Write one shard: the chunks that are needed, a layer after the other, and the shard index ``[chunks, L]``."""
        chunk_bytes = CHUNK_ROWS * stream.nbytes
        chunks, layers = self.needed.shape[1], len(self.layers)
        path = folder.joinpath("c", "0", "0", *["0"] * len(stream.shape))
        path.parent.mkdir(parents=True)
        fd, at, sizes = fs.open_new(path), 0, list[int]()
        try:
            step = max(1, gather_bytes // chunk_bytes)
            for layer, begin in itertools.product(range(layers), range(0, chunks, step)):
                rows = self._gather(index, stream, layer, begin, min(begin + step, chunks))
                whole = [rows[start:start + chunk_bytes] for start in range(0, len(rows), chunk_bytes)]
                written = whole if self.compressor is None else [pack(chunk, stream, folder) for chunk in whole]
                sizes += map(len, written)
                at = fs.write_at(fd, written, at)
            table = np.full((layers, chunks, 2), MISSING, "<u8")
            table[self.needed] = np.stack([np.cumsum([0, *sizes])[:-1], sizes], axis=1)
            footer = table.swapaxes(0, 1).tobytes()
            fs.write_at(fd, [footer, crc32c(footer).to_bytes(4, "little")], at)
            fs.datasync(fd)
        finally:
            fs.close(fd)
        shape = (len(self.present), layers, *stream.shape)
        fs.write_new(folder / "zarr.json", array_metadata(
            shape, stream.dtype, stream.fill, (CHUNK_ROWS, 1, *stream.shape), stream_attributes(stream),
            stream_axes(stream), (chunks * CHUNK_ROWS, layers, *stream.shape), self.compressor))

    def _gather(self, index: int, stream: Stream, layer: int, begin: int, end: int) -> memoryview:
        """Chunks ``[begin, end)`` of a layer, those that are needed, as they lie in the file."""
        needed = self.needed[layer, begin:end]
        place = (np.cumsum(needed) - 1) * CHUNK_ROWS  # of a chunk's first row among what is gathered
        fill = np.full((), fill_of(stream), np.dtype(stream.dtype).newbyteorder("<")).tobytes()
        nbytes = int(needed.sum()) * CHUNK_ROWS * stream.nbytes
        out = np.frombuffer(bytearray(fill * (nbytes // len(fill))), np.uint8).reshape(-1, stream.nbytes)
        low, high = begin * CHUNK_ROWS, end * CHUNK_ROWS
        first = max(bisect_left(self.sources, low, key=lambda source: source.start) - 1, 0)
        for source in itertools.takewhile(lambda source: source.start < high, self.sources[first:]):
            a, b, layers = max(source.start, low), min(source.stop, high), source.view.frame.layers
            if a >= b or self.layers[layer] not in layers:
                continue
            row = np.arange(a, b) - low
            rows = source.rows[a - source.start : b - source.start]
            pieces = source.view.pieces([layers.index(self.layers[layer])], rows)[0]
            section = source.view.section(index)
            out[place[row // CHUNK_ROWS] + row % CHUNK_ROWS] = (
                section.lenient() if isinstance(section, CompressedChunks) else section)[pieces]
        return out.reshape(-1).data
