"""What all keys share, so divided that no one of them can shut out the others."""

from __future__ import annotations

from collections import Counter

__all__ = ["fits", "share"]


def share(limit: int, owner: str) -> int:
    """How much of ``limit`` one owner may have: half, or all on a service without keys, where there is but one."""
    return max(1, limit // 2) if owner else limit


def fits(held: Counter[str], owner: str, more: int, limit: int) -> bool:
    """Whether an owner may have so much more beside what all hold; where nobody holds anything it may be any amount.

    So one may hold more than its share, but it never counts for more: the others still get theirs.
    """
    mine = held[owner]
    others = sum(min(amount, share(limit, other)) for other, amount in held.items() if other != owner)
    return not (mine or others) or (others + mine + more <= limit and (not mine or mine + more <= share(limit, owner)))
