"""Answers of vLLM on two stages of GPUs, and the rows that were captured of them.

With CUDA graphs of whole steps answers of Gemma 2 are wrong there at times, with taps and without, if all layers of a
stage have a window: 90 of 320 on two H100s, at generated tokens and by that stage's attention alone. So such an engine
is refused, and told what helps.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from engine_side.plugin import register
from schemas.read.reader import StoreReader
from tests.support.engines.engines import DTYPE, ON_GPU, SHARED, Engine, in_this_process
from tests.support.models.families import family_model
from tests.support.models.features import GREEDY, RAW, tokens
from tests.support.models.reference import Reference

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900),
              pytest.mark.skipif(ON_GPU and torch.cuda.device_count() < 2, reason="NOT RUN: needs two GPUs")]
LENGTHS = (1, 5, 9, 20, 33, 64, 70, 80)
BATCHES = 40
BOTH_KINDS = "gemma2, both kinds on each stage"
OFF = 0.3  # of a log-probability, in bfloat16; wrong ones were off by 2.5


def staged(family: str, reader: StoreReader, **more: Any) -> Engine:
    """An engine of two stages."""
    from vllm import LLM

    folder = family_model(family, DTYPE)
    with in_this_process(False):
        llm = LLM(str(folder), dtype=DTYPE, skip_tokenizer_init=True, max_model_len=256, max_num_seqs=8, seed=0,
                  block_size=32, max_num_batched_tokens=64, enable_prefix_caching=False, max_logprobs=512,
                  pipeline_parallel_size=2, **SHARED, **more)
    return Engine(llm, reader, Reference(folder))


def batches() -> Iterator[list[list[int]]]:
    """Prompts of different lengths, eight at a time."""
    draw = random.Random(1)
    for _ in range(BATCHES):
        yield [tokens(draw.choice(LENGTHS), seed=draw.randrange(999)) for _ in range(8)]


ASKED = {"max_tokens": 6, "logprobs": 512, **GREEDY}


PIECEWISE = {"compilation_config": {"cudagraph_mode": "PIECEWISE"}}


@pytest.mark.skipif(not ON_GPU, reason="vLLM's CPU build runs no stages without taps, which take its first step")
@pytest.mark.parametrize(("family", "more"), [
    pytest.param("gemma2", {}, marks=pytest.mark.xfail(reason="vLLM 0.26: layers with a window are wrong at times"),
                 id="gemma2, graphs of whole steps"),
    pytest.param("gemma2", PIECEWISE, id="gemma2"), pytest.param(BOTH_KINDS, {}, id="gemma2, both kinds"),
    pytest.param("qwen3", {}, id="qwen3")])
def test_answers_of_two_stages(family: str, more: dict[str, Any], reader: StoreReader,
                               monkeypatch: pytest.MonkeyPatch) -> None:
    """Without taps: what rows could at best be right about."""
    monkeypatch.delenv("VLLM_TAP_ENDPOINT")
    engine, wrong = staged(family, reader, **more), []
    try:
        for prompts in batches():
            for prompt, output in zip(prompts, engine.run(prompts, [ASKED] * 8, [None] * 8), strict=True):
                text = (*prompt, *output.outputs[0].token_ids)
                rows = engine.reference.rows(text)["final_norm", 0][len(prompt) - 1 : -1]
                off = apart(engine, rows, output)
                if off.max() > OFF:
                    wrong.append((len(prompt), off.round(2).tolist()))
    finally:
        engine.close()
    assert not wrong, f"{len(wrong)} of {8 * BATCHES} answers: {wrong[:5]}"


@pytest.mark.parametrize(("family", "more"), [
    pytest.param("gemma2", PIECEWISE if ON_GPU else {}, id="gemma2"),
    pytest.param(BOTH_KINDS, {}, id="gemma2, both kinds"), pytest.param("qwen3", {}, id="qwen3")])
def test_answers_and_rows_of_two_stages(family: str, more: dict[str, Any], reader: StoreReader,
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    """With taps: the row before each generated token gives the answer's probabilities, and so does Hugging Face's."""
    monkeypatch.setenv("VLLM_TAP_ARM", "q,k,v,final_norm")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # there may be fewer cores than ranks
    register()  # vLLM asks once a process, and may have asked for an engine without taps
    engine, off = staged(family, reader, **more), {"captured": 0.0, "Hugging Face": 0.0}
    try:
        for prompts in batches():
            for one in engine.run(prompts, [ASKED] * 8, [RAW] * 8):
                begin, end = one.prompt_len - 1, len(one.tokens) - 1
                captured = engine.reader.slice(one.id, "final_norm", [0], begin, end).values()[0]
                wanted = engine.reference.rows(one.tokens)["final_norm", 0][begin:end]
                for whose, rows in (("captured", captured), ("Hugging Face", wanted)):
                    off[whose] = max(off[whose], float(apart(engine, rows, one.output).max()))
    finally:
        engine.close()
    assert max(off.values()) <= OFF, off


def apart(engine: Engine, rows: npt.NDArray[np.float32], output: Any) -> npt.NDArray[np.float32]:
    """How far vLLM's log-probabilities are from those that rows of ``final_norm`` give, at worst for each token."""
    model, (answer,) = engine.reference.model, output.outputs
    said = np.array([[at[token].logprob for token in range(512)] for at in answer.logprobs])
    with torch.inference_mode():
        logits = model.get_output_embeddings()(torch.tensor(rows))
        if cap := getattr(model.config, "final_logit_softcapping", None):
            logits = torch.tanh(logits / cap) * cap
        found: npt.NDArray[np.float32] = np.abs(said - logits.log_softmax(-1).numpy()).max(axis=-1)
    return found
