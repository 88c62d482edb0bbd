"""Captures that are told to be complete at a glance: never one that a full look at its rows would not call so."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas import limits
from schemas.catalog.records import Capture, connect_write, load_drops, load_extents, pack_layers
from schemas.read.coverage import status_of
from schemas.spec import Resolved
from schemas.wire.row_table import FLAG_DRAFT, FLAG_RECOMPUTED
from tests.schemas.read.test_coverage import FINISHED
from writer_service.catalog import catalog
from writer_service.catalog.whole import is_whole

SITES = {"resid_post": [0, 1], "attn_out": [1]}
Rows = Sequence[tuple[str, int, Sequence[int], Sequence[int], int]]  # site, seq, layers, positions, flags


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sqlite3.Connection]:
    made = connect_write(tmp_path_factory.mktemp("whole") / "catalog.sqlite")
    catalog.create(made, "00" * 16)
    yield made
    made.close()


def asked(capture: Capture = FINISHED, layers: dict[str, list[int]] = SITES, **how: object) -> Capture:
    """A capture that asks for rows of two sites; ``how``: other fields of what it asks for."""
    resolved = Resolved(layers, dict.fromkeys(layers, "raw"), **{"positions": "all", "prefix_cache": "allow", **how})
    return replace(capture, resolved=msgspec.json.encode(resolved).decode())


def found(db: sqlite3.Connection, capture: Capture, rows: Rows, drops: Sequence[tuple[str, int, int, int]] = ()
          ) -> tuple[bool, str]:
    """What a glance says of the capture, and what its status is."""
    with catalog.transaction(db):
        db.execute("DELETE FROM extents")
        db.execute("DELETE FROM drops")
        for site, seq, layers, positions, flags in rows:
            table = [(position, number, 10 + position, flags) for number, position in enumerate(positions)]
            db.execute("INSERT INTO extents VALUES (?, ?, 0, ?, 1, 0, ?, 0, 0, ?, ?, x'', 0)", (
                capture.id, site, seq, len(table), pack_layers(list(layers)), np.asarray(table, "<u4").tobytes()))
        for site, seq, start, stop in drops:
            db.execute("INSERT INTO drops VALUES (?, ?, 0, ?, ?, ?, ?, 'ring_full')", (
                capture.id, site, seq, pack_layers([0, 1]), start, stop))
    return is_whole(db, capture), status_of(capture, load_extents(db, capture.id), load_drops(db, capture.id))


WHOLE: Rows = [("resid_post", 1, [0, 1], range(3), 0), ("attn_out", 2, [1], range(3), 0),
               ("resid_post", 3, [0, 1], range(3, 8), 2), ("attn_out", 4, [1], range(3, 8), 2)]


def test_rows_that_all_came_once_and_in_order(db: sqlite3.Connection) -> None:
    assert found(db, asked(), WHOLE) == (True, "complete")
    assert found(db, asked(positions=[(1, 3), (5, 7)]), [
        ("resid_post", 1, [0, 1], [1, 2], 0), ("attn_out", 2, [1], [1, 2, 5, 6], 0),
        ("resid_post", 3, [0, 1], [5, 6], 0)]) == (True, "complete")
    assert found(db, asked(positions=[(90, 99)]), []) == (False, "complete")  # of sites without a row nothing is known


@pytest.mark.parametrize(("rows", "drops"), [
    (WHOLE[:3], []),  # a site ends early
    ([*WHOLE[:3], ("attn_out", 4, [1], [3, 4, 6, 7, 7], 0)], []),  # the right number, and not the right rows
    ([*WHOLE[:2], ("resid_post", 3, [0], range(3, 8), 0), WHOLE[3]], []),  # of one of two layers
    ([*WHOLE[:3], ("attn_out", 4, [1], range(3, 8), FLAG_DRAFT)], []),  # guesses that other tokens were chosen for
    (WHOLE, [("resid_post", 9, 2, 4)]),  # computed again, and then dropped
    ([("resid_post", 1, [0, 1], range(8), 0)], []),  # of one of two sites
])
def test_rows_of_which_some_are_missing(db: sqlite3.Connection, rows: Rows, drops: list[tuple[str, int, int, int]]
                                        ) -> None:
    assert found(db, asked(replace(FINISHED, prompt_tokens=b"", output_tokens=bytes(24))), rows, drops) == (
        False, "incomplete")


def test_tokens_past_the_rows_are_looked_at(db: sqlite3.Connection) -> None:
    """An engine that ended a request early has no rows of its last tokens."""
    assert found(db, asked(replace(FINISHED, finish_reason="abort", end=3)), WHOLE) == (False, "incomplete")


def test_what_others_have_to_say_is_looked_at(db: sqlite3.Connection) -> None:
    """Ranks, layers in another writer's store, deletion."""
    for capture in (asked(replace(FINISHED, group="g")), asked(elsewhere={"resid_post": [0]}),
                    asked(replace(FINISHED, deleted=True)), replace(FINISHED, resolved=None)):
        assert not found(db, capture, WHOLE)[0]


def test_a_claim_of_many_rows_takes_no_memory(db: sqlite3.Connection) -> None:
    claims = replace(FINISHED, prompt_len=0, end=limits.position_max, output_tokens=b"")
    assert not found(db, asked(claims), WHOLE)[0]
    assert found(db, asked(claims, layers={}), []) == (True, "complete")


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_glance_and_a_full_look_agree(db: sqlite3.Connection, data: st.DataObject) -> None:
    """Of any rows, in any order, with any gaps."""
    rows, seq = [], 0
    for site, layers in SITES.items():
        at = 0
        while at < 8:
            stop = data.draw(st.integers(at + 1, 8))
            positions = data.draw(st.one_of(st.just(list(range(at, stop))), st.lists(st.integers(0, 9), max_size=5)),
                                  label="positions")
            flags = data.draw(st.sampled_from([0, 0, 0, 2, FLAG_DRAFT, FLAG_RECOMPUTED]))
            seq += 1
            rows.append((site, seq, data.draw(st.sampled_from([layers, layers, layers, layers[:1]])), positions, flags))
            at = stop
    cached = data.draw(st.sampled_from([0, 0, 2]))
    capture = asked(replace(FINISHED, cached=cached, end=data.draw(st.sampled_from([8, 8, 5]))),
                    positions=data.draw(st.sampled_from(["all", "prompt", "generated", [(1, 3), (4, 20)]])))
    whole, status = found(db, capture, rows)
    assert not whole or status == "complete"


def test_a_capture_that_ends_whole_is_refreshed_without_its_coverage(tmp_path: Path) -> None:
    """Readers wait for this: the tables of rows are read once, and nothing else of them is looked at."""
    db = connect_write(tmp_path / "catalog.sqlite")
    catalog.create(db, "00" * 16)
    capture = asked()
    with catalog.transaction(db):
        db.execute("INSERT INTO captures (id, ulid, sample, status, created_ms, stream, resolved, prompt_len, "
                   "finish_seq, \"end\", output_tokens) VALUES (?, ?, 0, 'running', 1, 's', ?, 3, 9, 8, ?)",
                   (capture.id, capture.ulid, capture.resolved, capture.output_tokens))
    found(db, capture, WHOLE)
    said: list[str] = []
    db.set_trace_callback(said.append)
    catalog.refresh(db, [capture.id])
    assert sum("FROM extents" in statement for statement in said) == 1
    assert db.execute("SELECT status, total_len FROM captures").fetchone()[:] == ("complete", 9)
    db.close()
