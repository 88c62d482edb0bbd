"""Small models with quantized weights, in the format of compressed-tensors, and what they compute in float32."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.support.models.families import family_model
from tests.support.models.reference import Reference

GROUP = 32  # inputs that share a scale, of 4-bit weights


def quantized_model(kind: str, dtype: str, folder: Path) -> tuple[Path, Reference]:
    """A qwen3 whose linear layers are ``int8`` (a scale an output; their operands are quantized too, a scale a row) or
    ``int4`` (weights alone, a scale for each 32 inputs), below ``folder``; and its reference.
    """
    shutil.copytree(family_model("qwen3", "float32"), model := folder / kind)
    weights, config = load_file(model / "model.safetensors"), json.loads((model / "config.json").read_text())
    plain, stored = {}, {}
    for name, tensor in weights.items():
        if name.startswith("model.layers.") and name.endswith("_proj.weight"):
            codes, scales = _codes(tensor.float(), kind, dtype)
            plain[name] = (codes * scales).flatten(1).to(tensor.dtype)
            stored |= _stored(name, codes, scales, kind)
        else:
            plain[name] = stored[name] = tensor.to(getattr(torch, dtype)).float()
    save_file(plain, model / "model.safetensors", {"format": "pt"})
    reference = Reference(model)
    if kind == "int8":
        for module in [each for each in reference.model.modules() if isinstance(each, nn.Linear)]:
            if module is not reference.model.get_output_embeddings():
                module.register_forward_pre_hook(_as_codes)
    save_file({name: tensor.to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor
               for name, tensor in stored.items()}, model / "model.safetensors", {"format": "pt"})
    (model / "config.json").write_text(json.dumps({**config, "dtype": dtype, "quantization_config": _config(kind)}))
    return model, reference


def _codes(weight: torch.Tensor, kind: str, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers and their scales, [outputs, groups, inputs of a group] and [outputs, groups, 1]."""
    grouped = weight.unflatten(1, (-1, GROUP if kind == "int4" else weight.shape[1]))
    most = 7 if kind == "int4" else 127
    scales = (grouped.abs().amax(-1, keepdim=True) / most).to(getattr(torch, dtype)).float()
    return (grouped / scales).round().clamp(-most, most), scales


def _stored(name: str, codes: torch.Tensor, scales: torch.Tensor, kind: str) -> dict[str, torch.Tensor]:
    if kind == "int8":
        return {name: codes.flatten(1).to(torch.int8), f"{name}_scale": scales[..., 0].contiguous()}
    flat = (codes.flatten(1) + 8).to(torch.int64).unflatten(1, (-1, 8))
    packed = (flat << (4 * torch.arange(8))).sum(-1)
    packed = torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
    shape = torch.tensor([codes.shape[0], codes.shape[1] * codes.shape[2]], dtype=torch.int64)
    return {f"{name}_packed": packed, f"{name}_scale": scales[..., 0].contiguous(), f"{name}_shape": shape}


def _config(kind: str) -> dict[str, Any]:
    plain = {"type": "int", "symmetric": True, "dynamic": False, "observer": "minmax"}
    operands = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    group = {"weights": {**plain, "num_bits": 8, "strategy": "channel"}, "input_activations": operands} \
        if kind == "int8" else {"weights": {**plain, "num_bits": 4, "strategy": "group", "group_size": GROUP}}
    return {"quant_method": "compressed-tensors", "format": "int-quantized" if kind == "int8" else "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], **group}}, "ignore": ["lm_head"],
            "quantization_status": "compressed"}


def _as_codes(_linear: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
    """An operand as it is after it was quantized: 127 codes to each side, a scale a row."""
    rows = args[0]
    scale = rows.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 127
    return ((rows / scale).round() * scale,)
