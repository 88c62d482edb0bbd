"""The same names, the same values: captures compared with TransformerLens in its own environment (`make lens`)."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schemas.reader import StoreReader
from schemas.sites import SITES
from tests.engine import parity_page
from tests.engine.engines import Engine, in_this_process
from tests.engine.families import family_model
from tests.engine.features import RAW, tokens
from tests.store_helpers import ROOT

PYTHON = os.environ.get("TAP_LENS_PYTHON")
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON, reason="needs TransformerLens in an environment of its own: make lens"),
]

# Names whose value there is another by convention; the site's meaning says so.
OTHERWISE = {"ln_final.hook_normalized"}
COMMON = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "q", "k", "v", "q_rot", "k_rot", "z", "embed",
          "final_norm")
ARMED = {"llama": (*COMMON, "mlp_post"), "mixtral": (*COMMON, "router_logits", "experts")}


@pytest.mark.parametrize("family", ARMED)
def test_captured_rows_are_transformer_lenss_hooks(
    family: str, reader: StoreReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = family_model(family, "float32")
    rows = captured_by_name(folder, ARMED[family], reader, monkeypatch)
    np.savez(tmp_path / "rows.npz", **rows)
    run = subprocess.run([str(PYTHON), "tests/programs/lens.py", str(folder), str(tmp_path / "rows.npz")], cwd=ROOT,
                         text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                         env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""})
    said = [line for line in run.stdout.splitlines() if line.startswith("ERRORS ")]
    assert run.returncode == 0 and said, run.stdout[-3000:]
    errors = worst_layer(json.loads(said[0].removeprefix("ERRORS ")))
    if table := os.environ.get("TAP_PARITY"):
        parity_page.merge_lens(Path(table), family, errors, version())
    for name, error in errors.items():
        assert error is not None, f"TransformerLens knows no {name}"
        assert (error > 0.01) if name in OTHERWISE else (error <= 1e-4), f"{name}: {error}"


def captured_by_name(folder: Path, sites: tuple[str, ...], reader: StoreReader, monkeypatch: pytest.MonkeyPatch
                     ) -> dict[str, Any]:
    """``tokens`` [n] and, by every TransformerLens name of the sites, rows [n, width]."""
    from vllm import LLM

    monkeypatch.setenv("VLLM_TAP_ARM", ",".join(sites))
    with in_this_process():
        llm: Any = LLM(str(folder), dtype="float32", skip_tokenizer_init=True, max_model_len=256, max_num_seqs=4,
                       block_size=32)
    engine = Engine(llm, reader, None)  # type: ignore[arg-type]
    try:
        (one,) = engine.run([tokens(60, seed=6)], [{"max_tokens": 8, "ignore_eos": True, "detokenize": False}], [RAW])
    finally:
        engine.close()
    found: dict[str, Any] = {"tokens": np.asarray(one.tokens[:-1], np.int64)}
    for entry in one.manifest.rows:
        values = reader.slice(one.id, entry.site, [entry.layer], 0, len(one.tokens)).values()[0]
        for name in SITES[entry.site].lens:
            found[name.format(l=entry.layer)] = values
    return found


def worst_layer(errors: dict[str, float | None]) -> dict[str, float | None]:
    """By name without its layer, the worst layer's error; None where a layer is unknown."""
    worst: dict[str, float | None] = {}
    for name, error in errors.items():
        first, _, rest = name.partition(".")
        short = f"blocks.{{l}}.{rest.partition('.')[2]}" if first == "blocks" else name
        before = worst.get(short, 0.0)
        worst[short] = None if error is None or before is None else max(before, error)
    return worst


def version() -> str:
    """Of TransformerLens, from its own environment."""
    code = "import importlib.metadata as m; print('transformer-lens', m.version('transformer-lens'))"
    return subprocess.run([str(PYTHON), "-c", code], text=True, stdout=subprocess.PIPE, check=True).stdout.strip()
