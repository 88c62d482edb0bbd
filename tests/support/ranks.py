"""Played ranks of one engine: several senders that each send their share of a capture's rows, as a layout says.

Layers of ``resid_post`` are dealt out whole, columns of ``q`` are of all ranks, and of ``k``, which pairs of ranks have
alike, the first of a pair sends them. What a row's columns hold follows from capture, position, layer, version and the
rank that has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from schemas import codecs
from schemas.ids import new_ulid
from schemas.wire.layout import Part, Share, places_of
from schemas.wire.messages import Dropped, EngineInfo, Join, PartFinish
from schemas.wire.row_table import FLAG_DRAFT, FLAG_RECOMPUTED, RowTable
from tests.support.store_helpers import Sender, engine_info, frame_of, key_of, pieces_of

COLUMNS = 64  # of a share
LAYERS = [0, 1, 2, 3]


def layout_of(ranks: int) -> list[Part]:
    """Who sends what."""
    parts = []
    for rank in range(ranks):
        dealt = [layer for layer in LAYERS if layer % ranks == rank]
        shares = {"resid_post": [Share(dealt, 0, COLUMNS)] if dealt else [],
                  "q": [Share(LAYERS, rank * COLUMNS, (rank + 1) * COLUMNS)]}
        if rank % 2 == 0:
            shares["k"] = [Share(LAYERS, rank // 2 * COLUMNS, (rank // 2 + 1) * COLUMNS)]
        parts.append(Part(rank, shares))
    return parts


def info_of(ranks: int, group: str = "", layout: list[Part] | None = None) -> EngineInfo:
    """What every rank says of the engine."""
    info = engine_info(COLUMNS, sites=("resid_post", "q", "k"))
    widths = {"resid_post": COLUMNS, "q": ranks * COLUMNS, "k": (ranks + 1) // 2 * COLUMNS}
    return msgspec.structs.replace(info, widths=widths, group=group or new_ulid(),
                                   layout=layout_of(ranks) if layout is None else layout)


class Rank(Sender):
    """One of them."""

    def __init__(self, endpoint: str, rank: int, info: EngineInfo, **options: Any) -> None:
        super().__init__(endpoint, engine=info, **options)
        self.rank = rank

    def join(self, capture: str) -> int:
        return self.send(Join(self.next(), capture))

    def part_finish(self, capture: str) -> int:
        return self.send(PartFinish(self.next(), capture))

    def drop(self, capture: str, site: str, start: int, stop: int, layers: Sequence[int], reason: str = "dropped"
             ) -> int:
        return self.send(Dropped(self.next(), capture, site, list(layers), start, stop, reason))

    def rows(self, capture: str, number: int, site: str, positions: Sequence[int], step: int, codec: str = "int8b64",
             version: int = 0, layers: Sequence[int] | None = None, drafts: Sequence[int] = (), again: bool = False,
             steps: list[int] | None = None, width: int = COLUMNS) -> int:
        """This rank's share of rows that one step computed."""
        layers = self.share(site) if layers is None else layers
        count = len(positions)
        keys = key_of(number, np.asarray(positions)[None, :], np.asarray(layers)[:, None], version) + 7919 * self.rank
        pieces = {name: piece.tobytes() for name, piece in pieces_of(codec, width, "float32", keys).items()}
        table = RowTable(np.zeros(count, np.uint32), np.asarray(positions, np.uint32),
                         np.asarray(positions, np.uint32) + 5000,
                         np.asarray([FLAG_DRAFT * (p in drafts) | FLAG_RECOMPUTED * again for p in positions],
                                    np.uint32))
        frame, parts = frame_of(self.next(), site, codec, "float32", width, layers, [capture], [count], table, pieces)
        return self.send(msgspec.structs.replace(frame, rank=self.rank, steps=steps or [step]), *parts)

    def share(self, site: str) -> list[int]:
        """The layers that it has something of."""
        assert self.engine is not None
        return sorted(layer for share in self.engine.layout[self.rank].shares.get(site, ()) for layer in share.layers)


def values(ranks: int, number: int, site: str, positions: Sequence[int], layers: Sequence[int] = LAYERS,
           codec: str = "int8b64", version: int = 0) -> np.ndarray[Any, Any]:
    """The whole rows that must be read, float32 ``[layers, n, width]``."""
    rows, places = [], places_of(layout_of(ranks))
    for layer in layers:
        columns = []
        for one in places[site, layer]:
            keys = key_of(number, np.asarray(positions)[None, :], np.asarray([layer])[:, None], version)
            stored = pieces_of(codec, one.width, "float32", keys + 7919 * one.part)
            pieces = {s.name: stored[s.name].view(s.dtype).reshape(1, len(positions), *s.shape)
                      for s in codecs.streams(codec, one.width, "float32")}
            columns.append(codecs.decode(codec, pieces, one.width, "float32")[0])
        rows.append(np.concatenate(columns, axis=1))
    return np.stack(rows)
