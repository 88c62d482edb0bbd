"""Make one control log of several that nobody appends to: each round of erasing leaves one, and a start too.

The records of the logs first … last go, as they lie there, into the log ``last``. Its head says how many numbers below
its own it stands for. Then the others are removed. A crash between the two leaves logs whose records another has as
well; the next start removes them. So a log that is not there is found in the next one that is (``log_of``).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Final

from schemas.errors import StoreError
from schemas.store.paths import journal_folder
from writer_service import fs
from writer_service.control_log import log_end, log_head, log_numbers, log_path, read_log, span_max, span_of

logs_min: Final = 4  # merged at a time
logs_max: Final = 4096
small_bytes: Final = 64 * 1024
merged_bytes_max: Final = 8 * 1024 * 1024  # a deletion writes such a log anew


def log_of(numbers: Sequence[int], number: int) -> int | None:
    """Log, of those that are there (ascending), that has the records of log ``number``; None where none has."""
    at = bisect_left(numbers, number)
    return numbers[at] if at < len(numbers) else None


def mergeable(store: Path, before: int, damaged: Collection[int] = ()) -> list[int]:
    """Neighbouring logs below ``before`` that should be one, ascending; none where there are few of them.

    A log joins smaller ones after it only where it is not much larger than all of these. So no record is written more
    often than some twenty times, however many logs come.
    """
    journal = store / journal_folder()
    run: list[int] = []
    total = 0
    for number in reversed([number for number in log_numbers(journal) if number < before]):
        size = log_path(journal, number).stat().st_size
        if not (run and number not in damaged and size <= max(2 * total, small_bytes)
                and total + size <= merged_bytes_max and len(run) < logs_max):
            if len(run) >= logs_min:
                break
            run, total = [], 0
        if number not in damaged:
            run.append(number)
            total += size
    return run[::-1] if len(run) >= logs_min else []


def merge(store: Path, uuid: bytes, numbers: Sequence[int]) -> None:
    """The last of the logs has the records of all, and the others are gone.

    ``DamagedLogError`` where a record of one is damaged: what follows it cannot be read, and would be gone for good.
    """
    journal = store / journal_folder()
    records = []
    for number in numbers:
        path = log_path(journal, number)
        data = path.read_bytes()
        try:
            end = max((after for after, _ in read_log(path, uuid)), default=log_end)
        except StoreError:
            end = 0
        if end != max(len(data), log_end):  # one whose head was never whole has no records
            raise DamagedLogError(number, path, end)
        records.append(data[log_end:])
    span = numbers[-1] - numbers[0]  # what a head below says is of a merge that is finished
    if span >= span_max:
        return
    last = log_path(journal, numbers[-1])
    fs.write_durable(last, log_head(uuid, span) + b"".join(records))
    fs.remove_all([log_path(journal, number) for number in numbers[:-1]])


class DamagedLogError(StoreError):
    """Log ``number`` has a damaged record."""

    def __init__(self, number: int, path: Path, end: int) -> None:
        super().__init__("merge control log", path, f"the record at byte {end} is damaged",
                         "put a good copy of the log in its place, or cut it off there")
        self.number = number


def superseded(journal: Path, uuid: bytes) -> list[Path]:
    """Logs whose records lie in a later one too, and what a merge that was cut short had begun to write."""
    found = {number for last, named in _named(journal) if _has(journal, uuid, last, named) for number in named}
    return [*(log_path(journal, number) for number in sorted(found)), *journal.glob(".control-*.log.tmp")]


def damaged_heads(journal: Path, uuid: bytes) -> list[Path]:
    """Logs that say that they stand for others, of which they have not all."""
    return [log_path(journal, last) for last, named in _named(journal) if not _has(journal, uuid, last, named)]


def _named(journal: Path) -> Iterator[tuple[int, list[int]]]:
    """Logs whose heads say that they stand for others, with those of them that are there."""
    numbers = log_numbers(journal)
    for last in numbers:
        span = span_of(log_path(journal, last))
        named = numbers[bisect_left(numbers, last - span) : bisect_left(numbers, last)]
        if named or span >= last:
            yield last, named


def _has(journal: Path, uuid: bytes, last: int, numbers: Sequence[int]) -> bool:
    """Whether the records of the others can be read from log ``last``: no hash covers what its head says."""
    if span_of(log_path(journal, last)) >= last:
        return False  # there is no log 0
    path = log_path(journal, last)
    try:
        end = max((after for after, _ in read_log(path, uuid)), default=log_end)
    except StoreError:
        return False
    whole = path.read_bytes()[log_end:end]
    return all(log_path(journal, number).read_bytes()[log_end:] in whole for number in numbers)


def finish_merges(store: Path, uuid: bytes) -> None:
    """Remove what a crash left of merged logs: before anything reads logs, and before one is scrubbed."""
    if left := superseded(store / journal_folder(), uuid):
        fs.remove_all(left)
