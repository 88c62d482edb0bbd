"""Stages: which layers of a model each rank of a pipeline-parallel engine runs. Arithmetic alone.

Layers are numbered over the whole model. The first stage has the embedding, the last the final norm.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from schemas.errors import StartError
from schemas.sites import site_named

__all__ = ["Has", "Stage", "layers_of", "of_engine"]


@dataclass(frozen=True, slots=True)
class Stage:
    """Stage ``number`` of ``count``: it runs the blocks ``start`` to ``stop`` − 1."""

    number: int
    count: int
    start: int
    stop: int

    @property
    def first(self) -> bool:
        """Whether token ids enter the model here."""
        return self.number == 0

    @property
    def last(self) -> bool:
        """Whether tokens are sampled from the output of this stage."""
        return self.number == self.count - 1

    def has(self, site: str, layer: int = 0) -> bool:
        """Whether it is here that rows of a site and layer are made, if the model has them."""
        if site_named(site).per_layer:
            return self.start <= layer < self.stop
        return self.first if site == "embed" else self.last


@dataclass(frozen=True, slots=True)
class Has:
    """The part of a site that a rank, or an engine, has: rows of ``width`` numbers in these layers, a share of
    ``whole`` ones.

    ``head``: numbers of an attention head, 0 where the rows are not one head after the other.
    """

    layers: Sequence[int]
    width: int
    whole: int
    head: int
    meaning: str
    source: str


def layers_of(stages: Sequence[Stage], site: str, layers: Iterable[int]) -> list[list[int]]:
    """The layers of a site that each stage has."""
    chosen = list(layers)
    return [[layer for layer in chosen if stage.has(site, layer)] for stage in stages]


def of_engine(told: Sequence[Mapping[str, Has]]) -> dict[str, Has]:
    """The part of each site that an engine has, from its stages in their order; StartError where those differ in more
    than their layers.
    """
    found: dict[str, Has] = {}
    for stage in told:
        for site, has in stage.items():
            known = found.get(site)
            if known is not None and (known.width, known.whole, known.head) != (has.width, has.whole, has.head):
                raise StartError(f"vllm-tap: cannot arm {site}: its rows have {known.whole} numbers in some stages of "
                                 f"the pipeline and {has.whole} in others; arm other sites, or run on one device")
            found[site] = has if known is None else replace(known, layers=[*known.layers, *has.layers])
    return found
