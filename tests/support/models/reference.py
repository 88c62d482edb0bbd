"""The reference: a Hugging Face forward of the same tokens in float32, every site × layer, on the CPU.

Rows are read off Hugging Face's own modules, by the paths that its families use, not by ours.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM

F32 = npt.NDArray[np.float32]
Edit = Callable[[torch.Tensor], torch.Tensor]  # of rows [tokens, width]

# By kind of block: site → (module below the block, "in" or "out").
_LLAMA = {
    "resid_pre": ("", "in"), "resid_post": ("", "out"), "resid_mid": ("post_attention_layernorm", "in"),
    "attn_out": ("self_attn", "out"), "mlp_out": ("mlp", "out"), "mlp_post": ("mlp.down_proj", "in"),
    "q": ("self_attn.q_proj", "out"), "k": ("self_attn.k_proj", "out"), "v": ("self_attn.v_proj", "out"),
    "z": ("self_attn.o_proj", "in"),
}
_GEMMA = {
    **_LLAMA, "resid_mid": ("pre_feedforward_layernorm", "in"), "attn_out": ("post_attention_layernorm", "out"),
    "mlp_out": ("post_feedforward_layernorm", "out"), "attn_out_raw": ("self_attn", "out"),
    "mlp_out_raw": ("mlp", "out"),
}
_MIXTURE = {site: place for site, place in _LLAMA.items() if site != "mlp_post"}
_BLOCKS: dict[str, dict[str, tuple[str, str]]] = {
    "gemma2": _GEMMA, "gemma3_text": _GEMMA, "mixtral": _MIXTURE, "qwen3_moe": _MIXTURE,
    "phi3": {site: place for site, place in _LLAMA.items() if site not in ("q", "k", "v")},
    "opt": {
        "resid_pre": ("", "in"), "resid_post": ("", "out"), "resid_mid": ("final_layer_norm", "in"),
        "attn_out": ("self_attn", "out"), "mlp_out": ("fc2", "out"), "mlp_post": ("fc2", "in"),
        "q": ("self_attn.q_proj", "out"), "k": ("self_attn.k_proj", "out"), "v": ("self_attn.v_proj", "out"),
        "z": ("self_attn.out_proj", "in"),
    },
    "gpt_neox": {
        "resid_pre": ("", "in"), "resid_mid": ("post_attention_layernorm", "in"), "resid_post": ("", "out"),
        "attn_out": ("attention", "out"), "mlp_out": ("mlp", "out"), "mlp_post": ("mlp.dense_4h_to_h", "in"),
        "z": ("attention.dense", "in"),
    },
}


class Reference:
    """Rows of a model by (site, layer) for a token sequence."""

    def __init__(self, model: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
        self.model.eval()
        self._rows: dict[tuple[str, int], torch.Tensor] = {}
        self._tokens = torch.zeros(0, dtype=torch.long)
        kind = self.model.config.model_type
        base = self.model.base_model
        base = getattr(base, "decoder", base)
        for index, block in enumerate(base.layers):
            for site, (path, side) in _BLOCKS.get(kind, _LLAMA).items():
                self._watch(block.get_submodule(path), side, site, index)
            if kind in ("mixtral", "qwen3_moe") and hasattr(block.mlp, "experts"):  # some layers may be dense
                block.mlp.gate.register_forward_hook(self._router(index))
            if kind == "phi3":
                block.self_attn.qkv_proj.register_forward_hook(self._joint(index))
        norm = base.final_layer_norm if kind in ("opt", "gpt_neox") else base.norm
        if norm is not None:
            self._watch(norm, "out", "final_norm", 0)
        self._embedding = self.model.get_input_embeddings()
        self._rotary()

    def _watch(self, module: torch.nn.Module, side: str, site: str, layer: int) -> None:
        def before(_module: Any, args: Any, kwargs: Any) -> Any:
            given = args[0] if args else kwargs["hidden_states"]
            now = self._edited(site, layer, given)
            self._keep(site, layer, now)
            if now is not given and site == "resid_mid":  # the block goes on with that tensor as well
                given.copy_(now)
            elif now is not given:
                return ((now, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": now})
            return None

        def after(_module: Any, _args: Any, output: Any) -> Any:
            given = output[0] if isinstance(output, tuple) else output
            now = self._edited(site, layer, given)
            self._keep(site, layer, now)
            if now is not given:
                return (now, *output[1:]) if isinstance(output, tuple) else now
            return None

        if side == "in":
            module.register_forward_pre_hook(before, with_kwargs=True)
        else:
            module.register_forward_hook(after)

    def _edited(self, site: str, layer: int, rows: torch.Tensor) -> torch.Tensor:
        """Rows as an edit of the forward at hand makes them; the same tensor where there is none."""
        for edit in self._edits.get((site, layer), ()):
            rows = edit(rows.reshape(len(self._tokens), -1)).reshape(rows.shape)
        return rows

    def _keep(self, site: str, layer: int, rows: torch.Tensor) -> None:
        self._rows[site, layer] = rows.detach().reshape(len(self._tokens), -1)

    def _router(self, layer: int) -> Callable[..., None]:
        def hook(_gate: Any, _args: Any, output: Any) -> None:
            logits, _weights, ids = output
            self._keep("router_logits", layer, logits)
            self._keep("experts", layer, ids.float())

        return hook

    def _joint(self, layer: int) -> Callable[..., torch.Tensor]:
        def hook(_module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
            config = self.model.config
            size = config.hidden_size // config.num_attention_heads
            sizes = [config.num_attention_heads * size] + [config.num_key_value_heads * size] * 2
            parts = [self._edited(site, layer, rows)
                     for site, rows in zip("qkv", output.split(sizes, dim=-1), strict=True)]
            for site, rows in zip("qkv", parts, strict=True):
                self._keep(site, layer, rows)
            return torch.cat(parts, dim=-1)

        return hook

    def _rotary(self) -> None:
        """Queries and keys after the rotary embedding have no module: watch the function of the model's family."""
        family = importlib.import_module(type(self.model).__module__)
        original = getattr(family, "apply_rotary_pos_emb", None)
        if original is None:
            return

        def watched(*args: Any, **kwargs: Any) -> Any:
            q, k = original(*args, **kwargs)
            if self._calls is not None:
                q, k = (self._edited(site, self._calls, rows.transpose(1, 2)).transpose(1, 2)
                        for site, rows in (("q_rot", q), ("k_rot", k)))
                for site, rows in (("q_rot", q), ("k_rot", k)):
                    self._keep(site, self._calls, rows[0].transpose(0, 1))
                self._calls += 1
            return q, k

        family.apply_rotary_pos_emb = watched

    _calls: int | None = None
    _edits: Mapping[tuple[str, int], Sequence[Edit]] = {}

    def edited(self, tokens: tuple[int, ...], edits: Mapping[tuple[str, int], Sequence[Edit]]
               ) -> tuple[dict[tuple[str, int], F32], F32]:
        """Rows, and log-probabilities [tokens, vocabulary], of a forward in which rows of some places are changed."""
        self._tokens, self._edits = torch.tensor(tokens), edits
        self._rows, self._calls = {}, 0
        try:
            with torch.inference_mode():
                chances = self.model(self._tokens[None]).logits[0].float().log_softmax(-1)
                self._keep("embed", 0, self._embedding.weight[self._tokens])
        finally:
            self._calls, self._edits = None, {}
        return {key: value.numpy().copy() for key, value in self._rows.items()}, chances.numpy()

    @lru_cache(maxsize=256)  # noqa: B019 (one reference a model and session)
    def rows(self, tokens: tuple[int, ...]) -> dict[tuple[str, int], F32]:
        """``{(site, layer): [tokens, width]}``."""
        self._tokens = torch.tensor(tokens)
        self._rows, self._calls = {}, 0
        with torch.inference_mode():
            self.model(self._tokens[None])
            self._calls = None
            self._keep("embed", 0, self._embedding.weight[self._tokens])
        return {key: value.numpy().copy() for key, value in self._rows.items()}

    def attentions(self, tokens: tuple[int, ...]) -> list[F32]:
        """The weights of every layer, as its eager attention returns them: ``[heads, queries, keys]`` each."""
        self._tokens = torch.tensor(tokens)
        with torch.inference_mode():
            answer = self.model(self._tokens[None], output_attentions=True)
        return [weights[0].numpy().copy() for weights in answer.attentions]
