"""The rows of other blocks as they go into a cold one (schemas/store/cold_block.py):
writer by capture and layer, and written."""

from __future__ import annotations

import json
import sqlite3
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from schemas import codecs, limits
from schemas.catalog.records import Extent, Segment, load_drops, load_extents, load_segment
from schemas.codecs import Stream
from schemas.errors import CorruptError, StoreError
from schemas.read.segment_maps import SegmentMaps, View
from schemas.store.cold_block import CHUNK_ROWS, FORMAT, ColdFrame, frame_digest
from schemas.store.compressed import Packed, compressor, pack
from schemas.store.paths import array_metadata, block_name, group_metadata
from schemas.store.row_checksums import BlockChecksums
from schemas.store.segment import FrameHeader
from schemas.wire.messages import Frame
from schemas.wire.row_table import RowTable
from writer_service import fs
from writer_service.seal.crc32c import crc32c
from writer_service.seal.sealing import MISSING, fill_of, stream_attributes, write_whole

KEPT: Final = ("store_version", "segment_version", "writer", "writer_epoch", "site", "width", "model_dtype",
               "fingerprint", "codec", "axes")  # of the attributes, as the newest old block has them
gather_bytes: Final = 32 * 1024 * 1024  # of a stream in memory at once

I64 = npt.NDArray[np.int64]


def is_compressible(declared: Sequence[Stream]) -> bool:
    """Whether compressing is worth it: rows as they are, in one stream."""
    return len(declared) == 1


@dataclass(frozen=True, slots=True)
class Source:
    """Rows of a frame of an old block."""

    view: View
    rows: I64
    checksums: BlockChecksums


@dataclass(slots=True)
class Part:
    """Rows of a capture that become one frame: extents that follow each other, in the same layers."""

    capture: str
    created_ms: int
    stream: str
    epoch: int
    layers: tuple[int, ...]
    era: int  # how many drops came before it
    seqs: list[int] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    rows: int = 0

    @property
    def seq(self) -> int:
        """Sequence number of the newest rows: no other extent of the capture lies between."""
        return self.seqs[-1]


@dataclass(frozen=True, slots=True)
class _Span:
    """Rows of an old block, and where they go: ``start`` is a row of the new one."""

    start: int
    source: Source

    @property
    def stop(self) -> int:
        """Row after the last."""
        return self.start + len(self.source.rows)


class ColdBlockWriter:
    """Writer of one cold block: its plan is made first, then its arrays are written."""

    def __init__(self, store: Path, maps: SegmentMaps, db: sqlite3.Connection, segment: Segment,
                 replaces: Sequence[int], strict: bool, packed: bool) -> None:
        self.segment, self.replaces = segment, list(replaces)
        self.declared = codecs.streams(segment.codec, segment.width, segment.dtype)
        self.olds = [json.loads((store / block_name(old) / "zarr.json").read_text())["attributes"] for old in replaces]
        self.compressor = None
        if is_compressible(self.declared) and (packed or any(old.get("compression") for old in self.olds)):
            self.compressor = compressor(self.declared[0])
        self.damaged = False
        self.parts = self._plan(maps, db, strict)
        self.layers = sorted({layer for part in self.parts for layer in part.layers})
        sources = [source for part in self.parts for source in part.sources]
        self.starts = np.cumsum([0, *(len(source.rows) for source in sources)]).tolist()
        rows = self.starts.pop()
        if not rows:
            raise StoreError("compact", store / block_name(replaces[0]), "nothing in it can be read",
                             "vllm-tap fsck names what is damaged")
        self.spans = [_Span(start, source) for start, source in zip(self.starts, sources, strict=True)]
        chunks = -(-rows // CHUNK_ROWS)
        self.present = np.zeros((rows, len(self.layers)), bool)
        self.checksum = np.zeros((rows, len(self.layers)), np.uint64)
        for span in self.spans:
            source, at = span.source, slice(span.start, span.stop)
            layers = source.view.frame.layers
            columns = np.searchsorted(self.layers, layers)
            self.present[at, columns] = True
            self.checksum[at, columns] = source.checksums.of(source.view.offset, layers, source.rows).T
        padded = np.zeros((chunks * CHUNK_ROWS, len(self.layers)), bool)
        padded[:rows] = self.present
        self.needed: npt.NDArray[np.bool_] = np.asarray(padded.reshape(chunks, CHUNK_ROWS, -1).any(1)).T  # [L, chunks]
        self.rank = np.where(self.needed, np.cumsum(self.needed).reshape(self.needed.shape) - 1, -1)

    def _plan(self, maps: SegmentMaps, db: sqlite3.Connection, strict: bool) -> list[Part]:
        """The rows as frames. What is joined follows each other among all rows of its capture, with no drop between:
        then nothing that is said of the capture changes.
        """
        segments = {number: load_segment(db, number) for number in self.replaces}
        row_bytes = sum(stream.nbytes for stream in self.declared)
        query = ("SELECT DISTINCT e.capture AS id, e.site AS site, c.stream AS stream, c.epoch AS epoch, "
                 "c.created_ms AS created_ms FROM extents e JOIN captures c ON c.id = e.capture "
                 f"WHERE e.segment IN ({', '.join('?' * len(self.replaces))})")
        parts: list[Part] = []
        for row in db.execute(query, self.replaces).fetchall():
            drops = [drop.seq for drop in load_drops(db, row["id"]) if drop.site == row["site"]]
            part: Part | None = None
            for extent in load_extents(db, row["id"], row["site"]):
                segment = segments.get(extent.segment)
                source = None if segment is None else self._source(maps, segment, extent, row["id"], strict)
                if source is None:
                    part = None
                    continue
                era, most = bisect_left(drops, extent.seq), limits.frame_bytes_target // row_bytes
                if part is None or (part.layers, part.era) != (extent.layers, era) \
                        or (part.rows + len(extent.rows)) * len(part.layers) > most:
                    part = Part(row["id"], row["created_ms"], row["stream"], row["epoch"], extent.layers, era)
                    parts.append(part)
                part.seqs.append(extent.seq)
                part.sources.append(source)
                part.rows += len(extent.rows)
        return sorted(parts, key=lambda part: (part.layers, part.created_ms, part.capture, part.seq))

    def _source(self, maps: SegmentMaps, segment: Segment, extent: Extent, capture: str, strict: bool
                ) -> Source | None:
        """Source of an extent's rows; CorruptError where the block does not bear out the catalog, or then None."""
        place = f"{block_name(segment.number)} at {extent.offset}"
        rows = extent.rows[:, 1].astype(np.int64)
        try:
            view, checksums = maps.frame(segment, extent.offset), maps.checksums(segment)
            if checksums is None:
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
        return Source(view, rows, checksums)

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
        sources = [span.source for span in self.spans]
        row = {name: np.concatenate([getattr(source.view.table, name)[source.rows] for source in sources]).astype("<u4")
               for name in ("position", "token_id", "flags")}
        row["capture"] = np.repeat([capture_at[part.capture] for part in self.parts], sizes).astype("<u4")
        for name, column in row.items():
            write_whole(folder / name, column, ("row",))
        write_whole(folder / "present", self.present, ("row", "layer"))
        write_whole(folder / "checksum", self.checksum, ("row", "layer"))
        frames = {"frame_row": first, "frame_seq": np.array([part.seq for part in self.parts], np.uint64),
                  "frame_stream": np.array([known[part.stream, part.epoch] for part in self.parts], np.uint64),
                  "frame_xxh3": self._digests(row, first.astype(np.int64))}
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

    def _digests(self, row: dict[str, npt.NDArray[np.uint32]], first: I64) -> npt.NDArray[np.uint64]:
        found = np.empty(len(self.parts), np.uint64)
        for number, (part, start) in enumerate(zip(self.parts, first.tolist(), strict=True)):
            rows, segment = slice(start, start + part.rows), self.segment
            frame = Frame(part.seq, segment.site, segment.codec, segment.dtype, segment.width, list(part.layers),
                          [part.capture], [part.rows], 0, [], self.olds[-1]["fingerprint"])
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
            for layer, begin, end in self._windows(chunk_bytes):
                writer = self._gather(index, stream, layer, begin, end)
                whole = [writer[start:start + chunk_bytes] for start in range(0, len(writer), chunk_bytes)]
                written = whole if self.compressor is None else [pack(chunk, stream, folder) for chunk in whole]
                sizes += map(len, written)
                at = fs.write_at(fd, written, at)
            table = np.full((chunks, layers, 2), MISSING, "<u8")
            rank = self.rank.T[self.needed.T]
            table[self.needed.T] = np.stack([np.cumsum([0, *sizes])[rank], np.asarray(sizes, np.int64)[rank]], axis=1)
            footer = table.tobytes()
            fs.write_at(fd, [footer, crc32c(footer).to_bytes(4, "little")], at)
            fs.datasync(fd)
        finally:
            fs.close(fd)
        shape = (len(self.present), layers, *stream.shape)
        fs.write_new(folder / "zarr.json", array_metadata(
            shape, stream.dtype, stream.fill, (CHUNK_ROWS, 1, *stream.shape), stream_attributes(stream),
            ("row", "layer", "dim"), (chunks * CHUNK_ROWS, layers, *stream.shape), self.compressor))

    def _windows(self, chunk_bytes: int) -> Iterator[tuple[slice, int, int]]:
        """Layers × chunks ``[begin, end)`` that are writer at once, in the order of the file."""
        chunks, layers = self.needed.shape[1], len(self.layers)
        most = max(1, gather_bytes // chunk_bytes)
        if chunks <= most:
            step = most // chunks
            yield from ((slice(layer, min(layer + step, layers)), 0, chunks) for layer in range(0, layers, step))
        else:
            for layer in range(layers):
                edges = [*range(0, chunks, most), chunks]
                yield from ((slice(layer, layer + 1), begin, end) for begin, end in pairwise(edges))

    def _gather(self, index: int, stream: Stream, layers: slice, begin: int, end: int) -> memoryview:
        """The chunks of a window as they lie in the file."""
        needed, rank = self.needed[layers, begin:end], self.rank[layers]
        numbers = rank[:, begin:end][needed]
        if not len(numbers):
            return memoryview(b"")
        base = int(numbers[0]) * CHUNK_ROWS
        fill = np.full((), fill_of(stream), np.dtype(stream.dtype).newbyteorder("<")).tobytes()
        out = np.frombuffer(bytearray(fill * (len(numbers) * CHUNK_ROWS * stream.nbytes // len(fill))), np.uint8)
        out = out.reshape(-1, stream.nbytes)
        wanted = self.layers[layers]
        low, high = begin * CHUNK_ROWS, end * CHUNK_ROWS
        for span in self.spans[max(bisect_left(self.starts, low) - 1, 0):bisect_left(self.starts, high)]:
            a, b = max(span.start, low), min(span.stop, high)
            view = span.source.view
            mine = [at for at, layer in enumerate(wanted) if layer in view.frame.layers]
            if a >= b or not mine:
                continue
            row = np.arange(a, b)
            source = view.pieces([view.frame.layers.index(wanted[at]) for at in mine],
                                 span.source.rows[a - span.start : b - span.start])
            target = rank[np.asarray(mine)[:, None], row // CHUNK_ROWS] * CHUNK_ROWS + row % CHUNK_ROWS - base
            section = view.section(index)
            out[target] = section.lenient()[source] if isinstance(section, Packed) else section[source]
        return out.reshape(-1).data
