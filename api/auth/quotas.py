"""What a key's captures may take: what there is and what its requests in flight may yet add, against its quota."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import anyio

from api.errors import OverQuota
from schemas.read.reader import StoreReader

__all__ = ["Quotas"]


@dataclass(frozen=True, slots=True)
class _Reserved:
    ulid: str
    nbytes: int


class Quotas:
    """Room for requests in flight; ``of`` says how many bytes an owner's captures may take, 0 for any."""

    def __init__(self, reader: Callable[[], StoreReader]) -> None:
        self.of: Callable[[str], int] = lambda owner: 0
        self._reader = reader
        self._in_flight: defaultdict[str, list[_Reserved]] = defaultdict(list)
        self._turns: defaultdict[str, anyio.Lock] = defaultdict(anyio.Lock)

    async def reserve(self, owner: str, ulid: str, nbytes: int) -> Callable[[], None]:
        """Keeps ``nbytes`` for the captures of a request; what ends that is returned. OverQuota where they do not fit.
        """
        quota = self.of(owner)
        if not quota:
            return lambda: None
        async with self._turns[owner]:
            # Taken before it is looked what there is: a request that ends meanwhile is in one of the two.
            others = list(self._in_flight[owner])
            used, coming = await anyio.to_thread.run_sync(lambda: self._expected(owner, others, quota - nbytes))
            if used + coming + nbytes > quota:
                raise OverQuota(owner, used, coming, nbytes, quota)
            mine = _Reserved(ulid, nbytes)
            self._in_flight[owner].append(mine)
        return lambda: self._in_flight[owner].remove(mine)

    def _expected(self, owner: str, others: list[_Reserved], room: int) -> tuple[int, int]:
        """Bytes that there are, and that others may yet add; what these have stored is looked up where it matters."""
        used, coming = self._reader().owner_bytes(owner), sum(each.nbytes for each in others)
        if used + coming <= room or not others:
            return used, coming
        stored = self._reader().request_bytes(owner, [each.ulid for each in others])
        # What there is is asked last: so all of what is taken off is in it.
        return self._reader().owner_bytes(owner), sum(max(0, each.nbytes - stored[each.ulid]) for each in others)
