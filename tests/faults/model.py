"""A store in memory: what readers must get of a capture, from what was sent of it. It knows nothing of files.

An engine's messages count in the order of their numbers, so a writer that has not heard all of them yet answers as if
the rest had never been sent: ``Capture.answer(heard, told)``, for the engine's and the API's messages up to there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from typing import Protocol

from schemas import limits
from schemas.codecs import streams
from schemas.errors import NotFoundError
from schemas.read.reader import StoreReader
from tests.support.store_helpers import SITE, expected_pieces

beside_bytes_max = 4096  # of a capture's spec, tokens and tags, as the tests have them


class Numbered(Protocol):
    """Whoever sends: the number of its last message, and the last that it knows to be safe."""

    seq: int
    durable: int


@dataclass(frozen=True)
class Rows:
    """Rows at positions ``[start, stop)`` with the content of ``version``."""

    seq: int
    start: int
    stop: int
    version: int


@dataclass(frozen=True)
class Drop:
    """Rows that were not kept."""

    seq: int
    start: int
    stop: int


@dataclass(frozen=True)
class Finish:
    """The end, after ``output`` generated tokens."""

    seq: int
    end: int
    output: int
    reason: str


@dataclass(frozen=True)
class Answer:
    """What a reader says: rows by position, ranges that are missing with their reasons, how many rows lie there."""

    status: str
    total: int = 0
    expected: int = 0
    rows: tuple[tuple[int, bytes], ...] = ()
    missing: tuple[tuple[int, int, str], ...] = ()
    stored: int = 0


@dataclass
class Capture:
    """One capture; numbers are those of its engine's stream, and of the API's in ``asked``."""

    id: str
    number: int
    codec: str
    layers: list[int]
    prompt_len: int
    positions: str | list[tuple[int, int]]
    old: bool
    owner: str = ""
    owned: int = 0
    engine: Numbered | None = None
    opened: int = 0
    events: list[Rows | Drop | Finish] = field(default_factory=list)
    asked: list[tuple[int, str]] = field(default_factory=list)  # hold, release, delete
    lost: bool = False
    expired: bool = False

    @property
    def finished(self) -> bool:
        return any(isinstance(event, Finish) for event in self.events)

    @property
    def reach(self) -> int:
        """One past the highest position sent."""
        return max((event.stop for event in self.events if isinstance(event, Rows)), default=0)

    def standing(self, told: int) -> tuple[bool, bool]:
        """(held, deleted)."""
        held = deleted = False
        for seq, what in self.asked:
            if seq <= told and not deleted:
                held = what == "hold" if what != "delete" else held
                deleted = what == "delete" and not held
        return held, deleted or self.expired

    def answer(self, heard: int, told: int) -> Answer | None:
        """None where the capture is not to be found."""
        if self.standing(told)[1]:
            return None
        if self.engine is None or heard < self.opened:
            return Answer("pending") if self.owned and self.owned <= told else None
        events = [event for event in self.events if event.seq <= heard]
        finish = next((event for event in events if isinstance(event, Finish)), None)
        newest: dict[int, Rows | Drop] = {}
        for event in events:
            if not isinstance(event, Finish):
                newest.update(dict.fromkeys(range(event.start, event.stop), event))
        reach = max((event.stop for event in events if isinstance(event, Rows)), default=0)
        total = self.prompt_len + finish.output if finish else max(self.prompt_len, reach)
        served = finish.end if finish else total
        end = max(served, total - 1) if finish else total
        dropped = {p for event in events if isinstance(event, Drop) for p in range(event.start, event.stop)}
        rows, missing = [], []
        asked = [p for p in range(end) if self._asks(p)]
        for p in asked:
            found = newest.get(p)
            if isinstance(found, Rows) and p < served:
                rows.append((p, content(self.number, p, tuple(self.layers), self.codec, found.version)))
            elif p in dropped:
                missing.append((p, "dropped"))
            elif finish:
                missing.append((p, "aborted" if finish.reason == "abort" and p >= served else "dropped"))
            else:
                missing.append((p, "engine_lost" if self.lost else "pending"))
        ended = "incomplete" if missing else "complete" if asked else "empty"
        status = ended if finish else "incomplete" if self.lost else "running"
        stored = sum(event.stop - event.start for event in events if isinstance(event, Rows))
        return Answer(status, total, len(asked), tuple(rows), ranges(missing), stored)

    def _asks(self, position: int) -> bool:
        if isinstance(self.positions, str):
            return self.positions == "all" or position >= self.prompt_len
        return any(start <= position < stop for start, stop in self.positions)

    def answers(self, told: Sequence[int]) -> list[Answer | None]:
        """Every answer that is right while not all is known to have arrived; the API's messages are at ``told``."""
        heard = [0]
        if self.engine is not None:
            marks = {self.engine.durable, self.opened, *(event.seq for event in self.events)}
            heard = [seq for seq in sorted(marks) if self.engine.durable <= seq <= self.engine.seq]
        return [self.answer(seq, at) for seq in heard for at in told]


def ranges(positions: Sequence[tuple[int, str]]) -> tuple[tuple[int, int, str], ...]:
    """Neighbours of the same reason as ``(start, stop, reason)``."""
    found = []
    for (_, reason), group in groupby(enumerate(positions), lambda item: (item[1][0] - item[0], item[1][1])):
        at = [p for _, (p, _) in group]
        found.append((at[0], at[-1] + 1, reason))
    return tuple(found)


@cache
def content(number: int, position: int, layers: tuple[int, ...], codec: str, version: int) -> bytes:
    """The stored bytes of a row in all its layers."""
    pieces = expected_pieces(number, [position], layers, codec, version=version)
    return b"".join(pieces[name].tobytes() for name in sorted(pieces))


def read(reader: StoreReader, capture: Capture) -> Answer | None:
    """The same, as the store has it."""
    try:
        row = reader.capture(capture.id, capture.owner)
    except NotFoundError:
        assert reader.owner_bytes(capture.owner) == 0, "what is gone is counted for its owner"
        return None
    if row.status == "pending":
        return Answer("pending")
    manifest = reader.manifest(capture.id)
    entries = {(entry.expected, entry.captured, tuple((m.start, m.stop, m.reason) for m in entry.missing))
               for entry in manifest.rows}
    assert [entry.layer for entry in manifest.rows] == capture.layers and len(entries) == 1, manifest.rows
    ((expected, captured, missing),) = entries
    got = reader.slice(capture.id, SITE, capture.layers, 0, limits.position_max)
    assert got.token_ids.tolist() == [position + 5000 for position in got.positions.tolist()]
    rows = tuple((position, b"".join(got.pieces[name][:, at].tobytes() for name in sorted(got.pieces)))
                 for at, position in enumerate(got.positions.tolist()))
    assert len(rows) == captured, "the manifest counts other rows than are served"
    stored = sum(extent.rows for extent in manifest.sites[0].extents)
    if capture.owner:  # of this capture alone: its rows, and what is beside them
        row_bytes = sum(stream.nbytes for stream in streams(manifest.sites[0].codec, got.width, got.dtype))
        beside = reader.owner_bytes(capture.owner) - stored * len(capture.layers) * row_bytes
        assert 0 < beside < beside_bytes_max, beside
    assert (manifest.status, manifest.total_len) == (row.status, row.total_len)
    return Answer(row.status, row.total_len, expected, rows, missing, stored)
