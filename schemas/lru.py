"""A bounded mapping from which what was used least recently goes first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Lru"]

K = TypeVar("K")
V = TypeVar("V")


class Lru(Generic[K, V]):
    """Values by key, of a total ``weight`` of at most ``limit``; each weighs 1 unless said otherwise.

    Thread-safe: every call is whole. A weight must not change while its value is in here.
    """

    def __init__(self, limit: float, weight: Callable[[V], int] = lambda _: 1) -> None:
        self.limit, self.total = limit, 0
        self._weight, self._lock = weight, threading.Lock()
        self._values: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K) -> V | None:
        """The value, which is being used; None where there is none."""
        try:  # without the lock, which would take as long again: each of these is one step of the interpreter
            self._values.move_to_end(key)
            return self._values[key]
        except KeyError:
            return None

    def put(self, key: K, value: V) -> list[tuple[K, V]]:
        """Take up a value; the others that had to go for it. One that weighs too much stays until the next."""
        with self._lock:
            if (replaced := self._values.pop(key, None)) is not None:
                self.total -= self._weight(replaced)
            self._values[key] = value
            self.total += self._weight(value)
            gone = []
            while self.total > self.limit and len(self._values) > 1:
                gone.append(self._values.popitem(last=False))
                self.total -= self._weight(gone[-1][1])
            return gone

    def pop(self, key: K) -> V | None:
        """Give up a value; None where there is none."""
        with self._lock:
            if (value := self._values.pop(key, None)) is not None:
                self.total -= self._weight(value)
            return value

    def clear(self) -> None:
        """Give up everything."""
        with self._lock:
            self._values.clear()
            self.total = 0

    def items(self) -> list[tuple[K, V]]:
        """The entries, least recently used first."""
        with self._lock:
            return list(self._values.items())

    def __contains__(self, key: K) -> bool:
        return key in self._values

    def __len__(self) -> int:
        return len(self._values)
