"""The same names, the same values: captures compared with TransformerLens in its own environment (`make lens`)."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schemas.errors import SpecError
from schemas.read.reader import StoreReader
from schemas.sites import BY_MODEL, SITES, ask_site, names_of
from tests.engine.test_architectures import SITES as SITES_OF
from tests.support.engines.engines import Engine, in_this_process
from tests.support.models.families import FAMILIES, family_model
from tests.support.models.features import RAW, tokens
from tests.support.models.imaged import IMAGED
from tests.support.models.unlisted import UNLISTED
from tests.support.pages import parity_page
from tests.support.store_helpers import ROOT

PYTHON = os.environ.get("TAP_LENS_PYTHON")
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="needs TransformerLens in an environment of its own: make lens"),
]

# Names of sites that a family has here, and that TransformerLens does not know of it.
UNKNOWN = {"phi3": {"blocks.{l}.attn.hook_rot_q", "blocks.{l}.attn.hook_rot_k"}}
# Names that are refused of a family, because they are no site of it.
REFUSED = {family: set(BY_MODEL["hook_embed"].lens) for family in ("gemma2", "gemma3_text")}
OWN = {name for of in BY_MODEL.values() for name in of.lens}  # of models in no table any of these may be refused
# In no table, their sites are found by structure. Not Cohere 2, whose window vLLM and Hugging Face count otherwise.
BY_STRUCTURE = [name for name, family in UNLISTED.items() if name not in (*IMAGED, "cohere2") and not family.dtype]


@pytest.mark.parametrize("family", [*FAMILIES, *BY_STRUCTURE])
def test_captured_rows_are_transformer_lenss_hooks(
    family: str, reader: StoreReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = family_model(family, "float32")
    rows = captured_by_name(family, folder, reader, monkeypatch)
    np.savez(tmp_path / "rows.npz", **rows)
    run = subprocess.run([str(PYTHON), "tests/programs/lens.py", str(folder), str(tmp_path / "rows.npz")], cwd=ROOT,
                         text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                         env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""})
    said = [line for line in run.stdout.splitlines() if line.startswith("ERRORS ")]
    if family in UNLISTED and not said:
        pytest.skip(f"TransformerLens does not run it: {run.stdout.strip().splitlines()[-1][:300]}")
    assert run.returncode == 0 and said, run.stdout[-3000:]
    errors = worst_layer(json.loads(said[0].removeprefix("ERRORS ")))
    if table := os.environ.get("TAP_PARITY"):
        parity_page.merge_lens(Path(table), family, errors, version())
    bar = 1e-4
    if family in UNLISTED:  # a name that TransformerLens does not know of one is no wrong name
        bar, errors = UNLISTED[family].tolerance, {name: error for name, error in errors.items() if error is not None}
    for name, error in errors.items():
        assert (error is None) is (name in UNKNOWN.get(family, ())), f"{name}: {error}"
        assert error is None or error <= bar, f"{name}: {error}"


def captured_by_name(family: str, folder: Path, reader: StoreReader, monkeypatch: pytest.MonkeyPatch
                     ) -> dict[str, Any]:
    """``tokens`` [n] and, by every TransformerLens name that the capture knows, rows [n, width]."""
    from vllm import LLM

    monkeypatch.setenv("VLLM_TAP_ARM", ",".join(SITES_OF[family]))
    # Not where vLLM runs Hugging Face's classes, and changes them.
    with in_this_process(UNLISTED[family].here if family in UNLISTED else family != "gpt_neox"):
        llm: Any = LLM(str(folder), dtype="float32", skip_tokenizer_init=True, max_model_len=256, max_num_seqs=4,
                       block_size=32)
    engine = Engine(llm, reader, None)  # type: ignore[arg-type]
    try:
        prompt, length = tokens(60, seed=6), {"max_tokens": 8, "ignore_eos": True, "detokenize": False}
        few = [] if family in UNLISTED else [{**RAW, "sites": ["blocks.1.attn.hook_out"]}]
        one, *fewer = engine.run([prompt] * (1 + len(few)), [length] * (1 + len(few)), [RAW, *few])
    finally:
        engine.close()
    names = names_of(one.manifest.engine)
    for short in fewer:
        assert list(short.manifest.resolved["layers"]) == [names["attn.hook_out"]], "a spec means another than a reader"
    found: dict[str, Any] = {"tokens": np.asarray(one.tokens[:-1], np.int64)}
    there, refused = {(entry.site, entry.layer) for entry in one.manifest.rows}, set[str]()
    for short in ALL:
        for layer in range(3) if "{l}" in short else (0,):
            name = short.format(l=layer)
            try:
                asked = ask_site(name)[0]
                if (names.get(asked, asked), layer) in there or asked in BY_MODEL.keys() - names.keys():
                    found[name] = reader.slice(one.id, name, [layer], 0, len(one.tokens)).values()[0]
            except SpecError:
                refused.add(short)
    assert refused <= OWN if family in UNLISTED else refused == REFUSED.get(family, set())
    return found


ALL = [name for of in SITES.values() for name in of.lens] + [name for of in BY_MODEL.values() for name in of.lens]


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
