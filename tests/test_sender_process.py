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

from engine_side import shared
from engine_side.device import Crossing
from engine_side.events import Counted, Event, Finished, Freed, Lost, Opened, Run, decode, encode
from engine_side.recorder import Recorder
from engine_side.ring import Ring
from engine_side.selection import Entry
from engine_side.sender_process import SenderProcess
from engine_side.shared import COPIES, Events, Outbox, is_over
from engine_side.staging import Staging
from schemas.control import TapCounters
from schemas.spec import parse_spec, resolve
from tests.store_helpers import ROOT, SITE, WriterProcess, engine_info, until
from tests.test_sender import ARMED, LAYERS, MIB, TOKENS, WIDTH, Tapped, manifest_of

ENTRY = Entry(SITE, "raw", (0, 1))


class TappedProcess(Tapped):
    """What a worker holds, its sender a process as in an engine."""

    def __init__(self, endpoint: str) -> None:
        self.staging = Staging({SITE: torch.randn(LAYERS, TOKENS, WIDTH)}, ARMED.sites)
        self.ring = Ring(16 * MIB, pinned=False)
        self.recorder = Recorder(self.staging, "float32", "drop",
                                 Crossing(torch.device("cpu"), self.ring, outbox=Outbox(self.ring.shared)))
        self.process = SenderProcess(endpoint, engine_info(width=WIDTH, n_layers=LAYERS), self.ring.shared)
        self.process.start()
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
        ]
    spec = parse_spec({"codec": "raw"})
    made.append(Opened(1, "c", "r", spec.to_json(), resolve(spec, ARMED), {SITE: [9]}, list(range(1 << 20)), 3, 4, ""))
    return made


def test_events_come_whole_and_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "_QUEUE", 65_528)  # smaller than some events, and no multiple of any
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
    until(outbox.push, 30.0)
    taker.join(30.0)
    ring.close()
    assert len(outbox) == 0 and [encode(event) for event in got] == [encode(event) for event in wanted]
    assert repr(decode(encode(wanted[0]))) == repr(wanted[0])


def test_a_sender_that_never_looks_costs_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "_LEFT_MAX", 1 << 20)
    ring = Ring(1 << 16, pinned=False)
    outbox = Outbox(ring.shared)
    most = 0
    for number in range(10_000):
        outbox.append(Lost(ENTRY, np.zeros(200, np.int64), np.arange(200) + number))
        most = max(most, len(outbox))
    ring.close()
    assert ring.shared.abandoned and most < (4 << 20) + (2 << 20)


def test_copies_are_over_in_their_order_however_many_there_were() -> None:
    for last in (0, 1, 4095, 4096, 4097, 1 << 20):
        flag = last % COPIES
        assert all(is_over(number, flag) for number in range(max(0, last - 100), last + 1))
        assert not any(is_over(number, flag) for number in range(last + 1, last + 500))


def test_captures_through_the_process(tmp_path: Path) -> None:
    with WriterProcess(tmp_path / "store") as writer:
        tapped = TappedProcess(writer.endpoint)
        captures = [tapped.whole(100) for _ in range(50)]
        tapped.close()
        for capture in captures:
            manifest = manifest_of(writer.store, capture)
            assert (manifest.status, manifest.captured) == ("complete", manifest.expected)
    assert tapped.process.pid is not None and not psutil.pid_exists(tapped.process.pid)


def test_the_end_of_the_process_ends_captures_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with WriterProcess(tmp_path / "store") as writer:
        tapped = TappedProcess(writer.endpoint)
        assert manifest_of(writer.store, tapped.whole(100)).status == "complete"
        over = tapped.open(200)
        tapped.step(over, 0, 100)
        assert tapped.process.pid is not None
        os.kill(tapped.process.pid, signal.SIGKILL)
        until(lambda: tapped.ring.shared.abandoned != 0)
        tapped.step(over, 100, 100)
        tapped.finish(over, 200)
        for _ in range(5):
            tapped.whole(TOKENS)  # more than the ring and the queue would hold
        counters = tapped.recorder.counters
        tapped.close()
    assert (counters.captures_refused, counters.failures) == (5, 0)
    assert "signal 9): nothing more is captured" in caplog.text


ENGINE = """
import os, signal, sys, time
from pathlib import Path
from tests.test_sender_process import TappedProcess
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
                                text=True, check=False, timeout=60)
        process, capture, ring = engine.stdout.split()
        until(lambda: not psutil.pid_exists(int(process)), 15.0)
        manifest = manifest_of(writer.store, capture)
    assert engine.returncode == -signal.SIGKILL
    assert (manifest.status, manifest.captured) == ("incomplete", 150 * LAYERS)
    assert not Path(ring).exists()


def test_signals_meant_for_the_engine_do_not_end_the_process(tmp_path: Path) -> None:
    with WriterProcess(tmp_path / "store") as writer:
        tapped = TappedProcess(writer.endpoint)
        assert manifest_of(writer.store, tapped.whole(10)).status == "complete"  # it runs
        assert tapped.process.pid is not None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(tapped.process.pid, number)
        time.sleep(0.1)
        assert manifest_of(writer.store, tapped.whole(10)).status == "complete"
        tapped.close()
