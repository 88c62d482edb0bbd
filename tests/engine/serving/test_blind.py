"""Loud when blind: an engine whose taps would see nothing does not start, and says what it looked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.conftest import ENVIRONMENT
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
