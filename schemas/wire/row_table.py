"""Checks on frames, the same on sending and on receiving: every length against the header and the limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from schemas import codecs, limits
from schemas.errors import ProtocolError, SpecError
from schemas.ids import split_capture_id
from schemas.sites import is_site
from schemas.wire.layout import Part, share_of
from schemas.wire.messages import Frame

U32 = npt.NDArray[np.uint32]

FLAG_GENERATED = 1  # the row's token was sampled, not in the prompt
FLAG_RECOMPUTED = 2  # the position had been computed before (preemption)
FLAG_ERASED = 1 << 31  # set by the writer alone: the row is of a deleted capture, its bytes and token id are zeros
NO_STEP = 2**63 - 1  # larger than any step
FLAG_DRAFT = 4  # the row's token was a guess of speculative decoding, not known to be the sequence's own


@dataclass(frozen=True, slots=True)
class RowTable:
    """Columns of a frame's rows, in the order of the rows."""

    capture: U32  # index into Frame.captures
    position: U32
    token_id: U32
    flags: U32

    def to_bytes(self) -> bytes:
        """The four columns one after the other, little-endian."""
        return np.stack([self.capture, self.position, self.token_id, self.flags]).astype("<u4", copy=False).tobytes()

    @classmethod
    def from_bytes(cls, data: bytes | memoryview, n_rows: int) -> RowTable:
        """The inverse; ProtocolError where the length is not 16 bytes a row."""
        if len(data) != 16 * n_rows:
            raise ProtocolError(f"row table has {len(data)} bytes, {n_rows} rows need {16 * n_rows}")
        return cls(*np.frombuffer(data, "<u4").reshape(4, n_rows))


def check_frame(frame: Frame) -> int:
    """The number of rows of a frame whose header is consistent and within limits, else ProtocolError."""

    def need(condition: bool, what: str) -> None:
        if not condition:
            raise ProtocolError(f"frame {frame.seq}: {what}")

    need(frame.seq > 0, "seq must be positive")
    need(is_site(frame.site), f"unknown site {frame.site!r}")
    need(codecs.is_identity(frame.codec), f"unknown codec {frame.codec[:64]!r}")
    need(frame.dtype in codecs.MODEL_DTYPES, f"unknown dtype {frame.dtype!r}")
    need(0 < frame.width <= limits.width_max, f"width {frame.width}")
    need(0 < len(frame.layers) <= limits.layers_max, f"{len(frame.layers)} layers")
    need(min(frame.layers) >= 0 and max(frame.layers) < limits.layers_max, "layer out of range")
    need(frame.layers == sorted(set(frame.layers)), "layers not ascending")
    need(0 < len(frame.runs) <= limits.frame_runs_max, f"{len(frame.runs)} runs")
    need(all(0 < run <= limits.frame_rows_max for run in frame.runs), "run out of range")
    rows = sum(frame.runs)
    need(rows <= limits.frame_rows_max, f"{rows} rows")
    need(0 < len(frame.captures) <= limits.frame_captures_max, f"{len(frame.captures)} captures")
    need(len(set(frame.captures)) == len(frame.captures), "a capture is named twice")
    if frame.steps is not msgspec.UNSET:
        need(len(frame.steps) == len(frame.runs), f"{len(frame.steps)} steps of {len(frame.runs)} runs")
        need(min(frame.steps) >= 0 and max(frame.steps) < NO_STEP, "step out of range")
    need(len(frame.fingerprint) <= limits.alias_chars_max, f"fingerprint of {len(frame.fingerprint)} characters")
    need(all(split_capture_id(capture) is not None for capture in frame.captures), "malformed capture id")
    try:
        declared = codecs.streams(frame.codec, frame.width, frame.dtype)
    except SpecError as error:
        raise ProtocolError(f"frame {frame.seq}: {error}") from None
    need([part.name for part in frame.streams] == [stream.name for stream in declared], "streams do not fit the codec")
    total = 0
    for part, stream in zip(frame.streams, declared, strict=True):
        nbytes = rows * len(frame.layers) * stream.nbytes
        need(part.nbytes == nbytes, f"stream {part.name} has {part.nbytes} bytes, the shape says {nbytes}")
        total += nbytes
        if part.extents:
            sizes = [run * len(frame.layers) * stream.nbytes for run in frame.runs]
            need([size for _, size in part.extents] == sizes, f"extents of {part.name} do not fit its runs")
            need(all(offset >= 0 for offset, _ in part.extents), "negative offset")
    need(total <= limits.frame_bytes_max, f"{total} bytes, limit {limits.frame_bytes_max}")
    return rows


def steps_of(frame: Frame) -> npt.NDArray[np.uint64] | None:
    """The step that computed each row; None where the sender is no part of a group."""
    if frame.steps is msgspec.UNSET:
        return None
    return np.repeat(np.asarray(frame.steps, np.uint64), frame.runs)


def joined_steps(steps: Sequence[npt.NDArray[np.uint64] | None], rows: Sequence[int]) -> npt.NDArray[np.uint64] | None:
    """``steps_of`` several frames that have so many rows each, NO_STEP where one tells none; None where none does."""
    if all(each is None for each in steps):
        return None
    return np.concatenate([np.full(count, NO_STEP, np.uint64) if each is None else each
                           for each, count in zip(steps, rows, strict=True)])


def check_part(frame: Frame, part: Part) -> None:
    """ProtocolError where a frame of a group is not of the sender's share, or does not tell its steps."""
    if frame.steps is msgspec.UNSET:
        raise ProtocolError(f"frame {frame.seq}: a rank of a group must tell the steps of its runs")
    if frame.rank != part.rank:
        raise ProtocolError(f"frame {frame.seq}: rank {frame.rank}, of a sender that is rank {part.rank}")
    share = share_of(part, frame.site, frame.layers)
    if share is None:
        raise ProtocolError(f"frame {frame.seq}: layers {frame.layers[:8]} of {frame.site} are in no share of rank "
                            f"{part.rank}")
    if frame.width != share.stop - share.start:
        raise ProtocolError(f"frame {frame.seq}: width {frame.width}; rank {part.rank} has columns {share.start} to "
                            f"{share.stop} of {frame.site}")


def check_table(frame: Frame, table: RowTable) -> None:
    """ProtocolError where a row names no capture of the frame or a position out of range."""
    if int(table.capture.max(initial=0)) >= len(frame.captures):
        raise ProtocolError(f"frame {frame.seq}: a row names capture {int(table.capture.max())}")
    if int(table.position.max(initial=0)) > limits.position_max:
        raise ProtocolError(f"frame {frame.seq}: position {int(table.position.max())}")
