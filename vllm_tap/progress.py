"""Progress of long work: shown as a bar, told to a function, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

__all__ = ["ProgressFunction", "ProgressReport", "counting", "reporting"]

ProgressFunction = Callable[[int, int], None]  # (done, of how many)
ProgressReport = bool | ProgressFunction


@contextmanager
def reporting(report: ProgressReport, what: str) -> Iterator[ProgressFunction]:
    """The function to tell: the caller's own, one that draws a bar on standard error (True), or one that is silent."""
    if callable(report):
        yield report
    elif not report:
        yield lambda done, total: None
    else:
        with Progress(TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
                      console=Console(stderr=True)) as bar:
            task = bar.add_task(what, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def counting(report: ProgressReport, what: str, total: int) -> Iterator[Callable[[], None]]:
    """The function to call after each step of about ``total``; what is shown is never above it."""
    done = 0
    with reporting(report, what) as tell:

        def step() -> None:
            nonlocal done
            done += 1
            tell(min(done, total), total)

        yield step
