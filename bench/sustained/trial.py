"""Trials: a played engine, or a real one, and a line behind it, for so long; the control in turns with them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Final

from bench.sustained import stages
from bench.sustained.beside import Beside
from bench.sustained.clerk import Clerk
from bench.sustained.generating import GeneratingEngine
from bench.sustained.line import Line, Watch
from bench.sustained.plain import Plain, plain_rate
from bench.sustained.played import PlayedEngine, default_ring
from engine_side.transport.ring import Ring
from engine_side.transport.sender_process import SenderProcess
from schemas import limits
from writer_service.config import lanes_of
from writer_service.seal.sealer import patience_max

# More of the journal than that, and sealing falls behind.
UNSEALED_MAX: Final = (patience_max + 2 * lanes_of(os.cpu_count() or 1)) * limits.segment_bytes_target
SEAL_IDLE_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Setting:
    """What is measured; see the flags of ``python -m bench.sustained``."""

    shape: str = "3b"
    codec: str = "int8b64"
    load: str = "hook"
    step_tokens: int = 1024
    store: str = "shm"  # shm, disk, tcp
    folder: str = "/dev/shm"
    ring: int = 0  # bytes; 0: as an engine would take
    room: int = 4 << 30  # bytes that the store may take
    beside: tuple[str, ...] = ()
    threads: int = 2  # of the control
    control_s: float = 5.0  # 0: no control
    profile: bool = False
    engine: str = "played"  # or real


@dataclass(slots=True)
class Trial:
    """What came of one; GB are 10⁹ bytes of payload."""

    asked_gb_s: float | None  # None: as fast as the ring gives room
    seconds: float
    offered_gb_s: float
    durable_gb_s: float  # all bytes over the time until the last one was durable
    rows_offered: int
    rows_stored: int
    rows_dropped: int
    missing: dict[str, int]  # rows by reason, as the store tells
    durable_p50_ms: float
    durable_p99_ms: float
    durable_max_ms: float
    cpu_s_per_gb: dict[str, float]  # by process, until everything was sealed
    memory_mb: dict[str, float]  # by process, in the end
    memory_mb_min: dict[str, float]  # growth over the second half
    unsealed_gb: float  # when the last row was offered
    held: bool
    control_gb_s: float = 0.0  # of the turns before and after
    control_cpu_s_per_gb: float = 0.0
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)  # by process
    rounds_s: list[float] = field(default_factory=list)  # what a real engine took to generate, each time

    def beside(self, before: tuple[float, float], after: tuple[float, float]) -> None:
        """Take the control's turns before and after it."""
        self.control_gb_s, self.control_cpu_s_per_gb = ((a + b) / 2 for a, b in zip(before, after, strict=True))

    @property
    def ratio(self) -> float:
        """Over the control."""
        return self.durable_gb_s / self.control_gb_s if self.control_gb_s else float("nan")


class _TimedSender(SenderProcess):
    module: ClassVar[str] = "bench.sustained.stages"


class Bench:
    """The engine, the line, and who else is at work; made by ``bench``."""

    def __init__(self, setting: Setting, work: Path, engine: PlayedEngine | GeneratingEngine, line: Line, clerk: Clerk,
                 timed: Path | None) -> None:
        self.setting, self.work, self.engine, self.line, self._clerk = setting, work, engine, line, clerk
        self._timed = timed

    def control(self, **how: Any) -> tuple[float, float]:
        """GB a second of the plain threads, and processor seconds a GB; 0 where none are asked for.

        ``how``: what is otherwise than the setting has it, as in Plain.
        """
        setting = self.setting
        if not setting.control_s:
            return 0.0, 0.0
        assert isinstance(self.engine, PlayedEngine)
        memory = memoryview(self.engine.ring.shared.map)[: self.engine.ring.capacity]
        plain = Plain(setting.threads, setting.control_s, setting.room, setting.store == "disk")
        rate, cpu = plain_rate(memory, self.work, dataclasses.replace(plain, **how))
        return rate / 1e9, cpu * 1e9

    def trial(self, rate: float | None, seconds: float, tell: Callable[[float], None] = lambda done: None) -> Trial:
        """Play at ``rate`` bytes a second; see ``PlayedEngine.play``."""
        pids = {"engine": self.engine.pid, "sender": self.engine.sender.pid, **self.line.pids}
        before = self._counted()
        watch = Watch(pids)
        played = self.engine.play(seconds, rate, self._clerk.take, tell)
        unsealed = self.line.unsealed()
        account = self._clerk.settle()
        self.line.settle()
        use, after = watch.stop(), self._counted()
        gigabytes = played.nbytes / 1e9
        dropped = played.dropped or sum(account.missing.values())
        stored = gigabytes * (1 - dropped / max(1, played.rows))
        found = Trial(
            None if rate is None else rate / 1e9, played.seconds, gigabytes / played.seconds, stored / played.durable_s,
            played.rows, account.stored, dropped, dict(account.missing), played.quantile_ms(0.5),
            played.quantile_ms(0.99), played.quantile_ms(1.0),
            {name: value / max(stored, 1e-9) for name, value in use.cpu_s.items()},
            {name: values[-1] for name, values in use.memory_mb.items() if values},
            {name: use.slope_mb_min(name) for name in use.memory_mb}, unsealed / 1e9,
            held=not dropped and account.stored == played.rows and unsealed <= UNSEALED_MAX, rounds_s=played.rounds_s)
        for name, counts in after.items():
            since = counts.since(before[name])
            found.stages[name] = {"seconds": since.at, "gb": stored, "stages": since.stages, "threads": since.threads}
        return found

    def _counted(self) -> dict[str, stages.Counted]:
        return {} if self._timed is None else {name: stages.counted(self._timed, name) for name in ("sender", "writer")}


@contextmanager
def bench(setting: Setting, say: Callable[[str], None]) -> Iterator[Bench]:
    """Start everything, and end it."""
    with ExitStack() as ends:
        work = Path(ends.enter_context(TemporaryDirectory(prefix="vllm-tap-bench-", dir=setting.folder)))
        timed = Path(ends.enter_context(TemporaryDirectory(prefix="tap-stages-"))) if setting.profile else None
        if timed is not None:
            os.environ[stages.FOLDER] = str(timed)
        flags = ["--seal-idle-s", str(SEAL_IDLE_S), "--engine-lost-s", "3600"]
        if "retention" in setting.beside:
            flags += ["--retain-bytes", str(setting.room)]
        program = ("-m", "bench.sustained.stages") if timed is not None else ("-m", "writer_service")
        line = Line(work / "store", *flags, program=program, tcp=setting.store == "tcp")
        ends.callback(line.close)
        say(f"store in {setting.folder}, {line.where}")
        sender = _TimedSender if timed is not None else SenderProcess

        def start(ring: Ring) -> SenderProcess:
            return sender(line.senders_endpoint, ring.shared, line.curve)

        engine = GeneratingEngine(setting.shape, setting.codec, setting.load, line.store, line.endpoint, work,
                                  setting.ring) if setting.engine == "real" else PlayedEngine(
            setting.shape, setting.codec, setting.load, setting.step_tokens,
            setting.ring or default_ring(setting.shape), start)
        ends.callback(engine.close)
        room = None if "retention" in setting.beside else setting.room // (engine.row_bytes // engine.layers)
        clerk = Clerk(line.store, line.endpoint, room)
        ends.callback(clerk.close)
        others = {kind: Beside(kind, line.store) for kind in setting.beside if kind != "retention"}
        try:
            yield Bench(setting, work, engine, line, clerk, timed)
        finally:
            for kind, other in others.items():
                found = other.close()
                say(f"{kind}: {found['rows_s']:,.0f} rows/s, {found['not_there']} not there any more")


def search(made: Bench, seconds: float, steps: int, tell: Callable[[str], Callable[[float], None]],
           say: Callable[[str, Trial], None]) -> list[Trial]:
    """All trials: one as fast as the ring gives room, then the bisection; the highest that held is the answer."""
    made.trial(None, min(seconds, 5.0), tell("warming"))
    control = made.control()
    found = [made.trial(None, max(min(seconds, 5.0), seconds / 3), tell("as fast as it goes"))]
    low, high, rate = 0.0, 1.4e9 * found[0].durable_gb_s, 0.9e9 * found[0].durable_gb_s
    for number in range(steps + 1):
        before, control = control, made.control()
        found[-1].beside(before, control)
        say("as fast as it goes" if number == 0 else f"step {number} of {steps}", found[-1])
        if number == steps:
            break
        found.append(made.trial(rate, seconds, tell(f"step {number + 1} of {steps}: {rate / 1e9:.3g} GB/s")))
        low, high = (rate, high) if found[-1].held else (low, rate)
        rate = (low + high) / 2 if low else 0.75 * high
    return found


def best(trials: list[Trial]) -> Trial | None:
    """The highest rate that held; None where none did."""
    held = [trial for trial in trials if trial.held and trial.asked_gb_s is not None]
    return max(held, key=lambda trial: trial.asked_gb_s or 0.0, default=None)
