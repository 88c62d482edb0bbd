"""Which rows are served and why others are not; of speculative decoding only what the final sequence has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.catalog.records import Capture, Drop, Extent
from schemas.read.coverage import Coverage, LayerGroup, cover, status_of
from schemas.spec import Resolved
from schemas.wire.row_table import FLAG_DRAFT, FLAG_GENERATED, FLAG_RECOMPUTED

PROMPT = [10, 11, 12]
OUTPUT = [13, 14, 15, 16, 17, 18]
RUNNING = Capture(
    id="01", ulid="01", sample=0, owner="", status="running", created_ms=1, tags={}, stream="s", asked="{}",
    resolved=msgspec.json.encode(Resolved({"resid_post": [0, 1]}, {"resid_post": "raw"}, "all", "allow")).decode(),
    adapter="", edits="", prompt_len=3, prompt_tokens=np.asarray(PROMPT, "<u4").tobytes(), cached=0, finish_seq=None,
    finish_reason=None, stop_reason=None, output_tokens=b"", end=None, recomputed=0, client_reason=None, total_len=3,
    lost=False, failed=None, deleted=False)
FINISHED = replace(RUNNING, finish_seq=100, finish_reason="length", output_tokens=np.asarray(OUTPUT, "<u4").tobytes(),
                   end=8)

Row = tuple[int, int, int]  # position, token id, flags
REAL, DRAFT = FLAG_GENERATED, FLAG_GENERATED | FLAG_DRAFT


def frame(seq: int, rows: Sequence[Row], layers: tuple[int, ...] = (0, 1)) -> Extent:
    table = [(position, number, token, flags) for number, (position, token, flags) in enumerate(rows)]
    return Extent("resid_post", seq, 1, 0, layers, np.asarray(table, "<u4").tobytes())


def real(position: int, token: int | None = None) -> Row:
    return position, (PROMPT + OUTPUT)[position] if token is None else token, REAL


def draft(position: int, token: int | None = None) -> Row:
    return position, real(position, token)[1], DRAFT


PREFILL = frame(1, [(p, PROMPT[p], 0) for p in range(3)])


def only(coverage: Coverage) -> LayerGroup:
    (group,) = coverage.sites["resid_post"]
    return group


def served(coverage: Coverage) -> list[tuple[int, int]]:
    """(position, seq of the frame) of what is served."""
    group = only(coverage)
    return [(p, coverage.extents["resid_post"][e].seq)
            for p, e in zip(group.rows.positions.tolist(), group.rows.extent.tolist(), strict=True)]


def gaps(group: LayerGroup) -> list[tuple[int, int, str]]:
    return [(missing.start, missing.stop, missing.reason) for missing in group.missing]


def test_accepted_drafts_are_rows_like_others() -> None:
    frames = [PREFILL, frame(2, [real(3), draft(4), draft(5)]), frame(3, [real(6), draft(7)])]
    assert served(cover(FINISHED, frames, [])) == [(0, 1), (1, 1), (2, 1), (3, 2), (4, 2), (5, 2), (6, 3), (7, 3)]
    assert status_of(FINISHED, frames, []) == "complete"


def test_rows_after_an_abort_are_not_served() -> None:
    """They were computed, and the request had ended: nobody saw their tokens."""
    aborted = replace(FINISHED, finish_reason="abort", end=5)
    coverage = cover(aborted, [PREFILL, frame(2, [real(p) for p in range(3, 8)])], [])
    assert [p for p, _ in served(coverage)] == [0, 1, 2, 3, 4] and gaps(only(coverage)) == [(5, 8, "aborted")]


def test_rejected_drafts_give_way_to_what_was_computed_later() -> None:
    frames = [PREFILL, frame(2, [real(3), draft(4, 99), draft(5, 98)]), frame(3, [real(4), draft(5), draft(6, 97)]),
              frame(4, [real(6)]), frame(5, [real(7), draft(8, 96)])]
    coverage = cover(FINISHED, frames, [])
    assert served(coverage)[3:] == [(3, 2), (4, 3), (5, 3), (6, 4), (7, 5)]
    group = only(coverage)
    assert not group.missing
    assert group.rejected.positions.tolist() == [4, 5, 6, 8]
    assert [frames[e].seq for e in group.rejected.extent] == [2, 2, 3, 5]


def test_a_draft_that_equals_the_final_token_after_a_rejected_one_is_not_served() -> None:
    """The hard case: draft 4 was wrong, draft 5 happens to be the final token, and its recomputation was dropped."""
    frames = [PREFILL, frame(2, [real(3), draft(4, 99), draft(5)]), frame(3, [real(4)]), frame(5, [real(6), real(7)])]
    drop = Drop("resid_post", 4, (0, 1), 5, 6, "dropped")
    group = only(cover(FINISHED, frames, [drop]))
    assert 5 not in group.rows.positions and gaps(group) == [(5, 6, "dropped")]
    # Even where the drop was never reported:
    group = only(cover(FINISHED, frames, []))
    assert 5 not in group.rows.positions and gaps(group) == [(5, 6, "rejected_draft")]
    assert status_of(FINISHED, frames, []) == "incomplete"
    # In the same frame as the step after it (a frame holds many steps):
    one = [PREFILL, frame(2, [real(3), draft(4, 99), draft(5), real(4), real(6), real(7)])]
    assert gaps(only(cover(FINISHED, one, []))) == [(5, 6, "rejected_draft")]


def test_steps_are_told_apart_where_their_first_row_was_not_asked_for() -> None:
    """Positions 5 and 7 only: the second guess at 5 follows the first in the table, without a row between."""
    capture = replace(FINISHED, resolved=msgspec.json.encode(Resolved(
        {"resid_post": [0, 1]}, {"resid_post": "raw"}, [(5, 6), (7, 8)], "allow")).decode())
    frames = [frame(2, [draft(5, 99)]), frame(3, [draft(5), draft(7)])]
    group = only(cover(capture, frames, []))
    assert served(cover(capture, frames, [])) == [(5, 3), (7, 3)] and not group.missing
    assert group.rejected.positions.tolist() == [5]


def test_a_dropped_recomputation_hides_the_older_row_also_after_preemption() -> None:
    again = frame(3, [(p, (PROMPT + OUTPUT)[p], FLAG_RECOMPUTED) for p in (0, 1, 2, 3)])
    frames = [PREFILL, frame(2, [real(3), draft(4)]), again, frame(5, [real(5), real(6), real(7)])]
    drop = Drop("resid_post", 4, (0, 1), 4, 5, "dropped")
    group = only(cover(FINISHED, frames, [drop]))
    assert gaps(group) == [(4, 5, "dropped")]
    assert group.rejected.positions.tolist() == []  # it may have been a good guess: nothing is claimed


def test_positions_read_from_the_prefix_cache_half_way_are_named_and_take_nothing_away() -> None:
    """Preempted after position 1; at 2 the cache had it. A row at 3 is there, though it was named as well."""
    frames = [frame(1, [(0, 10, 0), (1, 11, 0)]), frame(2, [real(p) for p in range(3, 8)])]
    group = only(cover(FINISHED, frames, [Drop("resid_post", 3, (0, 1), 2, 4, "prefix_cached")]))
    assert gaps(group) == [(2, 3, "prefix_cached")]
    assert group.rows.positions.tolist() == [0, 1, 3, 4, 5, 6, 7]


def test_an_accepted_draft_computed_again_is_not_called_rejected() -> None:
    again = frame(3, [(4, OUTPUT[1], REAL | FLAG_RECOMPUTED)])
    frames = [PREFILL, frame(2, [real(3), draft(4)]), again, frame(4, [real(5), real(6), real(7)])]
    group = only(cover(FINISHED, frames, []))
    assert (4, 3) in served(cover(FINISHED, frames, [])) and group.rejected.positions.tolist() == []


@pytest.mark.parametrize("lost", [False, True])
def test_undecided_drafts_of_a_running_capture_wait(lost: bool) -> None:
    capture = replace(RUNNING, lost=lost)
    frames = [PREFILL, frame(2, [real(3), draft(4), draft(5)])]
    group = only(cover(capture, frames, []))
    assert group.rows.positions.tolist() == [0, 1, 2, 3] and group.rejected.positions.tolist() == []
    frames.append(frame(3, [real(5, 77), draft(6, 78)]))  # so 4 was accepted, 5 was not
    coverage = cover(capture, frames, [])
    assert served(coverage)[3:] == [(3, 2), (4, 2), (5, 3)] and coverage.end == 6
    assert only(coverage).rejected.positions.tolist() == [5]


def test_a_site_that_lags_behind_does_not_serve_what_another_site_knows_to_be_decided() -> None:
    capture = replace(RUNNING, resolved=msgspec.json.encode(Resolved(
        {"resid_post": [0], "mlp_out": [0]}, {"resid_post": "raw", "mlp_out": "raw"}, "all", "allow")).decode())
    ahead = [replace(part, site="mlp_out", seq=part.seq + 10) for part in (
        frame(1, [(p, PROMPT[p], 0) for p in range(3)]), frame(2, [real(3), draft(4, 99)]), frame(3, [real(4)]))]
    behind = [PREFILL, frame(2, [real(3), draft(4, 99)])]
    coverage = cover(capture, [*behind, *ahead], [])
    (group,) = coverage.sites["resid_post"]
    assert group.rows.positions.tolist() == [0, 1, 2, 3] and gaps(group) == [(4, 5, "pending")]


def test_layers_of_a_site_may_differ() -> None:
    frames = [PREFILL, frame(2, [real(3), draft(4, 99)]), frame(3, [real(4)], layers=(0,)),
              frame(4, [real(5), real(6), real(7)])]
    drop = Drop("resid_post", 3, (1,), 4, 5, "dropped")
    by_layer = {group.layers: group for group in cover(FINISHED, frames, [drop]).sites["resid_post"]}
    assert by_layer[(0,)].missing == [] and gaps(by_layer[(1,)]) == [(4, 5, "dropped")]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_missing_ranges_are_what_counting_positions_says(data: st.DataObject) -> None:
    edge = st.integers(0, 30)
    ranges = sorted({*data.draw(st.lists(edge, max_size=8).filter(lambda edges: len(set(edges)) % 2 == 0))})
    positions = list(zip(ranges[::2], ranges[1::2], strict=True))
    end, cached = data.draw(edge), data.draw(st.integers(0, 20))
    output = data.draw(st.integers(0, 12))
    present = sorted(data.draw(st.sets(st.integers(0, 40))))
    drops = [Drop("resid_post", seq, (0,), start, start + n, "dropped") for seq, start, n in
             data.draw(st.lists(st.tuples(st.integers(1, 9), edge, st.integers(1, 9)), max_size=3))]
    resolved = msgspec.json.encode(Resolved({"resid_post": [0]}, {"resid_post": "raw"}, positions, "allow")).decode()
    capture = replace(RUNNING, resolved=resolved, prompt_len=20, cached=cached, finish_seq=99, finish_reason="abort",
                      output_tokens=bytes(4 * output), end=end)
    group = only(cover(capture, [frame(5, [(p, 0, 0) for p in present], layers=(0,))], drops))
    expected = [p for a, b in positions for p in range(a, min(b, max(end, 19 + output)))]
    gone = {p for drop in drops if drop.seq > 5 for p in range(drop.start, drop.stop)}
    there = [p for p in present if p in expected and p < end and p not in gone]
    dropped = {p for drop in drops for p in range(drop.start, drop.stop)}
    assert group.expected == len(expected) and group.rows.positions.tolist() == there
    assert [(p, m.reason) for m in group.missing for p in range(m.start, m.stop)] == [
        (p, "dropped" if p in dropped else "prefix_cached" if p < cached else "aborted" if p >= end else "dropped")
        for p in expected if p not in there]
    assert all(a.stop < b.start or a.reason != b.reason for a, b in pairwise(group.missing))


def test_an_undecided_draft_does_not_stand_for_what_came_from_the_cache() -> None:
    frames = [PREFILL, frame(2, [real(3), draft(4, 99), draft(5, 98)]), frame(4, [real(6), real(7)])]
    drop = Drop("resid_post", 3, (0, 1), 4, 6, "prefix_cached")
    for capture in (RUNNING, FINISHED):
        group = only(cover(capture, frames, [drop]))
        assert group.rows.positions.tolist() == [0, 1, 2, 3, 6, 7]
        assert gaps(group)[0] == (4, 6, "prefix_cached")


def test_a_dropped_row_parts_the_steps_around_it() -> None:
    """Draft 4 was wrong and its recomputation dropped: the accepted draft 6 of a later step is not its follower."""
    capture = replace(FINISHED, resolved=msgspec.json.encode(Resolved(
        {"resid_post": [0, 1]}, {"resid_post": "raw"}, [(4, 5), (6, 7)], "allow")).decode())
    frames = [frame(2, [draft(4, 99)]), frame(4, [draft(6)])]
    group = only(cover(capture, frames, [Drop("resid_post", 3, (0, 1), 4, 5, "dropped")]))
    assert group.rows.positions.tolist() == [6] and gaps(group) == [(4, 5, "dropped")]
