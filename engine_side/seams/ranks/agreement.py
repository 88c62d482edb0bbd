"""What the ranks of an engine tell each other while they start: every rank takes the same way through it, so that none
waits for one that does not come. Nothing here is called in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch

from schemas.errors import StartError

__all__ = ["all_together", "of_shares", "of_stages", "the_same", "together"]

T = TypeVar("T")


def of_shares(said: T) -> list[T]:
    """What the tensor-parallel ranks of this stage say, in their order."""
    return _told(said, "get_tp_group")


def of_stages(said: T) -> list[T]:
    """What the ranks with the same share say, in the order of their stages."""
    return _told(said, "get_pp_group")


def the_same(text: str) -> str:
    """What the first rank says, on every rank."""
    return of_shares(of_stages(text)[0])[0]


def together() -> AbstractContextManager[None]:
    """StartError on every rank of a stage where one of them raised anything: it raises that, and the others would wait
    for it in the next step.
    """
    return _agreed(of_shares, "tensor-parallel rank")


@contextmanager
def all_together() -> Iterator[None]:
    """StartError on every rank of the engine where one of them raised anything. Stages go different ways in what is
    within: none of them may wait for another there.
    """
    with _agreed(of_stages, "pipeline stage"), together():
        yield


@contextmanager
def _agreed(tell: Callable[[str], list[str]], who: str) -> Iterator[None]:
    """What all whom ``tell`` reaches come out of: with their own error, or with the first that another told."""
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    said = "" if error is None else str(error) if isinstance(error, StartError) else f"vllm-tap: {error!r}"
    told = tell(said)
    if error is not None:
        raise error
    rank, other = next(((rank, text) for rank, text in enumerate(told) if text), (0, ""))
    if other:
        raise StartError(f"{other} (reported by {who} {rank})")


def _told(said: T, group_of: str) -> list[T]:
    from vllm import distributed

    if not distributed.model_parallel_is_initialized():
        return [said]
    group: Any = getattr(distributed, group_of)()
    if group.world_size == 1:
        return [said]
    told: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(told, said, group=group.cpu_group)
    return told
