"""Fusions that vLLM's compiler is told to make, and the armed sites that would take one apart."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

from torch import nn

from engine_side.tap.architectures import TapPoint, of_model

logger = logging.getLogger("vllm.tap")

# Sites whose row exists only where the fusion that goes over it is not made: its pass has one of these in its name.
_TAKEN_APART: Final = {
    "mlp_post": ("act_quant",),
    "z": ("attn_quant",),
    "q_latent": ("norm_quant",),
    "mix_post": ("norm_quant",),
    "q": ("qk_norm_rope",),
    "k": ("qk_norm_rope",),
}


def fuses(passes: Any, *parts: str) -> bool:
    """Whether vLLM's compiler is told to fuse something that has one of ``parts`` in its name.

    ``passes``: ``compilation_config.pass_config``.
    """
    return any(chosen and any(part in name for part in parts) for name, chosen in vars(passes).items())


@dataclass(frozen=True, slots=True)
class Reduced:
    """Places whose rows an all-reduce made, before a norm adds them to the stream. To read or change the rows there
    ends the fusion of the two. The norm's own sum (``resid_mid``) comes out of the fusion, and may be read.
    """

    read: frozenset[str] = frozenset()
    changed: frozenset[str] = frozenset()

    def ended_by(self, point: TapPoint, edited: bool) -> bool:
        """Whether a place ends such a fusion. The input of a first block is fused with a norm that adds nothing, and
        comes out of that fusion too. So does a sum that the model itself writes out, because vLLM first makes it one
        with its norm.
        """
        if point.site in ("embed", "resid_pre") and point.layer == 0:
            return edited and bool(self.changed)
        if edited:
            return point.site in self.changed
        return point.site in self.read and (" + " in point.rule or not point.site.startswith("resid_"))


def reduced(model: nn.Module, sites: Collection[str], ranks: int) -> Reduced:
    """Such places of a model that has these ``sites`` on so many tensor-parallel ranks.

    Where a model norms what a sublayer made before it is added, as Gemma does, that norm has its argument come out of
    the fusion.
    """
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

    if ranks == 1 or not any(isinstance(module, RMSNorm | GemmaRMSNorm) for module in model.modules()):
        return Reduced()
    read, changed = set[str](), set[str]()
    for made, summed, behind in (("attn_out", (), ("resid_mid",)), ("mlp_out", ("resid_pre", "resid_post"), ())):
        if f"{made}_raw" in sites:
            changed.add(f"{made}_raw")
        else:
            read |= {made, *summed}
            changed |= {made, *summed, *behind}
    return Reduced(frozenset(read), frozenset(changed))


NOTHING: Final = Reduced()


def computed_apart(points: Iterable[TapPoint], compilation: Any, reduced: Reduced = NOTHING,
                   edited: Iterable[TapPoint] = ()) -> list[str]:
    """Sites that end a fusion of this engine's where they are captured (``points``) or ``edited``: vLLM then runs other
    kernels, which may round otherwise.

    ``compilation``: vLLM's ``compilation_config``. To be asked before the taps are installed.
    """
    from vllm.config import CompilationMode

    passes = compilation.pass_config if compilation.mode == CompilationMode.VLLM_COMPILE else SimpleNamespace()

    def apart(point: TapPoint, edit: bool) -> bool:
        taken = _TAKEN_APART.get(point.site, ())
        if any(part.endswith("quant") for part in taken) and multiplies(of_model(point.module)):
            return False  # there is nothing to quantize
        return (fuses(passes, *taken)
                or (fuses(passes, "allreduce_rms") and reduced.ended_by(point, edit))
                or (point.site == "mlp_post" and _takes(point.module)))

    ended = [point.site for edit, each in ((False, points), (True, edited)) for point in each if apart(point, edit)]
    return list(dict.fromkeys(ended))


def multiplies(projection: Any) -> bool:
    """Whether a linear layer multiplies the very rows that it is given."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    method = getattr(projection, "quant_method", None)
    return isinstance(projection, nn.Linear) if method is None else type(method) is UnquantizedLinearMethod


def warn(sites: list[str]) -> None:
    """Name the sites that change how this engine computes."""
    if sites:
        logger.warning(
            "vllm-tap: without taps this engine fuses what makes %s with the next operation, and with taps it does "
            "not, so tokens may differ from an engine without taps; leave these sites out of --arm, --probe and --edit "
            "to keep the same tokens", ", ".join(sites))


def _takes(projection: Any) -> bool:
    """Whether a projection takes codes that the activation before it makes in one kernel with it."""
    try:
        from vllm.model_executor.layers.fusion.quant_activation import get_input_quant_key
    except ImportError:  # an older vLLM, which knows no such kernel
        return False
    return get_input_quant_key(projection) is not None
