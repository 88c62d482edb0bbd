"""The segment format: frames one after the other, each a hashed head, its side streams and its main stream.

    prelude 64 B | header (msgpack) | row table | pad | side streams | pad | main stream | pad     (pads to 4096).

A segment is first the journal file of one (site, codec, width, dtype, fingerprint). Later it is the shard of a Zarr
array, unchanged but for an index appended to it. The parser trusts no length: it holds everything against limits, the
file's size and the hash before it is used. The walk ends at the first frame that is not whole.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from schemas import codecs, limits
from schemas.codecs import Stream
from schemas.errors import CorruptError, ProtocolError, SpecError, StoreError
from schemas.wire.messages import Frame, StreamPart, unpack
from schemas.wire.row_table import FLAG_ERASED, RowTable, check_frame, check_table

__all__ = ["FrameHeader", "FrameView", "Layout", "check_streams", "encode_head", "frame_layout", "frames_end",
           "head_digest", "parse_frame", "read_frame", "redacted_head", "verify_payload", "walk", "whole_frames"]

MAGIC: Final = b"TAPFRM01"
SEGMENT_VERSION: Final = 1
FLAG_REDACTED: Final = 1  # rows of deleted captures were erased (schemas.wire.row_table.FLAG_ERASED); hashed anew
# magic, version, flags, store uuid, segment number, header bytes, table bytes, total bytes, xxh3
PRELUDE: Final = struct.Struct("<8sII16sQIIQQ")
_HASH_AT: Final = PRELUDE.size - 8

Bytes = npt.NDArray[np.uint8]
Index = npt.NDArray[np.int64]


class FrameHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The frame as it came, its ring extents dropped, and which stream it came from.

    ``covered`` is the stream's durable number when the frame was appended: recovery counts on from there.
    """

    stream: str
    epoch: int
    covered: int
    frame: Frame


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(FrameHeader)


def align(nbytes: int) -> int:
    """``nbytes`` rounded up to a section boundary."""
    step = limits.section_align_bytes
    return -(-nbytes // step) * step


@dataclass(frozen=True, slots=True)
class Layout:
    """Byte offsets of the sections from the frame's start; ``parts`` in the order of the codec's streams."""

    parts: tuple[int, ...]
    side_end: int
    total: int


def frame_layout(head_bytes: int, part_bytes: Sequence[int]) -> Layout:
    """Lay out the sections of a frame: the first stream is the main one and comes last."""
    offset = align(head_bytes)
    sides = []
    for nbytes in part_bytes[1:]:
        sides.append(offset)
        offset += nbytes
    main = align(offset)
    return Layout((main, *sides), offset, align(main + part_bytes[0]))


def encode_head(store: bytes, number: int, header: FrameHeader, table: bytes | memoryview) -> tuple[bytes, Layout]:
    """Prelude, header and row table of a frame, padded to the next section, and its layout.

    ``store`` is the store's 16-byte uuid and ``number`` the segment's: bytes of a recycled file never pass.
    """
    frame = header.frame
    if any(part.extents for part in frame.streams):
        bare = [StreamPart(part.name, part.nbytes, part.xxh3) for part in frame.streams]
        header = msgspec.structs.replace(header, frame=msgspec.structs.replace(frame, streams=bare))
    body = _encoder.encode(header)
    used = PRELUDE.size + len(body) + len(table)
    layout = frame_layout(used, [part.nbytes for part in frame.streams])
    return seal_head(store, number, 0, body, table, layout.total), layout


def seal_head(store: bytes, number: int, flags: int, body: bytes, table: bytes | memoryview, total: int) -> bytes:
    """The hashed head of encoded parts, padded to a section."""
    fields = (MAGIC, SEGMENT_VERSION, flags, store, number, len(body), len(table), total)
    head = b"".join((PRELUDE.pack(*fields, 0), body, table))
    hashed = struct.pack("<Q", xxhash.xxh3_64_intdigest(head))
    return head[:_HASH_AT] + hashed + head[_HASH_AT + 8 :] + bytes(align(len(head)) - len(head))


def redacted_head(view: FrameView, store: bytes, number: int, rows: Index, digests: Sequence[int]) -> bytes:
    """The head of a frame whose ``rows`` were erased: as long as the old one, with the new xxh3 of every stream."""
    table = view.table
    token_id, flags = table.token_id.copy(), table.flags.copy()
    token_id[rows] = 0
    flags[rows] |= np.uint32(FLAG_ERASED)
    parts = [msgspec.structs.replace(part, xxh3=digest)
             for part, digest in zip(view.frame.streams, digests, strict=True)]
    body = _encoder.encode(msgspec.structs.replace(view.header, frame=msgspec.structs.replace(
        view.frame, streams=parts)))
    data = RowTable(table.capture, table.position, token_id, flags).to_bytes()
    if frame_layout(PRELUDE.size + len(body) + len(data), [part.nbytes for part in parts]) != view.layout:
        raise StoreError("redact frame", f"segment {number} at byte {view.offset}", "its head changes in length")
    return seal_head(store, number, view.flags | FLAG_REDACTED, body, data, view.layout.total)


@dataclass(slots=True)
class FrameView:
    """A frame in a mapped segment; nothing of the payload is read until asked for.

    ``offset`` is the frame's byte offset in ``data``; ``rows`` the number of its rows.
    """

    data: memoryview
    offset: int
    header: FrameHeader
    flags: int
    table: RowTable
    rows: int
    layout: Layout
    declared: tuple[Stream, ...]
    digest: int  # of the head, as it was parsed
    _first: Index = field(init=False)  # by row: the first row of its run
    _count: Index = field(init=False)  # by row: how many rows its run has
    _sections: dict[int, Bytes] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        runs = np.asarray(self.frame.runs, np.int64)
        self._first = np.repeat(np.cumsum(runs) - runs, runs)
        self._count = np.repeat(runs, runs)

    @property
    def frame(self) -> Frame:
        """The frame's message."""
        return self.header.frame

    @property
    def end(self) -> int:
        """Offset of what follows the frame."""
        return self.offset + self.layout.total

    @property
    def whole(self) -> bool:
        """Whether its payload can be had, and not only its head."""
        return len(self.data) >= self.end

    def pieces(self, layers: npt.ArrayLike, rows: npt.ArrayLike) -> Index:
        """Index of the piece of each (layer, row) in any of the streams: int64 ``[len(layers), len(rows)]``.

        ``layers`` are indexes into ``frame.layers``.
        """
        row = np.asarray(rows, np.int64)
        layer = np.asarray(layers, np.int64)[:, None]
        first, count = self._first[row], self._count[row]
        index: Index = first * len(self.frame.layers) + layer * count + (row - first)
        return index

    def runs_of(self, rows: Index) -> tuple[Index, Index]:
        """The number of each row's first piece, by layer, and how many pieces further the next layer's is."""
        first, count = self._first[rows], self._count[rows]
        return first * (len(self.frame.layers) - 1) + rows, count

    def move_to(self, data: memoryview) -> None:
        """Look at the same bytes in another map of the same file."""
        self.data, self._sections = data, {}

    def section(self, stream: int) -> Bytes:
        """All pieces of a stream as bytes ``[rows × layers, piece bytes]``, a view of the file."""
        if (known := self._sections.get(stream)) is not None:
            return known
        piece = self.declared[stream].nbytes
        count = self.rows * len(self.frame.layers)
        at = self.offset + self.layout.parts[stream]
        made = self._sections[stream] = np.frombuffer(self.data, np.uint8, count * piece, at).reshape(count, piece)
        return made


def parse_frame(data: memoryview, offset: int, store: bytes, number: int, path: object, file_bytes: int = 0
                ) -> FrameView:
    """The frame at ``offset`` of a segment; CorruptError (naming ``path`` and the offset) if it is not whole.

    ``data`` may end with the frame's head if ``file_bytes``, the size of the file that it is from, says how much
    follows. Then the view can give nothing of the payload.
    """
    size = max(len(data), file_bytes)

    def need(condition: bool, what: str) -> None:
        if not condition:
            raise CorruptError("read frame", f"{path} at byte {offset}", what)

    need(0 <= offset <= len(data) - PRELUDE.size, "the file ends before the frame's prelude")
    magic, version, flags, uuid, segment, n_header, n_table, total, digest = PRELUDE.unpack_from(data, offset)
    need(magic == MAGIC, "no frame starts here")
    need(version == SEGMENT_VERSION, f"format version {version}, this reader knows {SEGMENT_VERSION}")
    need(uuid == store and segment == number, "the frame belongs to another store or segment")
    need(n_header <= limits.message_header_bytes_max, f"header of {n_header} bytes")
    need(n_table <= 16 * limits.frame_rows_max, f"row table of {n_table} bytes")
    used = PRELUDE.size + n_header + n_table
    need(used <= total <= size - offset, f"frame of {total} bytes, {size - offset} left in the file")
    head = bytearray(data[offset : offset + used])
    head[_HASH_AT : PRELUDE.size] = bytes(8)
    need(xxhash.xxh3_64_intdigest(head) == digest, "the head does not match its checksum")
    try:
        header = unpack(_decoder, memoryview(head)[PRELUDE.size : PRELUDE.size + n_header])
        codecs.identified(header.frame.codec)  # StoreError where it is not installed: the frame is whole all the same
        rows = check_frame(header.frame)
        table = RowTable.from_bytes(bytes(head[used - n_table :]), rows)
        check_table(header.frame, table)
    except (msgspec.MsgspecError, ProtocolError, SpecError) as error:
        raise CorruptError("read frame", f"{path} at byte {offset}", error) from None
    frame = header.frame
    layout = frame_layout(used, [part.nbytes for part in frame.streams])
    need(layout.total == total, f"frame of {total} bytes, its sections need {layout.total}")
    declared = codecs.streams(frame.codec, frame.width, frame.dtype)
    return FrameView(data, offset, header, flags, table, rows, layout, declared, digest)


def read_frame(fd: int, offset: int, store: bytes, number: int, path: object, payload: bool) -> FrameView:
    """A copy of the frame at ``offset`` of an open file, of its head alone without ``payload``; CorruptError as above.

    For files that may be cut at this moment: a map of one would end the process where a page of it is gone.
    """
    left = max(os.fstat(fd).st_size - offset, 0)
    prelude = os.pread(fd, PRELUDE.size, offset)
    if len(prelude) < PRELUDE.size:
        raise CorruptError("read frame", f"{path} at byte {offset}", "the file ends before the frame's prelude")
    *_, n_header, n_table, total, _ = PRELUDE.unpack(prelude)
    wanted = min(total if payload else PRELUDE.size + n_header + n_table, left)
    data = os.pread(fd, wanted, offset)
    if len(data) < wanted:
        raise CorruptError("read frame", f"{path} at byte {offset}", "the file was cut")
    return parse_frame(memoryview(data), 0, store, number, f"{path} from byte {offset} on,", 0 if payload else left)


def head_digest(fd: int, offset: int) -> int | None:
    """The digest that the head at ``offset`` of an open file has now; None where the file ends before it.

    Where rows were erased since, it is not a view's ``digest`` any more: heads are rewritten before rows go.
    """
    prelude = os.pread(fd, PRELUDE.size, offset)
    return int(PRELUDE.unpack(prelude)[-1]) if len(prelude) == PRELUDE.size else None


def newer_frame(data: memoryview, offset: int, store: bytes) -> bool:
    """Whether a frame of a version that this program does not know starts at ``offset``."""
    if offset > len(data) - PRELUDE.size:
        return False
    magic, version, _, uuid, *_ = PRELUDE.unpack_from(data, offset)
    return bool(magic == MAGIC and version > SEGMENT_VERSION and uuid == store)


def verify_payload(view: FrameView, path: object, first: int = 0) -> None:
    """CorruptError where a stream's bytes do not match its checksum; of streams from number ``first`` on."""
    starts = (view.offset + at for at in view.layout.parts[first:])
    check_streams(view, (xxhash.xxh3_64_intdigest(view.data[start : start + part.nbytes])
                         for start, part in zip(starts, view.frame.streams[first:], strict=True)), path, first)


def check_streams(view: FrameView, digests: Iterable[int], path: object, first: int = 0) -> None:
    """CorruptError where the xxh3 of a frame's streams, from ``first`` on, are not those that its head names."""
    for part, digest in zip(view.frame.streams[first:], digests, strict=True):
        if digest != part.xxh3:
            raise CorruptError("read frame", f"{path} at byte {view.offset}", f"stream {part.name} does not match "
                               "its checksum", "the rows of this frame are lost; others are not affected")


Verify = Callable[[FrameView, object], object]


def walk(
    data: memoryview, store: bytes, number: int, path: object, verify: Verify | None, start: int = 0
) -> Iterator[FrameView]:
    """The frames of a segment from ``start`` up to the first that is not whole; with ``verify``, payload included."""
    offset = start
    while offset < len(data):
        try:
            view = parse_frame(data, offset, store, number, path)
            if verify is not None:
                verify(view, path)
        except CorruptError:
            return
        yield view
        offset = view.end


def whole_frames(
    data: memoryview, store: bytes, number: int, path: object, known: Sequence[tuple[int, int]],
    verify: Verify = verify_payload,
) -> Iterator[FrameView | CorruptError]:
    """The frames of a journal file that are whole, in order, and what is wrong with others.

    ``known`` are (offset, bytes) of frames that were acknowledged, in order: a damaged one costs no other. What follows
    them ends at the first that is not whole. ``verify`` raises CorruptError where a frame's payload is not whole.
    """
    parsed: list[FrameView | CorruptError] = []
    for offset, _ in known:  # all heads first: after megabytes of payload none of this is in the processor's cache
        try:
            parsed.append(parse_frame(data, offset, store, number, path))
        except CorruptError as error:
            parsed.append(error)
    for found in parsed:
        if isinstance(found, FrameView):
            try:
                verify(found, path)
            except CorruptError as error:
                yield error
                continue
        yield found
    yield from walk(data, store, number, path, verify, start=sum(known[-1]) if known else 0)


def frames_end(views: Sequence[FrameView], known: Sequence[tuple[int, int]]) -> int:
    """End of the last frame, those included that are known but not whole."""
    return max(sum(known[-1]) if known else 0, views[-1].end if views else 0)
