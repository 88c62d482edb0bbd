"""Rows of a store for training: shuffled, in batches, from any number of workers and ranks, resumable.

>>> data = rows("captures", "resid_post", 12, batch=4096, dtype=torch.bfloat16)   # doctest: +SKIP
>>> for batch in DataLoader(data, batch_size=None, num_workers=4):                # doctest: +SKIP
...     step(batch["resid_post.12"])                                              # [4096, width]

Rows are mixed in units of at most 128 neighbours on the disk. The units are permuted over all that was chosen, and
dealt out to the workers. A worker fills them into a window of at least 65,536 rows (``window``), out of which rows come
in random order. So two rows that follow each other come from the same unit with a chance of 128 / window, 1 in 512.
Across windows the mixing is that of the units. A choice smaller than a window is shuffled perfectly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch.utils.data import IterableDataset, get_worker_info

from schemas.bucket.places import Stores
from schemas.bucket.reader import share_of
from schemas.errors import ArgumentError
from vllm_tap.client.captures import Layers
from vllm_tap.client.listing import Where, wanted
from vllm_tap.loader.epoch_plan import WINDOW_ROWS, EpochPlan, rows_between, units_of
from vllm_tap.loader.joined_index import AnyIndex, index_each, joined, stores_named
from vllm_tap.loader.row_index import BLOCK_ROWS, build_index, keys_of
from vllm_tap.loader.row_window import Batch, Window, WindowMemory
from vllm_tap.loader.stored_rows import open_rows
from vllm_tap.progress import ProgressReport
from vllm_tap.store import Store

__all__ = ["Activations", "RowDataset", "activations", "rows"]

_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
I64 = npt.NDArray[np.int64]


def rows(store: Stores | Store, site: str | Sequence[str], layer: Layers = None, *,
         where: Where = None, codec: str | None = None, batch: int = 4096, dtype: torch.dtype = torch.float32,
         seed: int = 0, shuffle: bool = True, window: int = WINDOW_ROWS, rank: int | None = None,
         world: int | None = None, verify: bool = False, allow_missing: bool = True, progress: ProgressReport = False
         ) -> RowDataset:
    """The rows of a site and layer over all captures that ended, as batches of one epoch.

    ``store`` may be several, as in ``open_store``. An epoch then has the rows of all of them, each once. Their order is
    the same wherever the stores lie and however they are named. ConflictError where two have one capture.

    Several sites or layers (``["resid_mid.3", "mlp_out.3"]``, or one site and a list of layers) come aligned: row i of
    each is of the same token. ``where``: tags that a capture must have, or a function of its ``CaptureRow``. ``codec``
    chooses among captures that are stored in different ways. ``rank`` and ``world`` are those of torch.distributed
    where it is running.

    ``verify`` compares every row with its checksum. In a segment that is not sealed yet it does so for every frame,
    which reads all its layers. Without ``verify`` only heads of frames are compared, and rows out of a bucket. With
    ``allow_missing=False`` a chosen capture that lacks rows raises MissingRows; else the rows that are there are taken.

    A batch is a dict: ``site.layer`` [batch, width] of ``dtype`` for each, ``position``, ``token_id`` and ``capture``
    (a number in ``captures``), int64 [batch]. The last batch of a shard may be smaller. Iterating raises NotFoundError
    where a capture was deleted since: its rows are never handed out as the zeros that replace them.
    """
    if dtype not in _DTYPES:
        raise ArgumentError("dtype", dtype, f"valid: {', '.join(map(str, _DTYPES))}")
    if where is not None and not callable(where) and not (
            isinstance(where, Mapping) and all(isinstance(value, str) for value in where.values())):
        raise ArgumentError("where", where, "valid: tags and their values, both strings, or a function of a CaptureRow")
    plan = EpochPlan(seed, shuffle, batch, window, *_process(rank, world))
    keys, stores = keys_of(site, layer), stores_named(store)
    indexes = [build_index(stores[0], keys, where, codec, progress, allow_missing)] if len(stores) == 1 else index_each(
        stores, keys, lambda _, row: wanted(where, row), codec, progress, allow_missing)
    if isinstance(store, Store):
        _, cache, cache_bytes = store.opened
        indexes = [replace(index, cache=cache, cache_bytes=share_of(cache_bytes, len(stores))) for index in indexes]
    return RowDataset(joined(indexes), plan, dtype, verify)


def _process(rank: int | None, world: int | None) -> tuple[int, int]:
    """Rank and world, those of torch.distributed where none are given."""
    if (rank is None) != (world is None):
        raise ArgumentError("rank", rank, f"rank and world are given together, and world = {world}")
    if rank is not None and world is not None:
        return rank, world
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


class RowDataset(IterableDataset[Batch]):  # type: ignore[misc]  # torch is not looked into
    """The dataset of ``rows``: one epoch an iteration, batches already made (``DataLoader(…, batch_size=None)``).

    ``set_epoch`` chooses another order of the same rows. ``state_dict`` says how far an iteration has come, and
    ``load_state_dict`` lets the next one go on there. The order is the same again for the same seed, epoch, batch,
    window, ranks and workers. With a DataLoader of several workers ask ``state_after(batches, workers)``.
    """

    def __init__(self, index: AnyIndex, plan: EpochPlan, dtype: torch.dtype, verify: bool) -> None:
        self.index, self.plan, self.dtype, self.verify, self.epoch = index, plan, dtype, verify, 0
        self.batch, self.window = plan.batch, plan.window
        self.units = units_of(index)
        self._digest = xxhash.xxh3_64_hexdigest(index.order.encode() + self.units.astype("<i8").tobytes())
        self._memory = WindowMemory()
        self._done = 0  # batches of this process that are behind
        self._resume: dict[str, Any] | None = None

    @property
    def captures(self) -> list[str]:
        """The ids of the captures that the batches' ``capture`` counts in."""
        return self.index.captures

    @property
    def names(self) -> list[str]:
        """``site.layer`` of what is in a batch."""
        return self.index.names

    @property
    def rows(self) -> int:
        """Rows of an epoch, over all workers and ranks."""
        return self.index.rows

    def batches(self, workers: int = 0) -> int:
        """Batches of an epoch of this rank, with so many workers."""
        return sum(self._batches(max(workers, 1)))

    def _batches(self, workers: int) -> list[int]:
        return [self.plan.batches(self.units, self.epoch, worker, workers) for worker in range(workers)]

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be this epoch, from its beginning."""
        self.epoch, self._resume, self._done = epoch, None, 0

    # ── going on where it was left ──────────────────────────────────────────────────────────────────────────────

    def state_dict(self) -> dict[str, Any]:
        """The position of this process in the iteration that is under way; may be kept as JSON."""
        worker, workers = _worker()
        return self._state(workers, {worker: self._done})

    def state_after(self, batches: int, workers: int) -> dict[str, Any]:
        """The state when ``batches`` batches of the epoch have come out of a DataLoader with ``workers`` workers.

        A DataLoader takes batches from its workers in turn, and leaves out those that have none left. A new DataLoader
        begins with its first worker. So the state lets that worker take the place of the one whose turn it was.
        """
        if workers < 1:
            return self._state(1, {0: batches})
        ends = np.asarray(self._batches(workers))
        if batches > ends.sum():
            raise ArgumentError("batches", batches, f"an epoch has {ends.sum()}")
        rounds = np.searchsorted([int(np.minimum(ends, turn).sum()) for turn in range(int(ends.max()) + 1)], batches,
                                 side="right") - 1
        done = np.minimum(ends, rounds)
        turns = np.flatnonzero(ends > rounds)
        taken = batches - int(done.sum())
        done[turns[:taken]] += 1
        return self._state(workers, dict(enumerate(done.tolist())), int(turns[taken]) if taken < len(turns) else 0)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; SpecError where it is of other rows or of another order.

        Rows come in the order in which they lie on the disk. That order changes when the store is compacted, and when
        rows are erased from a compacted block. A dataset that is made afterwards refuses a state from before.
        """
        for name, mine in self._order().items():
            if state.get(name) != mine:
                why = f"this dataset has {name} = {mine}"
                if name == "order":
                    why += ("; the same rows lie in another order since, as the store was compacted or something was "
                            "erased beside them, and going on would repeat some and leave out others: begin the epoch "
                            "again, or the next one, with set_epoch")
                raise ArgumentError("state", {name: state.get(name)}, why)
        self.epoch, self._resume = int(state["epoch"]), dict(state)

    def _order(self) -> dict[str, Any]:
        """The inputs that the order of the rows follows from, beside the epoch and the workers."""
        return {"rows": self.rows, "names": self.names, **asdict(self.plan), "order": self._digest}

    def _state(self, workers: int, done: dict[int, int], turn: int = 0) -> dict[str, Any]:
        return {**self._order(), "epoch": self.epoch, "workers": workers, "done": done, "turn": turn}

    # ── one epoch of one worker ─────────────────────────────────────────────────────────────────────────────────

    def __iter__(self) -> Iterator[Batch]:
        worker, workers = _worker()
        skip, self._resume, state = 0, None, self._resume
        if state is not None:
            if state["workers"] != workers:
                raise ArgumentError("state", {"workers": state["workers"]}, f"this DataLoader has {workers}; the order "
                                                                        "depends on it")
            worker = (worker + state["turn"]) % workers
            done = {int(number): taken for number, taken in state["done"].items()}  # JSON has made them strings
            if worker not in done:
                raise ArgumentError("state", {"done": state["done"]}, f"says nothing of worker {worker}")
            skip = int(done[worker])
        self._done = skip
        order = self.plan.order(self.units, self.epoch, worker, workers)
        firsts, ends = self.units[order], np.cumsum(np.diff(self.units)[order])  # of the units, in this order
        total = int(ends[-1]) if len(ends) else 0
        files = open_rows(self.index, self.verify, self.plan.world * workers)
        try:
            for number in range(skip * self.batch // self.window, -(-total // self.window)):
                begin, end = number * self.window, min((number + 1) * self.window, total)
                chosen = rows_between(firsts, ends, begin, end)
                slots = self.plan.slots(len(chosen), self.epoch, worker, workers, number)
                filled = Window(files, chosen, slots, self._memory, min(self.window, total), self.dtype)
                self.index = files.index
                try:
                    for at in range(max(0, skip * self.batch - begin), len(chosen), self.batch):
                        self._done += 1
                        # Another process would be sent the whole window with the first view of it, and the last batch
                        # is still looked at when the next window is filled.
                        copied = get_worker_info() is not None or at + self.batch >= len(chosen)
                        yield filled.batch(at, min(at + self.batch, len(chosen)), copied)
                finally:
                    filled.close()
        finally:
            files.close()


def _worker() -> tuple[int, int]:
    """This process among the DataLoader's workers."""
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)


class Activations(Iterator[torch.Tensor]):
    """The iterator of ``activations``: ``[batch, d_in]``, without end, in another order every epoch."""

    def __init__(self, data: RowDataset) -> None:
        worker, workers = _worker()
        if not data.plan.rows_read(data.units, 0, worker, workers):  # all epochs would be empty, and no batch full
            plan, units = data.plan, len(data.units) - 1
            raise ArgumentError("rank", plan.rank, f"has no rows: {units} units of at most {BLOCK_ROWS} are shared by "
                                                   f"world x workers = {plan.world} x {workers}")
        if data.batch > (most := max(data.rows, WINDOW_ROWS)):  # it would be put together in memory, epoch after epoch
            raise ArgumentError("batch", data.batch, f"at most {most} rows; the store has {data.rows}")
        self.data, self._name, self._taken = data, data.names[0], 0
        self._batches, self._rest = iter(data), torch.empty(0)

    @property
    def d_in(self) -> int:
        """Numbers in a row."""
        return self.data.index.width(self._name)

    def __next__(self) -> torch.Tensor:
        parts = [self._rest] if len(self._rest) else []
        while sum(map(len, parts)) < self.data.batch:  # the rest of an epoch goes before the next
            parts.append(self._more())
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        self._rest = joined[self.data.batch:]
        self._taken += 1
        return joined[:self.data.batch]

    def _more(self) -> torch.Tensor:
        while (found := next(self._batches, None)) is None:
            self.data.set_epoch(self.data.epoch + 1)
            self._batches = iter(self.data)
        return found[self._name]

    def state_dict(self) -> dict[str, Any]:
        """The number of batches taken, and the order that they are of."""
        return {**self.data.state_after(0, 0), "epoch": 0, "taken": self._taken}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; SpecError where it is of other rows or of another order."""
        if not isinstance(state.get("taken"), int):
            raise ArgumentError("state", dict(state), "valid: what state_dict gave")
        epoch, left = 0, int(state["taken"]) * self.data.batch
        while left >= (size := self.data.plan.rows_read(self.data.units, epoch)):
            epoch, left = epoch + 1, left - size
        self.data.load_state_dict({**state, "epoch": epoch, "done": {0: left // self.data.batch}})
        self._batches, self._rest, self._taken = iter(self.data), torch.empty(0), int(state["taken"])
        if begun := left % self.data.batch:
            self._rest = self._more()[begun:]


def activations(store: Stores | Store, hook_name: str, batch: int = 4096, **options: Any) -> Activations:
    """Iterate over the rows of one hook without end, float32 ``[batch, d_in]``: a data provider for SAE trainers.

    ``hook_name`` is TransformerLens's (``blocks.12.hook_resid_post``) or ``resid_post.12``. ``options`` are those of
    ``rows``. Every batch has ``batch`` rows. ``state_dict`` and ``load_state_dict`` let another process continue.
    Raises SpecError if this rank has no rows.

    Examples:
        >>> for x in itertools.islice(activations("captures", "blocks.12.hook_resid_post"), 10_000):  # doctest: +SKIP
        ...     loss = train(x)                                                       # float32 [4096, d_in]
    """
    data = rows(store, hook_name, batch=batch, **options)
    return Activations(data)
