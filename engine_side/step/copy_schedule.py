"""The schedule of copies: behind which step waiting rows go to the host, and when the sender gets the tap's counters.
"""

from __future__ import annotations

import time
from copy import copy
from dataclasses import dataclass, field
from typing import Final

from engine_side.transport.device_copies import DeviceToHost
from engine_side.transport.events import Counted
from schemas.wire.messages import TapCounters

WAIT_S: Final = 0.0005
_REPORT_S: Final = 0.5
_FLUSH_S: Final = 1.0
_STEPS_WITHOUT_COPY_MAX: Final = 2


@dataclass(slots=True)
class CopySchedule:
    """Copies to the host and reports of the counters, in time with the model's steps."""

    to_host: DeviceToHost
    counters: TapCounters
    bytes_a_token: float = 0.0  # encoded of the last step whose rows were selected anew, all its tokens counted
    steps_without_copy: int = 0  # in a row, although something waited
    sender_progress_seen: int = -1  # bytes that the sender had taken when it was last waited for in vain
    reported: TapCounters = field(default_factory=TapCounters)  # what the sender was told
    report_at: float = 0.0  # time.monotonic() of the next report

    def send_waiting(self, tokens: int, has_prompt: bool, after_prompt: bool) -> None:
        """Start the copies that wait behind a step of ``tokens``, or leave them for a later step, but not much later.

        ``has_prompt``: the step waits for the host that launches it, and so do its tokens for the host that launches
        the next. ``after_prompt``: so it was with the step before.
        """
        # Much is begun soon, while the device still has a prompt to compute; scratch must not fill up either.
        if self.to_host.light:
            later = (has_prompt or after_prompt) and self.steps_without_copy < _STEPS_WITHOUT_COPY_MAX
        else:
            later = has_prompt and not after_prompt
        if later:
            self.steps_without_copy += 1
        else:
            self.steps_without_copy = 0
            self.to_host.before_step(tokens, self.bytes_a_token)

    def report(self) -> None:
        """Give the sender the counters, for the writer."""
        self.report_at = time.monotonic() + _REPORT_S
        if self.counters != self.reported:
            self.reported = copy(self.counters)
            self.to_host.send_event(Counted(self.reported))

    def flush(self) -> None:
        """Send everything; for a moment the sender is waited for, where it has no room for so much at once."""
        self.report()
        self.to_host.before_step(0, 0.0)
        shared, until = self.to_host.ring.shared, time.monotonic() + _FLUSH_S
        while not self.to_host.push() and shared.taken != self.sender_progress_seen:
            if time.monotonic() > until:
                self.sender_progress_seen = shared.taken  # it is waited for again once it takes more
            time.sleep(WAIT_S)
