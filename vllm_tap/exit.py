"""Signals that end a command with an engine of its own: at once, or once it has ended what is in flight."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any, Final

__all__ = ["Ending"]

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_IGNORED: Final = (signal.SIGINT, signal.SIGHUP)  # in the background of a script, and by nohup
_SAID: Final = b"\nending what is in flight; once more ends at once\n"


class Ending:
    """A ``with`` block that SIGINT, SIGTERM and SIGHUP end, by SystemExit.

    While it is ``patient``, the first signal only asks for an end; ``number`` is then its number. A second signal ends
    the block at once. So does the end of ``patience_s``, because a step may wait for a writer that waits for its disk.
    If ``is_failed``, the first signal ends it at once. ``at_once`` says whether it was ended at once. A signal that was
    ignored before stays ignored.

    SIGINT raises no KeyboardInterrupt: vLLM ignores one while its engine starts, and waits on for what has ended.
    """

    def __init__(self, patience_s: int, is_failed: Callable[[], bool]) -> None:
        self.number = 0
        self.at_once = False
        self._patient = False
        self._patience_s, self._is_failed = patience_s, is_failed
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Ending:
        for number in (*_SIGNALS, signal.SIGALRM):
            if number not in _IGNORED or signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        self.patient = False
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def patient(self) -> bool:
        """Whether the first signal only asks for an end."""
        return self._patient

    @patient.setter
    def patient(self, value: bool) -> None:
        self._patient = value
        signal.alarm(0)  # of one that was noted

    def _ask(self, number: int, _: object) -> None:
        if self.number or not self._patient or self._is_failed():
            signal.alarm(0)
            self.number = self.number or number
            self.at_once = True
            raise SystemExit(128 + self.number)
        self.number = number
        signal.alarm(self._patience_s)
        os.write(2, _SAID)  # now: what it waits for may take a while, and nothing else may be asked of a handler
