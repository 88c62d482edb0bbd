"""The side stream: encoding and copying off the model's stream on CUDA; on other devices the same calls do nothing.

Two hazards are ordered here. Staging is rewritten by the next step: ``block_main`` makes the model's stream wait for
the encoding. Ring memory is read by the sender: ``ready`` is an event after the copies, asked before a run is sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


class SideStream:
    """Work beside the model's stream of ``device``."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(device) if self.cuda else None
        self._encoded: Any = None

    @contextmanager
    def after_main(self) -> Iterator[None]:
        """Run what follows on the side stream, after what the model's stream has enqueued."""
        if not self.cuda:
            yield
            return
        main = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(main)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:  # also after an error: what was enqueued before it still reads staging
            self._encoded = torch.cuda.Event()
            self._encoded.record(self._stream)

    def block_main(self) -> None:
        """Hold the model's stream until the last rows are encoded."""
        if self._encoded is not None:
            torch.cuda.current_stream(self.device).wait_event(self._encoded)
            self._encoded = None

    def rows(self, index: npt.NDArray[np.int64]) -> Any:
        """An index for tensors of this device: a slice where the rows are contiguous."""
        if len(index) and index[-1] - index[0] + 1 == len(index):
            return slice(int(index[0]), int(index[-1]) + 1)
        host = torch.from_numpy(index)
        return host.pin_memory().to(self.device, non_blocking=True) if self.cuda else host

    def ready(self) -> Any:
        """An event after everything enqueued so far, or None where work is done when it returns."""
        if not self.cuda:
            return None
        event = torch.cuda.Event()
        event.record(self._stream)
        return event
