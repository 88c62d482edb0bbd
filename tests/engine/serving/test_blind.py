"""Loud when blind: an engine whose taps would see nothing does not start, and says what it looked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.conftest import ENVIRONMENT, Store
from vllm_tap.tiny_model import cache_dir


@pytest.fixture(scope="module")
def forks() -> Iterator[subprocess.Popen[str]]:
    """The process that starts them: it imports vLLM once."""
    with subprocess.Popen([sys.executable, "-m", "tests.support.engines.blind"], stdin=subprocess.PIPE, text=True,
                          stdout=subprocess.PIPE, cwd=Path(__file__).parents[3], env={
                              **os.environ, **ENVIRONMENT, "VLLM_CACHE_ROOT": str(cache_dir() / "vllm")}) as process:
        yield process


@pytest.mark.parametrize(
    ("case", "settings", "says"),
    [
        pytest.param("bypassed, unproved", {}, [
            "had written nothing: attn_out.0, attn_out.1, attn_out.2, attn_out.3;"], marks=pytest.mark.versions),
        pytest.param("bypassed", {}, ["continues with other tensors than those that taps would copy: resid_post.0"],
                     marks=pytest.mark.soak),
        pytest.param("changed", {"VLLM_TAP_ARM": "resid_pre,embed"}, [
            "the rows of resid_pre.0 are not the rows of the embedding table for the tokens ["],
            marks=pytest.mark.soak),
        ("stale, unproved", {"VLLM_TAP_ARM": "resid_mid,resid_post,mlp_out"}, [
            "resid_post.0 is not resid_mid.0 + mlp_out.0: the rows are off by "]),
        pytest.param("scaled", {"VLLM_TAP_ARM": "resid_mid,resid_post,mlp_out"}, [
            "do not match the table of architectures: "], marks=pytest.mark.soak),
        pytest.param("unknown", {"VLLM_TAP_ARM": "resid_post,q"}, ["this architecture is not in the table",
                     "the search for its sites failed"], marks=pytest.mark.soak),
        # Refused by checks that have quick tests of their own: here as a whole engine says it.
        pytest.param("tiny", {"VLLM_TAP_STAGING_BYTES_MAX": "100000"}, ["staging needs", "VLLM_TAP_STAGING_BYTES_MAX"],
                     marks=pytest.mark.soak),
        pytest.param("sharded", {"VLLM_TAP_ARM": "resid_post,q", "VLLM_TAP_EDIT": "q"},
                     ["tensor_parallel_size=2: each rank has only its share of q"], marks=pytest.mark.soak),
        pytest.param("tiny", {"VLLM_TAP_ARM": "mlp_out,resid_post.7"},
                     ["cannot arm resid_post.7: this model has resid_post in layers [0, 1, 2, 3]"],
                     marks=pytest.mark.soak),
        pytest.param("tiny", {"VLLM_TAP_ARM": "nope"}, ["VLLM_TAP_ARM = 'nope'", "unknown site"],
                     marks=pytest.mark.soak),
    ],
)
def test_an_engine_that_would_be_blind_does_not_start(
    case: str, settings: dict[str, str], says: list[str], tmp_path: Path, forks: subprocess.Popen[str]
) -> None:
    assert forks.stdin and forks.stdout
    settings = {"VLLM_TAP_ENDPOINT": f"ipc://{tmp_path}/w.sock"[:95], **settings}
    forks.stdin.write(json.dumps({"case": case, "settings": settings, "said": str(tmp_path / "said")}) + "\n")
    forks.stdin.flush()
    status, said = forks.stdout.readline(), (tmp_path / "said").read_text()
    assert int(status) != 0 and "STARTED" not in said, said[-3000:]
    for words in says:
        assert words in said, said[-3000:]


LATE = """
import os
from vllm import LLM, SamplingParams
from vllm_tap.tiny_model import tiny_model

def ask(**extra):
    llm = LLM(str(tiny_model()), dtype="float32", skip_tokenizer_init=True, max_model_len=64, enforce_eager=True)
    params = SamplingParams(max_tokens=2, detokenize=False, ignore_eos=True, extra_args=extra or None)
    print(llm.generate([{"prompt_token_ids": [1, 2, 3]}], params)[0].outputs[0].token_ids)
    llm.llm_engine.engine_core.shutdown()

if __name__ == "__main__":
    endpoint = os.environ.pop("VLLM_TAP_ENDPOINT")
    ask()
    os.environ["VLLM_TAP_ENDPOINT"] = endpoint
    ask(capture={"codec": "raw"})
"""


@pytest.mark.soak
def test_a_spec_that_no_front_end_has_read_is_said(tmp_path: Path, store: Store) -> None:
    """vLLM loads plugins once a process; here that was before the engine was to be tapped."""
    (tmp_path / "late.py").write_text(LATE)
    command = [sys.executable, str(tmp_path / "late.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={
        **os.environ, "VLLM_CACHE_ROOT": str(cache_dir() / "vllm"), "VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("[") >= 2
    assert (done.stdout + done.stderr).count("asks for a capture or edits, and nothing is captured or edited") == 1
