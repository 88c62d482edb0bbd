"""The model loader: taps go in after the weights are there and before anything is compiled or profiled.

Wraps ``BaseModelLoader.load_model`` and the workers' ``compile_or_warm_up_model``, where the self-test runs. To serve
adapters, vLLM puts layers of its own around those of the model, and these call the model's layers in another way. Taps
then wait for that (``load_lora_model``), and go into the model that it returns.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

from engine_side import worker
from engine_side.config import VARIABLES, from_environment
from engine_side.seams.compiled import loop_split
from engine_side.seams.patching import when_imported, wrap, wrap_when_imported
from engine_side.seams.self_test import self_test
from engine_side.seams.tapping import look_into, plan_arming, tap_model
from schemas.errors import StartError

_PLAN: Final = "vllm_tap_plan"


def connect() -> None:
    """Install the wrappers, and salt vLLM's caches of compiled graphs."""
    _salt_caches()
    loop_split.connect()
    wrap_when_imported("vllm.model_executor.model_loader.base_loader", {"BaseModelLoader.load_model": _load_model})
    wrap_when_imported("vllm.v1.worker.lora_model_runner_mixin", {
        "LoRAModelRunnerMixin.load_lora_model": _load_lora_model,
    })
    when_imported("vllm.v1.worker.gpu_worker", lambda module: _wrap_worker(module, "Worker"))
    when_imported("vllm.v1.worker.cpu_worker", lambda module: _wrap_worker(module, "CPUWorker"))


def _salt_caches() -> None:
    """Make the compile-cache keys of this process depend on what is armed when they are made.

    ``vllm.envs.compile_factors`` hashes every key of ``environment_variables``, so one more key changes every cache
    key. Without that, an untapped artifact would be loaded for a tapped engine in silence. Our own variables enter with
    a constant: they are read from the environment by us, and a store's address must not change what is compiled.
    """
    import vllm.envs

    variables = getattr(vllm.envs, "environment_variables", None)
    if not isinstance(variables, dict) or not hasattr(vllm.envs, "compile_factors"):
        raise StartError("vllm-tap: looked for vllm.envs.environment_variables and compile_factors, not found, so vLLM "
                         "could reuse compiled graphs of models without taps; use a vLLM version that is tested")
    variables["VLLM_TAP_SALT"] = lambda: config.salt() if (config := from_environment()) else None
    for name in VARIABLES:
        variables[name] = lambda: None


def _load_model(original: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    def load_model(self: Any, vllm_config: Any, model_config: Any, *args: Any, **kwargs: Any) -> nn.Module:
        config = from_environment()
        if config is None or model_config is not vllm_config.model_config or _drafts(vllm_config):
            return original(self, vllm_config, model_config, *args, **kwargs)
        plan = plan_arming(vllm_config, config)
        model = original(self, vllm_config, model_config, *args, **kwargs)
        plan = look_into(model, vllm_config, plan)
        if vllm_config.lora_config is None:
            tap_model(model, vllm_config, plan)
        else:
            vars(model)[_PLAN] = plan  # for _load_lora_model
        return model

    return load_model


def when_loaded(then: Callable[[nn.Module, Any], None]) -> None:
    """Call ``then(model, vllm_config)`` in this process with every engine's own model, as soon as it has its weights.
    This takes the place of taps, which go into an engine that was given a writer.
    """
    def load(original: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        def load_model(self: Any, vllm_config: Any, model_config: Any, *args: Any, **kwargs: Any) -> nn.Module:
            model = original(self, vllm_config, model_config, *args, **kwargs)
            if model_config is vllm_config.model_config and not _drafts(vllm_config):
                then(model, vllm_config)
            return model

        return load_model

    wrap_when_imported("vllm.model_executor.model_loader.base_loader", {"BaseModelLoader.load_model": load})


def _load_lora_model(original: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    def load_lora_model(self: Any, model: nn.Module, vllm_config: Any, *args: Any, **kwargs: Any) -> nn.Module:
        adaptable = original(self, model, vllm_config, *args, **kwargs)
        plan, config = vars(model).pop(_PLAN, None), from_environment()
        if config is not None and not _drafts(vllm_config):
            tap_model(adaptable, vllm_config, plan or plan_arming(vllm_config, config))
        return adaptable

    return load_lora_model


def _drafts(vllm_config: Any) -> bool:
    """Whether this configuration is a drafter's own: some drafters are loaded with one of theirs as the main one."""
    speculative = vllm_config.speculative_config
    return (speculative is not None and vllm_config.model_config is speculative.draft_model_config
            and speculative.draft_model_config is not speculative.target_model_config)


def _warm_up(original: Callable[..., Any]) -> Callable[..., Any]:
    def compile_or_warm_up_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if worker.CURRENT is None and from_environment() is not None:
            raise StartError(f"vllm-tap: load_format={self.vllm_config.load_config.load_format}: the model was loaded "
                             "without taps, because this format does not use BaseModelLoader.load_model; choose "
                             "another load_format")
        if worker.CURRENT is not None:
            self_test(self.model_runner, worker.CURRENT)
            kind = type(self.model_runner)
            worker.announce(f"{kind.__module__}.{kind.__name__}")
        return result

    return compile_or_warm_up_model


def _wrap_worker(module: types.ModuleType, name: str) -> None:
    """Warm-up, sleep and shutdown of a worker class; one that only inherits shutdown gets one of its own."""
    wrap(module, f"{name}.compile_or_warm_up_model", _warm_up)
    cls = getattr(module, name)
    if "shutdown" not in cls.__dict__:
        inherited = cls.shutdown
        cls.shutdown = lambda self: inherited(self)
    wrap(cls, "shutdown", _shutdown)
    if "sleep" in cls.__dict__:
        wrap(cls, "sleep", _sleep)


def _sleep(original: Callable[..., Any]) -> Callable[..., Any]:
    def sleep(self: Any, *args: Any, **kwargs: Any) -> Any:
        if worker.CURRENT is not None:
            worker.CURRENT.recorder.flush()  # scratch is memory that a deep sleep gives away
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
        return original(self, *args, **kwargs)

    return sleep


def _shutdown(original: Callable[..., Any]) -> Callable[..., Any]:
    def shutdown(self: Any, *args: Any, **kwargs: Any) -> Any:
        worker.stop()
        return original(self, *args, **kwargs)

    return shutdown
