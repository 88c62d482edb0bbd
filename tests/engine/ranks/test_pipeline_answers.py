"""Answers of vLLM on two stages, without taps: what a capture there could at best be right about.

On two H200s answers of Gemma 2 were wrong at times with ``q``, ``k`` and ``v`` armed, at generated tokens and in the
last stage's attention alone. So such models are refused there. If this fails, it is vLLM's own fault; if it passes,
take the refusal out of ``_check_stages`` and run it with VLLM_TAP_ARM=q,k,v.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from schemas.read.reader import StoreReader
from tests.support.engines.engines import DTYPE, ON_GPU, SHARED, Engine, in_this_process
from tests.support.models.families import family_model
from tests.support.models.features import GREEDY, tokens
from tests.support.models.reference import Reference

pytestmark = [pytest.mark.soak,
              pytest.mark.skipif(not ON_GPU or torch.cuda.device_count() < 2, reason="NOT RUN: needs two GPUs, since "
                                 "vLLM's CPU build runs no stages without taps, which take its first step")]
LENGTHS = (1, 5, 9, 20, 33, 64, 70, 80)
BATCHES = 40
OFF = 0.3  # of a log-probability, in bfloat16; wrong ones were off by 2.5


@pytest.mark.parametrize("family", ["gemma2", "qwen3"])
def test_answers_of_two_stages(family: str, reader: StoreReader, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import LLM

    monkeypatch.delenv("VLLM_TAP_ENDPOINT")
    folder, draw = family_model(family, DTYPE), random.Random(1)
    with in_this_process(False):
        llm = LLM(str(folder), dtype=DTYPE, skip_tokenizer_init=True, max_model_len=256, max_num_seqs=8, seed=0,
                  block_size=32, max_num_batched_tokens=64, enable_prefix_caching=False, max_logprobs=512,
                  pipeline_parallel_size=2, **SHARED)
    engine, wrong = Engine(llm, reader, Reference(folder)), []
    try:
        for _ in range(BATCHES):
            prompts = [tokens(draw.choice(LENGTHS), seed=draw.randrange(999)) for _ in range(8)]
            for prompt, output in zip(prompts, engine.run(prompts, [{"max_tokens": 6, "logprobs": 512, **GREEDY}] * 8,
                                                          [None] * 8), strict=True):
                (answer,) = output.outputs
                said = np.array([[at[token].logprob for token in range(512)] for at in answer.logprobs])
                off = np.abs(said - wanted(engine, (*prompt, *answer.token_ids))[len(prompt) - 1 : -1]).max(axis=-1)
                if off.max() > OFF:
                    wrong.append((len(prompt), off.round(2).tolist()))
    finally:
        engine.close()
    assert not wrong, f"{len(wrong)} of {8 * BATCHES} answers: {wrong[:5]}"


def wanted(engine: Engine, text: tuple[int, ...]) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """Hugging Face's log-probabilities behind every token: ``[tokens, vocabulary]``."""
    model = engine.reference.model
    with torch.inference_mode():
        logits = model.get_output_embeddings()(torch.tensor(engine.reference.rows(text)["final_norm", 0]))
        if cap := getattr(model.config, "final_logit_softcapping", None):
            logits = torch.tanh(logits / cap) * cap
        found: np.ndarray[tuple[int, int], np.dtype[np.float32]] = logits.log_softmax(-1).numpy()
    return found
