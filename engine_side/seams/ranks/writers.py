"""The stores that an engine's ranks reach, where each may send to a writer of its own host."""

from __future__ import annotations

from typing import Final

from engine_side.config import EngineConfig
from engine_side.seams.ranks.agreement import of_shares, of_stages
from schemas.errors import StartError
from schemas.wire.ask_store import reached_store
from schemas.wire.engine_info import EngineInfo

__all__ = ["stores_reached"]

REACH_S: Final = 60.0


def stores_reached(config: EngineConfig, info: EngineInfo) -> list[str]:
    """The store of each rank's writer, the same one for all where ranks may not have several; StartError on every rank
    where one has no writer.
    """
    if config.writers == "one" or not info.layout:
        return [""] * max(1, len(info.layout))
    mine = reached_store(config.endpoint, config.curve, REACH_S)
    stores = [store for stage in of_stages(of_shares(mine)) for store in stage]
    if lacking := [rank for rank, store in enumerate(stores) if not store]:
        raise StartError(f"vllm-tap: VLLM_TAP_WRITERS=several: no writer answered ranks {lacking} within {REACH_S:.0f} "
                         "s; start the writer of each host first, and look at VLLM_TAP_ENDPOINT there")
    return stores
