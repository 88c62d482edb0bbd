"""Writer, engine and API as one: started in order, watched, stopped in order, nothing left behind.

A child that dies is handled as in docs/reference/operations.md. The writer and the API are started again, after a
growing pause and at most RESTARTS_MAX times in RESTARTS_WINDOW_S. Pushes to a bucket are started again for ever: rows
are on the disk, and nobody waits for them. The engine's death ends the whole with status 1. Its
model would take minutes to come back, and its callers have lost their requests anyway. A child that dies before it was
ever ready ends the whole too: it would only die again. Status 2 says that a child did not take its arguments.

The stop takes at most STOP_S. The API is first: it cancels what it has at the engine, so that captures are closed with
their reason. Then the captures' ends are awaited. Then the engine is stopped, and the writer last, with everything on
disk. If the store is pushed to a bucket, a last push has another minute; what it does not bring goes after the next
start.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from engine_side.transport.ring_files import remove_orphans
from vllm_tap.serve.causes import advice_for
from vllm_tap.serve.child import Output, ServiceCommand, ServiceProcess, SessionGuard

__all__ = ["Supervisor"]

RESTARTS_MAX: Final = 5
RESTARTS_WINDOW_S: Final = 60.0
STOP_S: Final = 14.5
_STILL_EVERY_S: Final = 10.0
_USAGE: Final = 2  # of a program that does not take its arguments
# When each child is killed that has not gone, in seconds after the stop began.
_STOP_BY_S: Final = {"api": 5.0, "captures": 6.0, "engine": 12.5, "writer": STOP_S, "push": STOP_S + 60.0}
_STOP_LOADING_S: Final = 3.0  # the same for a child that was never ready: it has nothing to finish


class Supervisor:
    """Runs ``services``; ``output(name, line)`` gets their lines, and its own under the name "serve".

    ``running`` says how many captures are still open in the store (asked while stopping); ``ready`` is called once
    when every service is ready; ``pace`` multiplies every pause and deadline. Must be run in the main thread: signals
    and the children's death signal hang on it.
    """

    def __init__(self, services: Sequence[ServiceCommand], socket_dir: Path, output: Output,
                 running: Callable[[], int], ready: Callable[[], None], pace: float = 1.0) -> None:
        self._services = services
        self._output = output
        self._running = running
        self._ready = ready
        self._pace = pace
        self._guard = SessionGuard(socket_dir, pace)
        self._children: dict[str, ServiceProcess] = {}
        self._is_ready: dict[str, asyncio.Event] = {}
        self._stop = asyncio.Event()
        self._signals = 0
        self._status = 0

    async def run(self) -> int:
        """Run until a signal, or the end of a child that ends the whole; the exit status (0 after a signal)."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal, number)
        self._is_ready = {service.name: asyncio.Event() for service in self._services}
        self._guard.start()
        tasks = [asyncio.create_task(self._keep_guard()), asyncio.create_task(self._announce())]
        try:
            tasks += await self._start_all()
            await self._stop.wait()
        finally:
            self._stop.set()
            await self._stop_all()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._guard.stop()
        return self._status

    def end(self, reason: str, status: int = 1) -> None:
        """Ends the whole with ``status``."""
        if not self._stop.is_set():
            self._say(reason)
            self._status = status
            self._stop.set()

    # ── starting and watching ───────────────────────────────────────────────────────────────────────────────────

    async def _start_all(self) -> list[asyncio.Task[None]]:
        """The first service must be ready before the others start: they connect to it."""
        first, *others = self._services
        tasks = [asyncio.create_task(self._keep(first))]
        await self._first_of(self._is_ready[first.name].wait(), self._stop.wait())
        if not self._stop.is_set():
            tasks += [asyncio.create_task(self._keep(service)) for service in others]
        return tasks

    async def _keep(self, service: ServiceCommand) -> None:
        """Run a service until the stop, and start it again where it dies and may be started again."""
        restarts: deque[float] = deque()
        while not self._stop.is_set():
            child = ServiceProcess(service, self._guard, self._output)
            child.start()
            self._children[service.name] = child
            waiting = asyncio.create_task(self._until_ready(child))
            status = await child.wait()
            waiting.cancel()
            if self._stop.is_set():
                return
            died = f"{service.name} ended ({_status_text(status)})"
            if not self._is_ready[service.name].is_set():
                return self.end(f"{died} before it was ready; its last lines:{_quoted(child)}",
                                _USAGE if status == _USAGE else 1)
            if not service.restart:
                return self.end(f"{died}; everything is stopped. Its last lines:{_quoted(child)}")
            now = time.monotonic()
            while restarts and restarts[0] < now - RESTARTS_WINDOW_S:
                restarts.popleft()
            if len(restarts) >= RESTARTS_MAX and service.vital:
                return self.end(f"{died} for the {RESTARTS_MAX + 1}th time in {RESTARTS_WINDOW_S:.0f} s; "
                                f"everything is stopped. Its last lines:{_quoted(child)}")
            pause = 0.2 * 2 ** min(len(restarts), RESTARTS_MAX) * self._pace
            restarts.append(now)
            self._say(f"{died}: starting it again in {pause:.1f} s")
            await self._first_of(asyncio.sleep(pause), self._stop.wait())

    async def _until_ready(self, child: ServiceProcess) -> None:
        service = child.service
        if service.ready_line is not None:
            await child.ready_line.wait()
        while service.ready_url is not None and not await asyncio.to_thread(_answers, service.ready_url):
            await asyncio.sleep(0.25)
        seconds = time.monotonic() - child.started_s
        self._say(f"{service.name} is ready ({seconds:.1f} s)")
        self._is_ready[service.name].set()

    async def _announce(self) -> None:
        """Says every few seconds what is still being waited for, and once that all is ready."""
        began = time.monotonic()
        while waiting := [name for name, event in self._is_ready.items() if not event.is_set()]:
            try:
                await asyncio.wait_for(self._is_ready[waiting[0]].wait(), _STILL_EVERY_S)
            except TimeoutError:
                if self._stop.is_set():
                    return
                still = [name for name in waiting if not self._is_ready[name].is_set()]
                self._say(f"waiting for {' and '.join(still)} ({time.monotonic() - began:.0f} s)")
        if not self._stop.is_set():
            self._ready()

    async def _keep_guard(self) -> None:
        while True:
            await self._guard.died()
            if self._stop.is_set():
                return
            self._say("the guard process ended: starting another")
            await asyncio.sleep(0.1)
            self._guard.start()

    # ── stopping ────────────────────────────────────────────────────────────────────────────────────────────────

    def _on_signal(self, number: int) -> None:
        self._signals += 1
        if self._signals == 1:
            most = max(_STOP_BY_S.get(service.name, STOP_S) for service in self._services) * self._pace
            self._say(f"{signal.Signals(number).name}: stopping (at most {most:.0f} s; once more: at once)")
            self._stop.set()

    async def _stop_all(self) -> None:
        """API, captures, engine, writer, pushes: each has until its time, and nothing is left after the last."""
        began = time.monotonic()

        def left(name: str) -> float:
            by = _STOP_BY_S.get(name, STOP_S)
            if name == "engine" and not self._is_ready[name].is_set():
                by = _STOP_LOADING_S
            return 0.0 if self._signals > 1 else by * self._pace - (time.monotonic() - began)

        for name in _STOP_BY_S:
            if name == "captures":
                await self._await_captures(partial(left, name))
            elif name in self._children and not await self._stop_child(self._children[name], partial(left, name)):
                self._say(f"{name} did not end in time and was killed")
                remove_orphans()  # the memory that it had for the writer
        self._say(f"stopped in {time.monotonic() - began:.1f} s")

    async def _stop_child(self, child: ServiceProcess, left: Callable[[], float]) -> bool:
        stopping = asyncio.create_task(child.stop(left()))
        while not stopping.done():
            await asyncio.wait([stopping], timeout=0.1)
            if left() <= 0 and self._signals > 1 and not stopping.done():
                child.kill()
        return await stopping

    async def _await_captures(self, left: Callable[[], float]) -> None:
        """Waits for the ends of the captures that the API's stop has cut: an engine step or two."""
        running = 0
        while left() > 0 and "engine" in self._children and self._status == 0:
            try:
                running = await asyncio.to_thread(self._running)
            except Exception as error:  # a store that cannot be read must not keep the rest running
                self._say(f"cannot ask the store for open captures: {error}")
                return
            if running == 0:
                return
            await asyncio.sleep(0.1)
        if running:
            self._say(f"{running} captures were still open")

    # ── small things ────────────────────────────────────────────────────────────────────────────────────────────

    def _say(self, line: str) -> None:
        self._output("serve", line)

    @staticmethod
    async def _first_of(*waits: Coroutine[Any, Any, object]) -> None:
        tasks = [asyncio.create_task(wait) for wait in waits]
        _, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError, ValueError):
        return False


def _status_text(status: int) -> str:
    if status >= 0:
        return f"exit code {status}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-status).name
    return f"signal {-status}"


def _quoted(child: ServiceProcess) -> str:
    why = [] if (cause := child.causes.cause) is None else [f"why: {cause}"]
    helping = [f"what helps: {advice}"] if cause is not None and (advice := advice_for(cause)) is not None else []
    return "".join(f"\n    {line}" for line in [*child.last_lines, *why, *helping]) or " none"
