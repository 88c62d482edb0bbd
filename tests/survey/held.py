"""Rows of found sites in a running engine, held against what Hugging Face's modules make of the same tokens.

No name of a module is taken on trust here either: a row of ``attn_out`` must be what some module of Hugging Face's
block returned (times a number of the configuration) in which a row hangs on rows before it, or which norms such a one;
a row of ``mlp_out`` what some other module returned. Which one is said.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from engine_side.tap.architectures import Family
from engine_side.tap.taps import Call, rule_of

# Rows of heads and of the MLP's width have other names and shapes in Hugging Face: docs/evidence/parity.md holds them.
HELD: Final = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "attn_out_raw", "mlp_out_raw", "embed",
               "final_norm")
Key = tuple[str, int]  # site, layer


@dataclass(frozen=True, slots=True)
class Held:
    """The worst row's error over its length, of all layers, and Hugging Face's module of the first layer's rows.

    In bfloat16 it is the median row's of the worst layer: single rows of linear attention come near to zero.
    """

    error: float
    module: str


def watch(model: nn.Module, family: Family) -> dict[Key, list[torch.Tensor]]:
    """By site and layer, the rows [tokens, width] of every step from now on, taken by the rules of taps: of the stream
    and what is added to it, which Hugging Face's modules show.
    """
    rows: dict[Key, list[torch.Tensor]] = {}
    for site, places in family.found.items():
        if site not in HELD:
            continue
        for layer, place in places.items():
            kept = rows.setdefault((site, layer), [])
            _watch(model.get_submodule(place.path), place.rule, kept.append)
    return rows


def _watch(module: nn.Module, name: str, keep: Callable[[torch.Tensor], None]) -> None:
    rule, forward = rule_of(name), module.forward
    places = {name: number for number, name in enumerate(inspect.signature(forward).parameters)}

    def watched(*args: Any, **kwargs: Any) -> Any:
        call = Call(places, args, kwargs)
        if rule.before:
            keep(_flat(rule.rows(call)))
        result = forward(*args, **kwargs)
        if not rule.before:
            keep(_flat(rule.rows(call) if rule.written else rule.rows(module, result)))
        return result

    watched.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    module.forward = watched  # type: ignore[method-assign]


def _flat(rows: torch.Tensor) -> torch.Tensor:
    return rows.detach().reshape(-1, rows.shape[-1]).float().clone()


class Reference:
    """Hugging Face's forward of ``tokens``: all that a block is given and what is made in it, by path."""

    def __init__(self, folder: Path, tokens: list[int], n_layers: int, dtype: str = "float32") -> None:
        self.row = torch.max if dtype == "float32" else torch.median
        images = hasattr(AutoConfig.from_pretrained(folder), "vision_config")
        kind = AutoModelForImageTextToText if images else AutoModelForCausalLM
        self.model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        self.shape = (len(tokens), self.model.get_input_embeddings().weight.shape[-1])
        said = self.model.config.get_text_config().to_dict().values()
        self.factors = [1.0, *dict.fromkeys(one for one in said if isinstance(one, float) and 0 < one != 1)]
        self.inside: list[dict[str, torch.Tensor]] = []
        self.mixing: list[set[str]] = []  # by layer, the modules in which a row hangs on rows before it
        self._again = False
        self.pre: list[torch.Tensor] = []
        blocks = next(module for module in (self.model.get_decoder() if images else self.model).modules()
                      if isinstance(module, nn.ModuleList) and len(module) == n_layers)
        for block in blocks:
            self._listen(block)
        ids = torch.tensor([tokens])
        with torch.inference_mode():
            made = self.model(ids, output_hidden_states=False, use_cache=False)
            del made
            base = getattr(self.model, "model", self.model.base_model)
            for kept in (self.inside, self.mixing, self.pre):
                kept.clear()
            self.final = base(ids, use_cache=False).last_hidden_state[0].float()
            self.embed = self.model.get_input_embeddings().weight[ids[0]].float()

    def _listen(self, block: nn.Module) -> None:
        def began(_module: nn.Module, args: Any, kwargs: Any) -> None:
            self.inside.append({})
            self.mixing.append(set())
            self.pre.append(_first(args, kwargs)[0].float().clone())

        block.register_forward_pre_hook(began, with_kwargs=True)
        for path, module in block.named_modules():
            def heard(module: nn.Module, args: Any, kwargs: Any, result: Any, path: str = path) -> None:
                if self._again:
                    return
                if path and self._mixes(module, args, kwargs, result):
                    self.mixing[-1].add(path)
                for name, value in (("given to ", _first(args, kwargs)), ("", result)):
                    value = value[0] if isinstance(value, tuple) else value
                    if isinstance(value, torch.Tensor) and value.numel() == self.shape[0] * self.shape[1] and \
                            value.shape[-1] == self.shape[1]:
                        self.inside[-1][name + (path or "the block")] = value.reshape(self.shape).float().clone()
            module.register_forward_hook(heard, with_kwargs=True)

    def _mixes(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> bool:
        """Whether the last row of what a module returns is another where the rows before it are."""
        given, made = _first(args, kwargs), result[0] if isinstance(result, tuple) else result
        if not (isinstance(made, torch.Tensor) and isinstance(given, torch.Tensor) and given.is_floating_point()
                and made.numel() == self.shape[0] * self.shape[1] and given.numel() % self.shape[0] == 0):
            return False
        moved = given.reshape(self.shape[0], -1).clone()
        moved[:-1] += torch.randn(moved[:-1].shape, generator=torch.Generator().manual_seed(3))
        self._again = True
        try:
            args, kwargs = _with_first(args, kwargs, moved.reshape(given.shape))
            again = module(*args, **kwargs)
        finally:
            self._again = False
        again = again[0] if isinstance(again, tuple) else again
        return not torch.allclose(again.reshape(self.shape)[-1], made.reshape(self.shape)[-1], rtol=1e-4, atol=1e-6)

    def _attends(self, layer: int, path: str) -> bool:
        """Whether what a module returns comes of attention, or of what a layer has in its stead: it is in a module that
        mixes rows, or is given what one returned and no more.
        """
        inside, mixing = self.inside[layer], self.mixing[layer]

        def within(one: str) -> bool:
            return any(one == other or one.startswith(f"{other}.") for other in mixing)

        given = inside.get(f"given to {path}")
        return within(path) or (given is not None and any(
            torch.equal(rows, given) for name, rows in inside.items() if within(name)))

    def holds(self, rows: Mapping[Key, torch.Tensor]) -> dict[str, Held]:
        """By site, how far rows are from the nearest that Hugging Face makes in that layer's block."""
        found: dict[str, Held] = {}
        for (site, layer), ours in rows.items():
            if site not in HELD:
                continue
            theirs = self._candidates(site, layer)
            errors = {name: self._error(ours, one) for name, one in theirs.items()}
            error = min(errors.values(), default=float("inf"))
            name = next((name for name, one in errors.items() if one <= 2 * error), "")  # the outermost
            before = found.get(site, Held(0.0, name))
            found[site] = Held(max(before.error, error), before.module)
        return found

    def _error(self, ours: torch.Tensor, theirs: torch.Tensor) -> float:
        if ours.shape != theirs.shape:
            return float("inf")
        return float(self.row((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp_min(1e-30)))

    def _candidates(self, site: str, layer: int) -> dict[str, torch.Tensor]:
        if site in ("embed", "final_norm"):
            return {"": self.embed if site == "embed" else self.final}
        inside = self.inside[layer]
        if site == "resid_pre":
            return {"": self.pre[layer]}
        if site == "resid_post":
            return {"": self.pre[layer + 1] if layer + 1 < len(self.pre) else inside["the block"]}
        if site == "resid_mid":
            return inside
        made = {name: rows for name, rows in inside.items() if not name.startswith("given to ") and
                name != "the block" and self._attends(layer, name) is site.startswith("attn")}
        return {f"{name} × {factor:g}" if factor != 1 else name: factor * rows for name, rows in made.items()
                for factor in (self.factors if site.endswith("_out") else (1.0,))}


def _with_first(args: Any, kwargs: Mapping[str, Any], first: torch.Tensor) -> tuple[Any, dict[str, Any]]:
    if args:
        return (first, *args[1:]), dict(kwargs)
    name = next(name for name, value in kwargs.items() if isinstance(value, torch.Tensor))
    return args, {**kwargs, name: first}


def _first(args: Any, kwargs: Mapping[str, Any]) -> Any:
    return args[0] if args else next((value for value in kwargs.values() if isinstance(value, torch.Tensor)), None)
