"""Shares: which columns of which layers each rank of an engine sends. Arithmetic alone.

A rank has the layers of its pipeline stage. It has a row's columns by itself, or together with others that have the
same ones bit for bit. These are all ranks of its stage where a row is whole on every rank, and a few where there are
fewer K/V heads than ranks. Ranks with the same columns deal the layers out among themselves, so that no other rank
sends the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine_side.tap.stages import Stage, layers_of
from schemas.errors import StartError
from schemas.wire.layout import Part, Share

__all__ = ["layers_sent", "layout_of"]


def layout_of(layers: Mapping[str, Sequence[int]], widths: Mapping[str, int], whole: Mapping[str, int], ranks: int,
              stages: Sequence[Stage] = ()) -> list[Part]:
    """The share that each rank of an engine sends of the ``layers`` of each site; none where there is one rank.

    ``ranks`` of each of the ``stages`` (none: there is one) share out its rows. ``widths``: numbers in the row that a
    rank has, by site; ``whole``: in a whole row. StartError where the rows of the ranks do not make up whole ones.
    """
    count = max(1, len(stages))
    if ranks * count == 1:
        return []
    parts = [Part(rank, {}) for rank in range(ranks * count)]
    for site, chosen in layers.items():
        width = widths[site]
        alike = ranks * width // whole[site]  # ranks that have the same columns; they follow each other
        if alike * whole[site] != ranks * width or not 1 <= alike <= ranks or ranks % alike:
            raise StartError(f"vllm-tap: tensor_parallel_size={ranks}: cannot tell which {width} of the {whole[site]} "
                             f"columns of {site} each rank has; arm other sites, or run on one device")
        dealt = layers_of(stages, site, chosen) if stages else [list(chosen)]
        for part in parts:
            stage, rank = divmod(part.rank, ranks)
            start = rank // alike * width
            if mine := [layer for layer in dealt[stage] if layer % alike == rank % alike]:
                part.shares[site] = [Share(mine, start, start + width)]
    return parts


def layers_sent(part: Part | None, site: str, layers: Sequence[int]) -> list[int]:
    """The layers of a site that a rank sends: all on an engine of one rank, which is no part."""
    if part is None:
        return list(layers)
    mine = {layer for share in part.shares.get(site, ()) for layer in share.layers}
    return [layer for layer in layers if layer in mine]
