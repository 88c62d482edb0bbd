"""A sweep of activation patching: what is asked, what is known before its first cell, and the measure of one.

A cell is a site, layer and position: the corrupted prompt, with that one row set to the clean run's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import xxhash

from schemas.errors import ArgumentError
from schemas.sites import ask_site
from vllm_tap.client.answers import Answer
from vllm_tap.client.captures import F32

if TYPE_CHECKING:
    from vllm_tap.client.async_client import AsyncClient, AsyncGeneration
    from vllm_tap.client.http import AnyPrompt

__all__ = ["Cell", "LogitDifference", "Metric", "Prepared", "SweepAsked", "measure", "prepare"]

_CHANCES: Final = 20  # of the likeliest tokens, which an answer brings along
_AT_ONCE_MAX: Final = 16


@dataclass(frozen=True, slots=True)
class LogitDifference:
    """The logit of the token ``right`` less that of ``wrong``, at the first token of the answer; tokens by their ids,
    or by a text that is one token.
    """

    right: int | str
    wrong: int | str


Metric = LogitDifference | Callable[[Answer], float]
Cell = tuple[str, int, int]  # site, layer, position


@dataclass(frozen=True, slots=True)
class SweepAsked:
    """The arguments of ``patch_sweep``; None: every layer that is armed, every position of the prompt."""

    clean: AnyPrompt
    corrupted: AnyPrompt
    sites: Sequence[str]
    layers: Sequence[int] | None
    positions: Sequence[int] | None
    metric: Metric

    def __post_init__(self) -> None:
        if isinstance(self.sites, str) or not self.sites:
            raise ArgumentError("sites", self.sites, 'a list such as ["resid_post", "attn_out"]')
        if not isinstance(self.metric, LogitDifference) and not callable(self.metric):
            raise ArgumentError("metric", self.metric, "LogitDifference(right, wrong), or a function of the answer")
        for name, chosen in (("layers", self.layers), ("positions", self.positions)):
            if chosen is not None and (not len(chosen) or len(set(chosen)) != len(chosen) or min(chosen) < 0):
                raise ArgumentError(name, list(chosen), "numbers from 0, each once; leave it out for all")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A sweep whose two prompts were run: ``rows`` of the clean one by site and layer, [tokens, width];
    ``clean_metric`` and ``corrupted_metric`` are the ends of the scale.
    """

    model: str
    clean: list[int]
    corrupted: list[int]
    sites: list[str]
    layers: list[int]
    positions: list[int]
    cells: list[Cell]
    tokens: tuple[int, int] | None  # ids of right and wrong
    metric: Metric
    at_once: int
    rows: dict[tuple[str, int], F32] = field(repr=False)
    clean_metric: float = 0.0
    corrupted_metric: float = 0.0

    @property
    def name_of_metric(self) -> str:
        """The name of the measure, for people and for a file that a run goes on with."""
        if isinstance(self.metric, LogitDifference):
            return f"logit of {self.metric.right!r} less that of {self.metric.wrong!r}"
        return str(getattr(self.metric, "__qualname__", type(self.metric).__name__))

    @property
    def identity(self) -> dict[str, Any]:
        """The inputs that a cell's measure depends on; rows by their digest."""
        digest = xxhash.xxh3_128()
        for place in sorted(self.rows):
            digest.update(np.ascontiguousarray(self.rows[place]).tobytes())
        tokens = None if self.tokens is None else list(self.tokens)
        return {"model": self.model, "clean": self.clean, "corrupted": self.corrupted, "metric": self.name_of_metric,
                "tokens": tokens, "rows": digest.hexdigest()}


async def prepare(client: AsyncClient, asked: SweepAsked) -> Prepared:
    """Run both prompts once; ArgumentError where the sweep cannot be had, before any cell."""
    capabilities = await client.capabilities()
    edits = capabilities.get("edits") or {}
    armed = {site: list(layers) for site, layers in edits.get("armed", {}).items()}
    sites = [_site(name, armed) for name in asked.sites]
    layers = sorted({layer for site in sites for layer in armed[site]} if asked.layers is None else asked.layers)
    places = [(site, layer) for site in sites for layer in layers if layer in armed[site]]
    for layer in layers:
        if not any(place[1] == layer for place in places):
            raise ArgumentError("layers", layer, f"not armed for edits; armed: {armed} (serve with --edit)")
    clean, corrupted = [await _tokens(client, prompt) for prompt in (asked.clean, asked.corrupted)]
    if len(clean) != len(corrupted):
        raise ArgumentError("corrupted", f"{len(corrupted)} tokens", f"the clean prompt has {len(clean)}: a row is set "
                            "to that of the same position; choose prompts of one length")
    positions = list(range(len(clean))) if asked.positions is None else sorted(asked.positions)
    if positions[-1] >= len(clean):
        raise ArgumentError("positions", positions[-1], f"the prompts have {len(clean)} tokens, counted from 0")
    tokens = None
    if isinstance(asked.metric, LogitDifference):
        tokens = (await _token(client, "right", asked.metric.right), await _token(client, "wrong", asked.metric.wrong))
    answer = await client.generate(clean, 1, {"sites": sites, "layers": layers, "positions": "prompt", "codec": "raw"},
                                   **_FIELDS)
    rows = {(site, layer): await answer.capture.get(site, layer) for site, layer in places}
    cells = [(*place, position) for place, position in product(places, positions)]
    begun = Prepared(await client.model(), clean, corrupted, sites, layers, positions, cells, tokens, asked.metric,
                     max(1, min(_AT_ONCE_MAX, int(edits.get("rows", 0)) // 2)), rows)
    ends = [await _measured(client, begun, prompt, None) for prompt in (clean, corrupted)]
    if ends[0] == ends[1]:
        raise ArgumentError("metric", begun.name_of_metric, f"is {ends[0]:g} for both prompts: there is nothing to "
                            "scale by; choose another metric, or another corrupted prompt")
    return replace(begun, clean_metric=ends[0], corrupted_metric=ends[1])


async def measure(client: AsyncClient, sweep: Prepared, cell: Cell) -> float:
    """The metric of the corrupted prompt with one row of the clean run."""
    site, layer, position = cell
    edit = {"site": f"{site}.{layer}", "op": "set", "positions": [position],
            "rows": sweep.rows[site, layer][position : position + 1]}
    return await _measured(client, sweep, sweep.corrupted, [edit])


_FIELDS: Final[dict[str, Any]] = {"temperature": 0, "logprobs": _CHANCES, "return_tokens_as_token_ids": True}


async def _measured(client: AsyncClient, sweep: Prepared, prompt: list[int], edit: list[dict[str, Any]] | None
                    ) -> float:
    answer = await client.generate(prompt, 1, edit=edit, **_FIELDS)
    if sweep.tokens is None:
        assert callable(sweep.metric)
        return float(sweep.metric(answer))
    known = answer.response["choices"][0]["logprobs"]["top_logprobs"][0]
    right, wrong = [known[name] if (name := f"token_id:{token}") in known
                    else await _asked_for(client, prompt, token, edit) for token in sweep.tokens]
    return float(right - wrong)


async def _asked_for(client: AsyncClient, prompt: list[int], token: int, edit: list[dict[str, Any]] | None) -> float:
    """The log-probability of a token that is not among the likeliest: as the next one of the prompt."""
    answer = await client.generate([*prompt, token], 1, edit=edit, temperature=0, prompt_logprobs=0)
    told = answer.response["choices"][0]["prompt_logprobs"][-1]
    return float(told[str(token)]["logprob"])


def _site(name: str, armed: dict[str, list[int]]) -> str:
    site, layer = ask_site(name, "sites", ArgumentError)
    if layer is not None:
        raise ArgumentError("sites", name, f"has a layer in it; name the site, and layers=[{layer}]")
    if site not in armed:
        raise ArgumentError("sites", name, f"not armed for edits; armed: {', '.join(armed) or 'nothing'} (serve with "
                                           "--edit)")
    return site


async def _tokens(client: AsyncClient, prompt: AnyPrompt, **fields: Any) -> list[int]:
    """The tokens that a prompt is, as the model is given them."""
    if not isinstance(prompt, str) and all(isinstance(token, int) for token in prompt):
        return list(prompt)
    answer: AsyncGeneration = await client.generate(prompt, 1, {"sites": []}, temperature=0, **fields)
    return list((await answer.capture.manifest()).prompt_token_ids)


async def _token(client: AsyncClient, name: str, given: int | str) -> int:
    if isinstance(given, int):
        return given
    found = await _tokens(client, given, add_special_tokens=False)
    if len(found) != 1:
        raise ArgumentError(f"metric.{name}", given, f"is {len(found)} tokens ({found}); give a text of one, with the "
                                                     "space that is before it in a sentence, or the token's id")
    return found[0]

