"""Scenarios: kinds of engine, and the captures that each of them is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from schemas.codecs import CODECS

EVERY_SITE = "resid_post,attn_out,mlp_out,mlp_post,q,k,v"
DRAFTER = "drafter"  # in the place of layers: those of bench.shapes.drafter_layers
PROMPTS = {"layers": DRAFTER, "positions": "prompt", "codec": "raw16"}


def _edited(layers: Any) -> dict[str, Any]:
    """A vector added in layers, for every request of a batch; nothing is captured."""
    return {"edit": [{"site": "resid_post", "layers": layers, "op": "add", "vector": "vector", "scale": 0.5}]}


@dataclass(frozen=True, slots=True)
class Engine:
    """One process with one engine; ``scenarios`` are capture specs by name, or edits; None: nothing is asked."""

    scenarios: dict[str, dict[str, Any] | None]
    arm: str = ""  # "" without taps
    edit: str = ""  # what is armed for edits
    store: str = "shm"  # or "disk"
    eager: bool = False
    hooks: bool = False
    builtin: bool = False
    drafter: bool = False  # what is armed, or extracted by vLLM, is what a drafter is trained on, of prompts
    warmups: int = 1
    iterations_max: int = 1000
    every_set: bool = True  # False: it stands in the first set only, where its ratio is far from its bar


ENGINES: dict[str, Engine] = {
    "base": Engine({"base": None}),
    "again": Engine({"base, another process": None}),  # how far two processes of one kind are apart
    "tap": Engine({
        "idle": None,
        "zero layers": {"sites": []},
        "one probe": {"probe": ["probe"]},
        "one layer": {"layers": [8], "codec": "int8b64"},
        "last prompt token": {"positions": "last_prompt", "codec": "int8b64"},
        "every 4th layer": {"layers": "::4", "codec": "int8b64"},
        "four layers, prompts": PROMPTS,
        **{name: {"codec": name} for name, family in CODECS.items() if not family.sites},
    }, arm="resid_post"),
    "layer": Engine({"one layer armed, idle": None, "one layer armed, captured": {"codec": "int8b64"}},
                    arm="resid_post.8"),
    "edit": Engine({"four layers armed for edits, idle": None, "one layer edited": _edited(layers=[8]),
                    "four layers edited": _edited(layers=[2, 5, 8, 11])},
                   arm="resid_post.8", edit="resid_post.2,resid_post.5,resid_post.8,resid_post.11"),
    "edit-all": Engine({"every layer armed for edits, idle": None, "every layer edited": _edited(layers="all")},
                       arm="resid_post.8", edit="resid_post"),
    "drafter": Engine({"four layers armed, idle": None, "four layers armed, prompts": PROMPTS}, arm="resid_post",
                      drafter=True),
    "disk": Engine({"int8b64, disk": {"codec": "int8b64"}, "raw16, disk": {"codec": "raw16"}}, arm="resid_post",
                   store="disk", iterations_max=4, every_set=False),
    "sites": Engine({"every site armed, idle": None}, arm=EVERY_SITE, every_set=False),
    "eager": Engine({"base, eager": None}, eager=True, iterations_max=3, every_set=False),
    "hooks": Engine({"eager, hooks and .cpu()": None}, eager=True, hooks=True, iterations_max=2, every_set=False),
    "builtin": Engine({"vLLM extract_hidden_states": None}, builtin=True, iterations_max=10, every_set=False),
    "builtin-drafter": Engine({"vLLM extract_hidden_states, four layers, prompts": None}, builtin=True, drafter=True),
}
