"""Cold blocks: what compaction makes of sealed ones. Rows are sorted by capture; a layer's rows lie together.

Every stream is a shard of chunks of CHUNK_ROWS rows of one layer, all of a layer before the next. A chunk that no row
needs is not there. The rows of a capture that followed each other are one frame of one run. Its offset is its first row
in the block. Readers use a ``ColdFrame`` as they use a ``FrameView``. A frame's ``frame_xxh3`` covers everything that
the small arrays say of it; a row's ``checksum`` covers its bytes. Nothing in a cold block is ever changed: to take rows
out, another block is made that replaces it. Where the attribute ``compression`` says so, the chunks of its one stream
are compressed (schemas.store.compressed).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from schemas.codecs import Stream
from schemas.errors import CorruptError, StoreError
from schemas.store.block import MISSING, Block
from schemas.store.block_files import BlockFiles, MappedFolder
from schemas.store.compressed import CompressedChunks
from schemas.store.paths import main_chunk
from schemas.store.row_checksums import piece_digests
from schemas.store.segment import FrameHeader
from schemas.wire.messages import Frame
from schemas.wire.row_table import NO_STEP, RowTable, steps_of

__all__ = ["CHUNK_ROWS", "ColdBlock", "ColdFrame", "cold_attributes", "frame_digest", "open_cold"]

CHUNK_ROWS: Final = 64
FORMAT: Final = "vllm-tap cold block"

Index = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class ColdFrame:
    """Rows ``[offset, offset + rows)`` of a cold block, all of one capture and in the same layers."""

    block: ColdBlock
    offset: int
    rows: int
    header: FrameHeader
    table: RowTable
    columns: Index  # of frame.layers among the block's

    @property
    def frame(self) -> Frame:
        """The frame's message, as if an engine had sent these rows at once; its streams are not named."""
        return self.header.frame

    @property
    def declared(self) -> tuple[Stream, ...]:
        """The codec's streams."""
        return self.block.declared

    @property
    def stale(self) -> bool:
        """Whether another block has taken the place of this one: rows may have been deleted."""
        return not self.block.files.there()

    def pieces(self, layers: npt.ArrayLike, rows: npt.ArrayLike) -> Index:
        """Numbers of the pieces of each (layer, row) in any of the streams, ``[layers, rows]``, as FrameView.pieces."""
        columns = self.columns[np.asarray(layers, np.int64)]
        return self.block.pieces_at(np.asarray(rows, np.int64) + self.offset, columns)

    def section(self, stream: int) -> Bytes | CompressedChunks:
        """All pieces of a stream in the block, uint8 ``[pieces, piece bytes]``: a view of the file."""
        return self.block.section(stream)

    def verify(self) -> None:
        """CorruptError where a row's bytes do not match its checksum."""
        wrong = self.wrong()
        if wrong.any():
            layer, row = np.argwhere(wrong)[0].tolist()
            raise CorruptError("read frame", f"{self.block.main} at row {self.offset + row}",
                               f"layer {self.frame.layers[layer]} does not match its checksum",
                               "vllm-tap fsck names all that do not")

    def wrong(self) -> npt.NDArray[np.bool_]:
        """``[layers, rows]``: where a row's bytes do not match its checksum."""
        rows = np.arange(self.rows)
        pieces = self.pieces(np.arange(len(self.columns)), rows)
        expected = self.block.checksums_of(self.offset + rows, self.frame.layers)
        found = np.empty(expected.shape, np.uint64)
        sections = [section.lenient() if isinstance(section, CompressedChunks) else section
                    for section in map(self.section, range(len(self.declared)))]
        for number, at in enumerate(pieces):
            main, *sides = (section[at] for section in sections)
            found[number] = piece_digests(main, sides)
        return np.asarray(found != expected)


class ColdBlock(Block):
    """A cold block, R rows × L layers in F frames.

    FileNotFoundError where there is none, StoreError where its files are not whole.
    """

    def __init__(self, files: BlockFiles) -> None:
        try:
            super().__init__(files)
            if self.attributes["format"] != FORMAT:
                raise StoreError("open cold block", files.where(), "it is none")
            # By frame: its first row, its number in its stream, an index into the attribute streams, its hash.
            self.frames, self.seq, self.stream, self.digest = (
                self.column(name, "<u8") for name in ("frame_row", "frame_seq", "frame_stream", "frame_xxh3"))
            self.first = self.frames
            self.checksum_now = self.checksum  # nothing of it ever changes
            layers = len(self.layers)
            footer = files.end(self.main_name, self.index_bytes)
            index = np.frombuffer(footer, "<u8", (self.index_bytes - 4) // 8).reshape(-1, layers, 2)
        except FileNotFoundError:
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StoreError("open cold block", files.where(), repr(error), "vllm-tap fsck says what is lost") from None
        self.compressed: CompressedChunks | None = None
        self._sections: dict[int, Bytes] = {}
        nbytes = self.declared[0].nbytes
        if self.attributes.get("compression") is None:
            there = index[:, :, 1] == CHUNK_ROWS * nbytes
            chunk = np.where(there, index[:, :, 0].astype(np.int64) // (CHUNK_ROWS * nbytes), -1)
        else:
            there = index[:, :, 1] != MISSING
            order = np.argsort(index[there][:, 0], kind="stable")
            chunk = np.full(there.shape, -1, np.int64)
            chunk[there] = np.argsort(order)
            starts, sizes = index[there][order].T
            self.compressed = CompressedChunks(files, self.main_name, starts, sizes, CHUNK_ROWS, nbytes)
        self.chunk: Index = chunk  # [chunks, L]: number of the chunk among those in the file, -1 where it is not there

    @property
    def index_bytes(self) -> int:
        """Same as for a sealed block; an index has an entry a chunk."""
        return 16 * -(-len(self.present) // CHUNK_ROWS) * len(self.layers) + 4

    @property
    def weight(self) -> int:
        """Same as for a sealed block; it maps a file a stream."""
        return self.files.weight(len(self.declared))

    def pieces_at(self, rows: Index, columns: Index) -> Index:
        """Index of the piece of each (layer, row of the block) in any of the streams: ``[layers, rows]``; ``columns``
        are those of the block's layers.
        """
        found: Index = self.chunk[rows // CHUNK_ROWS, columns[:, None]] * CHUNK_ROWS + rows % CHUNK_ROWS
        return found

    @property
    def alike(self) -> bool:
        """They do, by chunks."""
        return True

    def places(self, rows: Index, columns: Index) -> list[tuple[str, Index]]:
        """Same as for a sealed block; every stream is a shard of its own."""
        pieces = self.pieces_at(rows, columns)
        return [(main_chunk(stream.name), pieces * stream.nbytes) for stream in self.declared]

    def section(self, stream: int) -> Bytes | CompressedChunks:
        """All pieces of a stream, uint8 ``[pieces, piece bytes]``: a view of the file, or what is indexed as one."""
        if self.compressed is not None:
            return self.compressed
        if (known := self._sections.get(stream)) is not None:
            return known
        declared = self.declared[stream]
        pieces = CHUNK_ROWS * (int(self.chunk.max(initial=-1)) + 1)
        name = main_chunk(declared.name)
        data = self.files.view(name)
        if len(data) < pieces * declared.nbytes:
            raise CorruptError("read rows", self.files.where(name),
                               f"{len(data)} bytes, its index needs {pieces * declared.nbytes}")
        made = np.frombuffer(data, np.uint8, pieces * declared.nbytes).reshape(pieces, declared.nbytes)
        return self._sections.setdefault(stream, made)

    def frame(self, offset: int) -> ColdFrame:
        """The frame whose first row is ``offset``; CorruptError where what is said of it does not match its hash."""
        number = int(np.searchsorted(self.frames, offset))
        stop = int(self.frames[number + 1]) if number + 1 < len(self.frames) else len(self.present)
        where = f"{self.files.where()} at row {offset}"
        if number >= len(self.frames) or self.frames[number] != offset or not offset < stop <= len(self.present):
            raise CorruptError("read frame", where, "no frame starts here")
        rows = slice(offset, stop)
        try:
            capture = self.attributes["captures"][int(self.row["capture"][offset])]
            stream = self.attributes["streams"][int(self.stream[number])]
        except IndexError:
            raise CorruptError("read frame", where, "it names no capture or stream of the block") from None
        columns = np.flatnonzero(self.present[offset])
        layers = [self.attributes["layers"][column] for column in columns.tolist()]
        identity = self.attributes["codec"]["name"]
        frame = Frame(int(self.seq[number]), self.attributes["site"], identity, self.attributes["model_dtype"],
                      self.attributes["width"], layers, [capture], [stop - offset], 0, [],
                      self.attributes["fingerprint"])
        steps = None if self.step is None else self.step[rows]
        if steps is not None and int(steps[0]) != NO_STEP:
            begins = np.flatnonzero(np.append(True, steps[1:] != steps[:-1]))
            runs = np.diff(np.append(begins, len(steps))).tolist()
            frame = msgspec.structs.replace(frame, runs=runs, steps=steps[begins].tolist())
        header = FrameHeader(stream["stream"], stream["epoch"], 0, frame)
        table = RowTable(np.zeros(stop - offset, np.uint32),
                         *(self.row[name][rows] for name in ("position", "token_id", "flags")))
        whole = bool((self.present[rows] == self.present[offset]).all()) and not (self.chunk[
            offset // CHUNK_ROWS : (stop - 1) // CHUNK_ROWS + 1, columns] < 0).any()
        if not whole or frame_digest(header, table, self.checksum[rows][:, columns]) != self.digest[number]:
            raise CorruptError("read frame", where, "what the block says of these rows does not match its checksum",
                               "the rows of this frame are lost; others are not affected")
        return ColdFrame(self, offset, stop - offset, header, table, columns)


def open_cold(folder: Path) -> ColdBlock:
    """The cold block in a folder; FileNotFoundError where there is none, StoreError where its files are not whole."""
    return ColdBlock(MappedFolder(folder))


def cold_attributes(folder: Path) -> dict[str, Any] | None:
    """The attributes of a cold block, None of any other."""
    attributes: dict[str, Any] = json.loads((folder / "zarr.json").read_text())["attributes"]
    return attributes if attributes["format"] == FORMAT else None


def frame_digest(header: FrameHeader, table: RowTable, checksum: npt.NDArray[np.uint64]) -> int:
    """xxh3 of all that a cold block says of a frame; ``checksum`` is ``[rows, layers]`` of the frame's layers."""
    frame = header.frame
    said = [header.stream, header.epoch, frame.seq, frame.site, frame.codec, frame.dtype, frame.width, frame.layers,
            frame.captures, frame.fingerprint]
    hashed = xxhash.xxh3_64(json.dumps(said).encode())
    for column in (table.position, table.token_id, table.flags):
        hashed.update(column.astype("<u4").tobytes())
    if (steps := steps_of(frame)) is not None:
        hashed.update(steps.astype("<u8").tobytes())
    hashed.update(np.ascontiguousarray(checksum, "<u8").tobytes())
    return int(hashed.intdigest())
