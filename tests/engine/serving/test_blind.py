"""Loud when blind: an engine whose taps would see nothing does not start, and says what it looked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.conftest import ENVIRONMENT
from vllm_tap.tiny_model import cache_dir

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize(
    ("case", "settings", "says"),
    [
        pytest.param("bypassed, unproved", {}, [
            "had written nothing: attn_out.0, attn_out.1, attn_out.2, attn_out.3;"], marks=pytest.mark.versions),
        pytest.param("bypassed", {}, ["goes on with other tensors than those that taps would take: resid_post.0"],
                     marks=pytest.mark.soak),
        ("changed", {"VLLM_TAP_ARM": "resid_pre,embed"}, [
            "the rows of resid_pre.0 are not those of the embedding table for the tokens ["]),
        ("stale, unproved", {"VLLM_TAP_ARM": "resid_mid,resid_post,mlp_out"}, [
            "resid_post.0 is not resid_mid.0 + mlp_out.0: the rows are off by "]),
        pytest.param("scaled", {"VLLM_TAP_ARM": "resid_mid,resid_post,mlp_out"}, [
            "are not what the table of architectures calls them: "], marks=pytest.mark.soak),
        pytest.param("unknown", {"VLLM_TAP_ARM": "resid_post,q"}, ["this architecture is not in the table",
                     "its sites are not found by structure"], marks=pytest.mark.soak),
        # Refused by checks that have quick tests of their own: here as a whole engine says it.
        pytest.param("tiny", {"VLLM_TAP_STAGING_BYTES_MAX": "100000"}, ["staging needs", "VLLM_TAP_STAGING_BYTES_MAX"],
                     marks=pytest.mark.soak),
        pytest.param("sharded", {"VLLM_TAP_ARM": "resid_post,q", "VLLM_TAP_EDIT": "q"},
                     ["tensor_parallel_size=2: a rank has only its share of q"], marks=pytest.mark.soak),
        pytest.param("tiny", {"VLLM_TAP_ARM": "mlp_out,resid_post.7"},
                     ["cannot arm resid_post.7: this model has resid_post in layers [0, 1, 2, 3]"],
                     marks=pytest.mark.soak),
        pytest.param("tiny", {"VLLM_TAP_ARM": "nope"}, ["VLLM_TAP_ARM = 'nope'", "unknown site"],
                     marks=pytest.mark.soak),
    ],
)
def test_an_engine_that_would_be_blind_does_not_start(
    case: str, settings: dict[str, str], says: list[str], tmp_path: Path
) -> None:
    environment = {**os.environ, **ENVIRONMENT, "VLLM_TAP_ENDPOINT": f"ipc://{tmp_path}/w.sock"[:95],
                   "VLLM_CACHE_ROOT": str(cache_dir() / "vllm"), **settings}
    run = subprocess.run([sys.executable, "-m", "tests.support.engines.blind", case], env=environment, text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=240,
                         cwd=Path(__file__).parents[3])
    assert run.returncode != 0 and "STARTED" not in run.stdout, run.stdout[-3000:]
    for words in says:
        assert words in run.stdout, run.stdout[-3000:]
