"""Writers: which ranks of an engine send to which, where each host has one of its own. Arithmetic alone.

The ranks that reach one writer are an engine of their own to it: they are numbered from 0, the first of them opens and
finishes captures, and their layout is of the layers that they send. A row is never divided.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, structs

from schemas.errors import StartError
from schemas.wire.engine_info import Divided, EngineInfo
from schemas.wire.layout import Part, places_of

__all__ = ["divided"]


def divided(info: EngineInfo, rank: int, stores: Sequence[str]) -> tuple[EngineInfo, int]:
    """The engine as the writer of ``rank`` is told of it, and the rank's number there; ``stores``: by rank, the store
    that its writer has. StartError where ranks with several writers share out the columns of a row, or count edits.
    """
    known = list(dict.fromkeys(stores))
    if len(known) < 2:
        return info, rank
    if info.edits is not None:
        raise StartError(f"vllm-tap: VLLM_TAP_WRITERS=several: {len(known)} stores are reached by the ranks of this "
                         "engine, and edits are counted for one; leave VLLM_TAP_EDIT out, or let all ranks send to one "
                         "writer")
    here, elsewhere = dict[str, list[int]](), dict[str, list[int]]()
    for (site, layer), columns in sorted(places_of(info.layout).items()):
        reached = {stores[one.part] for one in columns}
        if len(reached) > 1:
            raise StartError(f"vllm-tap: VLLM_TAP_WRITERS=several: ranks {[one.part for one in columns]} have a share "
                             f"of the columns of {site}.{layer} each, and send to {len(reached)} stores; leave {site} "
                             "out of VLLM_TAP_ARM, or let all ranks send to one writer")
        (here if reached == {stores[rank]} else elsewhere).setdefault(site, []).append(layer)
    mine = [number for number, store in enumerate(stores) if store == stores[rank]]
    writer = known.index(stores[rank])
    name = _named(info.called, writer)
    alone = len(mine) == 1
    return structs.replace(
        info, group="" if alone else name, instance=name or UNSET, divided=Divided(writer, elsewhere),
        layout=[] if alone else [Part(number, info.layout[old].shares) for number, old in enumerate(mine)],
        attention=[structs.replace(each, layers=left) for each in info.attention
                   if (left := [layer for layer in each.layers if layer in here.get("q_rot", ())])],
    ), mine.index(rank)


def _named(engine: str, writer: int) -> str:
    """The name of the ranks of a writer, as an engine of a server of its own: no other store has the others."""
    server, dash, number = engine.rpartition("-")
    return engine if writer == 0 else f"{server}.{writer}{dash}{number}"
