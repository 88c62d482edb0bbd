"""What the sender says, in what order, and until when it keeps what it said: by hand, and to a scripted writer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from engine_side.step.recorder import Recorder
from engine_side.tap.staging import Staging
from engine_side.transport import sender as sender_module
from engine_side.transport.device_copies import DeviceToHost
from engine_side.transport.events import Entry, Lost, Run
from engine_side.transport.ring import Ring
from engine_side.transport.sender import Sender
from engine_side.transport.shared_memory import Outbox
from schemas import limits
from schemas.wire.messages import Ack, Frame, FromSender, FromWriter, Hello, Ping, Refuse, Welcome, decode_from_sender
from tests.engine_side.transport.test_sender import ARMED, LAYERS, MIB, TOKENS, WIDTH, Tapped
from tests.schemas.wire.test_control_channel import Answer, Scripted
from tests.support.store_helpers import SITE, engine_info, socket_folder, until

ENTRY = Entry(SITE, "raw", tuple(range(LAYERS)))


class Still(Tapped):
    """What a worker holds, with a sender that does only what a test calls."""

    def __init__(self) -> None:
        self.staging = Staging({SITE: torch.randn(LAYERS, TOKENS, WIDTH)}, ARMED.sites)
        self.ring = Ring(4 * MIB, pinned=False)
        self.recorder = Recorder(self.staging, "float32", "drop",
                                 DeviceToHost(torch.device("cpu"), self.ring, outbox=Outbox(self.ring.shared)))
        self.sender = Sender("ipc://nowhere", engine_info(width=WIDTH, n_layers=LAYERS), self.ring.shared, os.getpid())
        self._tickets = {}

    def close(self, timeout_s: float = 0.0) -> None:
        self.ring.close()

    def take(self) -> list[str]:
        """Have it take the events; the kinds of all messages that it has numbered."""
        self.recorder.flush()
        self.sender._take_events()
        return [type(message).__name__ for message in self.said()]

    def said(self) -> list[FromSender]:
        return [decode_from_sender(outgoing.whole()[0]) for outgoing in self.sender.window.unacked.values()]


@pytest.fixture
def still() -> Iterator[Still]:
    made = Still()
    yield made
    made.close()


@pytest.fixture
def script() -> Iterator[Callable[[Answer], tuple[Scripted, Tapped]]]:
    made: list[Any] = []

    def make(answer: Answer) -> tuple[Scripted, Tapped]:
        endpoint = f"ipc://{socket_folder()}/w"
        made.append(Scripted(endpoint, answer))
        made.append(Tapped(endpoint))
        return made[-2], made[-1]

    yield make
    for one in made[::-1]:
        one.close(0.0) if isinstance(one, Tapped) else one.close()


def test_rows_and_losses_go_out_before_the_end_of_their_capture(still: Still) -> None:
    still.whole(20)
    assert still.take() == ["Open", "Frame", "Finish"]
    capture = still.open(20)
    slot = still.recorder.captures.slot_of[capture]
    still.recorder.outbox.append(Lost(ENTRY, np.full(20, slot), np.arange(20)))
    still.finish(capture, 20)
    assert still.take()[3:] == ["Open", "Dropped", "Finish"]


def test_a_loss_stands_between_what_was_taken_before_and_after_it(still: Still) -> None:
    """By their numbers: a loss takes older rows with it, and newer ones stand for what was lost."""
    capture = still.open(20)
    slot = still.recorder.captures.slot_of[capture]
    still.step(capture, 0, 20)
    still.recorder.outbox.append(Lost(ENTRY, np.full(10, slot), np.arange(10, 20)))
    still.step(capture, 5, 20)
    assert still.take() == ["Open", "Frame", "Dropped"]
    still.sender._close_old_frames(force=True)
    assert still.take() == ["Open", "Frame", "Dropped", "Frame"]


def test_the_ring_is_freed_in_the_order_in_which_it_was_taken(still: Still) -> None:
    capture = still.open(20)
    still.step(capture, 0, 20)
    still.take()
    offset, mark = still.ring.allocate(64) or pytest.fail("an empty ring refused")
    nowhere = np.array([77])  # a slot that nobody opened: it cannot be taken, and is free at once
    still.recorder.outbox.append(Run(ENTRY, nowhere, nowhere, nowhere, {"x": (offset, 64)}, offset, offset, (mark, 0)))
    with pytest.raises(KeyError):
        still.take()
    assert still.ring.shared.tail == 0
    still.sender._close_old_frames(force=True)
    assert still.ring.shared.tail == 0
    still.sender._cover(still.sender.window.last)
    assert still.ring.shared.tail == mark


def test_rows_wait_for_their_copy(still: Still) -> None:
    capture = still.open(20)
    assert still.take() == ["Open"]
    offset, mark = still.ring.allocate(1 << 14) or pytest.fail("an empty ring refused")
    slot = np.array([still.recorder.captures.slot_of[capture]])
    still.ring.shared.made = 1
    still.recorder.outbox.append(Run(ENTRY, slot, slot * 0, slot * 0, {"data": (offset, LAYERS * WIDTH * 4)},
                                     offset + 8192, offset + 8256, (mark, 0), copied=1))
    still.take()
    assert not still.sender.frames.open, "the copy is under way"
    still.ring.shared.copied = 1
    still.take()
    assert still.sender.frames.open


class Holding:
    """Answers as a writer that has what ``durable`` says, and changes that when it is told to."""

    def __init__(self) -> None:
        self.durable = 0
        self.greeted = 0
        self.ask_again = False

    def __call__(self, message: FromSender) -> list[FromWriter]:
        if isinstance(message, Hello):
            self.greeted += 1
            return [Welcome(store="s", durable=self.durable, ring=True)]
        if isinstance(message, Ping) and self.ask_again:
            self.ask_again = False
            return [Ack(self.durable, self.durable), Refuse("resend", "")]
        return [Ack(self.durable, self.durable)] if isinstance(message, Ping) else []


def seqs(scripted: Scripted) -> list[int]:
    return [message.seq for message in list(scripted.heard) if not isinstance(message, Hello | Ping) and message.seq]


def test_what_is_not_acknowledged_is_sent_again(
    script: Callable[[Answer], tuple[Scripted, Tapped]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And stays in the ring until then."""
    monkeypatch.setattr(limits, "heartbeat_interval_ms", 50)
    monkeypatch.setattr(sender_module, "_STALL_S", 1000.0)
    holding = Holding()
    scripted, tapped = script(holding)
    tapped.whole(20)
    assert until(lambda: seqs(scripted) == [1, 2, 3]), seqs(scripted)
    assert isinstance(next(m for m in scripted.heard if not isinstance(m, Hello | Ping) and m.seq == 2), Frame)
    assert tapped.ring.shared.tail == 0
    holding.durable, holding.ask_again = 1, True
    assert until(lambda: holding.greeted == 2)
    assert until(lambda: len(seqs(scripted)) > 4) and seqs(scripted) == [1, 2, 3, 2, 3]
    assert tapped.ring.shared.tail == 0
    holding.durable = 3
    assert until(lambda: tapped.ring.shared.tail == tapped.ring.head)


def test_what_was_lost_on_the_way_is_sent_again(
    script: Callable[[Answer], tuple[Scripted, Tapped]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "heartbeat_interval_ms", 50)
    monkeypatch.setattr(sender_module, "_STALL_S", 0.2)
    holding = Holding()
    scripted, tapped = script(holding)
    tapped.whole(20)
    assert until(lambda: len(seqs(scripted)) > 5), seqs(scripted)
    assert seqs(scripted)[:6] == [1, 2, 3, 1, 2, 3] and holding.greeted == 1
    holding.durable = 3
    assert until(lambda: not tapped.sender.window.unacked)


def test_an_ack_of_a_stream_that_is_no_more_covers_nothing(
    script: Callable[[Answer], tuple[Scripted, Tapped]]
) -> None:
    greeted, waits = 0, False

    def answer(message: FromSender) -> list[FromWriter]:
        nonlocal greeted
        if not isinstance(message, Hello) or not waits:
            return []
        greeted += 1
        return [Ack(9, 9)] if greeted == 1 else [Welcome(store="s", durable=0, ring=True)]

    scripted, tapped = script(answer)
    tapped.whole(20)
    assert until(lambda: len(tapped.sender.window.unacked) == 3)
    waits = True
    assert until(lambda: greeted > 1)
    assert until(lambda: seqs(scripted)) and until(lambda: len(seqs(scripted)) == 3) and seqs(scripted) == [1, 2, 3]
