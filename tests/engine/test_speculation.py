"""Speculative decoding: rows of drafts are computed and many are rejected; only accepted ones are served."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from engine_side import worker
from engine_side.transport.ring import Ring
from schemas.ids import new_ulid
from schemas.read.reader import StoreReader
from schemas.wire.row_table import FLAG_DRAFT
from tests.support.engines.engines import ALL_ROWS, ON_GPU, Captured, Engine, model, row_errors, start
from tests.support.models.drafters import draft_model, eagle_head
from tests.support.models.reference import Reference
from tests.support.store_helpers import until

DRAFTS = 3
LENGTH = 40
# Few tokens to choose from: the drafter finds the last ones again and guesses what came then, at times rightly.
VOCABULARY = [100, 200, 300]
PROMPTS = [[VOCABULARY[t] for t in np.random.default_rng(n).integers(0, 3, 5 + 7 * n)] for n in range(6)]
PARAMS = {"max_tokens": LENGTH, "ignore_eos": True, "allowed_token_ids": VOCABULARY}
FREE = {"max_tokens": LENGTH, "ignore_eos": True}  # a drafter that is a model guesses any token


METHODS = os.environ.get("TAP_DRAFTERS", "ngram").split(",")


@pytest.fixture(scope="module", params=METHODS)
def engine(request: pytest.FixtureRequest, reader: StoreReader, reference_of: Callable[[str], Reference],
           tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    family = "llama" if request.param == "eagle" else "qwen3"
    folder = tmp_path_factory.mktemp("drafter") / request.param
    drafter = {
        "ngram": lambda: {"prompt_lookup_max": 3, "prompt_lookup_min": 1},
        "draft_model": lambda: {"model": str(draft_model(model(family), folder))},
        "eagle": lambda: {"model": str(eagle_head(model(family), folder))},
    }[request.param]()
    engine = start(reader, reference_of(family), family, max_num_batched_tokens=64, enable_prefix_caching=False,
                   speculative_config={"method": request.param, "num_speculative_tokens": DRAFTS, **drafter})
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def captured(engine: Engine) -> list[Captured]:
    guesses_any = engine.limits["speculative_config"]["method"] != "ngram"
    return engine.run(PROMPTS, [FREE if guesses_any else PARAMS] * len(PROMPTS), [{"codec": "raw"}] * len(PROMPTS))


def test_every_row_of_the_final_sequence(engine: Engine, captured: list[Captured]) -> None:
    for one in captured:
        assert one.manifest.status == "complete"
        assert engine.check(one) == ALL_ROWS * (one.prompt_len + LENGTH - 1)
        assert one.manifest.engine["speculative"] == f"{engine.limits['speculative_config']['method']}, {DRAFTS} tokens"
        assert one.manifest.recomputed == 0  # a guess computed again is no recomputation


def test_drafts_were_accepted_and_rejected(engine: Engine, captured: list[Captured]) -> None:
    """Rejected rows are there for who asks for them, each what the model computes of the guesses up to it."""
    wrong_in_all = accepted = 0
    for one in captured:
        rejected = one.manifest.rows[0].rejected
        assert {entry.rejected for entry in one.manifest.rows} == {rejected}
        accepted += int((engine.reader.slice(one.id, "resid_post", [0]).flags & FLAG_DRAFT != 0).sum())
        rows = engine.reader.slice(one.id, "resid_post", [0, 1], rejected=True)
        assert len(rows.positions) == rejected and rows.values().shape[:2] == (2, rejected)
        assert (rows.flags & FLAG_DRAFT != 0).all()
        tokens = np.asarray(one.tokens)
        known = rows.positions < len(tokens)
        wrong = known & (rows.token_ids != tokens[np.where(known, rows.positions, 0)])
        wrong_in_all += int(wrong.sum())
        first = wrong & np.append(True, np.diff(rows.positions.astype(int)) != 1)  # else a wrong guess is its context
        for at in np.flatnonzero(first)[:2]:
            position = int(rows.positions[at])
            guessed = (*one.tokens[:position], int(rows.token_ids[at]))
            expected = engine.reference.rows(guessed)["resid_post", 0][[position]]
            assert (row_errors(rows.values()[0, [at]], expected) <= 1).all()
    enough = 0 if engine.limits["speculative_config"]["method"] == "eagle" else 20  # its head is a poor one
    assert wrong_in_all > 20 and accepted > enough, f"{wrong_in_all} rejected, {accepted} accepted: little is shown"


def test_positions_asked_for_one_by_one(engine: Engine) -> None:
    """Guesses at positions that were not asked for are not seen, those at the others are decided all the same."""
    first = PROMPTS[0]
    positions = [len(first) + at for at in (0, 3, 4, 9, 15, 16, 17, 30)]
    (one,) = engine.run([first], [PARAMS],
                        [{"codec": "raw", "positions": [*positions, len(first) + LENGTH + 3]}])
    assert one.manifest.status == "complete"
    assert engine.check(one) == ALL_ROWS * len(positions)


def test_clients_that_leave(engine: Engine) -> None:
    """Aborted between steps: what was computed of the sequence so far is there, its last guesses are not."""
    from vllm import SamplingParams

    ids = [new_ulid() for _ in range(3)]
    core = engine.llm.llm_engine
    for id_, tokens in zip(ids, PROMPTS, strict=False):
        core.add_request(id_, {"prompt_token_ids": tokens}, SamplingParams(
            temperature=0.0, **{**PARAMS, "max_tokens": 200}, extra_args={"capture": {"id": id_, "codec": "raw"}}))
    seen: dict[str, list[int]] = {}
    while min((len(tokens) for tokens in seen.values()), default=0) < 12 or len(seen) < 3:
        for output in core.step():
            seen[output.request_id] = list(output.outputs[0].token_ids)
    core.abort_request(list(seen), internal=False)
    while core.has_unfinished_requests():
        core.step()
    for id_, tokens in zip(ids, PROMPTS, strict=False):
        assert until(lambda id_=id_: engine.reader.manifest(id_).finish_reason) == "abort"  # type: ignore[misc]
        manifest = engine.reader.manifest(id_)
        assert manifest.output_token_ids[: len(seen[id_])] == seen[id_]
        one = Captured(id_, (*tokens, *manifest.output_token_ids), len(tokens), None, manifest)
        assert engine.check(one) >= ALL_ROWS * (len(tokens) + len(seen[id_]) - 1)
        assert {missing.reason for entry in manifest.rows for missing in entry.missing} <= {"aborted"}


@pytest.mark.skipif(ON_GPU, reason="the engine is in another process there")
def test_no_guess_stands_for_a_row_that_was_dropped(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hard case: after a wrong guess one that happens to be right, and the row computed in its place is dropped."""
    assert worker.CURRENT is not None and worker.CURRENT.recorder is not None
    allocate, chance = Ring.allocate, np.random.default_rng(3)
    monkeypatch.setattr(Ring, "allocate", lambda ring, *of: allocate(ring, *of) if chance.random() < 0.6 else None)
    monkeypatch.setattr(worker.CURRENT.recorder.bursts, "on_full", "drop")
    lucky = 0
    for one in engine.run(PROMPTS, [PARAMS] * len(PROMPTS), [{"codec": "raw"}] * len(PROMPTS)):
        assert engine.check(one) < ALL_ROWS * (one.prompt_len + LENGTH - 1)
        tokens = np.asarray(one.tokens)
        for entry in one.manifest.rows:
            assert {missing.reason for missing in entry.missing} <= {"dropped"}
            gone = [p for missing in entry.missing for p in range(missing.start, missing.stop)]
            guesses = engine.reader.slice(one.id, entry.site, [entry.layer], 0, len(tokens), rejected=True)
            lucky += int((np.isin(guesses.positions, gone) & (guesses.token_ids == tokens[guesses.positions])).sum())
    assert lucky > 0, "no guess happened to be right where the row was dropped: nothing is shown"
