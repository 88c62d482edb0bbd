"""The sender's process and what it shares with the steps: nothing is lost between them, and no end of one hurts."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from engine_side import worker
from engine_side.step.recorder import Recorder
from engine_side.tap.staging import Staging
from engine_side.transport import shared_memory
from engine_side.transport.device_copies import DeviceToHost
from engine_side.transport.events import (
    Counted,
    EditsCounted,
    Entry,
    Event,
    Finished,
    Freed,
    Lost,
    Opened,
    Run,
    decode,
    encode,
)
from engine_side.transport.ring import Ring
from engine_side.transport.sender_process import SenderProcess
from engine_side.transport.shared_memory import COPIES, Events, Outbox
from schemas.errors import StartError
from schemas.spec import parse_spec, resolve
from schemas.wire.messages import TapCounters
from tests.engine_side.transport.test_sender import ARMED, LAYERS, MIB, TOKENS, WIDTH, Tapped, manifest_of
from tests.support.processes import PATIENCE_S
from tests.support.store_helpers import ROOT, SITE, WriterProcess, engine_info, until

ENTRY = Entry(SITE, "raw", (0, 1))


class TappedProcess(Tapped):
    """What a worker holds, its sender a process as in an engine."""

    def __init__(self, endpoint: str) -> None:
        self.staging = Staging({SITE: torch.randn(LAYERS, TOKENS, WIDTH)}, ARMED.sites)
        self.ring = Ring(16 * MIB, pinned=False)
        self.recorder = Recorder(self.staging, "float32", "drop",
                                 DeviceToHost(torch.device("cpu"), self.ring, outbox=Outbox(self.ring.shared)))
        self.process = SenderProcess(endpoint, self.ring.shared)
        self.process.begin(engine_info(width=WIDTH, n_layers=LAYERS))
        self._tickets = {}

    def close(self, timeout_s: float = 7.0) -> None:
        self.recorder.flush()
        self.process.close(timeout_s)
        self.ring.close()


def events(draw: random.Random) -> list[Event]:
    """Of every kind and of every size, some larger than the queue."""

    def column(n: int) -> Any:
        return np.arange(n) + draw.randrange(1 << 40)

    made: list[Event] = []
    for number in range(60):
        n = draw.choice([1, 8, 300, 5000])
        made += [
            Run(ENTRY, column(n), column(n), column(n), {"x": (number, 7)}, 1, 2, (number, 0), number, 3, 64),
            Lost(ENTRY, column(n), column(n), "prefix_cached"), Freed((number, 1), 5),
            Finished(number, "c" * draw.randrange(40), "stop", None, list(range(n)), n, 0),
            Counted(TapCounters(steps=number)),
            EditsCounted("c", [("z", number)] * n, [(0, 1), (number,)], [(0, n)], n, n, (n, 0) if number % 2 else None),
        ]
    spec = parse_spec({"codec": "raw"})
    made.append(Opened(1, "c", "r", spec.to_json(), resolve(spec, ARMED), {SITE: [9]}, list(range(1 << 20)), 3, 4, "",
                       ""))
    return made


def test_events_come_whole_and_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_QUEUE", 65_528)  # smaller than some events, and no multiple of any
    ring = Ring(1 << 16, pinned=False)
    outbox, taken = Outbox(ring.shared), Events(ring.shared)
    wanted = events(random.Random(0))
    got: list[Event] = []

    def take() -> None:
        while len(got) < len(wanted):
            if (event := taken.first()) is not None:
                got.append(event)
                taken.take()
            else:
                time.sleep(0.0005)

    taker = threading.Thread(target=take, daemon=True)
    taker.start()
    for event in wanted:
        outbox.append(event)
    until(outbox.push)
    taker.join(PATIENCE_S)
    ring.close()
    assert len(outbox) == 0 and [encode(event) for event in got] == [encode(event) for event in wanted]
    assert repr(decode(encode(wanted[0]))) == repr(wanted[0])


def test_a_sender_that_never_looks_costs_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_OVERFLOW_MAX", 1 << 20)
    monkeypatch.setattr(shared_memory, "_STILL_S", 0.0)
    ring = Ring(1 << 16, pinned=False)
    outbox = Outbox(ring.shared)
    most = 0
    for number in range(10_000):
        outbox.append(Lost(ENTRY, np.zeros(200, np.int64), np.arange(200) + number))
        most = max(most, len(outbox))
    ring.close()
    assert ring.shared.abandoned and most < (4 << 20) + (2 << 20)


def test_much_at_once_is_no_reason_to_give_the_sender_up() -> None:
    """As when hundreds of requests with long prompts begin, or are aborted, in one step: it all comes, in its order."""
    ring = Ring(1 << 16, pinned=False)
    outbox, events = Outbox(ring.shared), Events(ring.shared)
    for number in range(250):
        outbox.append(Finished(number, "c", "abort", None, [1 << 20] * 100_000, 7, 0))
    assert len(outbox) > (64 << 20) and outbox.full and not ring.shared.abandoned
    for number in range(250):
        event = events.first()
        assert isinstance(event, Finished) and event.slot == number
        events.take()
        outbox.push()
    assert len(outbox) == 0 and not outbox.full and events.first() is None
    ring.close()


def unsent() -> tuple[Recorder, Ring]:
    """A recorder whose sender takes nothing, and has more to take than its queue holds."""
    ring = Ring(1 << 16, pinned=False)
    staging = Staging({SITE: torch.zeros(LAYERS, 8, WIDTH)}, ARMED.sites)
    recorder = Recorder(staging, "float32", "drop",
                        DeviceToHost(torch.device("cpu"), ring, outbox=Outbox(ring.shared)))
    for _ in range(3):
        recorder.to_host.send_event(Finished(0, "c", "abort", None, [1 << 20] * 400_000, 7, 0))
    assert len(recorder.outbox) > (4 << 20)
    return recorder, ring


def test_a_sender_that_stands_still_is_waited_for_once() -> None:
    recorder, ring = unsent()
    recorder.before_step(0)
    begin = time.monotonic()
    for _ in range(5):
        recorder.before_step(0)
        recorder.flush()
    assert time.monotonic() - begin < 0.5
    ring.close()


def test_what_was_left_for_a_sender_that_died_is_forgotten() -> None:
    recorder, ring = unsent()
    ring.shared.abandoned = 1
    begin = time.monotonic()
    recorder.before_step(0)
    assert time.monotonic() - begin < 0.5 and not recorder.to_host.overflow
    recorder.before_step(1)
    assert recorder.idle
    ring.close()


def test_how_many_copies_are_over_however_many_there_were() -> None:
    """The device's count is modulo, and may be newer than the step's, or behind it by all that can be under way."""
    ring = Ring(1 << 16, pinned=False)
    for made in (0, 1, 4095, 4096, 4097, 1 << 20):
        for under_way in (0, 1, 500, min(made, COPIES - 1)):
            ring.shared.made, ring.shared.copied = made, (made - min(under_way, made)) % COPIES
            assert ring.shared.over() == made - min(under_way, made)
        ring.shared.copied = (made + 3) % COPIES  # of copies begun after the step's count was read
        assert ring.shared.over() <= made
    ring.close()


class NumberedCopies(DeviceToHost):
    """Copies as a device makes and counts them, one a run."""

    number = 0

    def bring(self, runs: list[Run], at: int, base: int, nbytes: int) -> None:
        self.number += 1
        self.ring.shared.made = self.number
        for run in runs:
            run.copied = self.number
        self.outbox.extend(runs)
        self.ring.shared.copied = self.number % COPIES


def test_a_sender_that_was_stopped_for_thousands_of_copies_catches_up(tmp_path: Path) -> None:
    with WriterProcess(tmp_path / "store") as writer:
        tapped = TappedProcess(writer.endpoint)
        tapped.recorder.to_host.__class__ = NumberedCopies
        assert manifest_of(writer.store, tapped.whole(10)).status == "complete"
        os.kill(tapped.process.pid, signal.SIGSTOP)
        capture = tapped.open(6000)
        for first in range(0, 6000, 2):
            tapped.step(capture, first, 2)
        tapped.finish(capture, 6000)
        os.kill(tapped.process.pid, signal.SIGCONT)
        manifest = manifest_of(writer.store, capture)
        tapped.close()
    assert (manifest.status, manifest.captured) == ("complete", manifest.expected)


def test_a_sender_that_cannot_import_what_it_needs_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = Ring(1 << 16, pinned=False)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if "site-packages" not in entry])
    process = SenderProcess("ipc:///nowhere", ring.shared)
    with pytest.raises(StartError, match=r"ended while it started \(code 1\)"):
        process.begin(engine_info(width=WIDTH, n_layers=LAYERS))
    process.close()
    ring.close()


def test_a_sender_that_is_told_nothing_ends_with_its_engine() -> None:
    ring = Ring(1 << 16, pinned=False)
    process = SenderProcess("ipc:///nowhere", ring.shared)
    process.close()
    ring.close()
    assert not psutil.pid_exists(process.pid)


def test_a_process_forked_from_the_engine_has_no_part_in_its_sender(tmp_path: Path) -> None:
    with WriterProcess(tmp_path / "store") as writer:
        tapped = TappedProcess(writer.endpoint)
        info = engine_info(width=WIDTH, n_layers=LAYERS)
        worker.CURRENT = worker.Worker(info, torch.nn.Linear(1, 1), worker.Checks(), tapped.staging, tapped.recorder,
                                       tapped.process, None, os.getpid())
        try:
            child = os.fork()
            if child == 0:
                worker.stop()  # as its exit does
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        finally:
            worker.CURRENT = None
        assert not tapped.ring.shared.closing and psutil.pid_exists(tapped.process.pid)
        assert manifest_of(writer.store, tapped.whole(100)).status == "complete"
        tapped.close()


def test_what_the_queue_has_no_room_for_goes_out_before_the_engine_rests(tmp_path: Path) -> None:
    with WriterProcess(tmp_path / "store") as writer:
        tapped = TappedProcess(writer.endpoint)
        os.kill(tapped.process.pid, signal.SIGSTOP)
        captures = [tapped.open(900_000) for _ in range(2)]  # each with a prompt larger than the queue
        for capture in captures:
            tapped.finish(capture, 900_000)
        outbox = tapped.recorder.outbox
        assert isinstance(outbox, Outbox) and not outbox.push(), "there was room: the test shows nothing"
        threading.Timer(0.1, os.kill, (tapped.process.pid, signal.SIGCONT)).start()
        tapped.recorder.before_step(0)
        assert outbox.push()
        assert all(manifest_of(writer.store, capture).status == "incomplete" for capture in captures)
        tapped.close()


def test_a_sender_that_is_given_up_ends(tmp_path: Path) -> None:
    with WriterProcess(tmp_path / "store") as writer:
        tapped = TappedProcess(writer.endpoint)
        assert manifest_of(writer.store, tapped.whole(100)).status == "complete"
        over = tapped.open(100)
        tapped.recorder.flush()
        tapped.ring.shared.abandoned = 1
        until(lambda: not psutil.pid_exists(tapped.process.pid), 10.0)
        assert manifest_of(writer.store, over).status == "incomplete"
        tapped.close()


def test_token_ids_of_numpy_are_token_ids(tmp_path: Path) -> None:
    with WriterProcess(tmp_path / "store") as writer:
        tapped = TappedProcess(writer.endpoint)
        capture = tapped.open(20, list(np.arange(20)))
        tapped.step(capture, 0, 20)
        tapped.finish(capture, 20)
        assert manifest_of(writer.store, capture).status == "complete"
        tapped.close()


def test_a_capture_that_nobody_could_be_told_of_takes_no_rows() -> None:
    ring = Ring(16 * MIB, pinned=False)
    tapped = object.__new__(TappedProcess)
    tapped._tickets, tapped.ring = {}, ring
    tapped.staging = Staging({SITE: torch.randn(LAYERS, TOKENS, WIDTH)}, ARMED.sites)
    tapped.recorder = Recorder(tapped.staging, "float32", "drop",
                               DeviceToHost(torch.device("cpu"), ring, outbox=Outbox(ring.shared)))
    with pytest.raises(NotImplementedError):
        tapped.open(2, [object(), object()])
    tapped.step(next(iter(tapped._tickets)), 0, 2)
    assert not tapped.recorder.captures and len(tapped.recorder.outbox) == 0
    ring.close()


def test_captures_through_the_process(tmp_path: Path) -> None:
    with WriterProcess(tmp_path / "store") as writer:
        tapped = TappedProcess(writer.endpoint)
        captures = [tapped.whole(100) for _ in range(50)]
        tapped.close()
        for capture in captures:
            manifest = manifest_of(writer.store, capture)
            assert (manifest.status, manifest.captured) == ("complete", manifest.expected)
    assert not psutil.pid_exists(tapped.process.pid)


def test_the_end_of_the_process_ends_captures_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with WriterProcess(tmp_path / "store") as writer:
        tapped = TappedProcess(writer.endpoint)
        assert manifest_of(writer.store, tapped.whole(100)).status == "complete"
        over = tapped.open(200)
        tapped.step(over, 0, 100)
        os.kill(tapped.process.pid, signal.SIGKILL)
        until(lambda: tapped.ring.shared.abandoned != 0)
        tapped.step(over, 100, 100)
        tapped.finish(over, 200)
        for _ in range(5):
            tapped.whole(TOKENS)  # more than the ring and the queue would hold
        counters = tapped.recorder.counters
        tapped.close()
    assert (counters.captures_refused, counters.failures) == (5, 0)
    assert "signal 9). Generation goes on, but nothing is captured" in caplog.text


ENGINE = """
import os, signal, sys, time
from pathlib import Path
from tests.engine_side.transport.test_sender_process import TappedProcess
tapped = TappedProcess(sys.argv[1])
print(tapped.process.pid, flush=True)
capture = tapped.open(200)
tapped.step(capture, 0, 150)
tapped.recorder.flush()
print(capture, tapped.ring.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_engine_handed_over_is_kept_and_nothing_else_is_left(tmp_path: Path) -> None:
    with WriterProcess(tmp_path / "store") as writer:
        engine = subprocess.run([sys.executable, "-c", ENGINE, writer.endpoint], cwd=ROOT, stdout=subprocess.PIPE,
                                text=True, check=False, timeout=PATIENCE_S)
        process, capture, ring = engine.stdout.split()
        until(lambda: not psutil.pid_exists(int(process)))
        manifest = manifest_of(writer.store, capture)
    assert engine.returncode == -signal.SIGKILL
    assert (manifest.status, manifest.captured) == ("incomplete", 150 * LAYERS)
    assert not Path(ring).exists()


def test_signals_meant_for_the_engine_do_not_end_the_process(tmp_path: Path) -> None:
    with WriterProcess(tmp_path / "store") as writer:
        tapped = TappedProcess(writer.endpoint)
        assert manifest_of(writer.store, tapped.whole(10)).status == "complete"  # it runs
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(tapped.process.pid, number)
        time.sleep(0.1)
        assert manifest_of(writer.store, tapped.whole(10)).status == "complete"
        tapped.close()
