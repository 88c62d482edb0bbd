"""The commands that look after a store: what an operator does to it as a whole, and to captures in it."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from schemas.errors import TapError
from vllm_tap.cli.options import AnyStores, Catalog, Ref, Store, source_of

if TYPE_CHECKING:
    from writer_service.tools.findings import Finding
    from writer_service.tools.fsck import Report

__all__ = ["add"]


def add(app: typer.Typer) -> None:
    """Put the commands into ``app``."""
    app.command("fsck")(check)
    app.command("rebuild")(rebuild)
    app.command("compact")(compact)
    app.command("rm")(remove)
    app.command("hold")(hold)
    app.command("release")(release)
    app.command("curve-keys")(curve_keys)


def check(
    store: Store = Path("captures"),
    json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    bucket: Annotated[str | None, typer.Option(
        "--bucket", metavar="URL", help="Check the bucket that vllm-tap push brought the store to, not the store.")
        ] = None,
    deep: Annotated[bool, typer.Option("--deep", help="Read every byte of rows too; with --bucket.")] = False,
    orphans: Annotated[bool, typer.Option(
        "--remove-orphans", help="Delete objects that no head names; safe while others push; with --bucket.")] = False,
    older_than: Annotated[str, typer.Option(
        "--older-than", metavar="TIME", help="Delete only orphans that were written longer ago: 30m, 12h, 1d.")] = "1d",
    forget: Annotated[str | None, typer.Option(
        "--forget", metavar="PUSH", help="Give up a head that was taken over from; with --bucket.")] = None,
    catalog: Annotated[str | None, typer.Option(
        "--catalog", metavar="URL", help="Compare the bucket's catalog in Postgres too, row for row: "
                                         "postgresql://USER@HOST/DATABASE.")] = None,
) -> None:
    """Check every byte of a store, or what is in a bucket, and name what is bad. Exit code 1 where something is."""
    from vllm_tap.cli.show import print_json, progress_bar
    from writer_service.tools.fsck import fsck

    if bucket is not None:
        from vllm_tap.cli.bucket import fsck_bucket

        if orphans and catalog is not None:
            raise TapError("fsck: --catalog and --remove-orphans exclude each other; run one after the other")
        raise typer.Exit(fsck_bucket(bucket, deep, older_than if orphans else None, forget, json, catalog))
    if deep or orphans or forget is not None or catalog is not None:
        raise TapError("fsck: --deep, --remove-orphans, --forget and --catalog are of a bucket: name it with --bucket "
                       "URL")
    with progress_bar("checking") as bar:
        task = bar.add_task("")
        report = fsck(store, lambda done, total: bar.update(task, completed=done, total=total))
    if json:
        print_json({"ok": not report.bad, **asdict(report)})
    else:
        for bad in report.bad:
            print(_line(bad))
        print(_summary(report))
    raise typer.Exit(1 if report.bad else 0)


def rebuild(store: Store = Path("captures")) -> None:
    """Make the catalog again; no writer may run.

    It is made from journals and blocks.
    """
    from writer_service import fs
    from writer_service.tools.rebuild import rebuild as run

    done = run(store)
    fs.close(done.state.lock)
    print(f"{done.captures:,} captures; " + (
        "there was no catalog to compare with" if not done.compared
        else "the same as before" if not done.differences
        else "differs from the one before: " + ", ".join(
            f"{table} {gone:,} rows gone, {come:,} new" for table, (gone, come) in done.differences.items())))
    for name in done.state.skipped:
        print(f"blocks/{name} cannot be read and is left out")
    raise typer.Exit(1 if done.state.skipped else 0)


def compact(
    store: Store = Path("captures"),
    older_than: Annotated[float | None, typer.Option(
        "--older-than", metavar="DAYS", min=0.0, help="Only blocks of captures made longer ago; default: all.")] = None,
    zstd: Annotated[bool, typer.Option(
        "--zstd", help="Compress rows that are stored as they are (raw16, raw); of cold blocks too.")] = False,
) -> None:
    """Sort and join sealed blocks; no writer may run.

    Rows are sorted by capture and layer, and small blocks are joined.
    """
    from vllm_tap.cli.show import progress_bar
    from writer_service.tools.compaction import compact as run

    with progress_bar("compacting") as bar:
        task = bar.add_task("")
        done = run(store, older_than, lambda done, total: bar.update(task, completed=done, total=total), zstd)
    before, after = done.bytes_before, done.bytes_after
    gain = f" ({100 * (after - before) / before:+.1f} %)" if before else ""
    print(f"{done.blocks:,} blocks became {done.cold:,}: {before / 1e9:.3f} GB, now {after / 1e9:.3f} GB{gain}")
    for line in done.failed:  # blocks that had to be left
        print(f"left as it is: {line}", file=sys.stderr)
    raise typer.Exit(1 if done.failed else 0)


def remove(
    refs: Annotated[list[str], typer.Argument(help="Capture ids, response ids or X-Request-Ids.")],
    store: AnyStores,
    catalog: Catalog = None,
) -> None:
    """Delete captures for good.

    They are hidden at once. Their rows leave a disk within seconds, and a bucket with the next push of the store's
    folder, which deletes them there too.
    """
    from schemas.bucket.places import is_url
    from vllm_tap.cli.bucket import remove_there
    from vllm_tap.cli.show import homes, left_elsewhere
    from vllm_tap.store_control import delete

    left = left_elsewhere(source := source_of(store, catalog), refs)
    for place, mine in homes(source, refs).items():
        for target in remove_there(place, mine, catalog) if is_url(place) else delete(Path(place), mine):
            typer.echo(target)
    if left:
        typer.echo(f"layers of {', '.join(left)} are in other writers' stores: delete them there too (--store for "
                   "each)", err=True)


def hold(ref: Ref, store: Store = Path("captures")) -> None:
    """Keep a capture until it is released.

    A held capture is not deleted and does not expire.
    """
    from vllm_tap.store_control import hold as run

    typer.echo(run(store, ref, True))


def release(ref: Ref, store: Store = Path("captures")) -> None:
    """End a hold."""
    from vllm_tap.store_control import hold as run

    typer.echo(run(store, ref, False))


def curve_keys(
    name: Annotated[str, typer.Argument(help="The engine's name: letters, digits, '-' and '_'.")],
    folder: Annotated[Path, typer.Option("--folder", help="The writer's folder of keys, its --curve.")] = Path("curve"),
) -> None:
    """Make keys for an engine on another host.

    With them it may send to this host's writer. Prints the folder to carry there.
    """
    from schemas.wire.curve import make_sender

    typer.echo(make_sender(folder, name))
    typer.echo("carry this folder to the engine's host, name it there in VLLM_TAP_CURVE, and remove it here; the "
               f"writer takes --listen tcp://HOST:PORT --curve {folder} and knows new keys from its next start on",
               err=True)


def _line(bad: Finding) -> str:
    at = "" if bad.offset is None else f" at byte {bad.offset}"
    rows = ""
    if bad.capture:
        rows = (f" capture {bad.capture} {bad.site} layers {_numbers(bad.layers)} "
                f"positions {_numbers(bad.positions)}:")
    return f"{bad.file}{at}:{rows} {bad.what}"


def _numbers(numbers: tuple[int, ...]) -> str:
    from writer_service.tools.findings import ranges

    return ",".join(str(a) if a + 1 == b else f"{a}-{b - 1}" for a, b in ranges(numbers))


def _summary(report: Report) -> str:
    rows = sum(len(bad.layers) * len(bad.positions) for bad in report.bad)
    found = f"{len(report.bad):,} findings, {rows:,} bad rows" if report.bad else "nothing is wrong"
    return (f"{found} ({report.segments:,} segments, {report.frames:,} frames, {report.captures:,} captures, "
            f"{report.nbytes / 1e9:.3f} GB)")
