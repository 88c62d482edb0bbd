"""Seconds of the line from the engine's ring to the disk, as a writer tells them at its end."""

from __future__ import annotations

from typing import Final

import msgspec

__all__ = ["LineTimes", "line_times_of"]

_WORD: Final = "writer times "


class LineTimes(msgspec.Struct, frozen=True):
    """Seconds that the engine waited for room in its ring, by the stage that had to make it, of the rank that waited
    longest. Also the seconds in which the writer's stages were at work, side by side, since its start.
    """

    copies: float = 0.0  # from the device to the ring
    sender: float = 0.0
    writer: float = 0.0
    appending: float = 0.0  # frames checked and written to segments
    syncing: float = 0.0
    held: float = 0.0  # nothing received, because syncing or sealing had to catch up
    payload_bytes: int = 0  # of rows that the writer took

    @property
    def waited(self) -> float:
        """Seconds that the engine waited in all."""
        return self.copies + self.sender + self.writer

    def line(self) -> str:
        """The line that a writer prints."""
        return _WORD + msgspec.json.encode(self).decode()


def line_times_of(line: str) -> LineTimes | None:
    """The times of a line that a writer printed; None of any other line."""
    if not line.startswith(_WORD):
        return None
    try:
        return msgspec.json.decode(line[len(_WORD):], type=LineTimes)
    except msgspec.MsgspecError:
        return None
