"""A frame's bytes hashed in one pass: whole streams, which proves them, and each row, for a block's ``checksum``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from schemas.codecs import Stream
from schemas.native.loops import loops_for
from schemas.store.row_checksums import digests, side_digests
from schemas.store.segment import FrameView, check_streams

__all__ = ["hash_frame", "hash_streams", "prove_frame"]

U64 = npt.NDArray[np.uint64]

cache_bytes: Final = 1024 * 1024  # hashed twice while the processor's own cache has them


def hash_streams(declared: Sequence[Stream], streams: Sequence[Sequence[memoryview]]) -> tuple[list[int], U64]:
    """xxh3 of each stream, given as the buffers that it lies in, and schemas.store.row_checksums of each piece."""
    piece_bytes, main = declared[0].nbytes, streams[0]
    if any(buffer.nbytes % piece_bytes for buffer in main):  # parts of a message end anywhere
        main = [_joined(main)]
    sides = [np.frombuffer(_joined(buffers), np.uint8).reshape(-1, stream.nbytes)
             for buffers, stream in zip(streams[1:], declared[1:], strict=True)]
    seeds = side_digests(sides)
    loop = loops_for(sum(buffer.nbytes for buffer in main) // piece_bytes)
    first, found = (_stream if loop is None else loop.stream)(main, piece_bytes, seeds)
    return [first, *(xxhash.xxh3_64_intdigest(side.data) for side in sides)], found


def _joined(buffers: Sequence[memoryview]) -> memoryview:
    return buffers[0] if len(buffers) == 1 else memoryview(b"".join(buffers))


def _stream(buffers: Sequence[memoryview], piece_bytes: int, seeds: U64 | None) -> tuple[int, U64]:
    """``schemas.native.loops.Loops.stream`` in Python."""
    digest, found, first = xxhash.xxh3_64(), [], 0
    step = max(1, cache_bytes // piece_bytes)
    for buffer in buffers:
        part = np.frombuffer(buffer, np.uint8).reshape(-1, piece_bytes)
        for begin in range(0, len(part), step):
            pieces = part[begin:begin + step]
            digest.update(pieces.data)
            stop = first + len(pieces)
            found.append(digests(pieces, None if seeds is None else seeds[first:stop]))
            first = stop
    return digest.intdigest(), np.concatenate(found)


def hash_frame(view: FrameView) -> tuple[list[int], U64]:
    """xxh3 of each stream, and schemas.store.row_checksums of each piece: uint64 ``[rows × layers]``."""
    return hash_streams(view.declared, [[view.section(number).data] for number in range(len(view.declared))])


def prove_frame(view: FrameView, path: object) -> U64:
    """The rows' checksums of a frame; CorruptError where a stream's bytes do not match its own."""
    streams, found = hash_frame(view)
    check_streams(view, streams, path)
    return found
