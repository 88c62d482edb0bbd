"""Connections that never finish what they ask: a request's head must come within a bounded time."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["ENDS_WHAT_IT_CLOSES", "bounded_heads"]

ENDS_WHAT_IT_CLOSES: Final = "vllm_tap_ends_what_it_closes"  # in the state of requests that come over such a connection
_LOOK_S: Final = 0.5


class _Uncopied(h11.Connection):
    """Hands what is sent through as it is: joining the one piece of a body makes a copy of every slice."""

    def send(self, event: h11.Event) -> Any:
        pieces = self.send_with_data_passthrough(event)
        return pieces[0] if pieces and len(pieces) == 1 else b"".join(pieces or ())


class _BoundedHeads(H11Protocol):
    """Closes a connection whose next request's head is not whole after ``head_s`` seconds.

    The server itself times the pause between two requests alone: who sends a byte now and then would stay for ever. And
    what it closes stays until the caller has taken what was sent: one who takes nothing would keep that in memory.
    """

    head_s: ClassVar[float]
    _timer: asyncio.TimerHandle | None = None
    _full: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = _Uncopied(h11.SERVER)
        self.app_state = {**self.app_state, ENDS_WHAT_IT_CLOSES: True}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        self.resume_writing()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._end_if_closed()

    def resume_writing(self) -> None:
        if self._full is not None:
            self._full.cancel()
            self._full = None
        super().resume_writing()

    def _end_if_closed(self) -> None:
        if self.transport.is_closing():
            self.transport.abort()
        else:
            self._full = self.loop.call_later(_LOOK_S, self._end_if_closed)

    def _watch(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._stop()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.head_s, self.transport.abort)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def bounded_heads(head_s: float) -> Any:
    """The protocol class for uvicorn's ``http`` setting."""
    return type("BoundedHeads", (_BoundedHeads,), {"head_s": head_s})
