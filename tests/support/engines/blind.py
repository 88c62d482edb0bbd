"""Starts engines that must refuse to start (see test_blind.py), each in a fork of a process that imports vLLM once.

``python -m tests.support.engines.blind`` reads a line of JSON for each: its ``case``, the ``settings`` of its
environment and the file ``said`` for what it says. It answers with the exit status.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def _bypassed_attention() -> dict[str, Any]:
    """A model that calls its attention around ``self_attn.forward``, as a fused implementation could."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.qwen3 import Qwen3Attention, Qwen3DecoderLayer, Qwen3ForCausalLM

    from vllm_tap.tiny_model import tiny_model

    class BypassingLayer(Qwen3DecoderLayer):  # type: ignore[misc]
        def forward(self, positions: Any, hidden_states: Any, residual: Any) -> Any:
            if residual is None:
                residual = hidden_states
                hidden_states = self.input_layernorm(hidden_states)
            else:
                hidden_states, residual = self.input_layernorm(hidden_states, residual)
            hidden_states = Qwen3Attention.forward(self.self_attn, positions, hidden_states)
            hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
            return self.mlp(hidden_states), residual

    class BypassingModel(Qwen3ForCausalLM):  # type: ignore[misc]
        def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
            super().__init__(vllm_config=vllm_config, prefix=prefix)
            for layer in self.model.layers:
                layer.__class__ = BypassingLayer

    ModelRegistry.register_model("Qwen3ForCausalLM", BypassingModel)
    return {"model": str(tiny_model())}


def _changed_embeddings() -> dict[str, Any]:
    """A model that is not quite what its name says: its embeddings are doubled before the first block."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

    class DoublingModel(Qwen3ForCausalLM):  # type: ignore[misc]
        def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
            super().__init__(vllm_config=vllm_config, prefix=prefix)
            looked_up = self.model.embed_input_ids
            self.model.embed_input_ids = lambda input_ids: 2 * looked_up(input_ids)

    ModelRegistry.register_model("Qwen3ForCausalLM", DoublingModel)
    return {**_tiny(), "enforce_eager": True}


def _scaled_mlp() -> dict[str, Any]:
    """A model that is not quite what its name says: it adds less to the stream than its MLP returns."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.qwen3 import Qwen3DecoderLayer, Qwen3ForCausalLM

    class ScalingLayer(Qwen3DecoderLayer):  # type: ignore[misc]
        def forward(self, positions: Any, hidden_states: Any, residual: Any) -> Any:
            hidden_states, residual = super().forward(positions, hidden_states, residual)
            return 0.22 * hidden_states, residual

    class ScalingModel(Qwen3ForCausalLM):  # type: ignore[misc]
        def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
            super().__init__(vllm_config=vllm_config, prefix=prefix)
            for layer in self.model.layers:
                layer.__class__ = ScalingLayer

    ModelRegistry.register_model("Qwen3ForCausalLM", ScalingModel)
    return {**_tiny(), "enforce_eager": True}


def _scaled_mlp_in_stale_memory() -> dict[str, Any]:
    """The same, where whatever a dummy step leaves unwritten reads as no number."""
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN
    return _scaled_mlp()


def _unknown_architecture() -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2,
        "vocab_size": 512, "n_positions": 256, "torch_dtype": "float32"}))
    return {"model": str(folder), "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 128}


def _tiny() -> dict[str, Any]:
    from vllm_tap.tiny_model import tiny_model

    return {"model": str(tiny_model())}


def _sharded() -> dict[str, Any]:
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    return {**_tiny(), "tensor_parallel_size": 2}


CASES = {"sharded": _sharded, "bypassed": _bypassed_attention, "changed": _changed_embeddings, "scaled": _scaled_mlp,
         "stale": _scaled_mlp_in_stale_memory,
         "unknown": _unknown_architecture, "tiny": _tiny}



def start(named: str) -> None:
    """The engine of a case, to its refusal."""
    from vllm import LLM

    case, _, unproved = named.partition(", ")
    if unproved:  # as a model of whose weights the search can tell nothing: what is compiled is looked at all the same
        from engine_side.seams import loader

        loader.look_into = lambda _model, _config, plan: plan
    LLM(**{"max_model_len": 512, "dtype": "float32", **CASES[case]()})
    print("STARTED")


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # some vLLM logs to where answers are read from
    import vllm.entrypoints.llm  # noqa: F401 (what all of them need)

    for line in sys.stdin:
        asked = json.loads(line)
        if not (child := os.fork()):
            os.environ.update(asked["settings"])
            said = os.open(asked["said"], os.O_WRONLY | os.O_CREAT)
            os.dup2(said, 1)
            os.dup2(said, 2)
            start(asked["case"])
            break
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answers, flush=True)
