"""What vLLM's compiler hands to a router whose number of experts it may pad. Needs a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from schemas.read.reader import StoreReader
from tests.support.engines.engines import SHARED, in_this_process, refused_start
from tests.support.models.families import family_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: make bench-gpu on one")

PADDED, PLAIN = {"force_shape_pad": True}, {"shape_padding": False}
PROMPTS = [[length * 7 % 400 + place for place in range(length)] for length in (9, 40, 17)]


@contextmanager
def engine(monkeypatch: pytest.MonkeyPatch, inductor: dict[str, bool], arm: str | None, here: bool = False
           ) -> Iterator[Any]:
    """An engine of four experts, whose compiler pads or does not, with sites or without taps."""
    from vllm import LLM

    with monkeypatch.context() as patch, in_this_process(here):
        if arm is None:
            patch.delenv("VLLM_TAP_ENDPOINT")
        else:
            patch.setenv("VLLM_TAP_ARM", arm)
        llm = LLM(str(family_model("mixtral", "bfloat16")), dtype="bfloat16", skip_tokenizer_init=True,
                  max_model_len=256, max_num_seqs=8, seed=0, **SHARED,
                  compilation_config={"inductor_compile_config": dict(inductor)})
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()


def generated(llm: Any) -> list[list[int]]:
    from vllm import SamplingParams, TokensPrompt

    chosen = SamplingParams(max_tokens=8, temperature=0, detokenize=False, ignore_eos=True)
    # One by one: what a router misreads are the rows of whoever is in the batch.
    return [list(llm.generate(TokensPrompt(prompt_token_ids=prompt), chosen)[0].outputs[0].token_ids)
            for prompt in PROMPTS]


@pytest.mark.parametrize("arm", ["experts", "router_logits"])
def test_a_padded_router_is_refused_where_its_sites_are_armed(reader: StoreReader, monkeypatch: pytest.MonkeyPatch,
                                                              arm: str) -> None:
    with refused_start("wrong experts in .*shape_padding"), engine(monkeypatch, PADDED, arm, here=True):
        pass


def test_taps_change_nothing_of_what_a_padded_router_does(reader: StoreReader, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM generates otherwise by itself, and with other sites armed as it does."""
    said = {}
    for name, inductor, arm in (("plain", PADDED, None), ("tapped", PADDED, "resid_post"), ("right", PLAIN, None),
                                ("right, tapped", PLAIN, "resid_post,experts")):
        with engine(monkeypatch, inductor, arm) as llm:
            said[name] = generated(llm)
    assert said["tapped"] == said["plain"] and said["right, tapped"] == said["right"]
    if said["plain"] == said["right"]:
        pytest.skip("this vLLM reads padded logits as they are")
