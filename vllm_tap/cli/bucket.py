"""The commands of a store in a bucket: it is brought there, and looked at."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from schemas.errors import TapError
from vllm_tap.cli.options import Store

if TYPE_CHECKING:
    from vllm_tap.bucket.check import BucketReport
    from vllm_tap.bucket.erasure import Erased
    from vllm_tap.bucket.postgres import Brought
    from vllm_tap.bucket.push import Pushed

__all__ = ["add", "fsck_bucket", "remove_there"]



_commands = typer.Typer()


def add(app: typer.Typer) -> None:
    """Put the commands into ``app``."""
    app.registered_commands += _commands.registered_commands


@_commands.command()
def push(
    places: Annotated[list[str], typer.Argument(
        metavar="[STORE] URL", help="The folder of captures, as --store too; and s3://BUCKET/PREFIX, gs://…, az://… or "
                                    "a folder as file:///PATH.")],
    store: Store = Path("captures"),
    verify: Annotated[bool, typer.Option("--verify", help="Read the rows of all blocks back.")] = False,
    take_over: Annotated[bool, typer.Option(
        "--take-over", help="Go on from a head that this folder did not push; it stays whole below retired/.")] = False,
    local_bytes: Annotated[str | None, typer.Option(
        "--local-bytes", metavar="N", help="Then let rows that the bucket has leave this disk, the least recently read "
                                           "first, until they take no more than N bytes of it, as in 500GB.")] = None,
    catalog: Annotated[str | None, typer.Option(
        "--catalog", metavar="URL", help="Bring the catalog to this Postgres database too, "
                                         "postgresql://USER@HOST/DATABASE.")] = None,
    no_catalog: Annotated[bool, typer.Option(
        "--no-catalog", help="Push without the database that an earlier push named; its readers see the old "
                             "state.")] = False,
    every: Annotated[str | None, typer.Option(
        "--every", metavar="TIME", help="Push what is new so often, as in 60s or 5m, until SIGTERM or Ctrl-C, and once "
                                       "more then; what goes wrong is told and tried again.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object, for each push.")] = False,
) -> None:
    """Bring what is sealed of a store to a bucket, for open_store(URL); rows of deleted captures leave it."""
    from vllm_tap.bucket.push import push as run
    from vllm_tap.cli.show import progress_bar
    from vllm_tap.sizes import parse_age, parse_size

    *folders, url = places
    if len(folders) > 1 or "://" not in url:
        raise TapError(f"push {' '.join(places)}: name a store and a URL: vllm-tap push captures s3://BUCKET/PREFIX")
    if no_catalog and catalog is not None:
        raise TapError("push: --catalog and --no-catalog exclude each other; leave one out")
    store = Path(folders[0]) if folders else store
    room = None if local_bytes is None else parse_size(local_bytes, "--local-bytes")
    if every is not None:
        if take_over or verify:
            raise TapError("push --every goes on from its own pushes: leave out --take-over and --verify, or push once "
                           "with them before")
        _push_on(store, url, lambda: run(store, url, local_bytes=room, catalog=catalog, without_catalog=no_catalog),
                 parse_age(every, "--every", 1.0), lambda done: _show(done, json, room is not None))
        return
    with progress_bar("pushing") as bar:
        task = bar.add_task("")
        done = run(store, url, lambda done, total: bar.update(task, completed=done, total=total), verify, take_over,
                   room, catalog, no_catalog)
    _show(done, json, room is not None)


def _push_on(store: Path, url: str, push: Callable[[], Pushed], every_s: float, show: Callable[[Pushed], None]) -> None:
    """Push until a signal; a second one ends at once."""
    import signal
    import threading

    from vllm_tap.bucket.removal import Sweeper, Swept
    from vllm_tap.bucket.repeat import keep_pushing

    stop = threading.Event()

    def on_signal(number: int, _frame: object) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)
        stop.set()

    def told(what: Pushed | Swept | Exception | None) -> None:
        if isinstance(what, Exception):
            print(f"not pushed: {what}; tried again every {every_s:g} s", file=sys.stderr, flush=True)
        elif what is None:
            print(f"push ready: {url} every {every_s:g} s", file=sys.stderr, flush=True)
        elif isinstance(what, Swept):
            print(f"{what.url}: removed {what.objects:,} objects ({what.nbytes / 1e9:.3f} GB) that no head names "
                  "any more", file=sys.stderr, flush=True)
        else:
            show(what)
            sys.stdout.flush()

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, on_signal)
    keep_pushing(store, url, push, every_s, stop, told, Sweeper(url))


def _show(done: Pushed, as_json: bool, evicts: bool) -> None:
    from dataclasses import asdict

    from vllm_tap.cli.show import print_json

    if as_json:
        print_json(asdict(done))
    else:
        _tell(done, evicts)


def _tell(done: Pushed, evicts: bool) -> None:
    """Print the result of a push, in lines."""
    print(f"{done.url}: generation {done.generation}" + ("" if done.changed else ", nothing is new")
          + f"; {done.captures:,} captures in {done.blocks:,} blocks, {done.new_blocks:,} of them new "
          f"({done.new_bytes / 1e9:.3f} GB sent)")
    if done.catalog is not None:
        print(_catalog_line(done.catalog))
    if done.room is not None:
        print(f"{done.room.blocks:,} blocks evicted ({done.room.nbytes / 1e9:.3f} GB); rows take "
              f"{done.room.local_bytes / 1e9:.3f} GB of this disk now")
    elif evicts:
        print("no block evicted: another push of this store runs; the next one evicts", file=sys.stderr)
    if done.followed:
        print(f"{done.followed:,} captures that were deleted in the bucket are deleted here too", file=sys.stderr)
    if done.left_out:
        print(f"{done.left_out:,} captures are not final, or not all of their rows sealed: they go with a later push",
              file=sys.stderr)
    if done.retired is not None:
        print(f"taken over: the head before stays whole, {done.only_retired:,} captures are in it alone: "
              f"open_store('{done.url}#{done.retired}') reads it", file=sys.stderr)
    if done.erased.objects:
        print(f"{done.erased.objects:,} objects ({done.erased.nbytes / 1e9:.3f} GB) with rows of deleted captures "
              "were removed" + (", but the bucket keeps versions: they stay, readable by version, until a lifecycle "
                                "rule expires noncurrent versions" if done.is_versioned else ""), file=sys.stderr)
    _tell_retired(done.url, done.erased)
    if done.superseded and not done.erased.objects:
        print(f"{done.superseded:,} blocks that the head before named are in the bucket still: vllm-tap fsck --bucket "
              f"{done.url} --remove-orphans removes them", file=sys.stderr)


def _tell_retired(url: str, erased: Erased) -> None:
    for push_id in erased.retired:
        print(f"retired head {push_id} still has captures that were deleted, or cannot be read: vllm-tap fsck --bucket "
              f"{url} --forget {push_id} --remove-orphans --older-than 0s", file=sys.stderr)


def remove_there(url: str, refs: list[str], catalog: str | None) -> list[str]:
    """Delete captures of a store in a bucket, and tell what still has them; their ids."""
    from vllm_tap.bucket.deletion import hide

    done = hide(url, refs, catalog)
    if done.is_versioned:
        print(f"{done.url} keeps versions: what its catalog said of them stays, readable by version, until a "
              "lifecycle rule expires noncurrent versions", file=sys.stderr)
    _tell_retired(done.url, done.erased)
    return done.captures


def _catalog_line(done: Brought) -> str:
    if done.outrun:
        return f"{done.place}: another push was first, and brings its own catalog"
    sent = f"{done.sent:,} rows sent" + (", all there are" if done.whole else "")
    return f"{done.place}: {sent}, {done.removed:,} removed or replaced" if done.sent or done.removed else (
        f"{done.place}: has this catalog already")


@_commands.command()
def recall(store: Store = Path("captures")) -> None:
    """Bring rows that were evicted to a bucket back to the store's disk; a writer may run."""
    from vllm_tap.bucket.eviction import recall_all
    from vllm_tap.cli.show import progress_bar

    with progress_bar("recalling") as bar:
        task = bar.add_task("")
        blocks, nbytes = recall_all(store, lambda done, total: bar.update(task, completed=done, total=total))
    print(f"{blocks:,} blocks are on the disk again ({nbytes / 1e9:.3f} GB)")


def fsck_bucket(url: str, deep: bool, older_than: str | None, forget: str | None, json: bool,
                catalog: str | None = None) -> int:
    """Say what is wrong in a bucket, and remove what is asked for; the exit code."""
    from dataclasses import asdict

    from vllm_tap.bucket import removal
    from vllm_tap.bucket.check import check
    from vllm_tap.cli.show import print_json, progress_bar
    from vllm_tap.sizes import parse_age

    age_s = None if older_than is None else parse_age(older_than, "--older-than")
    if forget is not None:
        print(f"retired head {forget} is given up; {removal.forget(url, forget):,} captures were in it alone",
              file=sys.stderr)
    with progress_bar("checking") as bar:
        task = bar.add_task("")

        def tell(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        report = check(url, deep, tell, catalog) if age_s is None else removal.remove_orphans(url, age_s, deep, tell)
    if json:
        print_json({"ok": not report.bad, **asdict(report)})
    else:
        for line in _lines(report):
            print(line)
    if report.is_versioned:
        print(f"{url} keeps versions: what is deleted stays there, readable by version, until a lifecycle rule of the "
              "bucket expires noncurrent versions", file=sys.stderr)
    return 1 if report.bad else 0


def _lines(report: BucketReport) -> Iterator[str]:
    for bad in report.bad:
        yield f"{bad.key}: {bad.what}" + (f" (retired head {bad.head})" if bad.head else "")
    for lost in report.lost:
        yield (f"capture {lost.capture}: up to {lost.tokens:,} tokens lie in {lost.blocks:,} blocks that are not whole"
               + (f" (retired head {lost.head})" if lost.head else ""))
    if report.lost_captures > len(report.lost):
        yield f"… and {report.lost_captures - len(report.lost):,} captures more"
    for push in report.retired:
        yield f"retired head {push}: open_store('{report.url}#{push}') reads it"
    for key in report.first_strangers[:10]:
        yield f"{key}: is none of ours, and is left alone"
    if report.strangers > 10:
        yield f"… and {report.strangers - 10:,} objects more that are none of ours"
    if report.orphans:
        hours = max(time.time() - report.oldest_orphan_ms / 1000, 0) / 3600
        yield (f"{report.orphans:,} objects ({report.orphan_bytes / 1e9:.3f} GB) that no head names, the oldest of "
               f"{hours:.1f} hours ago" + (f"; {report.removed:,} removed ({report.removed_bytes / 1e9:.3f} GB)"
                                           if report.removed else ""))
    if report.catalog_rows:
        yield f"{report.catalog}: {report.catalog_rows:,} rows compared with the head's"
    found = f"{len(report.bad):,} findings, {report.lost_captures:,} captures lost in part or whole"
    yield (f"{found if report.bad else 'nothing is wrong'} (generation {report.head.generation}, epoch "
           f"{report.head.epoch}, {report.captures:,} captures, {report.blocks:,} blocks, {report.objects:,} objects, "
           f"{report.nbytes / 1e9:.3f} GB)")

