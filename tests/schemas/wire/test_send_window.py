"""The send window alone: numbers, what goes out next, what is kept, what is sent again."""

from __future__ import annotations

import pytest

from schemas.wire import send_window
from schemas.wire.send_window import SendWindow


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def time_ns(self) -> int:
        return int(self.now_s * 1e9)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(send_window, "time", made)
    return made


def filled(count: int) -> SendWindow[str]:
    window: SendWindow[str] = SendWindow()
    for number in range(1, count + 1):
        window.add(f"m{number}")
        assert window.last == number
    return window


def sent(window: SendWindow[str], room: int = 100) -> list[str]:
    """What goes out, where only ``room`` messages can."""
    out: list[str] = []

    def put(message: str) -> bool:
        if len(out) == room:
            return False
        out.append(message)
        return True

    window.send(put)
    return out


def test_each_goes_out_once_and_is_kept_until_it_is_covered() -> None:
    window = filled(4)
    assert sent(window, room=3) == ["m1", "m2", "m3"]
    assert sent(window) == ["m4"] and sent(window) == []
    assert window.cover(2) == ["m1", "m2"] and window.cover(2) == [] and list(window.unacked) == [3, 4]
    assert window.cover(4) == ["m3", "m4"] and not window.unacked


def test_a_new_connection_goes_on_behind_what_the_writer_has() -> None:
    window = filled(4)
    sent(window)
    window.resume(2)
    assert list(window.unacked) == [1, 2, 3, 4]  # until an Ack says which of them were refused
    assert sent(window) == ["m3", "m4"]
    assert window.cover(2) == ["m1", "m2"]


def test_what_stands_still_is_sent_again(clock: Clock) -> None:
    window = filled(3)
    sent(window)
    window.cover(1)
    clock.now_s += 1.0
    window.resend_after(1.0)
    assert sent(window) == []
    clock.now_s += 0.1
    window.resend_after(1.0)
    assert sent(window) == ["m2", "m3"]
    window.resend_after(1.0)
    assert sent(window) == []


def test_what_went_out_last_has_all_the_time(clock: Clock) -> None:
    """A sender that was idle for long has only just said something."""
    window = filled(1)
    sent(window)
    window.cover(1)
    clock.now_s += 60.0
    window.add("m2")
    assert sent(window) == ["m2"]
    clock.now_s += 0.5
    window.resend_after(1.0)
    assert sent(window) == []


def test_nothing_is_sent_again_that_has_not_gone_out(clock: Clock) -> None:
    window = filled(2)
    clock.now_s += 60.0
    window.resend_after(1.0)
    assert window.next == 1 and sent(window, room=1) == ["m1"]
    window.cover(1)
    clock.now_s += 60.0
    window.resend_after(1.0)
    assert window.next == 2


def test_a_new_stream_has_numbers_of_its_own(clock: Clock) -> None:
    window = filled(3)
    sent(window)
    window.cover(1)
    before = window.stream, window.epoch, window.nonces
    clock.now_s += 1.0
    assert window.begin_again() == ["m2", "m3"]
    assert window.stream != before[0] and window.epoch > before[1] and window.nonces is not before[2]
    assert (window.last, window.covered, window.next, len(window.unacked)) == (0, 0, 1, 0)
    window.add("m2")
    assert sent(window) == ["m2"]
