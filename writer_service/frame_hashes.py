"""A frame's bytes hashed in one pass: whole streams, which proves them, and each row, for a block's ``checksum``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from schemas.codecs import Stream
from schemas.segment import FrameView, check_streams

U64 = npt.NDArray[np.uint64]

cache_bytes: Final = 1024 * 1024  # hashed twice while the processor's own cache has them
pieces_at_once: Final = 512  # of small ones: each round holds the interpreter


class FrameHasher:
    """For the frames of a segment, one after the other; not thread-safe."""

    def __init__(self) -> None:
        self._made_for: tuple[Stream, ...] = ()

    def _make(self, declared: tuple[Stream, ...]) -> None:
        main, *sides = (stream.nbytes for stream in declared)
        self._at_once = max(1, min(pieces_at_once, cache_bytes // main))
        # Side pieces are brought together in the same memory every time: to make an object for each of them would take
        # longer than to hash them.
        self._joined = np.empty((self._at_once, sum(sides)), np.uint8)
        self._joined_pieces = [piece.data for piece in self._joined]
        self._made_for = declared

    def hash(self, view: FrameView) -> tuple[list[int], U64]:
        """xxh3 of each stream, and schemas.row_checksums of each piece: uint64 ``[rows × layers]``."""
        if view.declared != self._made_for:
            self._make(view.declared)
        digest: Callable[..., bytes] = xxhash.xxh3_64_digest
        seed: Callable[..., int] = xxhash.xxh3_64_intdigest
        main, *sides = (view.section(number) for number in range(len(view.declared)))
        streams = [xxhash.xxh3_64(), *(xxhash.xxh3_64(side.data) for side in sides)]
        found = np.empty(len(main), np.uint64)
        for start in range(0, len(main), self._at_once):
            pieces = main[start : start + self._at_once]
            stop = start + len(pieces)
            streams[0].update(pieces.data)
            if sides:
                np.concatenate([side[start:stop] for side in sides], axis=1, out=self._joined[: len(pieces)])
                digests = map(digest, pieces, map(seed, self._joined_pieces))
            else:
                digests = map(digest, pieces)
            found[start:stop] = np.frombuffer(b"".join(digests), ">u8")  # as xxh3_64_digest gives them
        return [stream.intdigest() for stream in streams], found

    def prove(self, view: FrameView, path: object) -> U64:
        """The rows' checksums of a frame; CorruptError where a stream's bytes do not match its own."""
        streams, found = self.hash(view)
        check_streams(view, streams, path)
        return found
