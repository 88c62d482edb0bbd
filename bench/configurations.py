"""Ways to run vLLM that a tap must not change: what ``LLM`` gets, and small models with real numbers for each."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Inductor picks nothing by timing: two compilations of one model agree bit for bit. vLLM 0.26 needs the last two said.
DETERMINISTIC = {"deterministic": True, "combo_kernels": True, "benchmark_combo_kernel": False}


@dataclass(frozen=True, slots=True)
class Configuration:
    """``model`` is one of MODELS; ``options`` go to ``LLM``; ``adapter``: every second request has a LoRA adapter."""

    model: str = "dense"
    options: dict[str, Any] = field(default_factory=dict)
    adapter: bool = False

    @property
    def ranks(self) -> int:
        """Devices that one engine takes."""
        return int(self.options.get("tensor_parallel_size", 1) * self.options.get("pipeline_parallel_size", 1)
                   * self.options.get("data_parallel_size", 1))


CONFIGURATIONS: dict[str, Configuration] = {
    "base": Configuration(),
    "eager": Configuration(options={"enforce_eager": True}),
    "float16": Configuration(options={"dtype": "float16"}),
    "full graphs": Configuration(options={"compilation_config": {"cudagraph_mode": "FULL"}}),
    "piecewise graphs": Configuration(options={"compilation_config": {"cudagraph_mode": "PIECEWISE"}}),
    "fp8 by token": Configuration(options={"quantization": "fp8"}),
    "fp8 static": Configuration("static"),
    "fp8 blocks": Configuration("blocks"),
    "fp8 K/V": Configuration(options={"kv_cache_dtype": "fp8"}),
    "LoRA": Configuration(options={"enable_lora": True, "max_lora_rank": 16}, adapter=True),
    "n-gram drafts": Configuration(options={"speculative_config": {
        "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}}),
    "steps of 256": Configuration(options={"max_num_batched_tokens": 256, "max_num_seqs": 64}),
    "steps of 16384": Configuration(options={"max_num_batched_tokens": 16384}),
    "400 sequences": Configuration(options={"max_num_seqs": 400}),
    "mixture": Configuration("mixture"),
    "tensor parallel": Configuration(options={"tensor_parallel_size": 2}),
    "pipeline parallel": Configuration(options={"pipeline_parallel_size": 2}),
    "tensor parallel, NCCL": Configuration(options={"tensor_parallel_size": 2, "disable_custom_all_reduce": True}),
    "fp8 mixture": Configuration("mixture", {"quantization": "fp8"}),
}


def _dense(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Qwen3Config(
        hidden_size=1024, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2, head_dim=128,
        intermediate_size=3072, vocab_size=8192, max_position_embeddings=2048, tie_word_embeddings=False,
        bos_token_id=1, eos_token_id=2, initializer_range=0.05)).to(torch.bfloat16).save_pretrained(folder)


def _mixture(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Qwen3MoeConfig(
        hidden_size=1024, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2, head_dim=128,
        intermediate_size=2048, moe_intermediate_size=512, num_experts=16, num_experts_per_tok=4, vocab_size=8192,
        max_position_embeddings=2048, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
        initializer_range=0.05, decoder_sparse_step=1)).to(torch.bfloat16).save_pretrained(folder)


def _quantized(folder: Path, about: dict[str, Any], scaled: Callable[[Any], dict[str, Any]]) -> None:
    """The dense model with every projection in fp8; ``scaled`` makes the tensors of one, by the end of their names."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(make_model("dense", folder.parent), folder)
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            tensors |= {name.removesuffix("weight") + end: one for end, one in scaled(tensor.float()).items()}
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", **about}
    (folder / "config.json").write_text(json.dumps(config))


def _static(folder: Path) -> None:
    import torch

    def scaled(weight: Any) -> dict[str, Any]:
        scale = weight.abs().max() / 448
        return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale,
                "input_scale": torch.tensor(0.05)}  # what is beyond 22 is cut off, as calibrated scales do

    _quantized(folder, {"activation_scheme": "static"}, scaled)


def _blocks(folder: Path) -> None:
    import torch

    def scaled(weight: Any) -> dict[str, Any]:
        blocks = weight.view(weight.shape[0] // 128, 128, weight.shape[1] // 128, 128)
        scale = blocks.abs().amax(dim=(1, 3)) / 448
        codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        return {"weight": codes.view(weight.shape), "weight_scale_inv": scale}

    _quantized(folder, {"activation_scheme": "dynamic", "weight_block_size": [128, 128]}, scaled)


MODELS: dict[str, Callable[[Path], None]] = {"dense": _dense, "mixture": _mixture, "static": _static, "blocks": _blocks}


def make_model(name: str, inside: Path) -> Path:
    """The folder of a model, made in ``inside`` where it is not there yet."""
    folder = inside / name
    if not folder.exists():
        MODELS[name](folder)
    return folder


def make_adapter(inside: Path) -> Path:
    """The folder of a LoRA adapter of the dense model: rank 16, every projection, random."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = inside / "adapter"
    if folder.exists():
        return folder
    folder.mkdir()
    torch.manual_seed(1)
    model = load_file(make_model("dense", inside) / "model.safetensors")
    shapes = {name: tensor.shape for name, tensor in model.items() if name.endswith("_proj.weight")}
    tensors = {}
    for name, (out, width) in shapes.items():
        path = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{path}.lora_A.weight"] = torch.randn(16, width, dtype=torch.bfloat16) * width ** -0.5
        tensors[f"{path}.lora_B.weight"] = torch.randn(out, 16, dtype=torch.bfloat16) * 0.05
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 16, "lora_alpha": 32, "bias": "none",
        "target_modules": sorted({name.split(".")[-2] for name in shapes})}))
    return folder
