"""LoRA adapters as PEFT writes them, made on the spot, and references that have them merged into their weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.support.models.blocks_reference import BlocksReference
from tests.support.models.reference import Reference

RANK, ALPHA = 8, 16

# Every projection of a block, by its name in Hugging Face's classes.
_LLAMA = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_ATTENTION = _LLAMA[:4]
TARGETS: dict[str, tuple[str, ...]] = {
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "mixtral": _ATTENTION,
    "qwen3_moe": _ATTENTION,
    "opt": ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"),
    "gpt_neox": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
}
EMBEDDED = ("llama", "qwen3")  # families whose embedding vLLM gives adapters, too


def targets(family: str) -> tuple[str, ...]:
    """The projections of a family that an adapter changes."""
    return TARGETS.get(family, _LLAMA)


def make(reference: Reference | BlocksReference, family: str, folder: Path, seed: int) -> Path:
    """A random adapter of all projections of a family; ``reference`` has its weights from now on."""
    noise, tensors = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    names = targets(family)
    for name, module in reference.model.named_modules():
        end = name.rpartition(".")[2]
        if end in names:
            outputs, inputs = module.weight.shape
            a = torch.randn(RANK, inputs, generator=noise) / 16
            b = torch.randn(outputs, RANK, generator=noise) / 8
            tensors |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
            module.weight.data += ALPHA / RANK * b @ a
        elif end == "embed_tokens" and family in EMBEDDED:
            a = torch.randn(RANK, module.num_embeddings, generator=noise) / 8
            b = torch.randn(module.embedding_dim, RANK, generator=noise) / 8
            tensors |= {f"base_model.model.{name}.lora_embedding_A": a,
                        f"base_model.model.{name}.lora_embedding_B": b}
            module.weight.data += ALPHA / RANK * (b @ a).T
            names = (*names, end)
    assert tensors
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "bias": "none",
        "target_modules": list(names)}))
    return folder
