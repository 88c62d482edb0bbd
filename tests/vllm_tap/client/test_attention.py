"""``Capture.attention`` over a store: what it reads, which queries it leaves out and names, and what it refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from schemas.attention import summarize
from schemas.errors import ArgumentError, LimitError, NotFoundError
from schemas.manifest import Missing
from tests.support.engines.attending import PROMPT, RULE, WHOLE, WINDOWED, Attending, attending
from vllm_tap import (
    AsyncClient,
    Attention,
    AttentionRule,
    BadRequest,
    MissingRows,
    NotComplete,
    Unattended,
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attending]:
    with attending(tmp_path_factory.mktemp("attention")) as engine:
        yield engine


def test_what_it_gives_is_computed_from_the_stored_rows(engine: Attending) -> None:
    capture = engine.store[engine.capture(WHOLE)]
    q, k = capture.slice("q_rot", 2), capture.slice("k_rot", 2)
    expected = summarize(q.values[0], k.values[0], q.positions, k.positions, RULE, 5)
    found = capture.attention(2, RULE, top=5)
    assert (found.capture, found.layer, found.codecs, found.unattended) == (capture.id, 2, ("raw", "raw"), [])
    assert found.keys.shape == (4, PROMPT, 5) and found.entropy.shape == (4, PROMPT)
    for name in ("keys", "weights", "entropy"):
        assert np.array_equal(getattr(found, name), getattr(expected, name))
    part = capture.attention(2, RULE, top=5, start=4, stop=7)
    assert part.positions.tolist() == [4, 5, 6] and part.token_ids.tolist() == q.token_ids[4:7].tolist()
    assert np.array_equal(part.weights, found.weights[:, 4:7]) and np.array_equal(part.keys, found.keys[:, 4:7])
    near = capture.attention(2, WINDOWED, start=9)
    assert near.keys[0, 0, :4].tolist()[3] == -1 and set(near.keys[0, 0, :3].tolist()) == {7, 8, 9}
    none = capture.attention(2, RULE, start=100)
    assert none.keys.shape == (4, 0, 8) and not none.unattended


def test_queries_that_lack_a_key_are_refused_or_named(engine: Attending) -> None:
    keys = [at for at in range(PROMPT) if at not in (4, 5, 9)]
    capture = engine.store[engine.capture({"q_rot": [at for at in range(PROMPT) if at != 1], "k_rot": keys})]
    with pytest.raises(MissingRows, match=r"attention of layer 1 needs q_rot, which of capture \w+ lacks positions "
                                          r"\[1, 2\) dropped") as refused:
        capture.attention(1, RULE)
    assert refused.value.missing == [Missing(1, 2, "dropped")]
    with pytest.raises(MissingRows, match=r"k_rot, which of .* \[4, 6\) dropped"):
        capture.attention(1, RULE, start=2)
    found = capture.attention(1, RULE, allow_missing=True)
    assert found.positions.tolist() == [0, 2, 3] and found.keys.max() == 3
    gap = Missing(4, 6, "dropped")
    assert found.unattended == [Unattended(1, 2, "q_rot", Missing(1, 2, "dropped")),
                                Unattended(4, PROMPT, "k_rot", gap)]
    found = capture.attention(1, WINDOWED, allow_missing=True)
    assert found.positions.tolist() == [0, 2, 3, 8]  # 6 and 7 look back on 5
    assert found.unattended[1:] == [Unattended(4, 8, "k_rot", gap),
                                    Unattended(9, 12, "k_rot", Missing(9, 10, "dropped"))]
    assert capture.attention(1, WINDOWED, start=8, stop=9).positions.tolist() == [8]  # all that it sees is there


def test_over_http_it_is_the_same(engine: Attending) -> None:
    keys = [at for at in range(PROMPT) if at not in (4, 5)]
    id_ = engine.capture({"q_rot": range(PROMPT), "k_rot": keys})
    here, there = engine.store[id_], engine.client.capture(id_)
    for rule, start, stop, heads in ((RULE, 0, None, None), (WINDOWED, 0, None, [3, 0]), (WINDOWED, 3, 9, [1]),
                                     (RULE, 5, 7, None)):
        a, b = (each.attention(3, rule, 4, start, stop, allow_missing=True, heads=heads) for each in (here, there))
        assert_same(a, b)
        assert_same(a, asyncio.run(awaited(engine.client.base_url, id_, start, stop, rule, heads)))
    with pytest.raises(MissingRows, match=r"k_rot, which of .* \[4, 6\) dropped"):
        there.attention(3, RULE)
    none = engine.client.capture(engine.capture({"q_rot": [], "k_rot": keys})).attention(0, RULE, allow_missing=True)
    assert none.keys.shape == (4, 0, 8)
    assert none.unattended == [Unattended(0, PROMPT, "q_rot", Missing(0, PROMPT, "dropped"))]


def assert_same(a: Attention, b: Attention) -> None:
    """The same answer, bit for bit."""
    for name in ("capture", "layer", "rule", "codecs", "unattended", "z_error", "heads"):
        assert getattr(a, name) == getattr(b, name), name
    for name in ("positions", "token_ids", "keys", "weights", "entropy"):
        x, y = getattr(a, name), getattr(b, name)
        assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes()), name


async def awaited(url: str, id_: str, start: int, stop: int | None, rule: AttentionRule, heads: Any) -> Attention:
    async with AsyncClient(url) as client:
        return await client.capture(id_).attention(3, rule, 4, start, stop, allow_missing=True, heads=heads)


def test_chosen_heads_are_those_of_all(engine: Attending) -> None:
    capture = engine.store[engine.capture({**WHOLE, "v": range(PROMPT), "z": range(PROMPT)})]
    every, some = (capture.attention(0, RULE, 3, check=True, heads=heads) for heads in (None, [3, 1]))
    assert every.heads == [0, 1, 2, 3] and some.heads == [3, 1]
    for name in ("keys", "weights", "entropy"):
        assert np.array_equal(getattr(some, name), getattr(every, name)[[3, 1]])
    alone = [capture.attention(0, RULE, 3, check=True, heads=[head]).z_error for head in range(4)]
    assert every.z_error == max(each for each in alone if each is not None) and some.z_error == max(alone[3], alone[1])
    for heads in ([4], [-1], [0, 0], []):
        with pytest.raises(ArgumentError, match=r"heads = .*each once; the layer has 4, counted from 0"):
            capture.attention(0, RULE, heads=heads)


def test_a_check_leaves_out_queries_that_lack_v_or_z(engine: Attending) -> None:
    rows = {**WHOLE, "v": [at for at in range(PROMPT) if at != 6], "z": [at for at in range(PROMPT) if at != 2]}
    id_ = engine.capture(rows)
    for capture in (engine.store[id_], engine.client.capture(id_)):
        with pytest.raises(MissingRows, match=r"the check of attention of layer 0 needs v, which .* \[6, 7\) dropped"):
            capture.attention(0, RULE, check=True)
        found = capture.attention(0, RULE, check=True, allow_missing=True)
        assert found.positions.tolist() == [0, 1, 3, 4, 5] and found.z_error is not None
        assert found.unattended == [Unattended(6, PROMPT, "v", Missing(6, 7, "dropped")),
                                    Unattended(2, 3, "z", Missing(2, 3, "dropped"))]
        assert capture.attention(0, RULE).positions.tolist() == list(range(PROMPT))


def test_what_the_engine_told_is_the_rule_and_another_is_refused(engine: Attending) -> None:
    id_ = engine.capture(WHOLE, told=True)
    capture, there = engine.store[id_], engine.client.capture(id_)
    for layer, rule in ((0, RULE), (1, WINDOWED), (2, RULE)):
        found = capture.attention(layer)
        assert found.rule == rule
        assert_same(found, capture.attention(layer, rule))
        assert_same(found, there.attention(layer))
    for each, error in ((capture, ArgumentError), (there, BadRequest)):
        with pytest.raises(error, match="layer = 3: its attention has attention sinks, which no rule says"):
            each.attention(3)
        with pytest.raises(error, match="layer = 3: its attention has attention sinks"):
            each.attention(3, RULE)
        with pytest.raises(error, match=r"window = 3: the engine that made this capture told None: leave the rule out"):
            each.attention(0, WINDOWED)
        with pytest.raises(error, match=r"scale = 0.125: the engine that made this capture told 0.25"):
            each.attention(0, AttentionRule(head_size=16, scale=0.125, window=None, soft_cap=None))


def test_keys_that_the_positions_left_out_are_named(engine: Attending) -> None:
    capture = engine.store[engine.capture({"q_rot": [11], "k_rot": [11]}, positions="last_prompt")]
    with pytest.raises(MissingRows, match=r"k_rot, which of .* \[0, 11\) not_asked"):
        capture.attention(0, RULE)
    found = capture.attention(0, RULE, allow_missing=True)
    assert found.unattended == [Unattended(11, 12, "k_rot", Missing(0, 11, "not_asked"))] and not found.positions.size


def test_a_capture_that_runs_is_waited_for_or_taken_as_it_is(engine: Attending) -> None:
    capture = engine.store[engine.capture(WHOLE, finish=False)]
    capture.wait_s = 0.1
    with pytest.raises(NotComplete):
        capture.attention(0, RULE)
    assert capture.attention(0, RULE, allow_missing=True).positions.tolist() == list(range(PROMPT))


def test_codes_of_heads_and_codes_of_no_heads(engine: Attending) -> None:
    coded = engine.store[engine.capture(WHOLE, "qk8:head=16")]
    assert coded.attention(0, RULE).codecs == ("qk8:head=16", "qk8:head=16")
    wrong = AttentionRule(head_size=32, scale=0.25, window=None, soft_cap=None)
    with pytest.raises(ArgumentError, match=r"rule\.head_size = 32: the rows were encoded by heads of 16 columns"):
        coded.attention(0, wrong)
    with pytest.raises(ArgumentError, match=r"or AttentionRule\(head_size=16, scale="):
        coded.attention(0)
    projected = engine.store[engine.capture(WHOLE, "rp8:k=8,seed=1")]
    with pytest.raises(ArgumentError, match=r"q_rot is stored as rp8:k=8,seed=1, whose numbers are not the columns"):
        projected.attention(0, RULE)


def test_what_is_refused_by_name(engine: Attending) -> None:
    capture = engine.store[engine.capture(WHOLE)]
    with pytest.raises(ArgumentError, match=r"^rule: missing; the engine .* did not tell .*\(head_size=…"):
        capture.attention(0)
    with pytest.raises(ArgumentError, match="rule = "):
        capture.attention(0, {"head_size": 16})  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"head_size = 48: does not divide rows of 64 and 64 columns"):
        capture.attention(0, AttentionRule(head_size=48, scale=1, window=None, soft_cap=None))
    for layer in (-1, True, [0, 1]):
        with pytest.raises(ArgumentError, match=r"layer = .*one layer's number"):
            capture.attention(layer, RULE)  # type: ignore[arg-type]
    for top in (0, 1.5):
        with pytest.raises(ArgumentError, match="top = "):
            capture.attention(0, RULE, top=top)  # type: ignore[arg-type]
    with pytest.raises(LimitError, match="ask for fewer positions, or a smaller top"):
        capture.attention(0, RULE, top=1 << 40)
    with pytest.raises(ArgumentError, match="start = -1"):
        capture.attention(0, RULE, start=-1)
    with pytest.raises(NotFoundError, match=r"has no q_rot\.7; it has: q_rot \[0, 1, 2, 3\], k_rot \[0, 1, 2, 3\]"):
        capture.attention(7, RULE)
    queries = engine.store[engine.capture({"q_rot": range(PROMPT)})]
    with pytest.raises(NotFoundError, match=r"attention of layer 0 needs q_rot and k_rot of it: .* has no k_rot\.0"):
        queries.attention(0, RULE)
