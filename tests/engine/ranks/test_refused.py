"""One rank that refuses at the start ends all of them, with its reason: the weights of one of two are damaged."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.support.engines.engines import DTYPE, ON_GPU
from tests.support.models.families import family_model

pytestmark = [pytest.mark.timeout(2400), pytest.mark.soak,
              pytest.mark.skipif(ON_GPU, reason="vLLM loads no shares of a model on every kind of GPU")]

START = """
import sys
from vllm import LLM
llm = LLM(sys.argv[1], load_format=sys.argv[2], dtype=sys.argv[3], skip_tokenizer_init=True, max_model_len=256,
          max_num_seqs=8, tensor_parallel_size=2, enforce_eager=True)
if sys.argv[4:]:
    llm.llm_engine.engine_core.save_sharded_state(sys.argv[4])
print("started")
"""


def started(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """vLLM on two ranks, to its end."""
    return subprocess.run([sys.executable, "-c", START, *map(str, arguments)], capture_output=True, text=True,
                          timeout=1000, check=False, env={
                              **{name: value for name, value in os.environ.items() if name != "VLLM_TAP_ENDPOINT"},
                              "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                              "VLLM_CPU_KVCACHE_SPACE": "1", **environment})


@pytest.mark.parametrize(("family", "says"), [
    ("granite", r"no norm behind the last block makes its result of it alone (said by tensor-parallel rank 1)"),
    ("qwen3", ""),
])
@pytest.mark.usefixtures("store")
def test_a_rank_that_refuses(family: str, says: str, tmp_path: Path) -> None:
    """A model in no table does not start; one of the table goes on without the proof, as it does on one rank."""
    whole = family_model(family, DTYPE)
    assert "started" in started(whole, "auto", DTYPE, tmp_path).stdout
    shutil.copy(whole / "config.json", tmp_path)
    (share,) = tmp_path.glob("model-rank-1-part-*.safetensors")
    weights = load_file(share)
    weights["model.norm.weight"].fill_(float("nan"))  # the first rank's is as it was, and so is all that it computes
    save_file(weights, share)
    done = started(tmp_path, "sharded_state", DTYPE, VLLM_TAP_ENDPOINT=os.environ["VLLM_TAP_ENDPOINT"],
                   VLLM_TAP_ARM="resid_post")
    said = done.stdout + done.stderr
    assert ("started" in done.stdout, done.returncode == 0) == (not says, not says), said
    assert (says or "not proved by structure") in said, said
