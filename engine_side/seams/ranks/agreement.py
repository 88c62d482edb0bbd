"""Agreement of an engine's ranks while they start: every rank takes the same way through it, so that none
waits for one that does not come. Nothing here is called in a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch

from schemas.errors import StartError

__all__ = ["Alone", "all_here", "all_together", "of_shares", "of_stages", "the_same", "together"]

T = TypeVar("T")
LATE_S: Final = 60  # that a rank with an error waits for the others: they may wait for it in a step


class Alone(StartError):
    """An error of this rank alone: the others have not come out of the same step."""


def of_shares(said: T) -> list[T]:
    """The answers of the tensor-parallel ranks of this stage, in their order."""
    return _told(said, "get_tp_group")


def of_stages(said: T) -> list[T]:
    """The answers of the ranks with the same share, in the order of their stages."""
    return _told(said, "get_pp_group")


def the_same(text: str) -> str:
    """The first rank's text, on every rank."""
    return of_shares(of_stages(text)[0])[0]


def all_here() -> None:
    """Wait until every rank is here: they load at speeds of their own."""
    _meet("get_pp_group")
    _meet("get_tp_group")


def together() -> AbstractContextManager[None]:
    """StartError on every rank of a stage where one of them raised anything: it raises that, and the others would wait
    for it in the next step.
    """
    return _agreed("get_tp_group", "tensor-parallel rank")


@contextmanager
def all_together() -> Iterator[None]:
    """StartError on every rank of the engine where one of them raised anything. Stages go different ways in what is
    within: none of them may wait for another there.
    """
    with _agreed("get_pp_group", "pipeline stage"), together():
        yield


@contextmanager
def _agreed(group_of: str, who: str) -> Iterator[None]:
    """A block that all of a group leave together: with their own error, or with the first that another told. Alone
    where the others do not come: this rank's end is then what ends them.
    """
    error: Exception | None = None
    try:
        yield
    except Alone:
        raise
    except Exception as raised:
        error = raised
    said = "" if error is None else str(error) if isinstance(error, StartError) else f"vllm-tap: {error!r}"
    try:
        _meet(group_of, None if error is None else timedelta(seconds=LATE_S))
    except RuntimeError:
        if error is None:
            raise
        raise Alone(f"{said} (the other ranks did not come to where this one ended within {LATE_S} s)") from error
    told = _told(said, group_of)
    if error is not None:
        raise error
    rank, other = next(((rank, text) for rank, text in enumerate(told) if text), (0, ""))
    if other:
        raise StartError(f"{other} (reported by {who} {rank})")


def _meet(group_of: str, within: timedelta | None = None) -> None:
    """Wait until all of a group are here; RuntimeError where they are not within that time, by default half an hour.

    Not by ``monitored_barrier``, in which all but the first wait for the first as long as it takes.
    """
    if (group := _group(group_of)) is not None:
        here: Any = torch.distributed.barrier(group.cpu_group, async_op=True)
        here.wait(*(() if within is None else (within,)))


def _told(said: T, group_of: str) -> list[T]:
    if (group := _group(group_of)) is None:
        return [said]
    told: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(told, said, group=group.cpu_group)
    return told


def _group(group_of: str) -> Any:
    """A group of this rank's, None where it is alone in it."""
    from vllm import distributed

    if not distributed.model_parallel_is_initialized():
        return None
    group: Any = getattr(distributed, group_of)()
    return group if group.world_size > 1 else None
