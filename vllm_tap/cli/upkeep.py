"""``fsck``, ``rebuild`` and ``compact``: what an operator does to a store as a whole."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from writer_service import fs
from writer_service.tools.compaction import compact
from writer_service.tools.findings import Finding, ranges
from writer_service.tools.fsck import Report, fsck
from writer_service.tools.rebuild import rebuild

__all__ = ["check_store", "compact_store", "rebuild_catalog"]


def check_store(store: Path, as_json: bool) -> int:
    """Look at every byte of a store; 1 where something is bad, else 0."""
    with _bar("checking") as bar:
        task = bar.add_task("")
        report = fsck(store, lambda done, total: bar.update(task, completed=done, total=total))
    if as_json:
        sys.stdout.buffer.write(msgspec.json.encode({"ok": not report.bad, **asdict(report)}) + b"\n")
        sys.stdout.buffer.flush()
    else:
        for bad in report.bad:
            print(_line(bad))
        print(_summary(report))
    return 1 if report.bad else 0


def rebuild_catalog(store: Path) -> int:
    """Put a catalog made of journals and blocks in the place of the one that is there."""
    done = rebuild(store)
    fs.close(done.state.lock)
    print(f"{done.captures:,} captures; " + (
        "there was no catalog to compare with" if not done.compared
        else "the same as before" if not done.differences
        else "differs from the one before: " + ", ".join(
            f"{table} {gone:,} rows gone, {come:,} new" for table, (gone, come) in done.differences.items())))
    for name in done.state.skipped:
        print(f"blocks/{name} cannot be read and is left out")
    return 1 if done.state.skipped else 0


def compact_store(store: Path, older_days: float | None, packed: bool) -> int:
    """Make cold blocks of sealed ones; 1 where a block had to be left as it is."""
    with _bar("compacting") as bar:
        task = bar.add_task("")
        done = compact(store, older_days, lambda done, total: bar.update(task, completed=done, total=total),
                       packed)
    print(f"{done.blocks:,} blocks became {done.cold:,}: {done.bytes_before / 1e9:.3f} GB, now "
          f"{done.bytes_after / 1e9:.3f} GB" + _gain(done.bytes_before, done.bytes_after))
    for line in done.failed:
        print(f"left as it is: {line}", file=sys.stderr)
    return 1 if done.failed else 0


def _gain(before: int, after: int) -> str:
    return f" ({100 * (after - before) / before:+.1f} %)" if before else ""


def _bar(what: str) -> Progress:
    return Progress(TextColumn(what), BarColumn(), DownloadColumn(), TimeRemainingColumn(),
                    console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())


def _line(bad: Finding) -> str:
    at = "" if bad.offset is None else f" at byte {bad.offset}"
    rows = ""
    if bad.capture:
        rows = (f" capture {bad.capture} {bad.site} layers {_numbers(bad.layers)} "
                f"positions {_numbers(bad.positions)}:")
    return f"{bad.file}{at}:{rows} {bad.what}"


def _numbers(numbers: tuple[int, ...]) -> str:
    return ",".join(str(a) if b == a + 1 else f"{a}-{b - 1}" for a, b in ranges(numbers))


def _summary(report: Report) -> str:
    rows = sum(len(bad.layers) * len(bad.positions) for bad in report.bad)
    found = f"{len(report.bad):,} findings, {rows:,} bad rows" if report.bad else "nothing is wrong"
    return (f"{found} ({report.segments:,} segments, {report.frames:,} frames, {report.captures:,} captures, "
            f"{report.nbytes / 1e9:.3f} GB)")
