"""The reference for families that are in no table: a Hugging Face forward in float32, read off its blocks.

The stream is what a block is given and returns; what is added to it is what modules of the block return, found by the
paths of ``tests/support/models/unlisted.py``.
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
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tests.support.models.reference import Edit
from tests.support.models.unlisted import Unlisted

F32 = npt.NDArray[np.float32]


class BlocksReference:
    """Rows of a model by (site, layer) for a token sequence; a layer that lacks a module lacks its site."""

    def __init__(self, model: Path, family: Unlisted) -> None:
        self.family = family
        kind = AutoModelForImageTextToText if family.images else AutoModelForCausalLM
        self.model = kind.from_pretrained(model, dtype=torch.float32, attn_implementation="eager", **family.reads)
        if family.reads.get("tie_word_embeddings"):  # Hugging Face takes both where a file has both
            self.model.get_output_embeddings().weight = self.model.get_input_embeddings().weight
        self.model.eval()
        self._rows: dict[tuple[str, int], torch.Tensor] = {}
        self._attending: dict[int, list[tuple[str, int, str]]] = {}  # by attention's id: site, layer, end
        self.base = base = getattr(self.model, "model", self.model.base_model)  # Llama 4 names another part
        if family.images:
            self.base = base = base.language_model
        (self.blocks,) = [module for name, module in base.named_children() if isinstance(module, nn.ModuleList)
                          and len(module) == self.model.config.get_text_config().num_hidden_layers]
        for layer, block in enumerate(self.blocks):
            block.register_forward_pre_hook(self._given(layer), with_kwargs=True)
            block.register_forward_hook(self._made("resid_post", layer))
            raw_attention, raw_mlp = ((path,) if path else () for path in family.raw)
            for site, paths in (("attn_out", family.attention), ("mlp_out", family.mlp),
                                ("attn_out_raw", raw_attention), ("mlp_out_raw", raw_mlp)):
                module = _first(block, paths)
                if module is not None:
                    factor = family.factor if site in ("attn_out", "mlp_out") else 1.0
                    module.register_forward_hook(self._made(site, layer, factor))
            for site, (path, end) in family.more.items():
                if (part := _first(block, (path,))) is not None:
                    self._watch(part, end, site, layer)
        if self._attending:
            self._watch_attention()

    def _watch(self, module: nn.Module, end: str, site: str, layer: int) -> None:
        """Keep rows of a site from one of the ends of a module that ``Unlisted.more`` knows."""
        kind, _, number = end.partition(" ")
        if kind == "in":
            module.register_forward_pre_hook(self._given(layer, site), with_kwargs=True)
        elif kind == "out":
            module.register_forward_hook(self._made(site, layer, place=int(number or 0)))
        elif kind == "chosen":  # by falling weight, as rows of ours are
            module.register_forward_pre_hook(lambda _module, args: self._keep(
                site, layer, args[1].gather(-1, args[2].argsort(dim=-1, descending=True)).float()))
        elif kind == "scored":
            module.register_forward_hook(lambda router, _args, result: self._keep(
                site, layer, result[0].topk(router.top_k).indices.float()))
        else:
            self._attending.setdefault(id(module), []).append((site, layer, end))

    def _watch_attention(self) -> None:
        """What attends has no module in Hugging Face: watch the function of the model's family."""
        family = importlib.import_module(type(self.model).__module__)
        original = family.eager_attention_forward

        def watched(module: nn.Module, query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            for site, layer, end in self._attending.get(id(module), ()):
                rows = self._rotated(query if end == "query" else key)
                if end == "shared key":
                    rows = rows[:, :1, :, -self.model.config.qk_rope_head_dim :]
                self._keep(site, layer, rows[0].transpose(0, 1).flatten(1))
            return original(module, query, key, *args, **kwargs)

        family.eager_attention_forward = watched

    def _rotated(self, heads: torch.Tensor) -> torch.Tensor:
        """Rows of heads [1, heads, tokens, width] with the numbers of a rotated pair side by side, as vLLM has them."""
        if not self.family.halves:
            return heads
        rotary = self.model.config.qk_rope_head_dim
        pairs = torch.stack(heads[..., -rotary:].chunk(2, dim=-1), dim=-1)
        return torch.cat([heads[..., :-rotary], pairs.flatten(-2)], dim=-1)

    def _given(self, layer: int, site: str = "resid_pre") -> Callable[..., Any]:
        def hook(_module: Any, args: Any, kwargs: Any) -> Any:
            rows = self._changed(site, layer, args[0] if args else kwargs["hidden_states"])
            self._keep(site, layer, rows)
            return ((rows, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": rows})

        return hook

    def _made(self, site: str, layer: int, factor: float = 1.0, place: int = 0) -> Callable[..., None]:
        def hook(_module: Any, _args: Any, result: Any) -> Any:
            rows = result[place] if isinstance(result, tuple) else result
            changed = self._changed(site, layer, rows)
            self._keep(site, layer, factor * changed)
            if changed is rows:
                return None
            return (changed, *result[1:]) if isinstance(result, tuple) else changed

        return hook

    def _changed(self, site: str, layer: int, rows: torch.Tensor) -> torch.Tensor:
        """Rows as an edit of the forward at hand makes them; the same tensor where there is none."""
        for edit in self._edits.get((site, layer), ()):
            rows = edit(rows.reshape(-1, rows.shape[-1])).reshape(rows.shape)
        return rows

    def _keep(self, site: str, layer: int, rows: torch.Tensor) -> None:
        self._rows[site, layer] = rows.detach().reshape(-1, rows.shape[-1]).clone()

    _edits: Mapping[tuple[str, int], Sequence[Edit]] = {}

    def edited(self, tokens: tuple[int, ...], edits: Mapping[tuple[str, int], Sequence[Edit]]
               ) -> tuple[dict[tuple[str, int], F32], F32]:
        """Rows, and log-probabilities [tokens, vocabulary], of a forward in which rows of some places are changed."""
        self._rows, self._edits = {}, edits
        try:
            with torch.inference_mode():
                ids = torch.tensor(tokens)[None]
                chances = self.model(ids, **self._seen(ids)).logits[0].float().log_softmax(-1)
        finally:
            self._edits = {}
        return {key: rows.numpy() for key, rows in self._rows.items()}, chances.numpy()

    def _seen(self, ids: torch.Tensor) -> dict[str, Any]:
        """What a forward is given beside the tokens."""
        return {}

    @lru_cache(maxsize=256)  # noqa: B019 (one reference a family and session)
    def rows(self, tokens: tuple[int, ...]) -> dict[tuple[str, int], F32]:
        """``{(site, layer): [tokens, width]}``."""
        self._rows = {}
        ids = torch.tensor(tokens)
        with torch.inference_mode():
            self._keep("final_norm", 0, self.base(ids[None]).last_hidden_state)
            if not self.family.images:
                self._keep("embed", 0, self.family.scale * self.model.get_input_embeddings().weight[ids])
        return self._read()

    def _read(self) -> dict[tuple[str, int], F32]:
        """What the last forward has left, with what follows from it."""
        if self.family.between:
            for layer in range(len(self.blocks)):
                self._keep("resid_mid", layer, self._rows["resid_pre", layer] + self._rows["attn_out", layer])
        return {key: rows.numpy() for key, rows in self._rows.items()}


def _first(block: nn.Module, paths: tuple[str, ...]) -> nn.Module | None:
    """The first of the modules that a block has, of the class that is asked for."""
    named = dict(block.named_modules())
    for path, _, kind in (text.partition(":") for text in paths):
        if path in named and type(named[path]).__name__.startswith(kind):
            return named[path]
    return None
