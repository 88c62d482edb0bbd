"""Limits of owners: what all keys share, so divided that none shuts out the others, and the bytes each key may take."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import anyio

from api.errors import OverQuota
from schemas.bucket.reader import AnyReader

__all__ = ["Quotas", "fits", "share"]


def share(limit: int, owner: str) -> int:
    """Part of ``limit`` that one owner may have: half, or all on a service without keys, where there is but one."""
    return max(1, limit // 2) if owner else limit


def fits(held: Counter[str], owner: str, more: int, limit: int) -> bool:
    """Whether an owner may have so much more beside what all hold; where nobody holds anything it may be any amount.

    So one may hold more than its share, but it never counts for more: the others still get theirs.
    """
    mine = held[owner]
    others = sum(min(amount, share(limit, other)) for other, amount in held.items() if other != owner)
    return not (mine or others) or (others + mine + more <= limit and (not mine or mine + more <= share(limit, owner)))


@dataclass(frozen=True, slots=True)
class _Reserved:
    ulid: str
    nbytes: int


class Quotas:
    """Room for requests in flight; ``of`` says how many bytes an owner's captures may take, 0 for any."""

    def __init__(self, reader: Callable[[], AnyReader]) -> None:
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
