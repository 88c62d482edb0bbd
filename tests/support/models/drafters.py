"""Small drafters for speculative decoding that guess rightly at times: made of the tiny model's own weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM


def draft_model(target: Path, folder: Path) -> Path:
    """A model of its own: the target with noise on its output layer, so that it often says something else."""
    shutil.copytree(target, folder)
    weights = load_file(folder / "model.safetensors")
    name = "lm_head.weight" if "lm_head.weight" in weights else "model.embed_tokens.weight"
    table = weights[name].float()
    noise = torch.randn(table.shape, generator=torch.Generator().manual_seed(1))
    weights[name] = (table + noise * table.std() * 0.4).to(weights[name].dtype)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def eagle_head(target: Path, folder: Path) -> Path:
    """An EAGLE head of one layer that adds nothing to its projection of (next token's embedding, last hidden state).

    The projection is the least-squares one on random tokens: its guesses are bad ones, but not all of them.
    """
    folder.mkdir()
    config = json.loads((target / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    weights = load_file(target / "model.safetensors")
    head = {name.removeprefix("model."): tensor for name, tensor in weights.items()
            if name.startswith("model.layers.0.") and "input_layernorm" not in name}
    for name in ("layers.0.self_attn.o_proj.weight", "layers.0.mlp.down_proj.weight"):
        head[name] = torch.zeros_like(head[name])
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    tokens = torch.randint(10, 2000, (8, 400), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        states = model.base_model(tokens).last_hidden_state
        seen = torch.cat([model.get_input_embeddings()(tokens[:, 1:]), states[:, :-1]], dim=-1)
        solution = torch.linalg.lstsq(seen.flatten(0, 1), states[:, 1:].flatten(0, 1)).solution
    head["fc.weight"] = solution.T.contiguous().to(weights["model.embed_tokens.weight"].dtype)
    save_file(head, folder / "model.safetensors", {"format": "pt"})
    return folder
