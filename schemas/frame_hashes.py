"""A frame's bytes hashed in one pass: whole streams, which proves them, and each row, for a block's ``checksum``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from schemas.codecs import Stream
from schemas.row_checksums import piece_digests
from schemas.segment import FrameView, check_streams

__all__ = ["hash_frame", "hash_streams", "prove_frame"]

U64 = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]

cache_bytes: Final = 1024 * 1024  # hashed twice while the processor's own cache has them


def hash_streams(declared: Sequence[Stream], streams: Sequence[Sequence[memoryview]]) -> tuple[list[int], U64]:
    """xxh3 of each stream, given as the buffers that it lies in, and schemas.row_checksums of each piece."""
    main, *sides = (_pieces(buffers, stream.nbytes) for buffers, stream in zip(streams, declared, strict=True))
    whole = [np.concatenate(arrays) if len(arrays) > 1 else arrays[0] for arrays in sides]
    digest, found, first = xxhash.xxh3_64(), [], 0
    step = max(1, cache_bytes // declared[0].nbytes)
    for array in main:
        for begin in range(0, len(array), step):
            pieces = array[begin:begin + step]
            digest.update(pieces.data)
            stop = first + len(pieces)
            found.append(piece_digests(pieces, [side[first:stop] for side in whole]))
            first = stop
    return [digest.intdigest(), *(xxhash.xxh3_64_intdigest(side.data) for side in whole)], np.concatenate(found)


def _pieces(buffers: Sequence[memoryview], nbytes: int) -> list[Bytes]:
    """Buffers as pieces; those that end in the middle of one, as parts of a message may, are joined."""
    if any(buffer.nbytes % nbytes for buffer in buffers):
        buffers = [memoryview(b"".join(buffers))]
    return [np.frombuffer(buffer, np.uint8).reshape(-1, nbytes) for buffer in buffers]


def hash_frame(view: FrameView) -> tuple[list[int], U64]:
    """xxh3 of each stream, and schemas.row_checksums of each piece: uint64 ``[rows × layers]``."""
    return hash_streams(view.declared, [[view.section(number).data] for number in range(len(view.declared))])


def prove_frame(view: FrameView, path: object) -> U64:
    """The rows' checksums of a frame; CorruptError where a stream's bytes do not match its own."""
    streams, found = hash_frame(view)
    check_streams(view, streams, path)
    return found
