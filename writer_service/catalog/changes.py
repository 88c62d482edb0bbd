"""Changes of a store that the catalog must hear of: entries of the control logs, and these."""

from __future__ import annotations

from dataclasses import dataclass

from schemas.wire.messages import Frame
from schemas.wire.row_table import RowTable
from writer_service.control_log import LogEntry


@dataclass(frozen=True, slots=True)
class Indexed:
    """A frame that lies whole in a segment, as the catalog needs it."""

    stream: str
    epoch: int
    covered: int
    segment: int
    offset: int
    nbytes: int
    frame: Frame
    table: RowTable


@dataclass(frozen=True, slots=True)
class SegmentMade:
    """A segment that the catalog must know before its first frame."""

    number: int
    site: str
    codec: str
    dtype: str
    width: int
    fingerprint: str

    @classmethod
    def of(cls, frame: Frame, number: int) -> SegmentMade:
        """Segment ``number`` that takes such frames."""
        return cls(number, frame.site, frame.codec, frame.dtype, frame.width, frame.fingerprint)


@dataclass(frozen=True, slots=True)
class SegmentSealed:
    """A segment that is now a block."""

    number: int


@dataclass(frozen=True, slots=True)
class SegmentGone:
    """A segment that ended without a frame, or a block that was taken away."""

    number: int


@dataclass(frozen=True, slots=True)
class LogBegun:
    """The entries that follow lie in this control log."""

    number: int


@dataclass(frozen=True, slots=True)
class Erased:
    """A block of which nothing of deleted captures is left."""

    segment: int
    captures: list[str]


@dataclass(frozen=True, slots=True)
class Scrubbed:
    """A control log tells nothing of deleted captures any more."""

    log: int
    captures: list[str]


@dataclass(frozen=True, slots=True)
class Compacted:
    """A cold block that has taken over the rows of other blocks; these still lie there, and are taken away next."""

    made: SegmentMade
    replaces: list[int]
    frames: list[Indexed]


Change = LogEntry | Indexed | SegmentMade | SegmentSealed | SegmentGone | LogBegun | Erased | Scrubbed | Compacted
