"""Finding the end mark of an event stream without changing or holding back its bytes."""

from __future__ import annotations

import json
from typing import Any, Final

__all__ = ["DoneFinder", "last_event"]

_DONE: Final = (b"data: [DONE]",)


class DoneFinder:
    """Splits a byte stream just before the line that begins with one of ``marks``; holds back only what may yet become
    that line.
    """

    def __init__(self, marks: tuple[bytes, ...] = _DONE) -> None:
        self._marks = marks
        self._held = b""  # the beginning of a line that may be the mark
        self._in_line = False  # whether a line has begun that is not the mark

    def feed(self, chunk: bytes) -> tuple[bytes, bytes]:
        """``(bytes before the mark, bytes from the mark on)``; the second is empty until the mark is there."""
        data, self._held = self._held + chunk, b""
        start = 0
        if self._in_line:
            start = data.find(b"\n") + 1
            if start == 0:
                return data, b""
            self._in_line = False
        while start < len(data):
            if data.startswith(self._marks, start):
                return data[:start], data[start:]
            end = data.find(b"\n", start)
            if end < 0:
                line = data[start:]
                if any(mark.startswith(line) for mark in self._marks):
                    self._held = line
                    return data[:start], b""
                self._in_line = True
                return data, b""
            start = end + 1
        return data, b""

    def rest(self) -> bytes:
        """Bytes that were held back when the stream ended."""
        held, self._held = self._held, b""
        return held


def last_event(tail: bytes) -> dict[str, Any]:
    """The last JSON object among the events in ``tail``; empty where there is none."""
    for line in reversed(tail.splitlines()):
        if line.startswith(b"data: {"):
            try:
                event = json.loads(line.removeprefix(b"data: "))
            except ValueError:
                return {}
            return event if isinstance(event, dict) else {}
    return {}
