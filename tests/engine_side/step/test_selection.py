"""Row selection against the plainest possible oracle, over random batches, chunks, preemptions and specs."""

from __future__ import annotations

import time

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_side.step.selection import CaptureTable, plan_of
from schemas.spec import Armed, Resolved, intervals, parse_spec, resolve
from schemas.wire.row_table import FLAG_DRAFT, FLAG_GENERATED, FLAG_RECOMPUTED

ARMED = Armed({"resid_post": [0, 1, 2, 3], "attn_out": [0, 1, 2, 3]}, n_layers=4)
SPECS = [
    {},
    {"positions": "prompt"},
    {"positions": "generated", "layers": [1]},
    {"positions": "last_prompt"},
    {"positions": [0, 5, 6, 30]},
    {"positions": [[3, 9], [12, 13]], "sites": ["attn_out"]},
    {"positions": []},
    {"sites": []},
]


def _resolved(spec: dict[str, object]) -> Resolved:
    return resolve(parse_spec(spec), ARMED)


@st.composite
def _steps(draw: st.DrawFn) -> tuple[list[tuple[int, int, int | None]], list[list[tuple[int, int]]]]:
    """Requests (prompt length, step they leave, spec or None) and, by step, who computes how many rows."""
    requests = draw(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 8),
                                       st.none() | st.integers(0, len(SPECS) - 1)), min_size=1, max_size=6))
    steps = draw(st.lists(st.lists(st.tuples(st.integers(0, len(requests) - 1), st.integers(1, 9)),
                                   unique_by=lambda pair: pair[0], max_size=6), min_size=1, max_size=8))
    return requests, steps


@settings(max_examples=200, deadline=None)
@given(_steps(), st.lists(st.integers(0, 7), max_size=4))
def test_selection_equals_the_oracle(
    drawn: tuple[list[tuple[int, int, int | None]], list[list[tuple[int, int]]]], preempted_at: list[int]
) -> None:
    requests, steps = drawn
    table, done, highest, opened = CaptureTable(), dict[int, int](), dict[int, int](), set[int]()
    for number, step in enumerate(steps):
        batch = [(i, rows) for i, rows in step if requests[i][1] > number]
        for i in list(opened):
            if requests[i][1] <= number:
                table.close(f"r{i}")
                opened.discard(i)
        for i, _ in batch:
            if number in preempted_at:
                done[i] = 0
            spec = requests[i][2]
            if spec is not None and i not in opened:
                table.open(f"r{i}", _resolved(SPECS[spec]), requests[i][0])
                opened.add(i)
        starts = np.cumsum([0] + [rows for _, rows in batch])
        first = np.array([done.get(i, 0) for i, _ in batch], np.int64)
        selected = table.select([f"r{i}" for i, _ in batch], starts, first)

        expected = []
        for (i, rows), start in zip(batch, starts, strict=False):
            prompt_len, _, spec = requests[i]
            for k in range(rows):
                position = done.get(i, 0) + k
                if spec is not None:
                    resolved = _resolved(SPECS[spec])
                    wanted = not resolved.empty and any(
                        a <= position < b for a, b in intervals(resolved.positions, prompt_len))
                    if wanted:
                        flags = (FLAG_GENERATED if position >= prompt_len else 0) | (
                            FLAG_RECOMPUTED if position < highest.get(i, 0) else 0)
                        expected.append((int(start) + k, table.slot_of[f"r{i}"], position, flags, plan_of(resolved)))
            done[i] = done.get(i, 0) + rows
            highest[i] = max(highest.get(i, 0), done[i])
        got = [] if selected is None else [
            (int(r), int(s), int(p), int(f), table.plans[int(q)])
            for r, s, p, f, q in zip(selected.row, selected.slot, selected.position, selected.flags, selected.plan,
                                     strict=True)
        ]
        assert got == expected


@settings(max_examples=300, deadline=None)
@given(st.data(), st.integers(0, len(SPECS) - 1), st.integers(1, 9), st.integers(0, 3))
def test_drafts_and_positions_that_the_host_only_guesses(
    data: st.DataObject, spec: int, prompt_len: int, slack: int
) -> None:
    """A request alone: the truth starts at or below what the host says, by at most the slack once it generates."""
    resolved, table = _resolved(SPECS[spec]), CaptureTable()
    table.open("r", resolved, prompt_len)
    ranges = [] if resolved.empty else intervals(resolved.positions, prompt_len)
    truth = highest = 0
    for _ in range(data.draw(st.integers(1, 6))):
        decodes = truth > prompt_len
        drafts = data.draw(st.integers(0, 3)) if truth >= prompt_len else 0
        rows = 1 + drafts if truth >= prompt_len else data.draw(st.integers(1, prompt_len - truth))
        host = truth + (data.draw(st.integers(0, slack)) if decodes else 0)
        selected = table.select(["r"], np.array([0, rows]), np.array([host]), np.array([drafts]), slack)
        got = {} if selected is None else dict(zip(selected.row.tolist(), selected.flags.tolist(), strict=True))
        for row in range(rows):
            if any(a <= truth + row < b for a, b in ranges):
                assert row in got, (truth, host, row)
            if not any(a <= host + row - less < b for a, b in ranges for less in range(slack + 1)):
                assert row not in got
            if row in got:
                assert bool(got[row] & FLAG_DRAFT) == (row >= rows - drafts)
                assert not got[row] & FLAG_RECOMPUTED  # a draft computed again was never more than a guess
        if selected is not None and selected.slack is not None:
            assert set(selected.slack.tolist()) <= {0, slack}
        truth += rows - drafts + data.draw(st.integers(0, drafts))
        highest = max(highest, truth)
        assert table.computed[0] <= highest
    assert table.recomputed[0] == 0


def test_a_prompt_that_comes_row_by_row_is_followed_to_its_end() -> None:
    """Rows of what is generated are flagged: they are not the same rows with the same flags."""
    table = CaptureTable()
    table.open("r", _resolved({}), 5)
    selected = table.select(["r"], np.array([0, 1]), np.array([2]))
    assert selected is not None and selected.steps_unchanged == 3


def test_slots_and_plans_are_used_again() -> None:
    table = CaptureTable()
    for round_ in range(50):
        for i in range(8):
            table.open(f"{round_}.{i}", _resolved({"layers": [(round_ + i) % 4]}), 5)
        for i in range(8):
            table.close(f"{round_}.{i}")
    assert len(table._ranges) == 8
    assert len(table.plans) <= 8


def test_a_step_of_256_captures_costs_under_a_microsecond_a_request() -> None:
    table = CaptureTable()
    names = [f"chatcmpl-request-{i}" for i in range(256)]
    for i, name in enumerate(names):
        table.open(name, _resolved(SPECS[i % 4]), 512)
    starts, first = np.arange(257), np.full(256, 600, np.int64)
    table.select(names, starts, first)
    best = min(_timed(lambda: table.select(names, starts, first)) for _ in range(200))
    assert best / 256 < 1e-6, f"{best / 256 * 1e9:.0f} ns a request"


def _timed(call: object) -> float:
    begin = time.perf_counter()
    call()  # type: ignore[operator]
    return time.perf_counter() - begin
