"""One question to a writer, before anything is sent to it: how fast its store takes rows."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import Final

from schemas.errors import StartError
from schemas.wire.connection import Connection
from schemas.wire.messages import Ack, Bye, Connect, Ping, StoreState
from schemas.wire.send_window import SendWindow

__all__ = ["ask_store"]

_AGAIN_S: Final = 0.1
_LINGER_MS: Final = 200


def ask_store(endpoint: str, curve: Path | None, timeout_s: float) -> StoreState:
    """The writer's answer at ``endpoint``, once its store is measured; after ``timeout_s`` seconds what was told
    last, which knows nothing where no writer answers, or one of an earlier version. ``curve``: keys, for one on another
    host.
    """
    ask = partial(Ping, asks=True)
    connection = Connection(endpoint, SendWindow(), Connect("", "front_end", 0, pid=os.getpid()), ask, curve)
    told, asked_s, until = StoreState(), float("-inf"), time.monotonic() + timeout_s
    try:
        connection.open()
        while not told.bytes_s and connection.refused is None and (now := time.monotonic()) < until:
            connection.tend()
            if connection.welcome is not None and now - asked_s > _AGAIN_S:
                asked_s = now
                connection.say(ask())
            connection.wait(20)
            for answer in connection.receive():
                if isinstance(answer, Ack) and isinstance(answer.store, StoreState):
                    told = answer.store
        if connection.welcome is not None:
            connection.say(Bye(0))
    except StartError:  # keys that are gone: whoever sends rows says so
        pass
    finally:
        connection.close(_LINGER_MS)
    return told
