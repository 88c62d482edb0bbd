"""How a decoder block exposes its parts, one entry a family; verified against the loaded model at start."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

from schemas.errors import StartError


@dataclass(frozen=True, slots=True)
class Block:
    """Where the parts of a block are. The block's forward returns (hidden, residual): the stream is their sum."""

    layers: str
    attention: str
    mlp: str
    sites: tuple[str, ...] = ("resid_post", "attn_out", "mlp_out")


_LLAMA: Final = Block("model.layers", "self_attn", "mlp")

ARCHITECTURES: Final[dict[str, Block]] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": _LLAMA,
    "Qwen3ForCausalLM": _LLAMA,
}

MEANING: Final[dict[str, str]] = {
    "resid_post": "raw weights; hidden + residual as the block returns them, before any norm",
    "attn_out": "raw weights; attention output as added to the residual stream",
    "mlp_out": "raw weights; MLP output as added to the residual stream",
}


@dataclass(frozen=True, slots=True)
class Point:
    """One place to tap: the module whose forward is wrapped, and what of its result is the row."""

    site: str
    layer: int
    module: nn.Module
    result: str  # "sum" of (hidden, residual), or the "tensor" itself


def find_points(model: nn.Module, names: list[str], sites: tuple[str, ...], n_layers: int) -> Iterator[Point]:
    """Every (site, layer) to tap; StartError names what was looked for and what was found."""
    block = next((ARCHITECTURES[name] for name in names if name in ARCHITECTURES), None)
    if block is None:
        raise StartError(f"vllm-tap: no tap is known for the architecture {', '.join(names)}; "
                         f"known: {', '.join(ARCHITECTURES)}")
    if unknown := [site for site in sites if site not in block.sites]:
        raise StartError(f"vllm-tap: cannot arm {', '.join(unknown)} on {', '.join(names)}; "
                         f"this model offers: {', '.join(block.sites)}")
    layers = _part(model, block.layers)
    if not isinstance(layers, nn.ModuleList) or len(layers) != n_layers:
        length = len(layers) if hasattr(layers, "__len__") else "-"
        raise StartError(f"vllm-tap: looked for {n_layers} blocks at {block.layers}, "
                         f"found {type(layers).__name__} of length {length}")
    for index, layer in enumerate(layers):
        parts: dict[str, tuple[nn.Module, str]] = {
            "resid_post": (layer, "sum"),
            "attn_out": (_part(layer, block.attention), "tensor"),
            "mlp_out": (_part(layer, block.mlp), "tensor"),
        }
        for site in sites:
            yield Point(site, index, *parts[site])


def _part(module: nn.Module, path: str) -> Any:
    found: Any = module
    for name in path.split("."):
        if not hasattr(found, name):
            raise StartError(f"vllm-tap: looked for {path} on {type(module).__name__}, "
                             f"found {', '.join(name for name, _ in module.named_children()) or 'no parts'}")
        found = getattr(found, name)
    return found
