"""Sites: the named points of a decoder block, and their TransformerLens names in both spellings.

The canonical names are ours (``resid_post``); wherever a site is accepted, so are ``resid_post.12``,
``blocks.12.hook_resid_post`` and the newer ``blocks.12.hook_out``. A name with a layer fixes that layer. Beside those
of the model, every registered probe is a site (schemas.probes): ``probe.NAME``. A few TransformerLens names are one
site on most models and another on some (``BY_MODEL``): they are accepted where the model is known.
TransformerLens names: https://transformerlensorg.github.io/TransformerLens/
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from schemas.errors import SpecError

__all__ = [
    "BY_MODEL",
    "PROBE",
    "SITES",
    "Site",
    "ask_site",
    "edited_place",
    "has_heads",
    "is_probe",
    "is_site",
    "layers_by_site",
    "lens_name",
    "lens_names",
    "names_of",
    "parse_site",
    "site_meant",
    "site_named",
    "transformer_lens_name",
]


@dataclass(frozen=True, slots=True)
class Site:
    """One named point of the model.

    ``width`` says what a row's length follows: hidden, mlp, q_heads, kv_heads, q_latent, latent,
    rotary, mixed, steps, mixer, experts, chosen_experts, scores.
    ``per_layer`` is False for points that exist once a model. ``meaning`` is shown in manifests and help.
    """

    name: str
    width: str
    per_layer: bool
    meaning: str
    lens: tuple[str, ...]  # TransformerLens names, "{l}" for the layer; the first is what we print
    ids: bool = False  # rows are whole numbers that no codec may change: always stored ``raw``

_TABLE: Final = (
    Site("resid_pre", "hidden", True, "residual stream entering the block",
         ("blocks.{l}.hook_resid_pre", "blocks.{l}.hook_in")),
    Site("resid_mid", "hidden", True, "residual stream after attention was added, before the MLP",
         ("blocks.{l}.hook_resid_mid",)),
    Site("resid_post", "hidden", True, "residual stream leaving the block",
         ("blocks.{l}.hook_resid_post", "blocks.{l}.hook_out")),
    Site("attn_out", "hidden", True, "what attention adds to the residual stream",
         ("blocks.{l}.hook_attn_out",)),
    Site("mlp_out", "hidden", True, "what the MLP adds to the residual stream",
         ("blocks.{l}.hook_mlp_out",)),
    Site("attn_out_raw", "hidden", True, "attention output before a norm that follows it", ()),
    Site("mlp_out_raw", "hidden", True, "MLP output before a norm that follows it", ()),
    Site("mlp_post", "mlp", True, "MLP activation before the down projection", ("blocks.{l}.mlp.hook_post",)),
    Site("q", "q_heads", True, "queries before the rotary embedding", ("blocks.{l}.attn.hook_q",)),
    Site("k", "kv_heads", True, "keys before the rotary embedding", ("blocks.{l}.attn.hook_k",)),
    Site("v", "kv_heads", True, "values", ("blocks.{l}.attn.hook_v",)),
    Site("q_rot", "q_heads", True, "queries as the attention kernel gets them", ("blocks.{l}.attn.hook_rot_q",)),
    Site("k_rot", "kv_heads", True, "keys as the attention kernel gets them", ("blocks.{l}.attn.hook_rot_k",)),
    Site("z", "q_heads", True, "attention result before the output projection", ("blocks.{l}.attn.hook_z",)),
    Site("q_latent", "q_latent", True, "compressed queries of latent attention, after their norm", ()),
    Site("kv_latent", "latent", True, "compressed keys and values of latent attention, after their norm", ()),
    Site("k_pe", "rotary", True, "the rotated part of the keys of latent attention, shared by all heads", ()),
    Site("mix_in", "mixed", True, "what a mixer (Mamba, linear attention) makes of a token by its input projection, "
         "before the convolution", ()),
    Site("mix_steps", "steps", True, "what a mixer makes of a token by a second, narrower projection, as of decay and "
         "update in Qwen3-Next", ()),
    Site("mix_post", "mixer", True, "mixer result before the output projection, after its norm", ()),
    Site("router_logits", "experts", True, "expert router logits", ("blocks.{l}.mlp.gate.hook_out",)),
    Site("experts", "chosen_experts", True, "ids of the experts that the token was sent to, heaviest first",
         ("blocks.{l}.mlp.hook_expert_indices", "blocks.{l}.mlp.gate.hook_expert_indices"), ids=True),
    Site("embed", "hidden", False, "token embeddings", ()),
    Site("final_norm", "hidden", False,
         "output of the final norm, after its weight (TransformerLens's hook_normalized is before it)",
         ("ln_final.hook_out",)),
)


@dataclass(frozen=True, slots=True)
class ByModel:
    """TransformerLens names, and the sites of which one is meant, on some models none; ``why`` they differ."""

    lens: tuple[str, ...]
    sites: tuple[str, ...]
    why: str


_OWN: Final = "what the module itself returns, before a norm that follows it on some models"
BY_MODEL: Final = {
    "attn.hook_out": ByModel(("blocks.{l}.attn.hook_out",), ("attn_out", "attn_out_raw"), _OWN),
    "mlp.hook_out": ByModel(("blocks.{l}.mlp.hook_out",), ("mlp_out", "mlp_out_raw"), _OWN),
    "hook_embed": ByModel(("hook_embed", "embed.hook_out"), ("embed", "resid_pre.0"),
                          "embeddings as they enter the first block, which some models scale before"),
}
_ELSEWHERE: Final = {"ln_final.hook_normalized": "TransformerLens takes it before the norm's weight; final_norm "
                                                 "(ln_final.hook_out) is after it"}

SITES: Final[dict[str, Site]] = {site.name: site for site in _TABLE}
_NAMED: Final = {name: site.name for site in _TABLE for name in site.lens} | {
    name: key for key, named in BY_MODEL.items() for name in named.lens}
_FIXED: Final = {name: key for name, key in _NAMED.items() if "{l}" not in name}
_PER_LAYER: Final = {name.removeprefix("blocks.{l}."): key for name, key in _NAMED.items() if "{l}" in name}
_BLOCK: Final = re.compile(r"blocks\.([0-9]{1,4})\.(.+)", re.ASCII)
_SHORT: Final = re.compile(r"([a-z_]+)\.([0-9]{1,4})", re.ASCII)
_NAME_MAX: Final = 64  # longer ones are not misspelt
PROBE: Final = "probe."
_PROBE: Final = re.compile(r"(probe\.[A-Za-z0-9][A-Za-z0-9_-]{0,63})(?:\.([0-9]{1,4}))?", re.ASCII)


def parse_site(name: str, field: str = "sites", error: type[SpecError] = SpecError) -> tuple[str, int | None]:
    """``(site, layer)`` of a name in any accepted spelling; layer is None where the name fixes none.

    >>> parse_site("blocks.16.hook_out")
    ('resid_post', 16)

    Refuses names that the model decides (``BY_MODEL``).
    """
    site, layer = ask_site(name, field, error)
    return site_meant(site, {}, name, field, error), layer


def ask_site(name: str, field: str = "sites", error: type[SpecError] = SpecError, valid: Iterable[str] = ()
             ) -> tuple[str, int | None]:
    """``parse_site`` for whom ``site_meant`` will tell the model: of a name that it decides the key of ``BY_MODEL``.

    ``valid``: what the error of an unknown one lists; every site where not given.
    """
    if name in SITES:
        return name, None
    if name in _FIXED:
        return _FIXED[name], None
    if name in _ELSEWHERE:
        raise error(field, name, _ELSEWHERE[name])
    if (match := _BLOCK.fullmatch(name)) and match[2] in _PER_LAYER:
        return _PER_LAYER[match[2]], int(match[1])
    if (match := _SHORT.fullmatch(name)) and match[1] in SITES and SITES[match[1]].per_layer:
        return match[1], int(match[2])
    if match := _PROBE.fullmatch(name):
        return match[1], None if match[2] is None else int(match[2])
    raise error(field, name, f"unknown site; {_meant(name)}valid: {', '.join(valid or SITES)}, those of blocks "
                             "also with a layer (resid_post.12), or a TransformerLens name such as "
                             "blocks.12.hook_resid_post")


def site_meant(site: str, names: Mapping[str, str], name: str, field: str = "sites",
               error: type[SpecError] = SpecError) -> str:
    """The site of what ``ask_site`` found, on a model with these ``names`` (``Armed.names``)."""
    if site not in BY_MODEL:
        return site
    if site not in names:
        raise error(field, name, f"{BY_MODEL[site].why}: which site that is depends on the model; ask for "
                                 f"{' or '.join(BY_MODEL[site].sites)}")
    return names[site]


def names_of(engine: Mapping[str, Any]) -> dict[str, str]:
    """``Armed.names`` of an engine as a manifest has it; none of one that did not say."""
    found: dict[str, str] = engine.get("armed", {}).get("names", {})
    return found


def _meant(name: str) -> str:
    """The nearest name that there is, as a question."""
    from difflib import get_close_matches  # only an error needs it

    if len(name) > _NAME_MAX:
        return ""
    if match := _BLOCK.fullmatch(name):
        found = [f"blocks.{match[1]}.{near}" for near in get_close_matches(match[2], _PER_LAYER, 1)]
    else:
        layer = match[2] if (match := _SHORT.fullmatch(name)) else ""
        found = [f"{near}.{layer}" if layer and SITES[near].per_layer else near
                 for near in get_close_matches(name.partition(".")[0], SITES, 1)]
    return f"did you mean {found[0]}? " if found else ""


def layers_by_site(places: Iterable[str]) -> dict[str, list[int] | None]:
    """The layers of each site of ``places`` (sites, or ``site.layer``), in order; None for all that it has."""
    found: dict[str, list[int] | None] = {}
    for site, layer in map(parse_site, places):
        known = found.setdefault(site, [])
        found[site] = None if layer is None or known is None else sorted({*known, layer})
    return found


def is_probe(site: str) -> bool:
    """Whether a site is a probe's: its rows are float32 scores, whatever the model's dtype is."""
    return site.startswith(PROBE)


def is_site(name: str) -> bool:
    """Whether the name is a site's canonical one."""
    return name in SITES or ((match := _PROBE.fullmatch(name)) is not None and match[2] is None)


def site_named(name: str) -> Site:
    """The site of a canonical name; of a probe, one made up."""
    return SITES[name] if name in SITES else Site(name, "scores", True, "scores of a probe", ())


def has_heads(site: str) -> bool:
    """Whether the rows of a site are one head after the other."""
    return site_named(site).width in ("q_heads", "kv_heads")


def edited_place(site: str, layer: int) -> tuple[str, int]:
    """The place of a site and layer: what enters a block is what the one before has handed on."""
    return ("resid_post", layer - 1) if site == "resid_pre" and layer else (site, layer)


def transformer_lens_name(site: str, layer: int, names: Mapping[str, str] | None = None) -> str | None:
    """The TransformerLens name of a site on a model with these ``names``, or None where it has none."""
    name = lens_name(site, names or {})
    return None if name is None else name.format(l=layer)


def lens_name(site: str, names: Mapping[str, str]) -> str | None:
    """The same with {l} for the layer."""
    return next(iter(lens_names(site, names)), None)


def lens_names(site: str, names: Mapping[str, str]) -> tuple[str, ...]:
    """Every TransformerLens name of a site on a model with these ``names``, {l} for the layer; the first is printed."""
    own = [name for key, meant in names.items() if meant == site and key in BY_MODEL for name in BY_MODEL[key].lens]
    return (*site_named(site).lens, *own)
