"""The residual stream between two blocks: read at the norm that makes it, and kept in staging for the norm behind it.

A block's first norm adds hidden and residual. A tap takes that sum, so nothing is added twice and vLLM's fusions with
the norm stay (``at_norms``).

The sum goes on to the second norm, behind attention, where the compiled graph is cut. So it is written for that norm,
and once more into staging. That costs 10 µs of a decode step of a 3B model on an H200, and a millisecond of a step of
8,192 tokens. Where the second norm reads staging (``read_back``), the first write has no reader and is left out. The
sum is the same, bit for bit.

Staging may be read, not changed. So this is done only with norms that vLLM leaves to the compiler, and with none of its
fusions that update the residual in place. It is done only where the graph is cut, which rounds the sum to the model's
dtype. In one whole graph the compiler may go on with more bits than a row has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from engine_side.seams.compiled.fusions import fuses
from engine_side.tap import taps
from engine_side.tap.architectures import TapPoint
from engine_side.tap.staging import Staging


def at_norms(points: Iterable[TapPoint], adding: Mapping[int, nn.Module]) -> list[TapPoint]:
    """The points, with those of the stream between two blocks moved to the norm that makes the same sum.

    A kernel that fuses this norm with the all-reduce before it makes no other: to add the two once more would end the
    fusion. A point stays at its block if the stream goes on to another stage of a pipeline. An edit between two blocks
    is one of what the first returns, so the norm has it too. ``adding``: as of ``find_adding``; none of a model that
    may add rows of images to the stream there.
    """
    norms = {layer: norm for layer, norm in adding.items() if _adds(norm)}
    ahead = {"resid_pre": 0, "resid_post": 1}  # blocks

    def moved(point: TapPoint) -> TapPoint:
        added = point.rule in ("stream_in", "stream_out") or (" + " in point.rule and " × " not in point.rule)
        norm = norms.get(point.layer + ahead[point.site]) if added and point.site in ahead else None
        return point if norm is None else replace(point, module=norm, rule="second")

    return [moved(point) for point in points]


def read_back(carried: Iterable[tuple[tuple[nn.Module, nn.Module], TapPoint]], staging: Staging, vllm_config: Any
              ) -> int:
    """Make second norms read the stream from staging where that is safe; returns how many."""
    if not functional(vllm_config):
        return 0
    found = [(norms[1], staging.of_layer(point.site, point.layer))
             for norms, point in carried if all(map(_adds, norms))]
    for norm, buffer in found:
        taps.read_back(norm, buffer)
    return len(found)


def functional(vllm_config: Any) -> bool:
    """Whether norms make new tensors of the stream as it is rounded, and leave what they are given as it is."""
    try:
        from vllm import envs

        compilation = vllm_config.compilation_config
        fused = fuses(compilation.pass_config, "norm", "rms", "padding", "enable_sp", "gemm_comms")
        adding = vllm_config.kernel_config.ir_op_priority.fused_add_rms_norm
        return (adding[0] == "native" and not fused and not envs.VLLM_BATCH_INVARIANT and _cut(compilation))
    except (ImportError, AttributeError, IndexError):
        return False


def _cut(compilation: Any) -> bool:
    """Whether operations are run as they are written, or the graph is cut at attention before it is compiled."""
    from vllm.config import CompilationMode

    return (compilation.mode == CompilationMode.NONE or compilation.backend == "eager"
            or (compilation.mode == CompilationMode.VLLM_COMPILE and compilation.splitting_ops_contain_attention()
                and not compilation.use_inductor_graph_partition))


def _adds(norm: nn.Module) -> bool:
    """Whether a norm is one of vLLM's that adds a residual."""
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

    return isinstance(norm, RMSNorm | GemmaRMSNorm)
