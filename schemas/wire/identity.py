"""Nonces, which tell a sender from a copy of it: a process that was cloned, or a snapshot that was resumed twice.

Both have the same stream and numbers, and the nonces drawn before the copy. So a number is drawn for each Hello, and a
Hello tells the recent ones. The writer keeps the newest number of the Hello that it took last. It takes another Hello
only if that number is among those that it tells. The sender itself knows what it drew. Of its copies only one can be
the first to come, and the others do not know the number that this one drew.
"""

from __future__ import annotations

import os
import time
from typing import Final

__all__ = ["NONCE", "Nonces"]

NONCE: Final = 1 << 55  # the bit that every nonce has, and no process id
told_max: Final = 256
_kept: Final = 64  # of those before the last Welcome: which of them the writer has is not known


class Nonces:
    """Nonces of the Hellos of one stream, oldest first."""

    def __init__(self) -> None:
        self._drawn: list[int] = []
        self._kept = 0

    def draw(self) -> list[int]:
        """Draw one for a Hello that goes out now; all that it tells, the newest last."""
        # Not random bytes alone: a machine that is copied with its memory may draw the same ones for a moment.
        self._drawn.append((int.from_bytes(os.urandom(7), "little") ^ time.time_ns()) & (NONCE - 1) | NONCE)
        if len(self._drawn) > told_max:
            # The writer that took one went away at once, or took many before: the first and the newest stay.
            del self._drawn[(self._kept + told_max) // 2]
        return list(self._drawn)

    def withdraw(self) -> None:
        """Take the last one back, whose Hello never went out."""
        self._drawn.pop()

    def welcomed(self) -> None:
        """Forget old ones: the writer took one, and which it took before does not matter any more."""
        del self._drawn[:-_kept]
        self._kept = len(self._drawn)
