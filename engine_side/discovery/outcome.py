"""Outcome of a search, as the caller is told of it: every site with its places, proofs and widths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from engine_side.tap.architectures import find_points
from schemas.errors import StartError

if TYPE_CHECKING:  # the command that prints an outcome has no seconds for torch
    from torch import nn

    from engine_side.tap.architectures import Family


class ProvedPlace(msgspec.Struct, frozen=True):
    """The place of a site's rows in a layer: ``rule`` of the module at ``path``. ``identity`` is the equation that
    shows it. ``off`` is how far the rows are off the identity: of a sum, as a share of the stream's numbers; of equal
    rows, as a share of their length.

    Without an identity the place comes from the table, and the search has not looked at it.
    """

    layer: int
    path: str
    rule: str
    identity: str = ""
    off: float | None = None


class ProvedSite(msgspec.Struct, frozen=True):
    """A site of a loaded model; ``width``: numbers in a row."""

    width: int
    meaning: str
    places: list[ProvedPlace]


class Outcome(msgspec.Struct, frozen=True):
    """Sites of a loaded model; ``failed`` is the first identity that was not fulfilled, "" where all were.
    ``rounding``: how far off an identity may be in this dtype.
    """

    dtype: str
    rounding: float
    vllm_version: str
    n_layers: int
    sites: dict[str, ProvedSite] = {}
    names: dict[str, str] = {}  # as Armed.names
    refused: dict[str, str] = {}  # why the model lacks a site
    failed: str = ""


def proved_sites(model: nn.Module, family: Family, names: list[str], sites: Sequence[str], n_layers: int, hidden: int
                 ) -> dict[str, ProvedSite]:
    """The members of ``sites`` that this model has, with their places in every layer."""
    proofs = {(proof.site, proof.layer): proof for proof in family.proofs}
    paths = {id(part): f"{path}.{name}" for path, module in model.named_modules()
             for name, part in vars(module).items()}  # a router is no module, but a part of one
    paths |= {id(module): path for path, module in model.named_modules()}
    found: dict[str, ProvedSite] = {}
    for site in sites:
        try:
            points = list(find_points(model, family, names, (site,), n_layers, hidden))
        except StartError:  # a site that only some models of the family have
            continue
        places = []
        for point in points:
            proof, path = proofs.get((site, point.layer)), paths[id(point.module)]
            places.append(ProvedPlace(point.layer, path, point.rule) if proof is None else
                          ProvedPlace(point.layer, path, point.rule, proof.identity, proof.off))
        found[site] = ProvedSite(points[0].width, points[0].meaning, places)
    return found
