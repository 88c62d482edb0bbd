"""Running the cells of a sweep, several at once: on asyncio, or in threads over a blocking connection."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from vllm_tap.client.sweep_plan import Cell, Prepared, SweepAsked, measure, prepare
from vllm_tap.client.sweep_result import PatchSweep, Results, outcome
from vllm_tap.progress import ProgressReport, reporting

if TYPE_CHECKING:
    from vllm_tap.client.async_client import AsyncClient

__all__ = ["sweep", "sweep_in_threads"]

T = TypeVar("T")


async def sweep(client: AsyncClient, asked: SweepAsked, results: str | Path | None, progress: ProgressReport
                ) -> PatchSweep:
    """Every cell that ``results`` has not; the first error ends it, what was measured is kept."""
    sweep = await prepare(client, asked)
    with closing(Results(sweep, results)) as kept, reporting(progress, "patching") as tell:
        free, total, left = asyncio.Semaphore(sweep.at_once), len(sweep.cells), kept.left(sweep)
        done = itertools.count(total - len(left))
        tell(next(done), total)

        async def one(cell: Cell) -> None:
            async with free:
                kept.add(cell, await measure(client, sweep, cell))
            tell(next(done), total)

        try:
            async with asyncio.TaskGroup() as group:
                for cell in left:
                    group.create_task(one(cell))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return outcome(sweep, kept.measured)


def sweep_in_threads(client: AsyncClient, run: Callable[[Coroutine[Any, Any, Any]], Any], asked: SweepAsked,
                     results: str | Path | None, progress: ProgressReport) -> PatchSweep:
    """The same where ``run`` runs a coroutine of ``client`` by blocking."""
    sweep: Prepared = run(prepare(client, asked))
    with closing(Results(sweep, results)) as kept, reporting(progress, "patching") as tell:
        left, total = kept.left(sweep), len(sweep.cells)
        tell(total - len(left), total)
        with ThreadPoolExecutor(sweep.at_once) as pool:
            cells = {pool.submit(lambda cell: run(measure(client, sweep, cell)), cell): cell for cell in left}
            try:
                for done, future in enumerate(as_completed(cells), total - len(left) + 1):
                    kept.add(cells[future], future.result())
                    tell(done, total)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        return outcome(sweep, kept.measured)
