"""vLLM's own dtypes of the cache beside codecs, by the command: three engines, one after the other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from schemas.errors import ArgumentError
from tests.support.engines.engines import ON_GPU
from vllm_tap.fidelity.job import FidelityJob
from vllm_tap.fidelity.kv.job import KVJob
from vllm_tap.fidelity.kv.own_cache import AUTO, OwnCache, check_kept, run_own
from vllm_tap.fidelity.reports.page import ratios_of
from vllm_tap.fidelity.reports.report import load_report
from vllm_tap.tiny_model import tiny_model

pytestmark = [pytest.mark.skipif(ON_GPU, reason="float32 on a CPU")]


def fidelity(out: Path, *words: str) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_TAP_")}  # of other tests
    return subprocess.run([sys.executable, "-m", "vllm_tap", "fidelity", "kv", str(tiny_model()), "--tokens", "24",
                           "--parts", "kv", "--bar", "1e-9", "--out", str(out), *words, "--", "--dtype", "float32"],
                          capture_output=True, text=True, env=own)


@pytest.mark.soak  # three engines of two processes each, one after the other
def test_vllms_own_fp8_stands_beside_the_codec(tmp_path: Path) -> None:
    """It costs about what 8-bit floats cost, its kernel's own rounding on top, and takes their bytes; another start
    without it is the same bits.
    """
    done = fidelity(tmp_path, "--modes", "in-forward", "--codecs", "fp8,kv4", "--engine-dtypes", "fp8")
    assert done.returncode == 0, done.stdout + done.stderr
    report = load_report(tmp_path / "report.json")
    assert [place.name for place in report.places] == ["in-forward/kv", "engine/kv"]
    mean = {place.name: {one.name: float(np.mean(one.prompts["kl"])) for one in place.patched}
            for place in report.places}
    assert 0.5 < mean["engine/kv"]["fp8"] / mean["in-forward/kv"]["fp8"] < 8
    assert mean["engine/kv"]["fp8"] < mean["in-forward/kv"]["kv4"] < mean["engine/kv"]["shuffled"]
    assert mean["engine/kv"]["shuffled"] == mean["in-forward/kv"]["shuffled"]
    engine = report.places[-1]
    assert engine.harness == [0.0] * 16 and engine.told["identity"] == "the same bits, from another start as well"
    assert ratios_of(report)["engine/kv fp8"] == ratios_of(report)["in-forward/kv fp8"] == 2.0
    assert not list(tmp_path.glob("engines-*"))


def test_a_dtype_that_an_engine_takes_by_name_alone_is_refused() -> None:
    """As vLLM's CPU build takes turboquant_4bit_nc: it says nothing, and keeps float32."""
    norm, tokens = np.random.default_rng(0).normal(size=(3, 4, 8)).astype(np.float32), np.zeros((3, 2), np.int64)
    other = norm.copy()
    other[2, 3, 7] += 1e-6
    found = {AUTO: OwnCache(norm, tokens, 4096), "same": OwnCache(norm.copy(), tokens, 4096),
             "other": OwnCache(other, tokens, 1024)}
    for name in (AUTO, "other"):
        check_kept(name, found)
    with pytest.raises(ArgumentError, match=r"--engine-dtypes = 'same': an engine with it gives the same bits as "
                                            r"without, from 4096 bytes a token \(4096 without\): its attention does"):
        check_kept("same", found)


def test_an_engine_that_does_not_start_is_refused_with_its_own_words(tmp_path: Path) -> None:
    job = FidelityJob(str(tiny_model()), tmp_path)
    with pytest.raises(ArgumentError, match=r"--engine-dtypes = 'auto': an engine with --kv-cache-dtype auto does not "
                                            r"run here: .+; leave it out"):
        run_own(job, np.zeros((2, 8), np.int64), 2, ("--no-such-flag",), (), tmp_path)


@pytest.mark.parametrize(("more", "match"), [
    ({"engine_dtypes": ("fp9",)}, r"--engine-dtypes = 'fp9': valid for this vLLM: float16, bfloat16, fp8, "),
    ({"engine_dtypes": ("auto",)}, r"--engine-dtypes = 'auto': valid for this vLLM"),
    ({"engine_dtypes": ("fp8", "fp8")}, r"--engine-dtypes = 'fp8,fp8': names one twice"),
    ({"window": 4}, r"--window = 4: goes with --modes rolling"),
    ({"window": 0, "modes": ("rolling",)}, r"--window = 0: valid: positions, at least 1")])
def test_what_cannot_be_had_is_refused_before_any_engine(more: dict[str, tuple[str, ...]], match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        KVJob(FidelityJob(str(tiny_model()), tiny_model()), **more)  # type: ignore[arg-type]
