"""Fusions that vLLM's compiler is told to make, and the armed sites that would take one apart."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, Final

from torch import nn

from engine_side.tap.architectures import TapPoint, of_model

logger = logging.getLogger("vllm.tap")

# Sites whose row exists only where the fusion that goes over it is not made: its pass has one of these in its name.
_TAKEN_APART: Final = {
    "mlp_post": ("act_quant",),
    "z": ("attn_quant",),
    "q": ("qk_norm_rope",),
    "k": ("qk_norm_rope",),
    "attn_out": ("allreduce_rms",),
    "mlp_out": ("allreduce_rms",),
}


def fuses(passes: Any, *parts: str) -> bool:
    """Whether vLLM's compiler is told to fuse something that has one of ``parts`` in its name.

    ``passes``: ``compilation_config.pass_config``.
    """
    return any(chosen and any(part in name for part in parts) for name, chosen in vars(passes).items())


def computed_apart(points: Iterable[TapPoint], compilation: Any) -> list[str]:
    """Sites whose taps end a fusion of this engine's: vLLM then runs other kernels, which may round otherwise.

    ``compilation``: vLLM's ``compilation_config``. To be asked before the taps are installed.
    """
    from vllm.config import CompilationMode

    passes = compilation.pass_config if compilation.mode == CompilationMode.VLLM_COMPILE else SimpleNamespace()

    def apart(point: TapPoint) -> bool:
        if point.site in ("mlp_post", "z") and multiplies(of_model(point.module)):
            return False  # there is nothing to quantize
        return fuses(passes, *_TAKEN_APART.get(point.site, ())) or (point.site == "mlp_post" and _takes(point.module))

    return list(dict.fromkeys(point.site for point in points if apart(point)))


def multiplies(projection: Any) -> bool:
    """Whether a linear layer multiplies the very rows that it is given."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    method = getattr(projection, "quant_method", None)
    return isinstance(projection, nn.Linear) if method is None else type(method) is UnquantizedLinearMethod


def warn(sites: list[str]) -> None:
    """Name the sites that change how this engine computes."""
    if sites:
        logger.warning(
            "vllm-tap: without taps this engine fuses %s with the next operation, and with taps it does not, so tokens "
            "may differ from an engine without taps; leave these sites out of --arm to keep the same tokens",
            ", ".join(sites))


def _takes(projection: Any) -> bool:
    """Whether a projection takes codes that the activation before it makes in one kernel with it."""
    try:
        from vllm.model_executor.layers.fusion.quant_activation import get_input_quant_key
    except ImportError:  # an older vLLM, which knows no such kernel
        return False
    return get_input_quant_key(projection) is not None
