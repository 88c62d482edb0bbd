"""Every site of every architecture against Hugging Face, in a ragged batch with chunked prefill.

``make test`` runs three families; ``make parity`` runs all and writes the table of docs/parity.md (TAP_PARITY names the
file, TAP_FAMILIES the families).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine_side.architectures import ARCHITECTURES
from schemas.reader import StoreReader
from schemas.sites import SITES as schema_sites
from tests.engine.engines import DTYPE, ON_GPU, Engine, prompt
from tests.engine.families import FAMILIES, make
from tests.engine.heads import check_heads
from tests.engine.reference import Reference

pytestmark = pytest.mark.timeout(600)

HEADING = """# Parity

Every site of every architecture, captured from vLLM (`raw`, float32, CPU) and compared with a Hugging Face forward of
the same tokens: eight requests of 1 to 80 prompt tokens in one batch, prefill in chunks of 64, three layers, every
position. The figure is the worst row's error over its length, ‖x − x̂‖ / ‖x̂‖; `–` is a site that the architecture does
not have. The models are small, with random weights, made by Hugging Face's own classes. `make parity` regenerates this
page.
"""
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
CHOSEN = os.environ.get("TAP_FAMILIES", "qwen3,gemma2,mixtral").replace("all", ",".join(SITES)).split(",")


@pytest.fixture(scope="module")
def table() -> Iterator[dict[str, dict[str, float]]]:
    """The worst error by family and site; written as Markdown where TAP_PARITY names a file."""
    worst: dict[str, dict[str, float]] = {}
    yield worst
    if path := os.environ.get("TAP_PARITY"):
        lines = [HEADING, "| site | " + " | ".join(worst) + " |", "|---" * (len(worst) + 1) + "|"]
        for site in schema_sites:
            cells = [f"{errors[site]:.1e}" if site in errors else "–" for errors in worst.values()]
            if set(cells) != {"–"}:
                lines.append(f"| `{site}` | " + " | ".join(cells) + " |")
        Path(path).write_text("\n".join(lines) + "\n")


def test_every_architecture_of_the_table_has_a_row_here() -> None:
    assert set(SITES) == set(FAMILIES)
    assert len(ARCHITECTURES) == len(FAMILIES)


def after_a_choice(family: str, site: str, layer: int) -> bool:
    """Whether a row follows a router's choice: in bfloat16 a close call goes the other way, and all that follows."""
    return "router_logits" in SITES[family] and (layer > 0 or site in ("mlp_out", "resid_post", "final_norm"))


@pytest.mark.parametrize("family", CHOSEN)
def test_every_site(
    family: str, reader: StoreReader, table: dict[str, dict[str, float]], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm import LLM

    monkeypatch.setenv("VLLM_TAP_ARM", ",".join(SITES[family]))
    folder = make(family, tmp_path / family, DTYPE)
    llm: Any = LLM(str(folder), dtype=DTYPE, skip_tokenizer_init=True, max_model_len=256, max_num_seqs=8,
                   max_num_batched_tokens=64, block_size=32, **({"gpu_memory_utilization": 0.3} if ON_GPU else {}))
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
                if ON_GPU and after_a_choice(family, entry.site, entry.layer):
                    continue
                x = reference[entry.site, entry.layer][rows.positions]
                error = np.linalg.norm(rows.values()[0] - x, axis=-1) / np.linalg.norm(x, axis=-1)
                worst[entry.site] = max(worst[entry.site], float(error.max()))
        table[family] = worst
        if family in ("qwen3", "opt"):
            check_heads(engine, SITES[family])
        assert max(worst.values()) <= (0.1 if ON_GPU else 1e-4), worst
    finally:
        engine.close()
