"""A writer beside a program that captures offline: started, watched, started again where it dies, stopped cleanly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final

from schemas.errors import StartError
from schemas.wire.line_times import LineTimes, line_times_of
from vllm_tap.serve.guard import RUN
from vllm_tap.serve.services import writer_command

__all__ = ["READY_S", "WriterProcess"]

READY_S: Final = 60.0
_STOP_S: Final = 30.0
_RESTARTS_MAX: Final = 5
_RESTARTS_WINDOW_S: Final = 60.0  # a server runs for months: what died long ago does not count


class WriterProcess:
    """The writer, ``python -m writer_service``, for the length of a ``with`` block.

    The writer gets a death signal when this program dies, however it dies. A writer that dies is started again; the
    engine keeps what was not yet safe. Where that fails, ``failed`` says why and ``give_up`` is called. By default it
    interrupts the main thread, which may wait in an engine that waits for the writer.
    """

    def __init__(self, store: Path, endpoint: str, durability: str = "fsync",
                 give_up: Callable[[], None] = lambda: os.kill(os.getpid(), signal.SIGINT)) -> None:
        self.endpoint, self._command = endpoint, writer_command(store, endpoint, durability)
        self._give_up = give_up
        self._lines: deque[str] = deque(maxlen=20)
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        self.failed: str | None = None
        self.began = False  # whether it was ever ready

    def __enter__(self) -> WriterProcess:
        ready = threading.Event()
        self._watcher = threading.Thread(target=self._watch, args=(ready,), name="writer-watch", daemon=True)
        self._watcher.start()
        deadline = time.monotonic() + READY_S
        while not ready.wait(0.05):
            if self.failed is not None or time.monotonic() > deadline:
                self._stop()
                raise StartError(f"the writer did not start: {self.failed or f'not ready in {READY_S:.0f} s'}")
        self.began = True
        return self

    @property
    def pid(self) -> int | None:
        """Process id of the writer that runs now."""
        return None if self._process is None else self._process.pid

    @property
    def times(self) -> LineTimes | None:
        """The times of waiting for room that the writer told at its end, all 0 where nothing waited; None where it did
        not end in order.
        """
        if not any(line.startswith("writer stopped") for line in self._lines):
            return None
        return next((found for line in self._lines if (found := line_times_of(line)) is not None), LineTimes())

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._stop()

    def _watch(self, ready: threading.Event) -> None:
        """Lives as long as the program, so the death signal of what it starts means the program's death."""
        deaths: deque[float] = deque()
        while not self._stopping.is_set():
            process = subprocess.Popen(
                [*RUN, "start", "-1", str(os.getpid()), *self._command], stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1"})
            self._process = process
            assert process.stdout is not None
            with process.stdout as output:
                for data in output:
                    line = data.decode("utf-8", "replace").rstrip()
                    self._lines.append(line)
                    if line.startswith("writer ready"):
                        ready.set()
            status = process.wait()
            if self._stopping.is_set():
                return
            if not ready.is_set():
                self.failed = self._lines[-1] if self._lines else f"exit code {status}"
                return
            now = time.monotonic()
            while deaths and deaths[0] < now - _RESTARTS_WINDOW_S:
                deaths.popleft()
            if len(deaths) >= _RESTARTS_MAX:
                self.failed = (f"it ended {_RESTARTS_MAX + 1} times in {_RESTARTS_WINDOW_S:.0f} s; last: "
                               f"{self._lines[-1] if self._lines else '–'}")
                self._give_up()
                return
            print(f"the writer ended (status {status}); starting it again", file=sys.stderr)
            time.sleep(0.2 * 2**len(deaths))
            deaths.append(now)

    def _stop(self) -> None:
        self._stopping.set()
        process = self._process
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
        self._watcher.join(5)
