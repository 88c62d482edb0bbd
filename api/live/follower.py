"""Following the rows of one site of a capture while it is made, each frame once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from api.errors import BadParam
from api.slices.query import SiteQuery
from schemas import limits
from schemas.bucket.reader import AnyReader
from schemas.errors import CorruptError, NotFoundError, StoreError
from schemas.read.journal_tail import FrameAt
from schemas.read.reader import LiveRows, PartsCursor

__all__ = ["Follower", "choose"]


def choose(reader: AnyReader, capture: str, owner: str, query: SiteQuery) -> tuple[str, list[int]] | None:
    """The site and the layers asked for; None while no engine has begun the capture."""
    manifest = reader.manifest(capture, owner)
    if not manifest.resolved:
        return None
    chosen = query.choose(manifest.resolved["layers"], manifest.engine)
    if len(chosen) > 1:
        raise BadParam("site", None, f"this capture has several; name one of {', '.join(chosen)}")
    return next(iter(chosen.items()))


class Follower:
    """Progress of one stream of rows. Frames are sent once; what was sent before it was durable is made up for.

    ``event`` makes the bytes that are sent of rows, given their site.
    """

    def __init__(self, capture: str, owner: str, query: SiteQuery, after: int, event: Callable[[str, LiveRows], bytes]
                 ) -> None:
        self.capture, self.owner, self.query, self.event = capture, owner, query, event
        self.site, self.layers = "", list[int]()
        self.durable = after  # every frame up to this number is durable, and sent
        self.newly_durable = False
        self._parts: PartsCursor | None = None  # of a capture that several ranks send
        self.todo = deque[FrameAt | PartsCursor]()  # what the last look found to send
        self._first = 0  # so many of the capture's rows in the first of them were sent
        self._sent: set[int] = set()  # numbers above ``durable`` that were sent before they were durable

    def look(self, reader: AnyReader) -> str:
        """The capture's status; finds what there is to send."""
        try:
            # Looked at before the rows: what is final then has all its rows in the store.
            status = reader.capture(self.capture, self.owner).status
            chosen = None if self.site else choose(reader, self.capture, self.owner, self.query)
        except NotFoundError:  # it was there when the stream began
            return "deleted"
        if chosen is not None:
            self.site, self.layers = chosen
            self._parts = PartsCursor(self.durable) if reader.in_parts(self.capture) else None
        if self._parts is not None:
            self.todo = deque([self._parts])
            return status
        for frame in reader.frames(self.capture, self.site, self.durable) if self.site else ():
            if frame.seq not in self._sent:
                self.todo.append(frame)
            elif frame.durable:
                self._sent.discard(frame.seq)
                self.durable = max(self.durable, frame.seq)
                self.newly_durable = True
        return status

    def _moved(self, reader: AnyReader, frame: FrameAt) -> bool:
        """Whether compaction moved a frame since it was found; then its rows are looked for where they are now.

        Frames are joined by that: some of their rows may come once more.
        """
        found = [each for each in reader.frames(self.capture, self.site, self.durable) if each.seq not in self._sent]
        if not frame.durable or frame in found:
            return False
        self.todo, self._first = deque(found), 0
        return True

    def take(self, reader: AnyReader) -> bytes:
        """The next events, of a megabyte or so: who takes them slowly holds no more, who is late catches up at once."""
        events, size = list[bytes](), 0
        while self.todo and size < limits.live_event_bytes_max:
            frame = self.todo[0]
            if isinstance(frame, PartsCursor):
                if (told := reader.part_rows(frame, self.capture, self.site, self.layers)) is None:
                    self.todo.clear()
                    break
                events.append(self.event(self.site, told))
                size += len(events[-1])
                continue
            try:
                rows = reader.live_rows(frame, self.capture, self.layers, self._first)
            except CorruptError:
                if frame.durable and not events:
                    raise
                if frame.durable:
                    break  # what came before it is sent first
                self.todo.popleft()  # it is not whole yet, and comes again
                self._first = 0
                continue
            except StoreError:
                if not self._moved(reader, frame):
                    raise
                continue
            if rows is not None and rows.more:
                self._first += len(rows.positions)
            else:
                self.todo.popleft()
                self._first = 0
                if frame.durable:
                    self.durable = max(self.durable, frame.seq)
                else:
                    self._sent.add(frame.seq)
            if rows is not None:
                events.append(self.event(self.site, rows))
                size += len(events[-1])
        return b"".join(events)
