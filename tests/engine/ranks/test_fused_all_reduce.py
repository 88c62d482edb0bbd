"""vLLM's fused kernels of an all-reduce and a norm on two GPUs: how many run with and without taps, and whether rows
beside them are Hugging Face's. Needs FlashInfer.
"""

from __future__ import annotations

from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from schemas.read.reader import StoreReader
from tests.engine.discovery.test_wide import LAYERS, wide_model
from tests.support.engines.engines import ON_GPU, SHARED, Engine, in_this_process
from tests.support.models.features import GREEDY, tokens
from tests.support.models.reference import Reference

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900), pytest.mark.skipif(
    not ON_GPU or torch.cuda.device_count() < 2 or find_spec("flashinfer") is None,
    reason="NOT RUN: needs two GPUs and FlashInfer")]
PLACES = 2 * LAYERS + 1  # behind the embedding, each attention and each MLP
_running: list[Any] = []


def watch(worker: Any) -> None:
    """Note the kernels that a rank runs from now on."""
    torch.cuda.synchronize()
    _running.append(torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]))
    _running[0].start()


def seen(worker: Any) -> dict[str, int]:
    """All-reduces since then, fused with a norm and plain."""
    torch.cuda.synchronize()
    profile = _running.pop()
    profile.stop()
    names: Counter[str] = Counter()
    for each in profile.key_averages():
        if "allreduce_fusion_kernel" in each.key:
            names["fused"] += each.count
        elif "cross_device_reduce" in each.key or "ncclDevKernel_AllReduce" in each.key:
            names["plain"] += each.count
    return dict(names)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is wide enough for the kernels."""
    return wide_model("qwen3", tmp_path_factory.mktemp("wide"))


@pytest.mark.parametrize(("arm", "edit", "ended"), [
    pytest.param("", "", set(), id="no taps"),
    pytest.param("embed,resid_pre,resid_mid,resid_post", "", set(), id="sums of norms"),
    pytest.param("attn_out.3,mlp_out.5,resid_post", "resid_mid.7,resid_post.1",
                 {"attn_out", "mlp_out", "resid_mid", "resid_post"}, id="four that end one each")])
def test_fused_kernels(arm: str, edit: str, ended: set[str], folder: Path, reader: StoreReader,
                       monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    from vllm import LLM

    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    if arm:
        monkeypatch.setenv("VLLM_TAP_ARM", arm)
        monkeypatch.setenv("VLLM_TAP_EDIT", edit)
    else:
        monkeypatch.delenv("VLLM_TAP_ENDPOINT")
    with in_this_process(False):
        llm: Any = LLM(str(folder), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=256, max_num_seqs=8,
                       max_num_batched_tokens=64, seed=0, tensor_parallel_size=2, **SHARED,
                       compilation_config={"cudagraph_mode": "NONE", "pass_config": {"fuse_allreduce_rms": True}})
    engine = Engine(llm, reader, Reference(folder))
    try:
        params = [{"max_tokens": 6, **GREEDY}] * 3
        specs = [{"codec": "raw"} if arm else None] * 3
        engine.run([tokens(20, seed=seed) for seed in range(3)], params, specs)
        llm.collective_rpc(watch)
        captured = engine.run([tokens(length, seed=length) for length in (5, 90, 31)], params, specs)
        ranks = llm.collective_rpc(seen)
        for one in captured if arm else ():
            assert one.manifest.status == "complete" and engine.check(one) > 0
    finally:
        engine.close()
    log = "".join(capfd.readouterr())
    for rank in ranks:
        steps, rest = divmod(sum(rank.values()), PLACES)
        assert steps and not rest, rank
        assert rank["fused"] == steps * (PLACES - len(ended)), rank
    told = log.partition("fuses what makes ")[2].partition(" with the next")[0]
    assert set(told.split(", ")) - {""} == ended
