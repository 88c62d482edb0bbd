"""Checks that vLLM finds in a tapped model what it would find without taps, or the engine does not start.

The exact class of a layer and of its quantization method decides how vLLM gives it adapters, loads it anew and runs its
experts. A layer that vLLM puts in another's place after the taps would also run in ways that no tap sees.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from engine_side.tap.architectures import TapPoint
from schemas.errors import StartError

Classes = Mapping[str, tuple[type, type]]
Homes = Mapping[str, tuple[nn.Module, str]]


def classes(model: nn.Module) -> Classes:
    """Class of each module by its path, and that of its quantization method (NoneType where it has none)."""
    return {path: (type(module), type(getattr(module, "quant_method", None))) for path, module in model.named_modules()}


def check_classes(before: Classes, model: nn.Module) -> None:
    """StartError where a module of ``model`` has another class than ``before`` its taps."""
    after = classes(model)
    for path in before.keys() | after.keys():
        was, is_now = before.get(path), after.get(path)
        if was != is_now:
            raise StartError(f"vllm-tap: {path} is {is_now} with taps and {was} without, so vLLM would serve adapters, "
                             "quantize or load weights differently with vllm-tap; arm other sites, and report it")


def homes(model: nn.Module, points: Iterable[TapPoint]) -> Homes:
    """Tapped modules by their path in ``model``, each with its ``site.layer``s."""
    paths = {id(module): path for path, module in model.named_modules()}
    found: dict[str, tuple[nn.Module, str]] = {}
    for point in points:
        if (path := paths.get(id(point.module))) is not None:  # a router is no module
            said = [found[path][1]] if path in found else []
            found[path] = point.module, ", ".join([*said, f"{point.site}.{point.layer}"])
    return found


def check_homes(before: Homes, model: nn.Module) -> None:
    """StartError where vLLM has put something else in the place of a module since it was tapped."""
    now = dict(model.named_modules())
    for path, (module, sites) in before.items():
        if (other := now.get(path)) is not module:
            raise StartError(f"vllm-tap: vLLM has replaced {path}, a {type(module).__name__} with taps of {sites}, by "
                             f"a {type(other).__name__}, so its rows would not be those that the model computes; arm "
                             "other sites, or start without the vLLM option that replaces it")
