"""Questions to a writer, before anything is sent to it: how fast its store takes rows, and which store it is."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from schemas.errors import StartError
from schemas.wire.connection import Connection
from schemas.wire.messages import Ack, Bye, Connect, Ping, StoreState, Welcome
from schemas.wire.send_window import SendWindow

__all__ = ["ask_store", "reached_store"]

_AGAIN_S: Final = 0.1
_LINGER_MS: Final = 200


def ask_store(endpoint: str, curve: Path | None, timeout_s: float) -> StoreState:
    """The writer's answer at ``endpoint``, once its store is measured; after ``timeout_s`` seconds what was told
    last, which knows nothing where no writer answers, or one of an earlier version. ``curve``: keys, for one on another
    host.
    """
    return _asked(endpoint, curve, timeout_s, lambda welcome, told: bool(told.bytes_s))[1]


def reached_store(endpoint: str, curve: Path | None, timeout_s: float) -> str:
    """The UUID of the store that is written at ``endpoint``, "" where no writer answers; the rest as ``ask_store``."""
    welcome, _ = _asked(endpoint, curve, timeout_s, lambda welcome, told: welcome is not None)
    return "" if welcome is None else welcome.store


def _asked(endpoint: str, curve: Path | None, timeout_s: float, known: Callable[[Welcome | None, StoreState], bool]
           ) -> tuple[Welcome | None, StoreState]:
    """The last answers of a writer, until what is asked is ``known``."""
    ask = partial(Ping, asks=True)
    connection = Connection(endpoint, SendWindow(), Connect("", "front_end", 0, pid=os.getpid()), ask, curve)
    welcome, told, asked_s, until = None, StoreState(), float("-inf"), time.monotonic() + timeout_s
    try:
        connection.open()
        while not known(welcome, told) and connection.refused is None and (now := time.monotonic()) < until:
            connection.tend()
            if connection.welcome is not None and now - asked_s > _AGAIN_S:
                asked_s = now
                connection.say(ask())
            connection.wait(20)
            for answer in connection.receive():
                if isinstance(answer, Ack) and isinstance(answer.store, StoreState):
                    told = answer.store
            welcome = connection.welcome
        if welcome is not None:
            connection.say(Bye(0))
    except StartError:  # keys that are gone: whoever sends rows says so
        pass
    finally:
        connection.close(_LINGER_MS)
    return welcome, told
