"""docs/howto/patching.md as it stands: its service, its block, and every cell of its picture against Hugging Face."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.conftest import ENVIRONMENT
from tests.support.models.edited import moved
from tests.support.models.reference import Reference
from tests.support.pages.readme import blocks
from tests.support.processes import free_port
from tests.support.served import serving
from tests.support.store_helpers import ROOT
from vllm_tap.client.sweep_result import PatchSweep
from vllm_tap.tiny_model import cache_dir, tiny_model

pytestmark = pytest.mark.soak
PYTHON = os.environ.get("TAP_LENS_PYTHON")
RIGHT, WRONG = 1248, 1986


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PatchSweep]:
    """What the page's block makes, in a folder of its own."""
    folder, port, engine_port = tmp_path_factory.mktemp("patching"), free_port(), free_port()
    command, = (block for block in blocks("console", "docs/howto/patching.md") if "serve" in block)
    environment = {key: value for key, value in (os.environ | ENVIRONMENT).items() if not key.startswith("VLLM_TAP_")}
    words = [*command.split()[2:], "--port", str(port), "--engine-port", str(engine_port), "--store",
             str(folder / "captures"), "--", "--max-model-len", "256", "--max-num-seqs", "16"]
    space: dict[str, Any] = {}
    with serving(words, environment | {"VLLM_CACHE_ROOT": str(cache_dir() / "vllm")}), \
            pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        block, = blocks("python", "docs/howto/patching.md")
        exec(compile(block.replace("8100", str(port)), "docs/howto/patching.md", "exec"), space)  # noqa: S102
        space["client"].close()
    assert (folder / "patching.png").read_bytes().startswith(b"\x89PNG")
    if into := os.environ.get("TAP_PICTURE"):  # of the page, drawn anew
        Path(into).write_bytes((folder / "patching.png").read_bytes())
    assert json.loads((folder / "sweep.json").read_text())["values"] == space["sweep"].values.tolist()
    yield space["sweep"]


def test_every_cell_is_hugging_faces(found: PatchSweep, reference_of: Callable[[str], Reference]) -> None:
    reference = reference_of("qwen3")
    last = len(found.clean) - 1

    def measure(tokens: list[int], edits: list[dict[str, Any]]) -> float:
        chances = reference.edited((*tokens, 0), moved(edits, len(tokens)))[1][last]
        return float(chances[RIGHT] - chances[WRONG])

    rows, _ = reference.edited((*found.clean, 0), {})
    clean, corrupted = measure(found.clean, []), measure(found.corrupted, [])
    for (number, layer, position), value in np.ndenumerate(found.values):
        patched = measure(found.corrupted, [{
            "site": f"{found.sites[number]}.{layer}", "op": "set", "positions": [position],
            "rows": [rows[found.sites[number], layer][position].tolist()]}])
        assert abs(value - (patched - corrupted) / (clean - corrupted)) < 1e-3, (number, layer, position)


def test_the_picture_is_the_one_of_the_textbooks(found: PatchSweep) -> None:
    stream = found.values[found.sites.index("resid_post")]
    assert np.abs(stream[:, :2]).max() < 1e-4  # before the first difference
    assert abs(stream[-1, -1] - 1) < 1e-4 and np.abs(stream[-1, :-1]).max() < 1e-4  # what the answer is made of
    assert stream[0].argmax() == 2 and (np.diff(stream[:, 2]) < 0).all() and (np.diff(stream[:2, -1]) > 0).all()


@pytest.mark.skipif(not PYTHON, reason="needs TransformerLens in an environment of its own: make lens")
def test_every_cell_is_transformer_lenss(found: PatchSweep, tmp_path: Path) -> None:
    (tmp_path / "asked.json").write_text(json.dumps({
        "clean": found.clean, "corrupted": found.corrupted, "right": RIGHT, "wrong": WRONG, "layers": found.layers,
        "sites": {"resid_post": "blocks.{l}.hook_resid_post", "attn_out": "blocks.{l}.hook_attn_out",
                  "mlp_out": "blocks.{l}.hook_mlp_out"}}))
    run = subprocess.run([str(PYTHON), "tests/programs/lens_patching.py", str(tiny_model()),
                          str(tmp_path / "asked.json")], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT, env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""})
    said = [line for line in run.stdout.splitlines() if line.startswith("VALUES ")]
    assert run.returncode == 0 and said, run.stdout[-3000:]
    values = np.array(json.loads(said[0].removeprefix("VALUES ")))
    assert values.shape == found.values.shape and np.abs(values - found.values).max() < 1e-3
