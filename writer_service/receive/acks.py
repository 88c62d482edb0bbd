"""What goes back to senders: at once, or an Ack at the end of the step, which says everything before it too."""

from __future__ import annotations

from schemas.wire.messages import FromWriter, Refuse, encode
from writer_service.counters import Counters
from writer_service.receive.sockets import Sockets
from writer_service.sender_state import SenderState


class Acks:
    """The way back, and who waits for an Ack. ``os_is_enough``: rows count as safe once the system has them."""

    def __init__(self, sockets: Sockets, counters: Counters, os_is_enough: bool) -> None:
        self.os_is_enough = os_is_enough
        self._sockets, self._counters = sockets, counters
        self._want_ack: dict[str, SenderState] = {}

    def send(self, address: bytes, message: FromWriter) -> None:
        """An answer now."""
        self._sockets.send(address, encode(message))

    def start_over(self, address: bytes) -> None:
        """What was sent after the last Ack is lost to us."""
        self.send(address, Refuse("resend", "a sync failed; say Hello and send again"))

    def ack(self, state: SenderState) -> None:
        """An Ack at the end of this step."""
        self._want_ack[state.stream] = state

    def flush(self) -> None:
        """The end of a step."""
        for state in self._want_ack.values():
            if state.address is not None and not state.must_greet:
                self.send(state.address, state.ack(self.os_is_enough))
                self._counters.acks += 1
        self._want_ack.clear()
