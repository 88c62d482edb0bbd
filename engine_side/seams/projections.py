"""Joint projections of q, k and v whose matrix product is written into staging itself: nothing is copied.

A copy is a kernel of its own in every layer, because nothing fuses with the product before it. It takes 1.3 % of a
decode step of a 3B model on an H200. Where the product is a plain one, the same kernel gets staging for its output
instead. That output must not be changed in place afterwards, as a rotary embedding may do. So this is done only where q
and k are normed first, which makes new tensors. It is not done where vLLM is told to fuse norm and rotation into one
kernel that works in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from engine_side.seams.compiled.fusions import fuses, multiplies
from engine_side.tap import taps
from engine_side.tap.architectures import TapPoint, of_model

BUFFER = "vllm_tap_straight"

_library = torch.library.Library("vllm_tap", "FRAGMENT")
_library.define("project(Tensor rows, Tensor weight, Tensor(a!) buffer) -> ()")


def _project(rows: torch.Tensor, weight: torch.Tensor, buffer: torch.Tensor) -> None:
    """Write ``rows`` [n, hidden] · ``weight`` [width, hidden]ᵀ to the first n of ``buffer`` [tokens, width].

    It gets the whole buffer: told to write into a part, the compiler lets it write elsewhere and copies that, twice.
    """
    torch.mm(rows, weight.t(), out=buffer[: rows.shape[0]])


def _project_fake(rows: torch.Tensor, weight: torch.Tensor, buffer: torch.Tensor) -> None:
    """Return nothing."""


for _device in ("CPU", "CUDA"):
    _library.impl("project", _project, _device)
torch.library.register_fake("vllm_tap::project", _project_fake, lib=_library)


def find_writers(model: nn.Module, passes: Any) -> dict[int, Callable[[Any, torch.Tensor], None]]:
    """Writers into staging by the ``id`` of their projection, for every projection of a model that can write there.

    ``passes``: vLLM's choice of what its compiler fuses (``compilation_config.pass_config``).
    """
    if fuses(passes, "qk_norm_rope"):
        return {}
    return {id(module.qkv_proj): write_into for module in model.modules()
            if _normed(module) and _plain(module.qkv_proj)}


def copied_where_quantized(points: Iterable[TapPoint]) -> list[TapPoint]:
    """The ``points``, with the rule ``copied operand`` in place of ``operand`` where a projection quantizes the row
    first.

    Such a projection may be fused with the activation, and take numbers that were never rounded to a row. From staging
    it would make other codes (1.6 % of them in fp8) than without a tap. Only one that multiplies the row as it is reads
    it from staging.
    """
    return [replace(point, rule="copied operand") if point.rule == "operand" and not multiplies(point.module)
            else point for point in points]


def _normed(module: nn.Module) -> bool:
    """Whether an attention makes new tensors of q and k before anything else is done to them."""
    parts = [getattr(module, name, None) for name in ("qkv_proj", "q_norm", "k_norm")]
    return all(isinstance(part, nn.Module) and not isinstance(part, nn.Identity) for part in parts)


def _plain(projection: Any) -> bool:
    """Whether a projection is ``F.linear`` on a GPU; quantized, packed or adapted ones are copied."""
    if of_model(projection) is not projection:
        return False  # adapters add to the product in place, and call it with the layer inside
    try:
        from vllm import envs
        from vllm.model_executor.layers.linear import UnquantizedLinearMethod
        from vllm.model_executor.layers.utils import default_unquantized_gemm, dispatch_unquantized_gemm

        method = projection.quant_method
        product = getattr(method, "_gemm_impl", None) or dispatch_unquantized_gemm()  # newer ones keep it
        return bool(type(method) is UnquantizedLinearMethod and product is default_unquantized_gemm
                    and not envs.VLLM_BATCH_INVARIANT and not getattr(envs, "VLLM_LORA_ENABLE_DUAL_STREAM", False)
                    and projection.bias is None and projection.weight.is_cuda)
    except (ImportError, AttributeError):
        return False


def write_into(projection: Any, buffer: torch.Tensor) -> None:
    """Make ``projection`` write its product into the first rows of ``buffer`` [tokens, width]."""
    projection.register_buffer(BUFFER, buffer, persistent=False)
    taps.put(projection.quant_method, "apply", _apply)


def _apply(_method: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    assert bias is None
    rows = x.reshape(-1, x.shape[-1])
    buffer: torch.Tensor = getattr(layer, BUFFER)
    torch.ops.vllm_tap.project(rows, layer.weight, buffer)
    return buffer[: rows.shape[0]].view(*x.shape[:-1], buffer.shape[-1])
