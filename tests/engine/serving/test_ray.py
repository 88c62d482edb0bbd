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


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A Ray whose workers know nothing of the engines of other tests."""
    ray = pytest.importorskip("ray", reason="not installed: ray (make ray-test)")
    for name in [name for name in os.environ if name.startswith("VLLM_TAP_")]:
        monkeypatch.delenv(name)
    settings = {name: value for name, value in ENVIRONMENT.items() if not name.startswith("VLLM_TAP_")}
    ray.init(num_cpus=2, include_dashboard=False, logging_level="error", log_to_driver=False, runtime_env={"env_vars": {
        **settings, "VLLM_CACHE_ROOT": str(cache_dir() / "vllm")}})
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
