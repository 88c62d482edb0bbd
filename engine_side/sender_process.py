"""The sender in a process of its own, beside the one that runs the steps.

As a thread of that one it costs what it does: a step that takes up a prompt launches hundreds of kernels, each launch
gives the interpreter away for a moment, and a thread that takes it then makes that moment long (docs/performance.md).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import msgspec

from engine_side.sender import Sender
from engine_side.shared import Shared
from schemas.control import EngineInfo

__all__ = ["SenderProcess"]

logger = logging.getLogger("vllm.tap")


class _Task(msgspec.Struct):
    """What the process is told at its start."""

    endpoint: str
    info: EngineInfo
    path: str  # of the shared file
    capacity: int
    engine: int  # id of the process that runs the steps
    curve: str | None
    log_level: str


class SenderProcess:
    """The step's side of it: starts the process, sees its end, asks it to flush and end."""

    def __init__(self, endpoint: str, info: EngineInfo, shared: Shared, curve: Path | None = None) -> None:
        self.info = info
        self._endpoint, self._shared, self._curve = endpoint, shared, curve
        self._process: subprocess.Popen[bytes] | None = None
        self._watcher = threading.Thread(target=self._watch, name="vllm-tap-sender", daemon=True)

    @property
    def pid(self) -> int | None:
        """Of the process, once it was started."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Once; OSError where no process can be started."""
        level = logging.getLevelName(logger.getEffectiveLevel())
        task = _Task(self._endpoint, self.info, str(self._shared.path), self._shared.capacity, os.getpid(),
                     None if self._curve is None else str(self._curve), level)
        # Not from the working directory, where packages may have the names of ours; no threads of a linear algebra.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "engine_side.sender_process"], stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL, env={**os.environ, "OPENBLAS_NUM_THREADS": "1"})
        assert self._process.stdin is not None
        with self._process.stdin as told, contextlib.suppress(BrokenPipeError):  # its end is seen by the watcher
            told.write(msgspec.msgpack.encode(task))
        self._watcher.start()

    def close(self, timeout_s: float = 7.0) -> None:
        """Have it send what is there, say Bye and end."""
        self._shared.closing = 1
        if self._process is not None:
            self._watcher.join(timeout_s)
            if self._process.poll() is None:
                self._process.kill()
                self._watcher.join(1.0)

    def _watch(self) -> None:
        """Waits without the interpreter, so it costs no step anything."""
        assert self._process is not None
        code = self._process.wait()
        ended, self._shared.abandoned = self._shared.closing, 1
        if not ended:
            logger.error("vllm-tap: the sender's process ended (%s): nothing more is captured until the engine is "
                         "started again; generation goes on", f"signal {-code}" if code < 0 else f"code {code}")


def main() -> None:
    """Send until the engine asks for the end, or is gone: what it had handed over goes out even then."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # meant for the engine, which decides
        signal.signal(number, signal.SIG_IGN)
    try:
        task = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=_Task)
    except msgspec.MsgspecError:  # the engine ended before it said anything
        return
    logging.basicConfig(level=task.log_level, format="%(levelname)s %(asctime)s [sender] %(message)s",
                        datefmt="%m-%d %H:%M:%S")
    shared = Shared.opened(Path(task.path), task.capacity)
    sender = Sender(task.endpoint, task.info, shared, task.engine, None if task.curve is None else Path(task.curve))
    sender.run(lambda: bool(shared.closing) or os.getppid() != task.engine)
    if os.getppid() != task.engine:
        shared.path.unlink(missing_ok=True)  # nobody else does


if __name__ == "__main__":
    main()
