"""Find the bytes of a frame, in the sender's ring or in the message's parts, and check them. Nothing is copied."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from schemas import codecs
from schemas.errors import ProtocolError
from schemas.native.loops import loops_for
from schemas.store.frame_hashes import hash_streams
from schemas.store.row_checksums import piece_bytes_min
from schemas.wire.messages import Frame
from writer_service.sender_state import MappedRing


def find_payload(frame: Frame, ring: MappedRing | None, parts: Sequence[memoryview]) -> list[list[memoryview]]:
    """The buffers of each stream in order, of its size; ProtocolError otherwise.

    ``frame`` has passed check_frame: extents fit its runs.
    """
    streams: list[list[memoryview]] = []
    used = 0
    if ring is not None:
        ring.check()
    for part in frame.streams:
        if part.extents:
            if ring is None:
                raise ProtocolError(f"frame {frame.seq}: {part.name} is in a ring that this writer cannot read; send "
                                    "parts")
            buffers = [ring.run(offset, nbytes) for offset, nbytes in part.extents]
        else:
            buffers, size = [], 0
            while size < part.nbytes and used < len(parts):
                buffers.append(parts[used])
                size += parts[used].nbytes
                used += 1
            if size != part.nbytes:
                raise ProtocolError(f"frame {frame.seq}: {part.name} has {size} bytes in parts, its header says "
                                    f"{part.nbytes}")
        streams.append(buffers)
    if used != len(parts):
        raise ProtocolError(f"frame {frame.seq}: {len(parts) - used} payload parts too many")
    return streams


def check_payload(frame: Frame, streams: Sequence[Sequence[memoryview]], rows: bool) -> npt.NDArray[np.uint64] | None:
    """ProtocolError where a stream's bytes do not match its xxh3.

    ``rows`` asks for the row_checksums of each piece as well, while the bytes are in the processor's cache. None
    where that would take the interpreter: receiving is where time is short, sealing has more of it.
    """
    declared = codecs.streams(frame.codec, frame.width, frame.dtype)
    piece_bytes, checksums = declared[0].nbytes, None
    if rows and piece_bytes >= piece_bytes_min and loops_for(frame.streams[0].nbytes // piece_bytes) is not None:
        digests, checksums = hash_streams(declared, streams)
    else:
        digests = [_digest(buffers) for buffers in streams]
    for part, digest in zip(frame.streams, digests, strict=True):
        if digest != part.xxh3:
            raise ProtocolError(f"frame {frame.seq}: stream {part.name} does not match its checksum")
    return checksums


def _digest(buffers: Sequence[memoryview]) -> int:
    digest = xxhash.xxh3_64()
    for buffer in buffers:
        digest.update(buffer)
    return digest.intdigest()
