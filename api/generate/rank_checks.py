"""Ranks of an engine whose senders are gone: captures that need them are refused, others are served."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from api.errors import PartLost
from schemas.spec import Resolved
from schemas.wire.engine_info import EngineInfo
from schemas.wire.layout import LEADER, places_of

__all__ = ["check_ranks"]


def check_ranks(resolved: Resolved, engine: EngineInfo, lost: Mapping[str, Collection[int]], param: str = "capture"
                ) -> None:
    """PartLost where a capture needs rows of ranks that are ``lost``, naming the first place and all of these ranks.

    ``engine`` is one of those that a request may go to, which are alike; ``lost`` has ranks by what their engine is
    called. ``param``: what the request brought, its capture or, alone, its edit, of which a manifest tells.
    """
    for name, ranks in lost.items():
        if LEADER in ranks:
            without = "a capture" if param == "capture" else "a capture and an edit"
            raise PartLost(f"rank {LEADER} of {name} has no sender any more, and only this rank begins captures; "
                           f"start the engine again; without {without} the request is served", param)
    places, dead = places_of(engine.layout), set[int]().union(*lost.values())
    needs = {place: {one.part for one in columns} & dead for place, columns in places.items()}
    needed = [(site, layer) for site, layers in resolved.layers.items() for layer in layers
              if needs.get((site, layer))]
    if not needed:
        return
    gone = set[int]().union(*(needs[place] for place in needed))
    who = [(name, sorted(gone & set(ranks))) for name, ranks in lost.items() if gone & set(ranks)]
    told = " and ".join(f"rank{'s' if each[1:] else ''} {', '.join(map(str, each))} of {name}" for name, each in who)
    has = "has" if [len(ranks) for _, ranks in who] == [1] else "have"
    (site, layer), more = needed[0], f" and {len(needed) - 1} more" if len(needed) > 1 else ""
    alive = next((f"{site}.{layer}" for site, layer in places if not needs[site, layer]), None)
    instead = f"ask for sites and layers of other ranks, such as {alive}" if alive else "send no capture"
    raise PartLost(f"{told} {has} no sender any more, and rows of {site}.{layer}{more} need it; start the engine "
                   f"again, or {instead}", param)
