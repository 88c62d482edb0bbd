"""Ranks of an engine whose senders are gone: captures that need them are refused, others are served."""

from __future__ import annotations

from collections.abc import Collection

from api.errors import PartLost
from schemas.spec import Resolved
from schemas.wire.layout import LEADER, places_of
from schemas.wire.messages import EngineInfo

__all__ = ["check_ranks"]


def check_ranks(resolved: Resolved, engine: EngineInfo, lost: Collection[int], param: str = "capture") -> None:
    """PartLost where a capture needs rows of ranks of ``engine`` that are ``lost``, naming the first of each.
    ``param``: what the request brought, its capture or, alone, its edit, of which a manifest tells.
    """
    if not lost:
        return
    if LEADER in lost:
        without = "a capture" if param == "capture" else "a capture and an edit"
        raise PartLost(f"rank {LEADER} of the engine has no sender any more, and only this rank begins captures; "
                       f"start the engine again; without {without} the request is served", param)
    places = places_of(engine.layout)
    dead = {place: {one.part for one in columns} & set(lost) for place, columns in places.items()}
    needed = [(site, layer) for site, layers in resolved.layers.items() for layer in layers if dead.get((site, layer))]
    if not needed:
        return
    ranks = sorted(set().union(*(dead[place] for place in needed)))
    (site, layer), more = needed[0], f" and {len(needed) - 1} more" if len(needed) > 1 else ""
    who = f"rank {ranks[0]} of the engine has" if len(ranks) == 1 else (
        f"ranks {', '.join(map(str, ranks))} of the engine have")
    alive = next((f"{site}.{layer}" for site, layer in places if not dead[site, layer]), None)
    raise PartLost(f"{who} no sender any more, and rows of {site}.{layer}{more} need it; start the engine again, or "
                   f"{f'ask for sites and layers of other ranks, such as {alive}' if alive else 'send no capture'}")
