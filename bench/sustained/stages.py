"""Where the line's processor time goes, by stage: timers around the functions of a sender and a writer, put there from
outside. Nothing but Python is needed.

``python -m bench.sustained.stages`` is a writer with them, ``main`` of this module a sender. A stage's seconds are
those of its own thread's processor, the system's part included, without the stages that it calls. Every stage says how
often it reads, writes and hashes each byte that it is given; a byte that is hashed a second time while the processor's
first cache has it counts as hashed and not as read.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Final

FOLDER: Final = "BENCH_STAGES"  # the environment's name of the folder where the processes write what they have counted
_WRITE_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class Stage:
    """A function by where it is looked up when it is called; ``name`` of several may be the same.

    A name that begins with ": " is put behind that of the stage that it is called from. ``nbytes`` tells from the
    arguments and the result how many bytes were touched, ``reads``, ``writes`` and ``hashes`` times each.
    """

    name: str
    module: str
    function: str
    nbytes: Callable[[tuple[Any, ...], Any], int] = lambda args, result: 0
    reads: int = 0
    writes: int = 0
    hashes: int = 0


def _sizes(buffers: Any) -> int:
    return sum(memoryview(buffer).nbytes for buffer in buffers)


_BUILDER, _SENDER = "engine_side.transport.frame_builder", "engine_side.transport.sender"
_JOURNAL, _SEALING = "writer_service.journal", "writer_service.seal.sealing"

SENDER: Final = (
    Stage("choose events", _SENDER, "Sender._take_events"),
    Stage("choose events", "engine_side.transport.shared_memory", "Events.first"),
    Stage("frames and row tables", _BUILDER, "FrameBuilder.add"),
    Stage("frames and row tables", _BUILDER, "FrameBuilder.close"),
    Stage("frames and row tables", _BUILDER, "FrameBuilder._message"),
    Stage("put steps together", _BUILDER, "FrameBuilder._contiguous",
          lambda args, result: memoryview(result).nbytes if args[3].steps > 1 else 0, reads=1, writes=1),
    Stage("hash", _BUILDER, "_digest"),  # in whatever thread; the next tells the bytes
    Stage("hash", _BUILDER, "FrameBuilder._stream", lambda args, result: result[0].nbytes, reads=1, hashes=1),
    Stage("join for the network", _SENDER, "Sender._inline", lambda args, result: args[1].nbytes, reads=1, writes=1),
    Stage("send", _SENDER, "Sender._send_unsent"),
    Stage("send", "schemas.wire.connection", "Connection.send"),
    Stage("acknowledgements", _SENDER, "Sender._receive"),
    Stage("turns of the loop", _SENDER, "Sender._turn"),
)
WRITER: Final = (
    Stage("receive", "writer_service.receive.receiver", "Receiver.receive"),
    Stage("receive", "writer_service.receive.sockets", "Sockets.receive"),
    Stage("check heads and tables", "writer_service.receive.receiver", "Receiver._take_frame"),
    Stage("append: bookkeeping", _JOURNAL + ".journal", "Journal.start_append"),
    Stage("append: bookkeeping", _JOURNAL + ".journal", "Journal.finish_append"),
    Stage("append: bookkeeping", _JOURNAL + ".journal", "Journal.append"),
    Stage("append: wait for lanes", _JOURNAL + ".parallel_append", "ParallelAppend.take"),
    Stage("append: bookkeeping", _JOURNAL + ".parallel_append", "PendingAppend.write"),
    Stage("check hash, hash rows", _JOURNAL + ".parallel_append", "check_payload",
          lambda args, result: sum(part.nbytes for part in args[0].streams), reads=1, hashes=2),
    Stage("ring to file", _JOURNAL + ".open_segments", "OpenSegment.append"),
    Stage(": write", "writer_service.fs", "write_at", lambda args, result: _sizes(args[1]), reads=1, writes=1),
    Stage(": write", "writer_service.fs", "write_blocks", lambda args, result: result, reads=1, writes=1),
    Stage("commit", _JOURNAL + ".journal", "Journal.start_commit"),
    Stage("commit", _JOURNAL + ".journal", "Journal.end_commit"),
    Stage("commit: sync", _JOURNAL + ".group_commit", "_sync"),
    Stage("catalog", _JOURNAL + ".group_commit", "_apply"),
    Stage("seal: choose", "writer_service.seal.sealer", "Sealer.step"),
    Stage("seal", "writer_service.seal.sealer", "Sealer._seal"),
    Stage("seal: heads", "schemas.store.segment", "parse_frame"),
    Stage("seal: prove side streams", _JOURNAL + ".checksum_cache", "FrameChecksums.prove",
          lambda args, result: sum(part.nbytes for part in args[1].frame.streams[1:]), reads=1, hashes=1),
    Stage("seal: read frames again", _SEALING, "prove_frame",
          lambda args, result: sum(part.nbytes for part in args[0].frame.streams), reads=1, hashes=2),
    Stage("seal: gather", _SEALING, "gather",
          lambda args, result: sum(side.nbytes for side in result.sides.values()), reads=1, writes=1),
    Stage(": sync", "writer_service.fs", "sync_files"),
    Stage(": sync", "writer_service.fs", "sync_dir"),
    Stage(": sync", "writer_service.fs", "datasync"),
    Stage("upkeep", "writer_service.upkeep.upkeep", "Upkeep.round"),
    Stage("acknowledgements", "writer_service.receive.senders", "Acks.flush"),
    Stage("turns of the loop", "writer_service.server", "Writer._step"),
)


@dataclass(slots=True)
class Count:
    """What a stage has done in one thread."""

    cpu_ns: int = 0
    wall_ns: int = 0
    calls: int = 0
    nbytes: int = 0


class Timers:
    """Timers of one process, and the thread that writes down what they have counted."""

    def __init__(self, stages: tuple[Stage, ...], path: Path) -> None:
        self._path = path
        self._local = threading.local()
        self._counts: dict[str, dict[str, Count]] = {}  # by thread, by stage
        self._touches = {stage.name: stage for stage in stages}
        for stage in stages:
            self._put(stage)
        threading.Thread(target=self._write, name="stages", daemon=True).start()

    def _put(self, stage: Stage) -> None:
        holder: Any = importlib.import_module(stage.module)
        *classes, name = stage.function.split(".")
        try:
            for each in classes:
                holder = getattr(holder, each)
            function = getattr(holder, name)
        except AttributeError:
            raise SystemExit(f"bench.sustained.stages: stage {stage.name!r} stands for {stage.module}."
                             f"{stage.function}, which is not there: name the function that does that now") from None
        setattr(holder, name, self._timed(stage, function))

    def _timed(self, stage: Stage, function: Callable[..., Any]) -> Callable[..., Any]:
        local, nested = self._local, stage.name.startswith(": ")

        @wraps(function)
        def timed(*args: Any, **keywords: Any) -> Any:
            stack = local.__dict__.setdefault("stack", [])
            name = (stack[-1][0].partition(": ")[0] if stack else "other") + stage.name if nested else stage.name
            frame = [name, 0, 0]  # processor's and clock's time of what it calls
            stack.append(frame)
            wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
            result = None
            try:
                result = function(*args, **keywords)
                return result
            finally:
                cpu, wall = time.thread_time_ns() - cpu, time.perf_counter_ns() - wall
                stack.pop()
                if stack:
                    stack[-1][1] += cpu
                    stack[-1][2] += wall
                count = self._count(name, stage)
                count.cpu_ns += cpu - frame[1]
                count.wall_ns += wall - frame[2]
                count.calls += 1
                with contextlib.suppress(TypeError, AttributeError):  # it failed, and has no result
                    count.nbytes += stage.nbytes(args, result)

        return timed

    def _count(self, name: str, stage: Stage) -> Count:
        mine: dict[str, Count] | None = self._local.__dict__.get("counts")
        if mine is None:
            thread = threading.current_thread()
            mine = self._local.counts = {}
            self._counts[f"{thread.name}#{thread.native_id}"] = mine
        if name not in mine:
            self._touches.setdefault(name, stage)
            mine[name] = Count()
        return mine[name]

    def _write(self) -> None:
        draft = self._path.with_suffix(".tmp")
        while True:
            stages: dict[str, list[float]] = {}
            for thread, counts in list(self._counts.items()):
                for name, count in list(counts.items()):
                    touch = self._touches[name]
                    sums = stages.setdefault(f"{kind_of(thread)}/{name}", [0.0] * 7)
                    for at, value in enumerate((count.cpu_ns / 1e9, count.wall_ns / 1e9, count.calls, count.nbytes,
                                                count.nbytes * touch.reads, count.nbytes * touch.writes,
                                                count.nbytes * touch.hashes)):
                        sums[at] += value
            draft.write_text(json.dumps({"at": time.monotonic(), "stages": stages, "threads": _threads()}))
            draft.rename(self._path)
            time.sleep(_WRITE_S)


def kind_of(thread: str) -> str:
    """Threads of a pool are of one kind."""
    return "main" if thread.startswith("MainThread") else thread.partition("#")[0].rstrip("_0123456789")


def _threads() -> dict[str, float]:
    """Processor seconds by kind of thread; ZeroMQ's own are among them."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    found: dict[str, float] = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            comm, fields = (task / "stat").read_text().rsplit(")", 1)
            name = kind_of(names.get(int(task.name)) or comm.partition("(")[2].partition("/")[0])
            seconds = (int(fields.split()[11]) + int(fields.split()[12])) / os.sysconf("SC_CLK_TCK")
            found[name] = found.get(name, 0.0) + seconds
    return found


@dataclass(frozen=True, slots=True)
class Counted:
    """What a process's timers had counted ``at`` (monotonic). Of stages, each ``thread/stage``: processor and clock
    seconds, calls, bytes given, bytes read, written, hashed. Of threads: all their processor seconds.
    """

    at: float
    stages: dict[str, list[float]]
    threads: dict[str, float]

    def since(self, before: Counted) -> Counted:
        """What was counted after ``before``; ``at`` is seconds then."""
        return Counted(
            self.at - before.at,
            {name: [a - b for a, b in zip(sums, before.stages.get(name, [0.0] * len(sums)), strict=True)]
             for name, sums in self.stages.items()},
            {name: seconds - before.threads.get(name, 0.0) for name, seconds in self.threads.items()})


def counted(folder: Path, process: str, timeout_s: float = 10.0) -> Counted:
    """What the timers of ``process`` ("sender", "writer") have counted until now."""
    now, path = time.monotonic(), folder / f"{process}.json"
    while time.monotonic() < now + timeout_s:
        with contextlib.suppress(FileNotFoundError):
            found = Counted(**json.loads(path.read_text()))
            if found.at >= now:
                return found
        time.sleep(_WRITE_S / 4)
    raise RuntimeError(f"the timers of the {process} have written nothing for {timeout_s:.0f} s")


def main() -> None:
    """A writer, where there are arguments, or a sender, with timers."""
    process = "writer" if len(sys.argv) > 1 else "sender"
    Timers(WRITER if process == "writer" else SENDER, Path(os.environ[FOLDER]) / f"{process}.json")
    if process == "writer":
        from writer_service.__main__ import main as run

        raise SystemExit(run())
    from engine_side.transport.sender_process import main as send

    send()


if __name__ == "__main__":
    main()
