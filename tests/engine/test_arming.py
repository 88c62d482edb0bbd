"""Taps in some layers alone: what is armed is captured as Hugging Face has it, and nothing else can be asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from engine_side import worker
from engine_side.seams import runner
from schemas.errors import SpecError
from schemas.read.reader import StoreReader
from schemas.wire.engine_info import Ring
from tests.support.engines.engines import DTYPE, ON_GPU, SHARED, Engine, in_this_process, refused_start
from tests.support.models.families import family_model
from tests.support.models.features import RAW, tokens
from tests.support.models.reference import Reference

ARM = "resid_post.2, blocks.0.hook_out, mlp_out, mlp_out.1, attn_out.1, q.1, k.1, v.1, q.2"
ARMED = {"resid_post": [0, 2], "mlp_out": [0, 1, 2], "attn_out": [1], "q": [1, 2], "k": [1], "v": [1]}
PARAMS: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True, "detokenize": False}


def as_on_a_gpu(recorder: Any, _: Any) -> None:
    """Rows that have to be chosen anew are taken with the next step."""
    recorder.defer_to_next_call = recorder.async_scheduling = True


@pytest.mark.usefixtures("store")
def test_another_librarys_code_is_refused_before_the_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import LLM

    monkeypatch.setenv("VLLM_TAP_ARM", "resid_post")
    with in_this_process(), refused_start("model_impl='transformers': the sites of .* in vLLM's own code only"):
        LLM(str(family_model("llama", DTYPE)), dtype=DTYPE, skip_tokenizer_init=True, max_model_len=256,
            model_impl="transformers", **SHARED)


def test_chosen_layers_are_armed(reader: StoreReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import LLM

    folder = family_model("llama", DTYPE)
    reference = Reference(folder)
    width = reference.model.config.hidden_size
    directions = np.random.default_rng(0).standard_normal((2, width)).astype(np.float32)
    save_file({"directions": directions}, tmp_path / "probe.safetensors")
    monkeypatch.setattr(runner, "_look_at", as_on_a_gpu)
    monkeypatch.setenv("VLLM_TAP_ARM", ARM)
    monkeypatch.setenv("VLLM_TAP_PROBES", f"tone={tmp_path}/probe.safetensors@resid_post.1")
    with in_this_process():
        llm: Any = LLM(str(folder), dtype=DTYPE, skip_tokenizer_init=True, max_model_len=256, max_num_seqs=4, **SHARED)
    engine = Engine(llm, reader, reference)
    try:
        assert worker.CURRENT is not None
        assert worker.CURRENT.info.armed.sites == ARMED
        assert worker.CURRENT.staging.buffers["attn_out"].shape[0] == 1, "room for layers that nobody armed"
        every, some = engine.run([tokens(40, seed=1), tokens(30, seed=2)], [PARAMS] * 2, [
            {**RAW, "sites": list(ARMED), "probe": ["tone"]}, {**RAW, "sites": ["blocks.2.hook_out"]}])
        assert {(row.site, row.layer) for row in every.manifest.rows} == {
            *((site, layer) for site, layers in ARMED.items() for layer in layers), ("probe.tone", 1)}
        assert [(row.site, row.layer) for row in some.manifest.rows] == [("resid_post", 2)]
        info = reader.engine()
        assert info is not None and info.ring == Ring(64 << 20, "VLLM_TAP_RING_BYTES", "wait")
        for one in (every, some):
            right = reference.rows(one.tokens)
            for row in one.manifest.rows:
                assert row.captured == len(one.tokens) - 1 and not row.missing
                found = reader.slice(one.id, row.site, [row.layer]).values()[0]
                scores = row.site == "probe.tone"
                wanted = right["resid_post", 1] @ directions.T if scores else right[row.site, row.layer]
                off = np.abs(found - wanted[: len(found)]).max() / np.abs(wanted).max()
                assert off <= (0.05 if ON_GPU else 1e-3), (row.site, row.layer)
        engine.run([tokens(20, seed=4)], [PARAMS], [None])
        (late,) = engine.run([tokens(20, seed=4)], [PARAMS], [RAW])
        assert all(row.captured == len(late.tokens) - 1 for row in late.manifest.rows), "after steps that took nothing"
        (one,) = engine.run([tokens(5, seed=5)], [PARAMS], [{**RAW, "layers": [1]}])
        assert {(row.site, row.layer) for row in one.manifest.rows} == {
            (site, 1) for site, layers in ARMED.items() if 1 in layers}
        for spec in ({"layers": [1], "sites": ["resid_post"]}, {"sites": ["resid_post.1"]},
                     {"layers": "::3", "sites": ["attn_out"]}):
            with pytest.raises(SpecError, match=r"not armed for \w+; armed: \["):
                engine.run([tokens(5, seed=3)], [PARAMS], [{**RAW, **spec}])
    finally:
        engine.close()
