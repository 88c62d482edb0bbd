"""Edits on engines of other kinds: quantized weights, drafters, weights that are loaded anew, requests that wait."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from schemas.ids import new_ulid
from schemas.read.reader import StoreReader
from tests.engine.edits.test_edits import check, operations, run
from tests.support.engines.engines import AMX, ON_GPU, Captured, Engine, in_this_process, model, prompt, start
from tests.support.models.common import COMMON
from tests.support.models.drafters import draft_model, eagle_head
from tests.support.models.edited import vector
from tests.support.models.features import counted, tokens
from tests.support.models.quantized import quantized_model
from tests.support.models.reference import Reference
from vllm_tap.tiny_model import HIDDEN

pytestmark = [pytest.mark.skipif(ON_GPU, reason="held against float32")]

# In int8 a number between two codes may fall to either, and what follows with it; bfloat16 has three digits.
QUANTIZED = [pytest.param("int8", *(("bfloat16", 0.2) if AMX else ("float32", 0.1)), id="int8"),
             pytest.param("int4", "bfloat16", 0.06, id="int4", marks=pytest.mark.soak)]


@pytest.mark.parametrize(("kind", "dtype", "bar"), QUANTIZED)
def test_quantized_weights(kind: str, dtype: str, bar: float, reader: StoreReader, tmp_path: Path,
                           monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operation: also of the operands of layers that quantize them."""
    from vllm import LLM

    save_file({"vector": vector(COMMON["hidden_size"], 11)}, tmp_path / "tone.safetensors")
    monkeypatch.setenv("VLLM_TAP_VECTORS", f"tone={tmp_path}/tone.safetensors")
    monkeypatch.setenv("VLLM_TAP_EDIT", "resid_post,attn_out.1,mlp_out.2,z.1,mlp_post.2")
    monkeypatch.setenv("VLLM_TAP_ARM", "resid_post,attn_out,mlp_out,z,mlp_post")
    folder, reference = quantized_model(kind, dtype, tmp_path)
    with in_this_process():
        engine = Engine(LLM(str(folder), dtype=dtype, skip_tokenizer_init=True, max_model_len=256, max_num_seqs=16,
                            max_num_batched_tokens=64, seed=0), reader, reference)
    try:
        edits: list[Any] = [None, *operations(engine), None]
        prompts = [tokens(68 + number, seed=90 + number) for number in range(len(edits))]
        for captured, edit in zip(run(engine, prompts, edits), edits, strict=True):
            check(engine, captured, edit, greedy=False, bar=bar)
    finally:
        engine.close()


ONE: list[dict[str, Any]] = [
    {"site": "resid_post.1", "op": "add", "vector": vector(HIDDEN, 21).tolist(), "scale": 0.8},
    {"site": "resid_post.1", "op": "ablate", "vector": vector(HIDDEN, 22).tolist(), "positions": "generated"},
    {"site": "attn_out.2", "op": "scale", "by": 0.5, "positions": "prompt"}]
OTHER: list[dict[str, Any]] = [
    {"site": "resid_post.2", "op": "cap", "vector": vector(HIDDEN, 23).tolist(), "high": 0.1},
    {"site": "attn_out.2", "op": "set", "vector": vector(HIDDEN, 24).tolist(), "positions": [[2, 9], [45, 50]]}]
EDITS: tuple[Any, ...] = (ONE, None, OTHER, ONE, None, OTHER, ONE, None)


def armed(reader: StoreReader, reference: Reference, family: str, **options: Any) -> Engine:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_TAP_EDIT", "resid_post,attn_out.2")
        return start(reader, reference, family, **options)


METHODS = os.environ.get("TAP_DRAFTERS", "eagle,draft_model").split(",")


@pytest.mark.soak
@pytest.mark.parametrize("method", METHODS)
def test_drafts_of_a_model(method: str, reader: StoreReader, reference_of: Callable[[str], Reference],
                           tmp_path: Path) -> None:
    """The drafter is not edited; rows of its guesses are, at the positions that they would have."""
    family = "llama" if method == "eagle" else "qwen3"
    made = {"eagle": eagle_head, "draft_model": draft_model}[method](model(family), tmp_path / method)
    engine = armed(reader, reference_of(family), family, max_num_batched_tokens=64, disable_log_stats=False,
                   speculative_config={"method": method, "num_speculative_tokens": 3, "model": str(made)})
    try:
        before = [counted(engine, f"spec_decode_num_{kind}_tokens") for kind in ("draft", "accepted")]
        prompts = [prompt(5 + 7 * number, seed=number) for number in range(len(EDITS))]
        captured = run(engine, prompts, EDITS, most=40)
        drafted, accepted = (counted(engine, f"spec_decode_num_{kind}_tokens") - past
                             for kind, past in zip(("draft", "accepted"), before, strict=True))
        assert drafted > accepted > 0, "some must be accepted, and some must not"
        for one, edit in zip(captured, EDITS, strict=True):
            check(engine, one, edit, bar=1e-4)
    finally:
        engine.close()


@pytest.fixture(scope="module")
def engine(reader: StoreReader, reference_of: Callable[[str], Reference]) -> Iterator[Engine]:
    """One that serves by priority, with few cache blocks."""
    made = armed(reader, reference_of("qwen3"), "qwen3", scheduling_policy="priority", max_num_batched_tokens=48,
                 max_model_len=256, num_gpu_blocks_override=12, disable_log_stats=False)
    yield made
    made.close()


def asked(edits: Sequence[Any], **more: Any) -> tuple[list[str], list[Any]]:
    """Ids and parameters of requests with these edits."""
    from vllm import SamplingParams

    ids = [new_ulid() for _ in edits]
    return ids, [SamplingParams(extra_args={
        "capture": {"codec": "raw", "id": id_}, **({} if edit is None else {"edit": edit})},
        **{"temperature": 0.0, "max_tokens": 30, "ignore_eos": True, **more})
        for id_, edit in zip(ids, edits, strict=True)]


def finished(engine: Engine) -> dict[str, Any]:
    """Step until nothing is left; outputs by request."""
    found = {}
    while engine.llm.llm_engine.has_unfinished_requests():
        found |= {output.request_id: output for output in engine.llm.llm_engine.step() if output.finished}
    return found


@pytest.mark.versions
def test_priorities(engine: Engine) -> None:
    """Urgent requests put others off, which are computed again with the edits that they had."""
    before = counted(engine, "num_preemptions")
    ids, params = asked(EDITS, max_tokens=50)
    core = engine.llm.llm_engine
    outputs: dict[str, Any] = {}
    for number, (id_, given) in enumerate(zip(ids, params, strict=True)):
        core.add_request(id_, {"prompt_token_ids": prompt(30 + 7 * number, seed=60 + number)}, given,
                         priority=len(ids) - number)
        for _ in range(4):
            outputs |= {output.request_id: output for output in core.step() if output.finished}
    outputs |= finished(engine)
    assert counted(engine, "num_preemptions") > before, "nothing was preempted"
    for id_, edit in zip(ids, EDITS, strict=True):
        check(engine, engine.captured(id_, outputs[id_]), edit, bar=1e-4)


def test_weights_loaded_anew_and_a_sleep(engine: Engine) -> None:
    """Between two steps of requests that go on, and before ones that begin."""
    ids, params = asked(EDITS[:4])
    core = engine.llm.llm_engine
    prompts = [prompt(20 + number, seed=80 + number) for number in range(4)]
    for id_, tokens_, given in zip(ids[:2], prompts, params, strict=False):
        core.add_request(id_, {"prompt_token_ids": tokens_}, given)
    for _ in range(5):
        core.step()
    engine.llm.collective_rpc("reload_weights")
    for level in (1, 2):
        engine.llm.collective_rpc("sleep", args=(level,))
        engine.llm.collective_rpc("wake_up")
    for id_, tokens_, given in zip(ids[2:], prompts[2:], params[2:], strict=True):
        core.add_request(id_, {"prompt_token_ids": tokens_}, given)
    outputs = finished(engine)
    for id_, edit in zip(ids, EDITS, strict=False):
        check(engine, engine.captured(id_, outputs[id_]), edit, bar=1e-4)


def test_a_pause(engine: Engine) -> None:
    ids, params = asked(EDITS[:3])
    core = engine.llm.llm_engine
    for number, (id_, given) in enumerate(zip(ids, params, strict=True)):
        core.add_request(id_, {"prompt_token_ids": prompt(20 + number, seed=85 + number)}, given)
    for _ in range(5):
        core.step()
    scheduler = core.engine_core.engine_core
    scheduler.pause_scheduler(mode="keep", clear_cache=False)
    scheduler.resume_scheduler()
    outputs = finished(engine)
    for id_, edit in zip(ids, EDITS, strict=False):
        check(engine, engine.captured(id_, outputs[id_]), edit, bar=1e-4)


def test_answers_with_a_structure(engine: Engine) -> None:
    """And several samples of one request beside them."""
    from vllm.sampling_params import StructuredOutputsParams

    ids, params = asked(EDITS[:4], max_tokens=12, ignore_eos=False,
                        structured_outputs=StructuredOutputsParams(regex="[a-z]{20,30}"))
    several, many = asked([ONE], n=3, temperature=1.0, max_tokens=12)
    outputs = engine.llm.generate([{"prompt_token_ids": prompt(25 + number, seed=70 + number)} for number in range(5)],
                                  [*params, *many], use_tqdm=False)
    for id_, output, edit in zip(ids, outputs, EDITS, strict=False):
        text = engine.llm.get_tokenizer().decode(output.outputs[0].token_ids, skip_special_tokens=True)
        assert text.isalpha(), text
        check(engine, engine.captured(id_, output), edit, greedy=False, bar=1e-4)
    texts = {tuple(sample.token_ids) for sample in outputs[4].outputs}
    assert len(texts) == 3
    for sample in range(3):
        captured = engine.captured(f"{several[0]}.{sample}", outputs[4], sample)
        check(engine, Captured(captured.id, captured.tokens, captured.prompt_len, None, captured.manifest), ONE,
              greedy=False, bar=1e-4)


def test_what_was_seen_here_can_fail(engine: Engine) -> None:
    """One edit is not the other."""
    captured, = run(engine, [prompt(30, seed=99)], [ONE])
    check(engine, captured, ONE, bar=1e-4)
    for other in (None, OTHER, ONE[:2]):
        with pytest.raises(AssertionError, match="is off by"):
            check(engine, captured, other, bar=1e-4)
    assert np.isfinite(engine.reader.slice(captured.id, "resid_post", [1]).values()).all()
