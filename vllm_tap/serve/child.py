"""One child process of the supervisor: started in its own session, its lines passed on, its whole session ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

from vllm_tap.serve.causes import Causes
from vllm_tap.serve.guard import GRACE_S, RUN, session_members, signal_session

__all__ = ["Output", "ServiceCommand", "ServiceProcess", "SessionGuard"]

_LINE_BYTES_MAX: Final = 16 * 1024
_LINES_KEPT: Final = 20
_POLL_S: Final = 0.03
# Of a process that ends.
_NOISE: Final = re.compile(r"\s*(nanobind: |- leaked |- \.\.\. skipped |See https://nanobind)")

Output = Callable[[str, str], None]  # (name of the service, line)


@dataclass(frozen=True, slots=True)
class ServiceCommand:
    """The command of a service that the supervisor keeps running.

    It is ready when it printed a line that starts with ``ready_line`` (where given) and ``ready_url`` (where given)
    answers 200. ``restart``: start it again when it dies; else its death ends everything. ``vital``: so does dying
    again and again.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    ready_line: str | None = None
    ready_url: str | None = None
    restart: bool = True
    vital: bool = True


async def _exit_of(process: subprocess.Popen[bytes]) -> int:
    """Waits for a process. By asking: asyncio's own wait lasts until whoever inherited the pipe has gone as well."""
    while (status := process.poll()) is None:
        await asyncio.sleep(_POLL_S)
    return status


class SessionGuard:
    """The process that ends every session when the supervisor is gone; started again where it dies itself."""

    def __init__(self, socket_dir: Path, pace: float = 1.0) -> None:
        self._arguments = ("guard", str(socket_dir), str(GRACE_S * pace))
        self._sessions: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self._write_fd = -1

    def start(self) -> None:
        """Starts the guard and tells it of the sessions that run."""
        self._close()
        read_fd, self._write_fd = os.pipe()
        self._process = subprocess.Popen([*RUN, *self._arguments], stdin=read_fd,
                                         stdout=subprocess.DEVNULL)
        os.close(read_fd)
        for session in self._sessions:
            self._tell(b"+", session)

    async def died(self) -> int:
        """Waits for the guard's own end and returns its exit status."""
        assert self._process is not None
        return await _exit_of(self._process)

    @property
    def fd(self) -> int:
        """The end of the pipe that a starting child writes its id to."""
        return self._write_fd

    def started(self, session: int) -> None:
        """The child told the guard by itself; kept for a guard that has to be started again."""
        self._sessions.add(session)

    def ended(self, session: int) -> None:
        """A session of which nothing is left."""
        self._sessions.discard(session)
        self._tell(b"-", session)

    async def stop(self) -> None:
        """Ends the guard; whatever it still knows of is ended with it."""
        self._close()
        await self.died()

    def _tell(self, sign: bytes, session: int) -> None:
        with contextlib.suppress(OSError):  # a dead guard: the next one gets the whole list
            os.write(self._write_fd, b"%s%d\n" % (sign, session))

    def _close(self) -> None:
        if self._write_fd >= 0:
            os.close(self._write_fd)
            self._write_fd = -1


class ServiceProcess:
    """One run of a service."""

    def __init__(self, service: ServiceCommand, guard: SessionGuard, report: Output) -> None:
        self.service = service
        self.ready_line = asyncio.Event()
        self.last_lines: deque[str] = deque(maxlen=_LINES_KEPT)
        self.causes = Causes()
        self.started_s = time.monotonic()
        self._guard = guard
        self._report = report
        self._process: subprocess.Popen[bytes] | None = None
        self._pump: asyncio.Task[None] | None = None
        self._in_usage = False

    @property
    def pid(self) -> int:
        """Process id, which is also the id of its session."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Starts the program; must run in the supervisor's main thread, which the death signal is tied to."""
        fd = self._guard.fd
        self._process = subprocess.Popen(
            [*RUN, "start", str(fd), str(os.getpid()), *self.service.command],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={**os.environ, **self.service.environment}, pass_fds=(fd,))
        self._guard.started(self._process.pid)
        assert self._process.stdout is not None
        self._pump = asyncio.create_task(self._pass_lines(self._process.stdout))

    async def _pass_lines(self, output: IO[bytes]) -> None:
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), output)
        try:
            buffer = b""
            while data := await reader.read(_LINE_BYTES_MAX):
                *lines, buffer = (buffer + data).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
                if len(buffer) > _LINE_BYTES_MAX:
                    lines, buffer = [*lines, buffer], b""
                for line in lines:
                    self._take(line)
            self._take(buffer)
        finally:
            transport.close()

    def _take(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip()
        # Before its one line about a flag argparse prints all that there are, three hundred lines of vLLM's.
        self._in_usage = text.startswith("usage: ") or (self._in_usage and text.startswith(" "))
        if not text or self._in_usage:
            return
        if not _NOISE.match(text):
            self.last_lines.append(text)
        self.causes.hear(text)
        self._report(self.service.name, text)
        if self.service.ready_line is not None and text.startswith(self.service.ready_line):
            self.ready_line.set()

    async def wait(self) -> int:
        """Waits for the program's end, then ends what is left of its session, and returns the exit status."""
        assert self._process is not None and self._pump is not None
        status = await _exit_of(self._process)
        await self._end_session()
        # Only a process that left the session could still hold the pipe: its lines are not waited for.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._pump, 1.0)
        return status

    async def stop(self, grace_s: float) -> bool:
        """SIGTERM to the leader; after ``grace_s`` SIGKILL to the whole session. True where that was not needed."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.terminate()
        gentle = True
        try:
            await asyncio.wait_for(_exit_of(self._process), max(grace_s, 0.0))
        except TimeoutError:
            gentle = False
            self.kill()
            await _exit_of(self._process)
        await self._end_session()
        return gentle

    def kill(self) -> None:
        """SIGKILL to the whole session, now."""
        signal_session(self.pid, signal.SIGKILL)

    async def _end_session(self) -> None:
        """Kills what the leader left behind, after a moment in which helpers may clean up behind it."""
        for _ in range(25):
            if not session_members(self.pid):
                break
            await asyncio.sleep(0.02)
        for _ in range(200):
            if not signal_session(self.pid, signal.SIGKILL):
                self._guard.ended(self.pid)
                return
            await asyncio.sleep(0.02)
        self._report(self.service.name, f"still there after SIGKILL: {session_members(self.pid)}")
