"""State of each sender: how far it has come, and the memory that the writer may read from."""

from __future__ import annotations

import mmap
import os
import stat
from collections import deque
from dataclasses import dataclass, field

from schemas import limits
from schemas.errors import ProtocolError
from schemas.wire.layout import Part
from schemas.wire.messages import Ack, TapState

refusals_kept_max = limits.control_records_pending_max  # no sender waits for more answers than that


@dataclass(frozen=True, slots=True)
class MappedRing:
    """A sender's ring file, mapped read-only; ``nbytes`` of it may be named by extents."""

    fd: int
    view: memoryview
    nbytes: int

    def run(self, offset: int, nbytes: int) -> memoryview:
        """The bytes of a run; ProtocolError where it lies outside."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ProtocolError(f"run of {nbytes} bytes at {offset} lies outside the ring of {self.nbytes}")
        return self.view[offset : offset + nbytes]

    def check(self) -> None:
        """ProtocolError where the file was cut since it was mapped: touching the lost pages would kill the writer."""
        if os.fstat(self.fd).st_size < self.nbytes:
            raise ProtocolError("the ring file was cut")

    def close(self) -> None:
        """Unmapped when the last view of it is gone."""
        os.close(self.fd)


def map_ring(path: str | None, nbytes: int) -> MappedRing | None:
    """The ring that a Hello names, None where it cannot be read: payload must then come in parts."""
    if not path or nbytes <= 0:
        return None
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or info.st_size < nbytes:
            os.close(fd)
            return None
        view = memoryview(mmap.mmap(fd, nbytes, prot=mmap.PROT_READ))
    except (OSError, ValueError):
        os.close(fd)
        return None
    return MappedRing(fd, view, nbytes)


@dataclass(slots=True)
class SenderState:
    """State of one stream. Numbers up to ``received`` were taken, up to ``durable`` they are on the disk.

    ``ahead`` holds numbers past ``received`` that already lie in the store: a resend of them is not stored again.
    """

    stream: str
    epoch: int
    role: str
    rank: int = 0
    shard: int = 0
    group: str = ""  # of ranks that send rows of the same captures, "" for a sender that is alone
    layout: list[Part] = field(default_factory=list)  # of the group
    instance: str = ""  # of an engine, what it is called among those of its server
    address: bytes | None = None  # of its connection
    nonce: int = 0  # of its last Hello; 0: not told
    remote: bool = False  # on another host
    received: int = 0
    waiting: int = 0  # messages past ``received`` that stand in the line: about to be written, or being written
    durable: int = 0
    settled: int = 0  # up to here the catalog, and so every reader, knows
    ahead: set[int] = field(default_factory=set)
    ring: MappedRing | None = None
    last_seen: float = 0.0
    begun: float = 0.0  # when this writer first had it (monotonic)
    tap: TapState | None = None  # what an engine said of itself with its last Ping
    uncaptured: int = 0  # requests, as a front end counted them by its last Ping
    name: str = ""  # of the engine, where a gateway has several behind it
    asks: bool = False  # its next Ack is to tell of the store
    must_greet: bool = False  # told to start again from ``durable``; nothing is taken before its Hello, logged anew
    ended: bool = False
    open_captures: set[str] = field(default_factory=set)
    refused: deque[tuple[int, str, str]] = field(default_factory=lambda: deque(maxlen=refusals_kept_max))
    reported: deque[tuple[int, str, str]] = field(default_factory=lambda: deque(maxlen=refusals_kept_max))

    @property
    def share(self) -> Part | None:
        """The share that a rank of a group sends; None of a sender that is alone."""
        return self.layout[self.rank] if self.group else None

    def greet(self) -> None:
        """A Hello came: go on from what is on the disk, and say again what was refused lately."""
        self.must_greet = False
        self.refused = deque([*self.reported, *self.refused], maxlen=refusals_kept_max)
        self.reported.clear()

    def close_ring(self) -> None:
        """Let go of the sender's memory; its next Hello may name it again."""
        if self.ring is not None:
            self.ring.close()
            self.ring = None

    def rewind(self) -> None:
        """Forget what was taken but did not reach the disk; its Hello may be among it."""
        self.received, self.waiting = self.durable, 0
        self.must_greet = True
        for kept in (self.refused, self.reported):  # what comes again may be taken then
            while kept and kept[-1][0] > self.durable:
                kept.pop()

    def covered(self, visible_is_enough: bool) -> int:
        """Highest number that an Ack may cover. Engines need their memory back; others want to read what they wrote."""
        if self.role != "engine":
            return self.settled
        return self.received if visible_is_enough else self.durable

    def ack(self, visible_is_enough: bool) -> Ack:
        """Ack for the sender now; a refusal is repeated until an Ack covers it."""
        durable = self.covered(visible_is_enough)
        answer = Ack(durable, self.received, list(self.refused))
        while self.refused and self.refused[0][0] <= durable:
            self.reported.append(self.refused.popleft())
        return answer
