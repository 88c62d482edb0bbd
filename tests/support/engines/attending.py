"""A small engine that sends queries and keys to a writer, the store that they lie in, and a service over it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from msgspec import structs

from schemas.attention import AttentionRule
from schemas.ids import new_ulid
from schemas.wire.engine_info import Attends
from schemas.wire.records import Dropped
from tests.support.api_stack import Stack, stack_in
from tests.support.store_helpers import Sender, engine_info, until
from vllm_tap import Client, Store, open_store

__all__ = ["LAYERS", "PROMPT", "RULE", "WHOLE", "WIDTH", "WINDOWED", "Attending", "attending"]

WIDTH, LAYERS, PROMPT = 64, [0, 1, 2, 3], 12
RULE = AttentionRule(head_size=16, scale=0.25, window=None, soft_cap=None)
WINDOWED = AttentionRule(head_size=16, scale=0.25, window=3, soft_cap=None)
WHOLE: Final = {"q_rot": range(PROMPT), "k_rot": range(PROMPT)}
TOLD: Final = (Attends([0, 2], 16, 0.25), Attends([1], 16, 0.25, 3), Attends([3], 16, 0.25, beyond="attention sinks"))


@dataclass(frozen=True)
class Attending:
    """Captures are sent by ``sender``, and by ``teller``, whose engine tells how its attention weighs keys (TOLD)."""

    sender: Sender
    teller: Sender
    store: Store
    client: Client
    stack: Stack

    def capture(self, rows: Mapping[str, Sequence[int]], codec: str = "raw", positions: Any = "all",
                finish: bool = True, told: bool = False) -> str:
        """A capture of ``rows`` by site; what is not among them of ``positions`` was dropped."""
        capture, send = new_ulid(), self.teller if told else self.sender
        send.open(capture, PROMPT, dict.fromkeys(rows, LAYERS), codec, positions)
        for site, there in rows.items():
            if len(there):
                send.frame([(capture, 0, there)], codec=codec, width=WIDTH, site=site)
            for at in sorted(set(range(PROMPT)) - set(there)) if positions == "all" else ():
                send.send(Dropped(send.next(), capture, site, LAYERS, at, at + 1))
        if finish:
            send.finish(capture, PROMPT)
        send.wait()
        if finish:
            self.store.final(capture, 60)
        expected = {site: len(there) * len(LAYERS) for site, there in rows.items() if len(there)}

        def taken() -> bool:  # the catalog follows the writer's word
            found = Counter[str]()
            for row in self.store.manifest(capture).rows:
                found[row.site] += row.captured
            return {site: count for site, count in found.items() if count} == expected

        assert until(taken)
        return capture


@contextmanager
def attending(folder: Path) -> Iterator[Attending]:
    """The engine, its writer and its service, as long as the context lasts."""
    info = engine_info(WIDTH, sites=("q_rot", "k_rot"))
    with stack_in(folder) as stack:
        stack.start_writer()
        stack.processes["writer"].wait_ready()
        stack.start_api("http://127.0.0.1:1")  # nothing is generated
        with (Sender(stack.endpoint, engine=info) as sender,
              Sender(stack.endpoint, engine=structs.replace(info, attention=list(TOLD))) as teller,
              open_store(stack.store) as store, Client(stack.url) as client):
            yield Attending(sender, teller, store, client, stack)
