"""The seams without vLLM: what must hold in whatever process the plugin is loaded."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_side.front.ticket import KEY, find
from engine_side.seams.patching import when_imported, wrap
from engine_side.seams.runner import check_wrapped
from engine_side.seams.self_test import check_model
from schemas.errors import StartError
from tests.support.processes import PATIENCE_S
from tests.support.store_helpers import ROOT


@pytest.fixture
def late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> tuple[str, Path]:
    """A module of its own for each test: its name and file."""
    name = f"imported_late_{abs(hash(request.node.name))}"
    monkeypatch.syspath_prepend(str(tmp_path))
    return name, tmp_path / f"{name}.py"


def test_a_module_that_was_only_looked_for_is_wrapped_when_it_is_imported(late: tuple[str, Path]) -> None:
    name, file = late
    file.write_text("value = 1\n")
    seen: list[types.ModuleType] = []
    when_imported(name, seen.append)
    assert importlib.util.find_spec(name) is not None and not seen
    module = importlib.import_module(name)
    assert seen == [module] and module.value == 1
    importlib.reload(module)
    assert seen == [module]


def test_a_module_that_fails_at_first_is_wrapped_when_it_succeeds(late: tuple[str, Path]) -> None:
    name, file = late
    file.write_text("import sys\nif not hasattr(sys, __name__):\n    setattr(sys, __name__, 1); raise ImportError\n")
    seen: list[types.ModuleType] = []
    when_imported(name, seen.append)
    with pytest.raises(ImportError):
        importlib.import_module(name)
    assert not seen
    assert [importlib.import_module(name)] == seen


def test_taps_in_another_model_than_the_one_that_runs_are_seen() -> None:
    target, drafter = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    check_model(target, target, "a runner")
    check_model(target, torch.nn.Sequential(target), "a runner that wraps its model")
    with pytest.raises(StartError, match="a runner runs a Sequential"):
        check_model(drafter, torch.nn.Sequential(target), "a runner")


def test_a_runner_that_inherits_a_wrapped_step_is_known() -> None:
    class Runner:
        def execute_model(self) -> None:
            pass

    class Special(Runner):
        def execute_model(self) -> None:
            super().execute_model()

    wrap(Runner, "execute_model", lambda original: lambda self: original(self))
    check_wrapped(Special)
    with pytest.raises(StartError, match="this engine uses the runner"):
        check_wrapped(type("Runner", (), {"execute_model": print}))


def test_a_module_that_is_not_there_is_named() -> None:
    for name in ("nobody_has_this", "json.nothing", "json.nothing.below"):
        with pytest.raises(StartError, match=f"looked for the module {name}, not found"):
            when_imported(name, lambda module: None)


def test_a_place_that_is_not_there_is_named_with_what_is(late: tuple[str, Path]) -> None:
    name, file = late
    file.write_text("class Scheduler:\n    def schedule_step(self): ...\nclass Worker(Scheduler): ...\n")
    module = importlib.import_module(name)
    for path, says in [("Schedule.schedule", f"looked for Schedule in {name}, found Scheduler; "),
                       ("Scheduler.schedule", f"schedule in {name}.Scheduler, found schedule_step; "),
                       ("Worker.schedule_step", f"schedule_step in {name}.Worker, found nothing like it; ")]:
        with pytest.raises(StartError, match=re.escape(says)):
            wrap(module, path, lambda original: original)


SEAMS = [
    "vllm.model_executor.model_loader.base_loader:BaseModelLoader.load_model",
    "vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin.load_lora_model",
    "vllm.v1.worker.gpu_worker:Worker.compile_or_warm_up_model",
    "vllm.v1.worker.cpu_worker:CPUWorker.compile_or_warm_up_model",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model",
    "vllm.v1.core.sched.scheduler:Scheduler._free_request",
    "vllm.v1.core.sched.scheduler:Scheduler.schedule",
    "vllm.v1.request:Request.get_skip_reading_prefix_cache",
    "vllm.v1.engine.core:EngineCoreProc.run_busy_loop",
    "vllm.v1.engine.core:DPEngineCoreProc.run_busy_loop",
    "vllm.v1.engine.core:EngineCoreProc.has_work",
    "vllm.v1.engine.core_client:InprocClient.get_output",
    "vllm.v1.engine.core_client:InprocClient.abort_requests",
    "vllm.v1.engine.input_processor:InputProcessor.process_inputs",
    "vllm.v1.engine.output_processor:RequestState.from_new_request",
    "vllm.v1.engine.output_processor:RequestState._new_completion_output",
    "vllm.v1.engine.output_processor:RequestState.make_request_output",
    "vllm.entrypoints.openai.completion.protocol:CompletionRequest.to_sampling_params",
    "vllm.entrypoints.openai.completion.protocol:CompletionRequest.to_beam_search_params",
    "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest.to_beam_search_params",
]


@pytest.mark.versions
def test_a_vllm_without_one_of_the_seams_does_not_start_and_says_what_it_looked_for(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    run = subprocess.run([sys.executable, "-m", "tests.programs.without_seams", *SEAMS], cwd=ROOT, text=True,
                         stdout=subprocess.PIPE, check=True, timeout=PATIENCE_S,
                         env={**os.environ, "VLLM_TAP_ENDPOINT": f"ipc://{tmp_path}/w.sock"[:95]})
    *said, at_last = json.loads(run.stdout.splitlines()[-1])
    for seam, text in zip(SEAMS, said, strict=True):
        module, _, path = seam.partition(":")
        owner, _, name = path.partition(".")
        looked, _, found = text.partition(", found ")
        assert looked == f"vllm-tap: looked for {name} in {module}.{owner}" and f"{name}_renamed" in found, text
    assert at_last == ""


@pytest.mark.parametrize("extra", [
    None, {}, [], "capture", {KEY: None}, {KEY: 7}, {KEY: {}}, {KEY: ""}, {KEY: "{"}, {KEY: "\ud800"},
    {KEY: '"\ud800"'}, {KEY: type("Text", (str,), {})("{}")},
    {KEY: "[" * 100_000}, {KEY: '{"ticket":"vllm-tap","id":[1]}'}, {KEY: '{"sites":["resid_post"]}'},
])
def test_what_is_no_ticket_is_none(extra: object) -> None:
    assert find(types.SimpleNamespace(extra_args=extra)) is None
    assert find(None) is None


PARAMS: list[dict[str, Any]] = [
    {}, {"stop": ["a", "b"], "bad_words": ["no"], "logprobs": 2},
    {"stop_token_ids": [1, 2], "logit_bias": {3: 0.5}, "allowed_token_ids": [4]},
    {"extra_args": {"more": {"own": [1]}}}, {"structured_outputs": {"choice": ["a", "b"]}},
    {"skip_clone": True, "n": 2}, {"logit_bias": {3: [0.5]}}, {"temperature": 0.0, "top_p": 0.5, "seed": 3},
]


@pytest.mark.versions
@pytest.mark.parametrize("given", PARAMS)
def test_a_request_gets_what_vllm_copies_of_its_parameters_but_for_the_spec(given: dict[str, Any]) -> None:
    sampling = pytest.importorskip("vllm.sampling_params")
    from engine_side.seams.front_end import _without_spec

    def made(extra: dict[str, Any]) -> Any:
        of = dict(given)
        if "structured_outputs" in of:
            of["structured_outputs"] = sampling.StructuredOutputsParams(**of["structured_outputs"])
        return sampling.SamplingParams(**{**of, "extra_args": {**of.get("extra_args", {}), **extra} or None})

    rest = given.get("extra_args", {})
    params, plain = made({KEY: {"sites": []}}), made({})
    got, whole = _without_spec(params, rest).clone(), plain.clone()
    for name in params.__struct_fields__:
        assert getattr(got, name) == getattr(whole, name) or name == "skip_clone", name
        if isinstance(getattr(got, name), list | set | dict) and not given.get("skip_clone"):
            assert getattr(got, name) is not getattr(params, name), f"{name} is the caller's"
    nested = {"extra_args", "structured_outputs"} & given.keys() or given.get("logit_bias") == {3: [0.5]}
    assert got.skip_clone == (not nested)
    assert params.extra_args == {**rest, KEY: {"sites": []}} and params.skip_clone == given.get("skip_clone", False)
    if rest:
        assert got.extra_args["more"]["own"] is not params.extra_args["more"]["own"]


@pytest.mark.versions
def test_parameters_that_were_changed_since_are_looked_at_again() -> None:
    """As vLLM's own copy does: else the engine would be the first that refuses them."""
    sampling = pytest.importorskip("vllm.sampling_params")
    from engine_side.seams.front_end import _without_spec

    for name, value in (("temperature", 0.0), ("stop_token_ids", [5]), ("seed", -1), ("stop", "a"), ("n", 2)):
        params = sampling.SamplingParams(top_p=0.5, temperature=0.7)
        setattr(params, name, value)
        assert _without_spec(params, {}) == _marked(copy.deepcopy(params)), name
    for name, wrong in (("max_tokens", 0), ("top_p", 0.0), ("n", 0)):
        params = sampling.SamplingParams()
        setattr(params, name, wrong)
        with pytest.raises(Exception, match=name) as ours:
            _without_spec(params, {})
        with pytest.raises(ours.type, match=re.escape(str(ours.value))):
            copy.deepcopy(params)


def _marked(params: Any) -> Any:
    params.skip_clone = True
    return params


CHILD = ("import sys, time; from engine_side.seams.scheduler import _die_with_parent; _die_with_parent(); "
         "print('armed', flush=True); time.sleep(float(sys.argv[1])); print('lives', flush=True)")
STARTED_IN_A_THREAD = """
import subprocess, sys, threading, time
def start():
    global child
    child = subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2]], stdout=subprocess.PIPE, text=True)
    print(child.stdout.readline(), end="", flush=True)
thread = threading.Thread(target=start)
thread.start()
thread.join()
if sys.argv[3] == "stay":
    print(child.communicate()[0], end="")
"""


def run_parent(child_s: str, then: str) -> str:
    parent = subprocess.run([sys.executable, "-c", STARTED_IN_A_THREAD, CHILD, child_s, then], cwd=ROOT, check=True,
                            stdout=subprocess.PIPE, text=True, timeout=PATIENCE_S)
    return parent.stdout


def test_an_engine_outlives_the_thread_that_started_it_but_not_the_process() -> None:
    assert run_parent("2", "stay").split() == ["armed", "lives"]
    before = set(_sleepers())
    assert run_parent("47", "go").split() == ["armed"]
    for _ in range(50):
        if not (left := set(_sleepers()) - before):
            break
        subprocess.run(["sleep", "0.1"], check=True)
    assert not left


def _sleepers() -> list[str]:
    found = []
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"_die_with_parent" in line.read_bytes() and line.read_bytes().endswith(b"\x0047\x00"):
                found.append(line.parent.name)
        except OSError:
            continue
    return found
