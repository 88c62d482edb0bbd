"""Edits that a probe's score switches on and off, and requests that it ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from vllm.v1.core.sched.scheduler import Scheduler

from engine_side import worker
from schemas.errors import SpecError
from schemas.read.reader import StoreReader
from tests.engine.edits.test_edits import HIDDEN, check, run, started
from tests.support.engines.engines import ON_GPU, Captured, Engine
from tests.support.models.edited import vector
from tests.support.models.features import counted, tokens

pytestmark = [pytest.mark.skipif(ON_GPU, reason="held against float32")]

EDIT = {"site": "resid_post.1", "op": "add", "vector": vector(HIDDEN, 5).tolist(), "scale": 0.7}


@pytest.fixture(scope="module")
def engine(reader: StoreReader, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine with a probe of two scores, of a row that the edit changes; of few cache blocks."""
    file = tmp_path_factory.mktemp("probes") / "tone.safetensors"
    save_file({"directions": np.stack([vector(HIDDEN, 21), vector(HIDDEN, 22)])}, file,
              {"site": "resid_post", "layer": "2", "names": "glad,sad"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_TAP_PROBES", f"tone={file}")
        made = started(reader, "qwen3", edit="resid_post.1,mlp_post.0")
    yield made
    made.close()


class OwnScheduler(Scheduler):
    """One that would not see what a probe has ended."""

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        return super().update_from_output(*args, **kwargs)


@pytest.mark.soak
def test_no_condition_with_a_scheduler_that_takes_results_in_a_way_of_its_own(
        reader: StoreReader, tmp_path: Path) -> None:
    """Before the module's engine, as it has one of its own."""
    save_file({"directions": np.stack([vector(HIDDEN, 21)])}, file := tmp_path / "tone.safetensors",
              {"site": "resid_post", "layer": "2"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_TAP_PROBES", f"tone={file}")
        made = started(reader, "qwen3", edit="resid_post.1", scheduler_cls=OwnScheduler)
    try:
        when = {"probe": "tone", "above": 1.0}
        for edit in ({"op": "stop", "when": when}, {**EDIT, "when": when}):
            with pytest.raises(SpecError, match=r"when = 'tone': a condition cannot be had with the scheduler .*"
                                                r"\.OwnScheduler, .*: leave scheduler_cls out"):
                run(made, [tokens(9, seed=1)], [[edit]])
        edited, = run(made, [tokens(9, seed=1)], [[EDIT]])
        check(made, edited, [EDIT])
    finally:
        made.close()


def scores(engine: Engine, captured: Captured) -> Any:
    """Scores [positions, 2] of a capture, all positions."""
    return engine.reader.slice(captured.id, "probe.tone", [2]).values()[0].astype(np.float64)


def turns(scores: Any, first: int, when: dict[str, Any]) -> list[int]:
    """Positions where edits are switched on and off: from the one after a score that crosses, in the captured order."""
    found: list[int] = []
    column = {"glad": 0, "sad": 1}[when["score"]]
    for position in range(first, len(scores)):
        score = scores[position, column]
        if score < when.get("below", -np.inf) if len(found) % 2 else score >= when["above"]:
            found.append(position + 1)
    return found


def conditions(engine: Engine, prompts: Sequence[Sequence[int]], most: int) -> list[dict[str, Any]]:
    """A condition for each prompt that is met in the midst of what it generates."""
    found = []
    plain = run(engine, prompts, [None] * len(prompts), sites=[], probe=["tone"], most=most)
    for number, captured in enumerate(plain):
        column = number % 2
        generated = scores(engine, captured)[captured.prompt_len - 1 :, column]
        high, low = np.quantile(generated, [0.8, 0.5])
        found.append({"probe": "tone", "score": ["glad", "sad"][column], "above": float(high),
                      **({"below": float(low)} if number % 3 else {})})
    return found


def test_edits_are_made_from_the_score_on_and_no_more(engine: Engine) -> None:
    """Beside requests without a condition, in chunks, with preemptions: the rows are those of Hugging Face with the
    edits made where the stored scores say.
    """
    lengths = (30, 90, 17, 61, 5, 75, 44, 8)
    prompts, most = [tokens(length, seed=length) for length in lengths], 40
    whens = conditions(engine, prompts, most)
    edits: list[Any] = [[{**EDIT, "when": when}, {"site": "mlp_post.0", "op": "scale", "by": 0.5, "when": when},
                         {"site": "resid_post.1", "op": "scale", "by": 0.9, "positions": "generated"}]
                        for when in whens]
    edits[4] = None
    before = counted(engine, "num_preemptions")
    switched = 0
    for captured, edit, when in zip(run(engine, prompts, edits, probe=["tone"], most=most), edits, whens,
                                    strict=True):
        if edit is None:
            check(engine, captured, None)
            continue
        end = len(captured.tokens) - 1
        found = [position for position in turns(scores(engine, captured), captured.prompt_len - 1, when)
                 if position < end]
        told = captured.manifest.edits
        assert [each.get("switched") for each in told] == [found, found, None]
        switched += len(found)
        spans = [[start, stop] for start, stop in zip(found[::2], [*found[1::2], end], strict=False)]
        assert told[0]["rows"][0]["expected"] == sum(stop - start for start, stop in spans)
        made = [{name: value for name, value in each.items() if name != "when"} | (
            {"positions": spans} if "when" in each else {}) for each in edit]
        check(engine, captured, made)
    assert switched > len(prompts), "conditions were met here and there"
    assert counted(engine, "num_preemptions") > before, "nothing was preempted"


def test_a_probe_ends_a_request(engine: Engine) -> None:
    """Where its score comes to what was said; others go on, and one whose score never does ends by its length."""
    prompts = [tokens(length, seed=700 + length) for length in (20, 33, 70)]
    whens = conditions(engine, prompts, 30)
    whens[1] = {**whens[1], "above": 1e9}
    for when in whens:
        when.pop("below", None)
    captured = run(engine, prompts, [[{"op": "stop", "when": when}] for when in whens], probe=["tone"], most=30)
    plain = run(engine, prompts, [None] * 3, most=30)
    for one, other, when, never in zip(captured, plain, whens, (False, True, False), strict=True):
        output = one.output.outputs[0]
        found = turns(scores(engine, one), one.prompt_len - 1, when)
        assert one.tokens == other.tokens[: len(one.tokens)]
        check(engine, one, None)
        told, = one.manifest.edits
        if never:
            assert (output.finish_reason, output.stop_reason, told["switched"]) == ("length", None, [])
            continue
        assert (output.finish_reason, output.stop_reason) == ("stop", "probe:tone")
        assert (one.manifest.finish_reason, one.manifest.stop_reason) == ("stop", "probe:tone")
        assert told == {"op": "stop", "when": when, "switched": [found[0]]}
        # The row of position p gives the token of p + 1; the host hears of it when one more has been drawn.
        assert found[0] <= len(one.tokens) - 1 <= found[0] + 1


def test_a_deep_sleep_takes_nothing_of_conditions(engine: Engine) -> None:
    """vLLM gives away what was allocated while a model was loaded, and puts back what its modules have as buffers."""
    current = worker.CURRENT
    assert engine and current is not None and current.editor is not None
    conditions = current.editor.conditions
    assert conditions is not None
    kept = {buffer.data_ptr() for buffer in current.model.buffers()}
    tensors = [each for each in vars(conditions).values() if isinstance(each, torch.Tensor) and each.numel()]
    assert len(tensors) >= 2 and all(each.data_ptr() in kept for each in tensors if each is not conditions._positions)


def test_what_a_condition_left_in_the_prefix_cache_is_for_its_equals(engine: Engine) -> None:
    prompt = tokens(96, seed=61)
    when = {**conditions(engine, [prompt], 20)[0]}
    edit = [{**EDIT, "when": when}]
    first, = run(engine, [prompt], [edit], probe=["tone"], most=20)
    longer = list(first.tokens)
    again, = run(engine, [prompt], [edit], probe=["tone"], most=20)
    assert again.output.num_cached_tokens >= 32 and again.tokens == first.tokens
    more, = run(engine, [longer], [edit], probe=["tone"], most=5)
    assert more.output.num_cached_tokens == 0, "what was an answer there is a prompt here"
    plain, = run(engine, [longer], [None], most=5)
    check(engine, plain, None)


def test_a_condition_that_has_used_its_switches_says_so(engine: Engine) -> None:
    when = {"probe": "tone", "score": "glad", "above": 0.0, "below": 0.0}
    edit = {"site": "resid_post.1", "op": "scale", "by": 1, "when": when}  # which changes no score
    plain, = run(engine, [tokens(9, seed=88)], [None], sites=[], probe=["tone"], most=120)
    when["above"] = when["below"] = float(np.median(scores(engine, plain)[plain.prompt_len - 1 :, 0]))
    captured, = run(engine, [tokens(9, seed=88)], [[edit]], probe=["tone"], most=120)
    found = turns(scores(engine, captured), captured.prompt_len - 1, when)
    told, = captured.manifest.edits
    assert len(found) > 16 and told["switched"] == found[:16] and told["used_up"] is True


def stop(**fields: Any) -> list[dict[str, Any]]:
    return [{"op": "stop", "when": {"probe": "tone", "score": "sad", "above": 1.0, **fields}}]


@pytest.mark.parametrize(("edit", "said"), [
    ([{"op": "stop"}], r"edit\[0\].when: missing; stop needs it"),
    ([{**stop()[0], "site": "z"}], r"edit\[0\].site = 'z': stop has when, and no site"),
    ([{"op": "scale", "by": 2}], r"edit\[0\].site: missing; valid: one of"),
    (stop(probe="none"), r"edit\[0\].when.probe = 'none': no such probe; registered: tone"),
    (stop(score="angry"), r"when.score = 'angry': the probe has the scores glad, sad"),
    (stop(score=2), r"when.score = 2: the probe has the scores glad, sad"),
    (stop(score=None), r"when.score: missing; the probe has the scores glad, sad"),
    (stop(above=None), r"edit\[0\].when.above = None: valid: a number"),
    (stop(above=float("nan")), r"when.above = nan: valid: a finite number"),
    (stop(below=0.5), r"when.below = 0.5: stop ends the request"),
    (stop(until=3), r"edit\[0\].when.until = 3: unknown field; valid: probe, score, above, below"),
    ([{**EDIT, "when": {"probe": "tone", "score": 0, "above": 1, "below": 2}}], r"when.below = 2: is beyond above = 1"),
    ([{**EDIT, "when": {"probe": "tone", "score": 0, "above": 1}, "positions": "prompt"}], r"never edits a prompt"),
    ([{**EDIT, "when": {"probe": "tone", "score": 0, "above": 1}}, *stop()], r"\[1\].when = '…': a request has one"),
])
def test_what_cannot_be_a_condition_is_refused(engine: Engine, edit: Any, said: str) -> None:
    from vllm import SamplingParams

    with pytest.raises(SpecError, match=said):
        engine.llm.generate([{"prompt_token_ids": tokens(5, seed=1)}], SamplingParams(extra_args={"edit": edit}),
                            use_tqdm=False)
