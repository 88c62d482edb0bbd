"""Recorder, ring and sender without a model: rows go to a real writer, and nothing the writer does ends them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from engine_side import worker
from engine_side.config import EngineConfig
from engine_side.front.ticket import Ticket
from engine_side.step.capture_lifecycle import End
from engine_side.step.recorder import Recorder
from engine_side.step.selection import Step
from engine_side.tap.shares import layout_of
from engine_side.tap.staging import Staging
from engine_side.transport.device_copies import DeviceToHost
from engine_side.transport.events import Counted, Entry, Run
from engine_side.transport.ring import Ring
from engine_side.transport.sender import Sender
from engine_side.transport.shared_memory import Outbox
from schemas import limits
from schemas.errors import StartError, TapError
from schemas.ids import new_ulid
from schemas.manifest import Manifest
from schemas.read.reader import StoreReader
from schemas.spec import Armed, parse_spec, resolve
from schemas.wire.engine_info import EngineInfo
from schemas.wire.line_times import line_times_of
from schemas.wire.messages import TapCounters
from tests.support.processes import PATIENCE_S
from tests.support.store_helpers import PROGRAMS, SITE, WriterProcess, engine_info, until

LAYERS, WIDTH, TOKENS = 4, 64, 8192
ARMED = Armed({SITE: list(range(LAYERS))}, LAYERS)
MIB = 1 << 20
FAULTY = PROGRAMS / "faulty_writer.py"


class Tapped:
    """What a worker holds, driven by hand: one request a capture, the whole prompt in steps of ``TOKENS`` rows."""

    def __init__(self, endpoint: str, on_full: str = "drop", ring_bytes: int = 16 * MIB, width: int = WIDTH,
                 curve: Path | None = None, group: tuple[EngineInfo, int] | None = None, begun: bool = True) -> None:
        info, rank = group or (engine_info(width=width, n_layers=LAYERS), 0)
        self.info: EngineInfo = info
        self.staging = Staging({SITE: torch.randn(LAYERS, TOKENS, width)}, ARMED.sites)
        self.ring = Ring(ring_bytes, pinned=False)
        self.recorder = Recorder(self.staging, "float32", on_full,
                                 DeviceToHost(torch.device("cpu"), self.ring, outbox=Outbox(self.ring.shared)),
                                 part=info.layout[rank] if info.layout else None,
                                 layers=info.sent if info.divided else None, divided=info.divided or None)
        self.sender = Sender(endpoint, self.info, self.ring.shared, os.getpid(), curve, rank)
        self.ending = threading.Event()
        self.thread = threading.Thread(target=self.sender.run, args=(self.ending.is_set,), daemon=True)
        if begun:
            self.thread.start()
        self._tickets: dict[str, Ticket] = {}

    def close(self, timeout_s: float = 7.0) -> None:
        """Sends what is there."""
        self.recorder.flush()
        self.ending.set()
        self.thread.join(timeout_s)
        self.ring.close()

    def open(self, prompt_len: int, ids: list[Any] | None = None, count: int = 1, **asked: Any) -> str:
        """Begins a capture of everything, raw, or of what is asked, the first of ``count`` samples; the request's id.
        """
        spec = parse_spec({"codec": "raw", "id": new_ulid(), **asked})
        capture = str(spec.id)
        ticket = Ticket(capture, spec.to_json(), resolve(spec, ARMED), 0, count, count)
        self._tickets[capture] = ticket
        self.recorder.open(capture, ticket, ids or list(range(prompt_len)), 0)
        return capture

    def ticket(self, capture: str) -> Ticket:
        """What the front end said of a capture."""
        return self._tickets[capture]

    def step(self, capture: str, first: int, rows: int, number: int = 0) -> None:
        """The model computes ``rows`` rows from position ``first`` on."""
        positions = torch.arange(first, first + rows)
        self.recorder.after_step(
            Step([capture], np.array([0, rows]), np.array([first]), positions, positions.to(torch.int32),
                 number=number))

    def finish(self, capture: str, prompt_len: int) -> None:
        """Ends it after one output token."""
        self.recorder.finish(End(capture, self._tickets[capture], "length", None, list(range(prompt_len)), [7],
                                 prompt_len))

    def whole(self, prompt_len: int) -> str:
        """One capture from begin to end in one step."""
        capture = self.open(prompt_len)
        self.step(capture, 0, prompt_len)
        self.finish(capture, prompt_len)
        return capture


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[WriterProcess]:
    with WriterProcess(tmp_path / "store") as process:
        yield process


def manifest_of(store: Path, capture: str) -> Manifest:
    """The manifest once the capture has ended, or as it stands after a while."""

    def look() -> Manifest | None:
        try:
            with StoreReader(store) as reader:
                return reader.manifest(capture)
        except (TapError, OSError):
            return None

    until(lambda: (found := look()) and found.status not in ("pending", "running"))
    found = look()
    assert found is not None, "the store knows no such capture"
    return found


def test_waiting_loses_nothing_however_small_the_ring(writer: WriterProcess) -> None:
    tapped = Tapped(writer.endpoint, on_full="wait", ring_bytes=4 * MIB)
    capture = tapped.whole(TOKENS)  # 8 MiB of rows in one step, twice the ring
    manifest = manifest_of(writer.store, capture)
    tapped.close()
    assert (manifest.status, manifest.captured) == ("complete", manifest.expected)


def test_the_steps_of_a_burst_are_put_together_in_memory_that_stays(writer: WriterProcess) -> None:
    tapped = Tapped(writer.endpoint)
    kept = []
    for prompt_len in (40, 10):
        capture = tapped.open(prompt_len)
        for position in range(prompt_len):  # bursts: a row a step
            tapped.step(capture, position, 1)
        tapped.finish(capture, prompt_len)
        manifest = manifest_of(writer.store, capture)
        assert (manifest.status, manifest.captured) == ("complete", manifest.expected)
        kept.append(tapped.sender.frames._copied)
    tapped.close()
    assert len(kept[0]) > 0 and kept[0] is kept[1]


def test_a_writer_with_another_store_is_served_from_there_on(writer: WriterProcess, tmp_path: Path) -> None:
    tapped = Tapped(writer.endpoint)
    assert manifest_of(writer.store, tapped.whole(100)).status == "complete"
    writer.kill()
    over = tapped.open(200)
    tapped.step(over, 0, 200)
    writer.store = tmp_path / "other"
    writer.start()
    tapped.finish(over, 200)
    manifests = [manifest_of(writer.store, capture) for capture in (over, tapped.whole(100))]
    tapped.close()
    assert [(one.status, one.captured) for one in manifests] == [("complete", one.expected) for one in manifests]


def test_a_disk_that_is_full_when_the_engine_greets_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = tmp_path / "full"
    monkeypatch.setenv("FAULT", "write_at:control-:1:1:ENOSPC")
    monkeypatch.setenv("FAULT_WHILE", str(full))
    with WriterProcess(tmp_path / "store", script=FAULTY) as writer:
        full.touch()
        tapped = Tapped(writer.endpoint)
        capture = tapped.whole(100)
        time.sleep(1.0)
        full.unlink()
        manifest = manifest_of(writer.store, capture)
        tapped.close()
    assert (manifest.status, manifest.captured) == ("complete", manifest.expected)


def test_a_ring_that_cannot_hold_a_row_ends_the_start() -> None:
    staging = Staging({SITE: torch.zeros(LAYERS, 1, 1 << 19)}, ARMED.sites)
    config = EngineConfig("ipc:///nowhere", ring_bytes=4 * MIB)
    with pytest.raises(StartError, match="VLLM_TAP_RING_BYTES=4194304: must be at least 33554432, four rows"):
        worker.start(config, engine_info(width=1 << 19), torch.nn.Linear(1, 1), worker.Tapped(staging),
                     worker.Seat())


def test_two_ranks_send_the_columns_that_they_have_under_one_capture(writer: WriterProcess) -> None:
    """Steps that both count are put together; of the last row one rank has another step's, and nobody gets that."""
    layers = ARMED.sites[SITE]
    info = msgspec.structs.replace(
        engine_info(width=2 * WIDTH, n_layers=LAYERS), group="g",
        layout=layout_of({SITE: layers}, {SITE: WIDTH}, {SITE: 2 * WIDTH}, 2))
    ranks = [Tapped(writer.endpoint, group=(info, rank)) for rank in (0, 1)]
    capture = ranks[0].open(TOKENS)
    ranks[1].recorder.open(capture, ranks[0].ticket(capture), list(range(TOKENS)), 0)
    for number, rank in enumerate(ranks):
        rank.step(capture, 0, TOKENS - 1, number=5)
        rank.step(capture, TOKENS - 1, 1, number=6 + number)
        rank.recorder.finish(End(capture, ranks[0].ticket(capture), "length", None, list(range(TOKENS)), [7], TOKENS))
    manifest = manifest_of(writer.store, capture)
    for rank in ranks:
        rank.close()
    assert {(row.layer, row.expected, row.captured) for row in manifest.rows} == {
        (layer, TOKENS, TOKENS - 1) for layer in layers}
    with StoreReader(writer.store) as reader:
        rows = reader.slice(capture, SITE, layers, 0, TOKENS).values()
    whole = torch.cat([rank.staging.buffers[SITE][:, : TOKENS - 1] for rank in ranks], dim=-1)
    assert np.array_equal(rows, whole.numpy())


def test_an_event_that_cannot_be_taken_does_not_block_the_ring(writer: WriterProcess) -> None:
    tapped = Tapped(writer.endpoint, on_full="wait", ring_bytes=4 * MIB)
    offset, mark = tapped.ring.allocate(1000) or pytest.fail("an empty ring refused")
    nowhere = np.array([77])  # a slot that nobody opened
    tapped.recorder.outbox.append(
        Run(Entry(SITE, "raw", (0,)), nowhere, nowhere, nowhere, {"x": (offset, 256)}, offset, offset, (mark, 0)))
    manifest = manifest_of(writer.store, tapped.whole(TOKENS))
    tapped.close()
    assert (manifest.status, manifest.captured) == ("complete", manifest.expected)


def test_waiting_is_counted_by_who_has_to_make_room(writer: WriterProcess) -> None:
    """First the sender, which has not begun; then the writer, which stands still. At its end the writer tells both."""
    tapped = Tapped(writer.endpoint, on_full="wait", ring_bytes=4 * MIB, begun=False)
    counters = tapped.recorder.counters
    os.kill(writer.process.pid, signal.SIGSTOP)
    step = threading.Thread(target=tapped.whole, args=(TOKENS,), daemon=True)
    step.start()
    assert until(lambda: counters.waited_sender_seconds > 0)
    assert not counters.waited_writer_seconds
    tapped.thread.start()
    assert until(lambda: tapped.sender._recorder_counters.waited_writer_seconds > 0), "told only at its end"
    assert step.is_alive()
    os.kill(writer.process.pid, signal.SIGCONT)
    step.join(PATIENCE_S)

    def told_to_the_sender() -> bool:
        tapped.recorder.flush()  # waits for a sender that has no room, but not for long
        return bool(tapped.sender._recorder_counters == counters)

    assert until(told_to_the_sender)
    tapped.close(timeout_s=PATIENCE_S)
    logs = writer.store / "writers" / "w0" / "journal"
    assert until(lambda: any(b"bye" in log.read_bytes() for log in logs.glob("control-*.log")))
    assert counters.waits > 0 and counters.waited_copies_seconds == 0
    (told,) = (found for line in writer.stop().splitlines() if (found := line_times_of(line)) is not None)
    assert (told.sender, told.writer) == (counters.waited_sender_seconds, counters.waited_writer_seconds)
    assert told.payload_bytes == TOKENS * LAYERS * WIDTH * 4 and told.appending > 0 and told.syncing > 0


def test_copies_that_are_under_way_are_waited_for_first() -> None:
    ring = Ring(4 * MIB, pinned=False)
    outbox, shared = Outbox(ring.shared), ring.shared
    assert shared.behind() == "writer"
    outbox.append(Counted(TapCounters()))
    assert shared.behind() == "sender"
    shared.made = 1
    assert shared.behind() == "copies"
    ring.copied.fill_(1)  # as the device does
    assert shared.behind() == "sender"
    ring.close()


def test_waiting_ends_when_the_sender_ends(tmp_path: Path) -> None:
    tapped = Tapped(f"ipc://{tmp_path}/nobody"[:100], on_full="wait", ring_bytes=4 * MIB)
    step = threading.Thread(target=tapped.whole, args=(TOKENS,), daemon=True)
    step.start()
    step.join(1.0)
    assert step.is_alive(), "the ring never filled: the test shows nothing"
    tapped.close(timeout_s=1.0)
    step.join(10.0)
    assert not step.is_alive()


def test_a_capture_that_was_refused_when_it_began_is_not_begun_in_its_midst(writer: WriterProcess) -> None:
    """A runner opens a request again when it comes back from a preemption; at its end the manifest says what it lacks.
    """
    tapped = Tapped(writer.endpoint)
    tapped.ring.shared.writer_away = 1
    capture = tapped.open(20)
    tapped.ring.shared.writer_away = 0
    tapped.recorder.open(capture, tapped._tickets[capture], list(range(20)), 25)
    tapped.step(capture, 0, 20)
    assert tapped.recorder.counters.captures_refused == 1 and tapped.recorder.counters.rows == 0
    tapped.finish(capture, 20)
    manifest = manifest_of(writer.store, capture)
    assert (manifest.status, manifest.captured) == ("incomplete", 0)
    assert manifest_of(writer.store, tapped.whole(100)).status == "complete"
    tapped.close()


def test_a_request_of_any_name_has_its_capture(writer: WriterProcess) -> None:
    """The writer takes names of so many characters; vLLM takes any of a caller's."""
    tapped, capture = Tapped(writer.endpoint), new_ulid()
    spec = parse_spec({"codec": "raw", "id": capture})
    ticket, name = Ticket(capture, spec.to_json(), resolve(spec, ARMED), 0, 1, 1), "r" * 1000
    tapped.recorder.open(name, ticket, list(range(8)), 0)
    positions = torch.arange(8)
    tapped.recorder.after_step(Step([name], np.array([0, 8]), np.array([0]), positions, positions.to(torch.int32)))
    tapped.recorder.finish(End(name, ticket, "length", None, list(range(8)), [7], 8))
    assert manifest_of(writer.store, capture).status == "complete"
    tapped.close()


def test_a_frame_has_no_more_rows_than_the_writer_takes(writer: WriterProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few bytes they are, and however far the sender is behind."""
    monkeypatch.setattr(limits, "frame_rows_max", 1000)  # here alone, not of the writer
    monkeypatch.setattr(limits, "frame_delay_ms", 60_000)
    tapped = Tapped(writer.endpoint)
    capture = tapped.open(4000)
    for first in range(0, 4000, 400):
        tapped.step(capture, first, 400)
    tapped.finish(capture, 4000)
    assert manifest_of(writer.store, capture).status == "complete"
    with StoreReader(writer.store) as reader, reader._catalog.moment() as now:
        rows = [row[0] for row in now.db.execute("SELECT n FROM extents ORDER BY seq")]
    assert rows == [800] * 5
    tapped.close()


def test_a_writer_that_is_away_costs_no_memory_by_the_step(tmp_path: Path) -> None:
    tapped = Tapped(f"ipc://{tmp_path}/nobody"[:100], ring_bytes=4 * MIB)
    capture = tapped.open(10)
    for first in range(0, 40_000, 40):
        tapped.step(capture, first, 40)
        time.sleep(0.001)
    until(lambda: not tapped.recorder.outbox)
    assert tapped.recorder.counters.dropped > 0
    kept = len(tapped.sender.window.unacked)
    tapped.close(timeout_s=1.0)
    assert kept < 100, kept


def test_a_writer_that_is_away_for_long_does_not_fill_memory(
    writer: WriterProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records of captures wait for it up to a bound; then captures are not begun, until it is back."""
    monkeypatch.setattr(limits, "records_pending_bytes_max", 64 << 10)
    tapped = Tapped(writer.endpoint)
    assert manifest_of(writer.store, tapped.whole(10)).status == "complete"
    writer.kill()
    kept = []
    while not tapped.ring.shared.writer_away:
        kept.append(tapped.whole(100))
        time.sleep(0.002)
        assert len(kept) < 1000
    before = tapped.recorder.counters.captures_refused
    refused = [tapped.whole(100) for _ in range(50)]
    assert tapped.sender._record_bytes < 80 << 10 and tapped.recorder.counters.captures_refused == before + 50
    writer.start()
    assert manifest_of(writer.store, kept[-1]).status in ("complete", "incomplete")
    until(lambda: not tapped.ring.shared.writer_away, 5.0)
    assert manifest_of(writer.store, tapped.whole(10)).status == "complete"
    tapped.close()
    with StoreReader(writer.store) as reader:
        there = {row.id for row in reader.captures(limit=1000)}
    assert set(kept) <= there and not there & set(refused)
