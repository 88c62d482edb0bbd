"""Many engines under Ray Data, by the block of docs/howto/ray.md: an actor is killed, every capture counts once."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.conftest import ENVIRONMENT
from tests.support.models.reference import Reference
from tests.support.pages.readme import blocks
from tests.support.store_helpers import WriterProcess
from vllm_tap import open_store
from vllm_tap.tiny_model import cache_dir, tiny_model

PAGE = "docs/howto/ray.md"
MORTAL = '''
class Mortal(CapturingEngine):
    def __call__(self, batch):
        made = super().__call__(batch)
        if 5 in batch["number"] and not DIED.exists():
            DIED.touch()
            os.kill(os.getpid(), signal.SIGKILL)  # after its captures are whole, before Ray knows
        return made


'''


@pytest.fixture(params=[2])
def cluster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A Ray with so many processors, by its own count, whose workers know nothing of the engines of other tests."""
    ray = pytest.importorskip("ray", reason="not installed: ray (make ray-test)")
    for name in [name for name in os.environ if name.startswith("VLLM_TAP_")]:
        monkeypatch.delenv(name)
    settings = {name: value for name, value in ENVIRONMENT.items() if not name.startswith("VLLM_TAP_")}
    ray.init(num_cpus=request.param, include_dashboard=False, logging_level="error", log_to_driver=False,
             runtime_env={"env_vars": {**settings, "VLLM_CACHE_ROOT": str(cache_dir() / "vllm")}})
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield ray
    ray.shutdown()


def test_a_killed_engine_and_a_job_that_is_run_again(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                     reference_of: Callable[[str], Reference]) -> None:
    monkeypatch.chdir(tmp_path)
    text, = (block for block in blocks("python", PAGE) if "from vllm import" in block)
    for page, here in (('LLM("Qwen/Qwen3-0.6B")', f'LLM({str(tiny_model())!r}, max_model_len=256, dtype="float32")'),
                       ("num_gpus=1", "num_cpus=1"), ("prompts = [", f"{MORTAL}prompts = ["),
                       ("        CapturingEngine, fn_c", "        Mortal, fn_c")):
        assert page in text, page
        text = text.replace(page, here)
    space: dict[str, Any] = {"__name__": PAGE, "os": os, "signal": signal, "DIED": tmp_path / "died"}
    code = compile(text, PAGE, "exec")
    exec(code, space)  # noqa: S102
    ids = [f"{number:026d}" for number in range(16)]
    assert (tmp_path / "died").exists() and sorted(space["answers"]["number"]) == list(range(16))
    stores = space["stores_in"](space["folder"])
    found = Counter(row.id for store in stores for row in open_store(store).captures("complete"))
    assert len(stores) == 3 and set(found) == set(ids)
    assert {name for name, count in found.items() if count == 2} == set(ids[4:8]), "nothing was captured twice"

    table = space["many"].to_pandas()
    assert not table.duplicated(["capture", "position"]).any() and set(table["capture"]) == set(ids)
    homes = [open_store(store) for store in stores]
    manifest = next(store for store in homes if any(row.id == ids[5] for row in store.captures()))[ids[5]].manifest()
    sequence = manifest.prompt_token_ids + manifest.output_token_ids
    mine = table[table["capture"] == ids[5]].sort_values("position")
    assert mine["position"].tolist() == list(range(len(sequence) - 1))
    assert mine["token_id"].tolist() == sequence[:-1]
    want = reference_of("qwen3").rows(tuple(sequence))["resid_post", 2][:-1]
    got = np.stack(mine["resid_post.2"].tolist())
    assert np.linalg.norm(got - want) < 0.01 * np.linalg.norm(want)  # int8b64

    exec(code, space)  # noqa: S102  # nothing is left
    assert space["left"] == [] and space["many"].count() == len(table)
    assert space["stores_in"](space["folder"]) == stores


@pytest.mark.parametrize("cluster", [6], indirect=True)  # Ray Data LLM's other stages want one each
def test_a_processor_of_ray_data_llm(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                     reference_of: Callable[[str], Reference]) -> None:
    monkeypatch.chdir(tmp_path)
    text, = (block for block in blocks("python", PAGE) if "ray.data.llm" in block)
    with WriterProcess(tmp_path / "captures") as writer:
        for page, here in (('model_source="Qwen/Qwen3-0.6B", accelerator_type="H100",',
                            f'model_source={str(tiny_model())!r}, log_engine_metrics=False, batch_size=8, '
                            'placement_group_config={"bundles": [{"CPU": 1}]},'),
                           ('{"max_model_len": 4096}', '{"max_model_len": 256, "dtype": "float32", '
                            '"enforce_eager": True, "max_num_seqs": 4, "gpu_memory_utilization": 0.3}'),
                           ("ipc:///run/tap/writer.sock", writer.endpoint)):
            assert page in text, page
            text = text.replace(page, here)
        space: dict[str, Any] = {"__name__": PAGE}
        for time in (1, 2):  # the second as if every batch had been repeated
            exec(compile(text, PAGE, "exec"), space)  # noqa: S102
            assert sorted(row["number"] for row in space["answers"]) == list(range(16))
            assert all(row["text"] for row in space["answers"])
            with open_store(tmp_path / "captures") as store:
                tags = sorted(int(row.tags["number"]) for row in store.captures("complete"))
            assert tags == sorted([*range(16)] * time)
        with open_store(tmp_path / "captures") as store:
            chosen = store[space["chosen"]["5"]].manifest()
        table = space["data"].to_pandas()
        assert not table.duplicated(["capture", "position"]).any() and table["capture"].nunique() == 16
        sequence = chosen.prompt_token_ids + chosen.output_token_ids
        mine = table[table["capture"] == chosen.id].sort_values("position")
        want = reference_of("qwen3").rows(tuple(sequence))["resid_post", 2][:-1]
        assert np.linalg.norm(np.stack(mine["resid_post.2"].tolist()) - want) < 0.01 * np.linalg.norm(want)  # int8b64
