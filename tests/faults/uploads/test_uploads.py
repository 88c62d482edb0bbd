"""A push killed at any moment, its writer too, before a service that refuses, is slow, cuts and loses answers."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from schemas.bucket.reader import AnyReader
from schemas.errors import BucketError
from tests.faults.conftest import times
from tests.faults.nursery import FLAGS, Forked, Nursery
from tests.faults.traffic import LAYERS, Capture, Traffic
from tests.support.buckets import NO_SERVER, SERVER, Fault, FaultProxy, s3_server
from tests.support.processes import PATIENCE_S
from tests.support.store_helpers import SITE, assert_adds_up, assert_rows, until
from vllm_tap import open_store
from vllm_tap.bucket.check import check
from vllm_tap.bucket.removal import remove_orphans
from writer_service.tools.fsck import fsck

URL, DAY_S = "s3://bucket/killed", 86_400
Record = Callable[[str, object], None]


@dataclass
class Line:
    """A writer, a push now and then, and the service between which things go wrong."""

    nursery: Nursery
    writer: Forked
    s3: FaultProxy
    rng: random.Random
    folder: Path
    shown: set[str] = field(default_factory=set)  # captures that were in the bucket when a push ended well
    asked: int = 0  # requests of the push
    longest: int = 40  # of the last that was not killed
    kills: int = 0
    writer_kills: int = 0
    ended: int = 0
    rows: int = 0

    def begin_writer(self) -> None:
        self.writer.begin(FLAGS, **self.s3.environment)
        assert self.writer.ready()

    def push(self, traffic: Traffic, kill: bool) -> None:
        """One push, which is killed at a random request or moment; whatever came of it is looked at."""
        argv = ["push", str(self.writer.store), URL, "--json", *self.rng.choice([[], [], ["--verify"]]),
                *self.rng.choice([[], [], ["--local-bytes", "20KB"]])]
        log = self.folder / "push"
        log.write_text("")
        self.asked, lock = 0, threading.Lock()
        at = self.rng.randrange(1, self.longest + 5) if kill and self.rng.random() < 0.7 else 0
        with_writer = self.rng.randrange(1, self.longest) if self.rng.random() < 0.4 else 0
        started = threading.Event()
        killed: list[int] = []

        def end() -> None:
            try:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                killed.append(self.asked)
            except ProcessLookupError:
                pass

        def fault(method: str, path: str) -> Fault:
            started.wait(PATIENCE_S)
            with lock:
                self.asked += 1
                number, dice, late_s = self.asked, self.rng.random(), self.rng.random() * 0.1
            if number == with_writer:
                self.writer.end(signal.SIGKILL)
                self.writer_kills += 1
            if number == at:
                end()
                return "503" if dice < 0.5 else None  # it came to nothing, or was done and nobody heard
            if dice > 0.9:
                time.sleep(late_s)
            return "503" if dice < 0.04 else "lost" if dice < 0.06 else "cut" if dice < 0.08 else None

        self.s3.fault = fault
        process = self.nursery.run("vllm-tap", argv, log, self.s3.environment)
        handle = os.pidfd_open(process.pid)
        started.set()
        timer = threading.Timer(self.rng.random() * 2, end)
        if kill and not at:
            timer.start()
        deadline = time.monotonic() + 300
        while process.poll() is None:
            assert time.monotonic() < deadline, log.read_text()
            if not self.writer.alive:  # somebody starts it again; a push may wait for what it has to erase
                self.begin_writer()
                traffic.connect()
            time.sleep(0.01)
        timer.cancel()
        os.close(handle)
        self.s3.fault = lambda method, path: None
        self.kills += len(killed)
        self.longest = max(self.longest, self.asked) if killed else max(self.asked, 40)
        print(self.kills, self.ended, self.asked, log.read_text()[:200].strip(), flush=True)
        self.look(traffic, log.read_text(), bool(killed))

    def look(self, traffic: Traffic, said: str, killed: bool) -> None:
        """What must be true at any moment; more of a push that says it is done."""
        if not self.writer.alive:
            self.begin_writer()
            traffic.connect()
        done = json.loads(said) if said.startswith("{") and said.endswith("}\n") else None
        assert done or killed or "vllm-tap: " in said, said
        try:
            opened = open_store(URL, self.folder / "cache")
        except BucketError as error:
            assert "no head.json in it" in str(error) and not self.shown and not done
            return
        with opened:
            listed = {row.id for row in opened.captures()}
            if done:
                assert done["captures"] == len(listed)
                self.ended, self.shown = self.ended + 1, listed
            by_id = {capture.id: capture for capture in traffic.captures}
            assert {name for name in self.shown if not by_id[name].delete} <= listed, "what was pushed is gone"
            few = sorted(listed) if len(listed) < 8 else self.rng.sample(sorted(listed), 8)
            for name in few:
                self.rows += self.whole(opened.reader, by_id[name])

    def whole(self, reader: AnyReader, capture: Capture) -> int:
        """Rows of a capture that the bucket shows are as they were sent, and all of them where it is complete. It is
        incomplete if its engine was away for too long when it was pushed.
        """
        status = reader.capture(capture.id).status
        assert status in ("complete", "empty", "incomplete"), "it shows a capture that has not ended"
        got = reader.slice(capture.id, SITE, LAYERS, 0, capture.total) if capture.total else None
        positions = [] if got is None else got.positions.tolist()
        if got is not None:
            assert_rows(got, capture.number, positions)
        assert_adds_up(reader.manifest(capture.id))
        assert status == "incomplete" or (capture.finish and positions == list(range(capture.total)))
        return len(positions)


@pytest.mark.faults
@pytest.mark.skipif(SERVER is None, reason=NO_SERVER)
def test_push_killed_in_mid_upload(nursery: Nursery, tmp_path: Path, rng: random.Random, record_property: Record,
                                   monkeypatch: pytest.MonkeyPatch) -> None:
    kills = times(20, 100)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    with s3_server() as s3:
        for name, value in s3.environment.items():
            monkeypatch.setenv(name, value)
        line = Line(nursery, Forked(nursery, tmp_path / "store"), s3, rng, tmp_path)
        line.begin_writer()
        traffic = Traffic(line.writer.endpoint, rng)
        traffic.connect()
        while line.kills < kills:
            traffic.send(rng.randrange(1, 25))
            traffic.receive()
            line.push(traffic, kill=rng.random() < 0.85)
            line.rows += traffic.check(line.writer.store, some=4)
            if line.shown and line.kills % 10 == 9:
                assert not check(URL).bad
        settle(line, traffic)
        orphans = until(lambda: cut_short(line, traffic), 300)
        assert remove_orphans(URL, DAY_S).removed == 0, "a push may be on its way"
        s3.ahead_s = DAY_S + 60
        assert remove_orphans(URL, DAY_S).removed >= orphans and check(URL).orphans == 0
        settle(line, traffic)
        line.writer.end(signal.SIGTERM)
        assert not fsck(line.writer.store).bad
        record_property("times", f"{line.kills} kills of a push, {line.writer_kills} of its writer, {line.ended} "
                                 f"pushes that ended, {line.rows} rows compared; {orphans} orphans, none a day later")
        traffic.close()


def cut_short(line: Line, traffic: Traffic) -> int:
    """The orphans that one more push has left, which was killed."""
    traffic.send(40)
    traffic.settle(line.writer.store)
    line.push(traffic, kill=True)
    return check(URL).orphans


def settle(line: Line, traffic: Traffic) -> None:
    """All that was sent is in the bucket, and what was deleted is not."""
    traffic.settle(line.writer.store)
    kept = {capture.id for capture in traffic.captures if not capture.delete}

    def is_pushed() -> bool:
        before = line.ended
        line.s3.fault = lambda method, path: None
        line.push(traffic, kill=False)
        return line.ended > before and line.shown == kept

    assert until(is_pushed, 300)
    everything(line, traffic)


def everything(line: Line, traffic: Traffic) -> None:
    """The whole bucket, byte for byte, and every row of it and of the store."""
    assert not check(URL, deep=True).bad
    with open_store(URL, line.folder / "cache") as opened:
        for capture in traffic.captures:
            if not capture.delete:
                assert opened.reader.capture(capture.id).status != "incomplete"
                line.rows += line.whole(opened.reader, capture)
    line.rows += traffic.check(line.writer.store)
