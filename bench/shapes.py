"""Models and loads of the benchmarks: random weights, since speed does not depend on their values."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file


@dataclass(frozen=True, slots=True)
class Shape:
    """A Qwen3-shaped model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int = 151936
    head_dim: int = 128

    @property
    def kv_bytes_a_token(self) -> int:
        """Of the cache, in 16 bits."""
        return 4 * self.layers * self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Load:
    """What one iteration generates."""

    batch: int
    prompt: int
    generated: int
    gathered: bool = False  # the engine's first step finds all requests there, so that all runs have the same steps


SHAPES = {
    "small": Shape(1024, 12, 8, 4, 3072, 8192),
    "3b": Shape(2048, 36, 16, 2, 11008),
    "8b": Shape(4096, 36, 32, 8, 12288),
}
LOADS = {
    "small": Load(8, 128, 32),
    "hook": Load(32, 512, 128),  # the case that is published for hooks
    "hook-gathered": Load(32, 512, 128, gathered=True),
    "decode1": Load(1, 16, 128),
    "decode32": Load(32, 16, 128, gathered=True),
    "decode256": Load(256, 16, 128, gathered=True),
    "prefill8k": Load(4, 8192, 2, gathered=True),
    "prompts": Load(32, 512, 1, gathered=True),  # what a drafter's training reads: prompts, nothing generated
    "prompts2k": Load(32, 2048, 1, gathered=True),
}


def prompts(load: Load, seed: str | int) -> list[dict[str, list[int]]]:
    """A batch of random tokens, the same for the same seed, as ``LLM`` takes them."""
    draw = random.Random(seed)
    return [{"prompt_token_ids": [draw.randrange(10, 8000) for _ in range(load.prompt)]} for _ in range(load.batch)]


def drafter_layers(name: str) -> list[int]:
    """Blocks whose output an EAGLE-3 drafter is trained on: three that vLLM chooses, and the last."""
    layers = SHAPES[name].layers
    return [1, layers // 2 - 1, layers - 4, layers - 1]


def make_probe(name: str, folder: Path) -> str:
    """What registers a probe of one direction, called probe, in the middle of a shape's layers."""
    shape = SHAPES[name]
    save_file({"directions": np.random.default_rng(0).standard_normal(shape.hidden, np.float32)},
              folder / "probe.safetensors")
    return f"probe={folder}/probe.safetensors@resid_post.{shape.layers // 2}"


def make_vector(name: str, folder: Path) -> str:
    """What registers a vector for edits, called vector."""
    save_file({"vector": np.random.default_rng(1).standard_normal(SHAPES[name].hidden, np.float32)},
              folder / "vector.safetensors")
    return f"vector={folder}/vector.safetensors"


def make_model(name: str, inside: Path) -> Path:
    """A folder in ``inside`` with the configuration of a shape; engines load it with random weights."""
    shape, folder = SHAPES[name], inside / f"model-{name}"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim, "intermediate_size": shape.intermediate, "vocab_size": shape.vocabulary,
        "max_position_embeddings": 16384, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False,
        "hidden_act": "silu", "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
    }))
    return folder
