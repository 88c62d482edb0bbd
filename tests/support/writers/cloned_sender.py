"""Senders of given identities, one at a time, in a process of their own.

Each line of standard input is a word with its arguments, answered by a line when it is done: ``begin ENDPOINT STREAM
EPOCH [CAPTURE ROWS]`` (with a capture that it had opened when it was cloned), ``open CAPTURE ROWS``, ``step CAPTURE
FIRST ROWS``, ``finish CAPTURE ROWS``, ``close``.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from engine_side.front.ticket import Ticket
from engine_side.transport.sender import Sender
from schemas.spec import parse_spec, resolve
from tests.engine_side.transport import test_sender
from tests.engine_side.transport.test_sender import ARMED, Tapped


class Clone(Tapped):
    """One of them."""

    def open_as(self, capture: str, rows: int) -> None:
        spec = parse_spec({"codec": "raw", "id": capture})
        ticket = Ticket(capture, spec.to_json(), resolve(spec, ARMED), 0, 1, 1)
        self._tickets[capture] = ticket
        self.recorder.open(capture, ticket, list(range(rows)), 0)


def begin(endpoint: str, stream: str, epoch: str, *opened: str) -> Clone:
    """With the identity that another may have as well, and what it had opened."""
    cloned = threading.Event()

    class Same(Sender):
        def run(self, closing: Callable[[], bool]) -> None:
            cloned.wait()
            self.window.stream, self.window.epoch = stream, int(epoch)
            super().run(closing)

    test_sender.Sender = Same  # type: ignore[misc]
    clone = Clone(endpoint)
    if opened:
        clone.open_as(opened[0], int(opened[1]))
    cloned.set()
    return clone


def main() -> None:
    clone: Clone | None = None
    for line in sys.stdin:
        word, *args = line.split()
        if word == "begin":
            clone = begin(*args)
        elif clone is not None:
            words = {"open": clone.open_as, "step": clone.step, "finish": clone.finish, "close": clone.close}
            words[word](*args[:1], *map(int, args[1:]))  # type: ignore[operator]
        print("done", flush=True)


if __name__ == "__main__":
    main()
