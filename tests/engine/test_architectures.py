"""Every site of every architecture against Hugging Face, in a ragged batch with chunked prefill."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine_side.architectures import ARCHITECTURES
from schemas.reader import StoreReader
from tests.engine.engines import Engine, prompt
from tests.engine.families import FAMILIES, make
from tests.engine.reference import Reference

pytestmark = pytest.mark.timeout(600)

HEADS = ("q", "k", "v", "q_rot", "k_rot", "z")
LLAMA = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "mlp_post", *HEADS, "embed", "final_norm")
SITES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "phi3"), LLAMA),
    **dict.fromkeys(("gemma2", "gemma3_text"), (*LLAMA, "attn_out_raw", "mlp_out_raw")),
    **dict.fromkeys(("mixtral", "qwen3_moe"), (*(s for s in LLAMA if s != "mlp_post"), "router_logits")),
    "opt": tuple(s for s in LLAMA if s not in ("q_rot", "k_rot")),
    "gpt_neox": ("resid_pre", "resid_post", "attn_out", "mlp_out", "mlp_post", "z"),
}
ONCE = ("embed", "final_norm")


def test_every_architecture_of_the_table_has_a_row_here() -> None:
    assert set(SITES) == set(FAMILIES)
    assert len(ARCHITECTURES) == len(FAMILIES)


@pytest.mark.parametrize("family", os.environ.get("TAP_FAMILIES", "qwen3,gemma2,mixtral").split(","))
def test_every_site(family: str, reader: StoreReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import LLM

    monkeypatch.setenv("VLLM_TAP_ARM", ",".join(SITES[family]))
    folder = make(family, tmp_path / family)
    llm: Any = LLM(str(folder), dtype="float32", skip_tokenizer_init=True, max_model_len=256, max_num_seqs=8,
                   max_num_batched_tokens=64, block_size=32)
    engine = Engine(llm, reader, Reference(folder))
    try:
        captured = engine.run([[t % 500 + 3 for t in prompt(n, seed=n)] for n in (9, 80, 1, 33, 20, 5, 70, 64)],
                              [{"max_tokens": 6, "ignore_eos": True, "detokenize": False}] * 8, [{"codec": "raw"}] * 8)
        worst = dict.fromkeys(SITES[family], 0.0)
        for one in captured:
            assert one.manifest.status == "complete"
            reference = engine.reference.rows(one.tokens)
            assert {(e.site, e.layer) for e in one.manifest.rows} == {
                (site, layer) for site in SITES[family] for layer in ((0,) if site in ONCE else (0, 1, 2))}
            for entry in one.manifest.rows:
                rows = reader.slice(one.id, entry.site, [entry.layer], 0, 1000)
                assert len(rows.positions) == entry.captured == entry.expected == len(one.tokens) - 1
                x = reference[entry.site, entry.layer][rows.positions]
                error = np.linalg.norm(rows.values()[0] - x, axis=-1) / np.linalg.norm(x, axis=-1)
                worst[entry.site] = max(worst[entry.site], float(error.max()))
        print(family, {site: f"{error:.1e}" for site, error in worst.items()})
        assert max(worst.values()) <= 1e-4, worst
    finally:
        engine.close()
