"""The sites of a model, of what the search has found of the blocks of each stage of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from engine_side.discovery.proofs import Proof
from engine_side.tap.architectures import Family, ModulePath
from schemas.errors import StartError

FAILED: Final = "the search for its sites failed: "  # in front of the reason
STREAM: Final = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "attn_out_raw", "mlp_out_raw")

Modules = tuple[tuple[str, str], ...]  # of a block: names and classes


@dataclass(frozen=True, slots=True)
class Part:
    """Sites of the blocks of a stage, by site and layer of the whole model.

    ``layers``: path of the list of blocks. ``stream``: rules by which a block gets the stream and returns it. ``came``
    and ``left``: names of the tensors whose sum it is between this stage and the one before and after; "" at the
    model's ends. ``absent`` says why the model has no such site, ``lacks`` why these blocks have none. ``sums``: a
    block adds attention and MLP alone. ``embedding`` is the path of the table, ``bare`` whether the first block gets
    its rows as they are, ``embeds`` whether its rows are what a stream begins with. ``adding`` as in Family.
    """

    layers: str
    found: Mapping[str, Mapping[int, ModulePath]]
    stream: tuple[str, str]
    came: str
    left: str
    absent: Mapping[str, str]
    lacks: Mapping[str, str]
    sums: bool
    modules: Mapping[int, Modules]
    proofs: tuple[Proof, ...]
    embedding: str = ""
    bare: bool = False
    embeds: bool = False
    adding: Mapping[int, str] = field(default_factory=dict)


def joined(parts: Sequence[Part]) -> Family:
    """The family of a model whose stages, in their order, have these parts; StartError where they do not fit."""
    first = parts[0]
    _check_handed_on(parts)
    found: dict[str, dict[int, ModulePath]] = {}
    absent, lacks, modules = dict[str, str](), dict[str, str](), dict[int, Modules]()
    for part in parts:
        for site, places in part.found.items():
            found.setdefault(site, {}).update(places)
        absent, lacks, modules = absent | dict(part.absent), lacks | dict(part.lacks), modules | dict(part.modules)
    sums = not absent and all(part.sums for part in parts)
    for site, by_layer in found.items():
        if len(widths := sorted({place.width for place in by_layer.values()})) > 1:
            absent[site] = f"its rows have {' or '.join(map(str, widths))} numbers, depending on the layer"
    absent |= _unlike(first.layers, found, modules)
    absent |= {site: why for site, why in lacks.items() if not found.get(site)}
    found = {site: places for site, places in found.items() if places and site not in absent}
    proofs = tuple(proof for part in parts for proof in part.proofs if proof.layer in found.get(proof.site, {}))
    return Family(first.layers, {}, {}, first.embedding, ("embed", "resid_pre") if first.bare else ("embed",),
                  _names(found, first.embeds), absent, sums, found, proofs,
                  adding={layer: path for part in parts for layer, path in part.adding.items()})


def _check_handed_on(parts: Sequence[Part]) -> None:
    for number, (one, other) in enumerate(pairwise(parts)):
        stages = f"stages {number} and {number + 1} of the pipeline"
        if one.layers != other.layers:
            raise refused(f"{stages} have their blocks at {one.layers} and {other.layers}")
        if one.stream != other.stream:
            raise refused(f"blocks of {stages} carry the stream differently: {' to '.join(one.stream)}, and "
                          f"{' to '.join(other.stream)}")
        if one.left != other.came:
            raise refused(f"between {stages} the stream leaves as {one.left} and arrives as {other.came}")


def _unlike(layers: str, found: Mapping[str, Mapping[int, ModulePath]], modules: Mapping[int, Modules]
            ) -> dict[str, str]:
    """Sites inside attention and the MLP that blocks of the same modules have in different places: one of them was
    told wrong. StartError where the stream or what is added to it is such a one.
    """
    alike: dict[Modules, tuple[int, dict[str, tuple[str, str]]]] = {}
    unlike: dict[str, str] = {}
    for layer, parts in sorted(modules.items()):
        sites = {site: (place.path.removeprefix(f"{layers}.{layer}"), place.rule) for site, places in found.items()
                 if site not in ("embed", "final_norm") and (place := places.get(layer)) is not None}
        other, expected = alike.setdefault(parts, (layer, sites))
        if differs := sorted(site for site in sites.keys() | expected if sites.get(site) != expected.get(site)):
            why = f"blocks {other} and {layer} have the same modules, and differ in"
            if stream := [site for site in differs if site in STREAM]:
                raise refused(f"{why} {', '.join(stream)}")
            unlike |= {site: f"{why} it" for site in differs}
    return unlike


def _names(found: Mapping[str, Mapping[int, ModulePath]], embeds: bool) -> dict[str, str]:
    """``Family.names``, without those that no site here is: what a module returns before it is multiplied by a number
    on its way into the stream, and embeddings that are.
    """
    names = {}
    for part, site in (("attn", "attn_out"), ("mlp", "mlp_out")):
        if f"{site}_raw" in found:
            names[f"{part}.hook_out"] = f"{site}_raw"
        elif not any(" × " in place.rule for place in found.get(site, {}).values()):
            names[f"{part}.hook_out"] = site
    if embeds:
        names["hook_embed"] = "embed"
    return names


def refused(why: str) -> StartError:
    """The error of a model in no table whose sites are not told."""
    return StartError(f"vllm-tap: this architecture is not in the table, and {FAILED}{why}")
