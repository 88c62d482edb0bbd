"""The sender in a process of its own, beside the one that runs the steps.

In a thread of that process, the sender would make steps longer. A step that takes up a prompt launches hundreds of
kernels, and each launch gives the interpreter away for a moment. A thread that takes it then makes that moment long
(docs/evidence/performance.md).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import ClassVar, Final

import msgspec

from engine_side.transport.sender import Sender
from engine_side.transport.shared_memory import Shared
from schemas.errors import StartError
from schemas.wire.engine_info import EngineInfo

__all__ = ["SenderProcess"]

logger = logging.getLogger("vllm.tap")

_BEGIN_S: Final = 60.0


class _Task(msgspec.Struct):
    """Settings that the process reads at its start."""

    endpoint: str
    info: EngineInfo
    path: str  # of the shared file
    capacity: int
    engine: int  # id of the process that runs the steps
    curve: str | None
    rank: int
    log_level: str


class SenderProcess:
    """The sender's process as the step sees it: starts it, notices its end, asks it to flush and end.

    It is started at once, since it takes a while to import what it needs, and sends from ``begin`` on.
    """

    module: ClassVar[str] = "engine_side.transport.sender_process"  # whose ``main`` the process runs

    def __init__(self, endpoint: str, shared: Shared, curve: Path | None = None, rank: int = 0) -> None:
        self._endpoint, self._shared, self._curve, self._rank = endpoint, shared, curve, rank
        self._begun = False
        # It imports what this process would: not what lies in some other working directory, or is another version.
        path = [str(Path(entry).absolute()) for entry in sys.path]
        program = f"import sys; sys.path[:] = {path!r}; from {self.module} import main; main()"
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"})  # NumPy would start threads that it never uses
        except OSError as error:
            raise StartError(f"vllm-tap: the sender's process cannot be started: {error}") from None
        self._watcher = threading.Thread(target=self._watch, name="vllm-tap-sender", daemon=True)
        self._watcher.start()

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def begin(self, info: EngineInfo) -> None:
        """Have it send for an engine; StartError where it has ended or does not begin. A second call does nothing."""
        if self._begun:
            return
        self._begun = True
        level = logging.getLevelName(logger.getEffectiveLevel())
        task = _Task(self._endpoint, info, str(self._shared.path), self._shared.capacity, os.getpid(),
                     None if self._curve is None else str(self._curve), self._rank, level)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as told:
            told.write(msgspec.msgpack.encode(task))
        until = time.monotonic() + _BEGIN_S
        while not self._shared.begun:
            code = self._process.poll()
            if code is not None or time.monotonic() > until:
                raise StartError("vllm-tap: the sender's process " + (
                    f"did not start within {_BEGIN_S:.0f} s" if code is None else
                    f"ended while it started ({_named(code)}); its standard error says why"))
            time.sleep(0.005)

    def close(self, timeout_s: float = 7.0) -> None:
        """Have it send what is there, say Bye and end."""
        self._shared.closing = 1
        if not self._begun:  # it waits for what it is to do
            assert self._process.stdin is not None
            self._process.stdin.close()
        self._watcher.join(timeout_s)
        if self._watcher.is_alive():
            self._process.kill()
            self._watcher.join(1.0)

    def _watch(self) -> None:
        """Wait for its end without the interpreter, so that it costs no step anything."""
        code = self._process.wait()
        known, self._shared.abandoned = self._shared.closing or self._shared.abandoned, 1
        if not known:
            logger.error("vllm-tap: the sender's process ended (%s). Generation goes on, but nothing is captured; "
                         "restart the engine to capture again", _named(code))


def _named(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"code {code}"


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
    sender = Sender(task.endpoint, task.info, shared, task.engine, None if task.curve is None else Path(task.curve),
                    task.rank)
    shared.begun = 1
    sender.run(lambda: bool(shared.closing or shared.abandoned) or os.getppid() != task.engine)
    if os.getppid() != task.engine:
        shared.path.unlink(missing_ok=True)  # nobody else does
