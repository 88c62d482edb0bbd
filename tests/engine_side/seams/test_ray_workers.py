"""What vLLM's own functions give to workers that Ray starts: each of our settings, before plugins are loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine_side.config import DRAWN, GROUP, VARIABLES
from schemas import legacy
from tests.support.engines.installed import entry_points

OURS = (*VARIABLES, *legacy.SETTINGS, "VLLM_PLUGINS")


def test_every_setting_is_copied_to_workers_of_either_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    """And to engines that Ray starts for data parallelism, which copy as the first does."""
    from vllm.ray.ray_env import get_env_vars_to_copy
    from vllm.v1.executor.ray_utils import WORKER_SPECIFIC_ENV_VARS

    for name in OURS:
        monkeypatch.setenv(name, "set")
    copied = get_env_vars_to_copy(exclude_vars=WORKER_SPECIFIC_ENV_VARS)
    assert set(OURS) <= copied
    ray_env_utils = pytest.importorskip("vllm.v1.executor.ray_env_utils", reason="a vLLM without the second executor")
    driver = ray_env_utils.get_driver_env_vars(worker_specific_vars=WORKER_SPECIFIC_ENV_VARS)
    assert {name: driver.get(name) for name in OURS} == dict.fromkeys(OURS, "set")


WORKER = """
import json, os, sys
from vllm.v1.worker.worker_base import WorkerWrapperBase
import vllm.v1.executor.ray_utils, vllm.v1.executor.ray_executor
from engine_side import plugin
from engine_side.config import from_environment
before = plugin._registered, from_environment()
worker = WorkerWrapperBase(rpc_rank=0)
worker.update_environment_variables([json.loads(sys.argv[1])])
class Config:
    def enable_trace_function_call_for_thread(self):
        assert not plugin._registered
    @property
    def parallel_config(self):  # asked for once plugins are loaded
        raise SystemExit(f"{before} {plugin._registered} {from_environment().arm} {os.environ['VLLM_TAP_GROUP']}")
worker.init_worker([{"vllm_config": Config()}])
"""


def test_a_worker_that_gets_them_late_loads_the_plugin_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                                 ) -> None:
    """Ray starts a process without them, which imports vLLM; then come the variables, then vLLM's start of a worker."""
    from vllm.ray.ray_env import get_env_vars_to_copy

    (tmp_path / "run").mkdir(mode=0o700)
    settings = {"VLLM_TAP_ENDPOINT": f"ipc://{tmp_path}/run/writer.sock", "VLLM_TAP_ARM": "resid_post.1,q",
                GROUP: f"{DRAWN}01A", "VLLM_PLUGINS": "vllm_tap"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    sent = {name: os.environ[name] for name in get_env_vars_to_copy() if name in os.environ}
    bare = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_TAP_", "VLLM_PLUGINS"))}
    bare["PYTHONPATH"] = os.pathsep.join([str(entry_points(tmp_path)), os.environ["PYTHONPATH"]])
    done = subprocess.run([sys.executable, "-c", WORKER, json.dumps(sent)], env=bare, capture_output=True, text=True,
                          timeout=300)
    assert done.stderr.splitlines()[-1] == f"(False, None) True ('resid_post.1', 'q') {DRAWN}01A", done.stderr[-3000:]
