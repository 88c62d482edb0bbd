"""Played ranks of one engine: several senders that each send their share of a capture's rows, as a layout says.

Layers of ``resid_post`` are dealt out whole, columns of ``q`` are of all ranks, and of ``k``, which pairs of ranks have
alike, the first of a pair sends them. What a row's columns hold follows from capture, position, layer, version and the
rank that has them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from schemas import codecs
from schemas.ids import new_ulid
from schemas.wire.engine_info import EngineInfo
from schemas.wire.layout import Part, Share, places_of
from schemas.wire.messages import Ping, Refuse, TapState, encode
from schemas.wire.records import Dropped, Join, PartFinish
from schemas.wire.row_table import FLAG_DRAFT, FLAG_RECOMPUTED, RowTable
from tests.support.store_helpers import Sender, engine_info, frame_of, key_of, pieces_of

COLUMNS = 64  # of a share
LAYERS = [0, 1, 2, 3]
SITES = ("resid_post", "q", "k")


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
    info = engine_info(COLUMNS, sites=SITES)
    widths = {"resid_post": COLUMNS, "q": ranks * COLUMNS, "k": (ranks + 1) // 2 * COLUMNS}
    group = group or new_ulid()
    if ranks == 1:
        return msgspec.structs.replace(info, widths=widths, instance=group)
    return msgspec.structs.replace(info, widths=widths, group=group, instance=group,
                                   layout=layout_of(ranks) if layout is None else layout)


class Rank(Sender):
    """One of them."""

    def __init__(self, endpoint: str, rank: int, info: EngineInfo, **options: Any) -> None:
        super().__init__(endpoint, engine=info, **options)
        self.rank = rank

    def join(self, capture: str) -> int:
        return self.send(Join(self.next(), capture))

    def part_finish(self, capture: str, edits: str = "") -> int:
        return self.send(PartFinish(self.next(), capture, edits or msgspec.UNSET))

    def drop(self, capture: str, site: str, start: int, stop: int, layers: Sequence[int], reason: str = "dropped"
             ) -> int:
        return self.send(Dropped(self.next(), capture, site, list(layers), start, stop, reason))

    def rows(self, capture: str, number: int, site: str, positions: Sequence[int], step: int, codec: str = "int8b64",
             version: int = 0, layers: Sequence[int] | None = None, drafts: Sequence[int] = (), again: bool = False,
             steps: list[int] | None = None, width: int = COLUMNS, token: int = 5000) -> int:
        """This rank's share of rows that one step computed, of tokens from ``token`` on."""
        layers = self.share(site) if layers is None else layers
        count = len(positions)
        keys = key_of(number, np.asarray(positions)[None, :], np.asarray(layers)[:, None], version) + 7919 * self.rank
        pieces = {name: piece.tobytes() for name, piece in pieces_of(codec, width, "float32", keys).items()}
        table = RowTable(np.zeros(count, np.uint32), np.asarray(positions, np.uint32),
                         np.asarray(positions, np.uint32) + token,
                         np.asarray([FLAG_DRAFT * (p in drafts) | FLAG_RECOMPUTED * again for p in positions],
                                    np.uint32))
        frame, parts = frame_of(self.next(), site, codec, "float32", width, layers, [capture], [count], table, pieces)
        assert self.engine is not None
        number = (steps or [step]) if self.engine.layout else msgspec.UNSET
        return self.send(msgspec.structs.replace(frame, rank=self.rank, steps=number), *parts)

    def share(self, site: str) -> list[int]:
        """The layers that it has something of."""
        assert self.engine is not None
        if not self.engine.layout:
            return LAYERS
        return sorted(layer for share in self.engine.layout[self.rank].shares.get(site, ()) for layer in share.layers)


class Ranks:
    """All of them, playing one capture; those that share nothing out of a site are silent about it."""

    def __init__(self, endpoint: str, count: int, group: str = "", name: str = "") -> None:
        self.info = msgspec.structs.replace(info_of(count, group), name=name)
        self.all = [Rank(endpoint, rank, self.info) for rank in range(count)]
        self.capture, self.number = new_ulid(), 1

    @property
    def leader(self) -> Rank:
        return self.all[0]

    @property
    def others(self) -> list[Rank]:
        return self.all[1:]

    def begin(self, prompt_len: int, codec: str = "int8b64") -> None:
        """The capture, of everything."""
        self.leader.open(self.capture, prompt_len, dict.fromkeys(SITES, LAYERS), codec)
        for rank in self.others:
            rank.join(self.capture)

    def step(self, positions: Sequence[int], step: int, who: Sequence[Rank] | None = None,
             sites: Sequence[str] = SITES, **options: Any) -> None:
        """One step of the engine: every rank sends its share."""
        for rank in self.all if who is None else who:
            for site in sites:
                if rank.share(site):
                    rank.rows(self.capture, self.number, site, positions, step, **options)

    def end(self, end: int, output: int, who: Sequence[Rank] | None = None) -> None:
        """The end, as all ranks say it, or ``who`` of those that do not lead."""
        self.leader.finish(self.capture, end, output)
        for rank in self.others if who is None else who:
            rank.part_finish(self.capture)

    def wait(self) -> None:
        """Until all that was said is durable."""
        for rank in self.all:
            rank.wait()

    def __enter__(self) -> Ranks:
        for rank in self.all:
            rank.hello()
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.all:
            rank.close()


class LivingRanks(Ranks):
    """Ranks that say that they live, but for those that were killed; ``lock`` is held to speak for one."""

    def __init__(self, endpoint: str, count: int, group: str = "", name: str = "") -> None:
        super().__init__(endpoint, count, group, name)
        self.lock, self.over, self.dead = threading.Lock(), threading.Event(), set[Rank]()
        self.tap: TapState | None = None  # what all say of themselves
        self.heart = threading.Thread(target=self.beat)

    def beat(self) -> None:
        while not self.over.wait(0.3):
            with self.lock:
                for rank in [rank for rank in self.all if rank not in self.dead]:
                    rank.socket.send(encode(Ping(self.tap)))
                    while (answer := rank.receive(0)) is not None:
                        if isinstance(answer, Refuse):
                            rank.hello()

    def kill(self, number: int) -> None:
        """As kill -9 of a rank's sender: its connection goes, without a word."""
        with self.lock:
            self.dead.add(self.all[number])
            self.all[number].close()

    def start(self, number: int) -> None:
        """A sender of that rank again: another stream."""
        with self.lock:
            self.all[number] = again = Rank(self.all[number].endpoint, number, self.info)
            again.hello()

    def send(self, capture: str, site: str, layers: list[int], prompt_len: int, end: int) -> None:
        """A whole capture of some layers of a site, by the ranks that have them."""
        with self.lock:
            having = [rank for rank in self.all if set(rank.share(site)) & set(layers)]
            self.leader.open(capture, prompt_len, {site: layers})
            for rank in having:
                if rank is not self.leader:
                    rank.join(capture)
                rank.rows(capture, 1, site, range(end), 1, layers=sorted(set(rank.share(site)) & set(layers)))
                if rank is not self.leader:
                    rank.part_finish(capture)
            self.leader.finish(capture, end, end + 1 - prompt_len)
            for rank in having:
                rank.wait()

    def __enter__(self) -> LivingRanks:
        super().__enter__()
        self.heart.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.heart.join()
        super().__exit__()


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
