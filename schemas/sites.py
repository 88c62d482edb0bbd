"""Sites: the named points of a decoder block, and their TransformerLens names in both spellings.

The canonical names are ours (``resid_post``); wherever a site is accepted, so are ``resid_post.12``,
``blocks.12.hook_resid_post`` and the newer ``blocks.12.hook_out``. A name with a layer fixes that layer. Beside those
of the model, every registered probe is a site (schemas.probes): ``probe.NAME``.
TransformerLens names: https://transformerlensorg.github.io/TransformerLens/
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from schemas.errors import SpecError

__all__ = ["PROBE", "SITES", "Site", "has_heads", "is_probe", "is_site", "layers_by_site", "parse_site", "site_named",
           "transformer_lens_name"]


@dataclass(frozen=True, slots=True)
class Site:
    """One named point of the model.

    ``width`` says what a row's length follows: hidden, mlp, q_heads, kv_heads, experts, chosen_experts, scores.
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
         ("blocks.{l}.hook_attn_out", "blocks.{l}.attn.hook_out")),
    Site("mlp_out", "hidden", True, "what the MLP adds to the residual stream",
         ("blocks.{l}.hook_mlp_out", "blocks.{l}.mlp.hook_out")),
    Site("attn_out_raw", "hidden", True, "attention output before a norm that follows it", ()),
    Site("mlp_out_raw", "hidden", True, "MLP output before a norm that follows it", ()),
    Site("mlp_post", "mlp", True, "MLP activation before the down projection", ("blocks.{l}.mlp.hook_post",)),
    Site("q", "q_heads", True, "queries before the rotary embedding", ("blocks.{l}.attn.hook_q",)),
    Site("k", "kv_heads", True, "keys before the rotary embedding", ("blocks.{l}.attn.hook_k",)),
    Site("v", "kv_heads", True, "values", ("blocks.{l}.attn.hook_v",)),
    Site("q_rot", "q_heads", True, "queries as the attention kernel gets them", ("blocks.{l}.attn.hook_rot_q",)),
    Site("k_rot", "kv_heads", True, "keys as the attention kernel gets them", ("blocks.{l}.attn.hook_rot_k",)),
    Site("z", "q_heads", True, "attention result before the output projection", ("blocks.{l}.attn.hook_z",)),
    Site("router_logits", "experts", True, "expert router logits", ("blocks.{l}.mlp.gate.hook_out",)),
    Site("experts", "chosen_experts", True, "ids of the experts that the token was sent to, heaviest first",
         ("blocks.{l}.mlp.hook_expert_indices", "blocks.{l}.mlp.gate.hook_expert_indices"), ids=True),
    Site("embed", "hidden", False, "token embeddings", ("hook_embed", "embed.hook_out")),
    Site("final_norm", "hidden", False,
         "output of the final norm, after its weight (TransformerLens's hook_normalized is before it)",
         ("ln_final.hook_out", "ln_final.hook_normalized")),
)

SITES: Final[dict[str, Site]] = {site.name: site for site in _TABLE}
_FIXED: Final = {name: site for site in _TABLE for name in site.lens if "{l}" not in name}
_PER_LAYER: Final = {name.removeprefix("blocks.{l}."): site for site in _TABLE for name in site.lens if "{l}" in name}
_BLOCK: Final = re.compile(r"blocks\.([0-9]{1,4})\.(.+)", re.ASCII)
_SHORT: Final = re.compile(r"([a-z_]+)\.([0-9]{1,4})", re.ASCII)
_NAME_MAX: Final = 64  # longer ones are not misspelt
PROBE: Final = "probe."
_PROBE: Final = re.compile(r"(probe\.[A-Za-z0-9][A-Za-z0-9_-]{0,63})(?:\.([0-9]{1,4}))?", re.ASCII)


def parse_site(name: str, field: str = "sites", error: type[SpecError] = SpecError) -> tuple[str, int | None]:
    """``(site, layer)`` of a name in any accepted spelling; layer is None where the name fixes none.

    >>> parse_site("blocks.16.hook_out")
    ('resid_post', 16)
    """
    if name in SITES:
        return name, None
    if name in _FIXED:
        return _FIXED[name].name, None
    if (match := _BLOCK.fullmatch(name)) and match[2] in _PER_LAYER:
        return _PER_LAYER[match[2]].name, int(match[1])
    if (match := _SHORT.fullmatch(name)) and match[1] in SITES and SITES[match[1]].per_layer:
        return match[1], int(match[2])
    if match := _PROBE.fullmatch(name):
        return match[1], None if match[2] is None else int(match[2])
    raise error(field, name, f"unknown site; {_meant(name)}valid: {', '.join(SITES)}, those of blocks also with a "
                             "layer (resid_post.12), or a TransformerLens name such as blocks.12.hook_resid_post")


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
    """What is known of a site by its canonical name."""
    return SITES[name] if name in SITES else Site(name, "scores", True, "scores of a probe", ())


def has_heads(site: str) -> bool:
    """Whether the rows of a site are one head after the other."""
    return site_named(site).width in ("q_heads", "kv_heads")


def transformer_lens_name(site: str, layer: int) -> str | None:
    """The TransformerLens name of a site, or None where it has none."""
    names = site_named(site).lens
    return names[0].format(l=layer) if names else None
