"""A bucket's catalog from its snapshot against the same from Postgres: opening, lists, manifests, a push.

    python -m bench.catalogs [--captures 100000] [--rounds 15] [--catalog postgresql://…]

The store has one capture from a real writer, whose rows in the catalog are copied under other ids, with tags of their
own; blocks are read by neither side. The bucket is a folder, so that no network is in the figures. Without --catalog
Debian's Postgres is started for it, on this host. Sides take turns; figures are medians in seconds, and their ratio.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from schemas.bucket.reader import BucketReader
from schemas.catalog.filters import CaptureFilter
from schemas.ids import new_ulid
from tests.schemas.postgres.server import postgres_server
from tests.support.store_helpers import Sender, WriterProcess, engine_info, until
from vllm_tap.bucket.push import push


def fill(store: Path, captures: int) -> list[str]:
    """A store of so many captures; the ids of those that were copied."""
    with WriterProcess(store, "--seal-idle-s", "0.1") as writer:
        with Sender(writer.endpoint, engine=engine_info(64, 32)) as engine:
            engine.open(capture := new_ulid(), prompt_len=32)
            engine.frame([(capture, 1, range(32))])
            engine.finish(capture, end=32)
            engine.wait()
            assert until(lambda: list((store / "blocks").glob("*.zarr")), 60)
        writer.stop()
    return copied(store, capture, captures - 1)


def copied(store: Path, capture: str, count: int) -> list[str]:
    """The catalog's rows of a capture under ``count`` other ids, which are given back."""
    made = [new_ulid() for _ in range(count)]
    with closing(sqlite3.connect(store / "catalog.sqlite")) as db:
        db.row_factory = sqlite3.Row
        for table, name in (("captures", "id"), ("extents", "capture")):
            first = dict(db.execute(f"SELECT * FROM {table} WHERE {name} = ?", (capture,)).fetchone())
            columns = [row["name"] for row in db.execute(f"PRAGMA table_info({table})")]  # without what is computed
            names = ", ".join(f'"{column}"' for column in columns)
            db.executemany(f"INSERT INTO {table} ({names}) VALUES ({','.join('?' * len(columns))})", (
                [{**first, name: ulid, "ulid": ulid, "created_ms": first.get("created_ms", 0) + number,
                  "tags": json.dumps({"run": str(number % 100), "user": f"u{number % 5000}"})}[column]
                 for column in columns] for number, ulid in enumerate(made)))
        db.executemany("INSERT INTO aliases (alias, owner, ulid) VALUES (?, '', ?)",
                       ((f"chatcmpl-{ulid}", ulid) for ulid in made))
        db.commit()
    return made


def seconds(call: Callable[[], object]) -> float:
    """How long a call takes."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def opened(url: str, catalog: str | None) -> float:
    """An open reader's first list, with a cache that is empty."""
    with tempfile.TemporaryDirectory() as cache:
        def once() -> None:
            with BucketReader(url, cache, catalog=catalog) as reader:
                reader.captures(limit=100)
        return seconds(once)


def asked(reader: BucketReader, refs: Iterator[str]) -> dict[str, Callable[[], object]]:
    """What is asked of an open reader."""
    return {
        "a list of 100": lambda: reader.captures(limit=100),
        "a list of 100 with a tag": lambda: reader.page(limit=100, wanted=CaptureFilter(tags=[("run", "7")])),
        "a list of 100 with a text": lambda: reader.page(limit=100, wanted=CaptureFilter(text="u77")),
        "a manifest": lambda: reader.manifest(next(refs)),
    }


def measure(store: Path, ids: list[str], url: str, catalog: str, rounds: int) -> dict[str, Any]:
    """Medians of both sides, in turns."""
    sides = {"snapshot": None, "postgres": catalog}
    took: dict[str, dict[str, list[float]]] = {}

    def note(what: str, side: str, value: float) -> None:
        took.setdefault(what, {}).setdefault(side, []).append(value)

    for _ in range(max(rounds // 3, 3)):
        for side, where in sides.items():
            note("open, and a list", side, opened(url, where))
    with tempfile.TemporaryDirectory() as cache:
        readers = {side: BucketReader(url, f"{cache}/{side}", catalog=where) for side, where in sides.items()}
        refs = iter(ids)
        calls = {side: asked(reader, refs) for side, reader in readers.items()}
        for _ in range(rounds):
            for side in sides:
                for what, call in calls[side].items():
                    note(what, side, seconds(call))
        bytes_kept = {side: sum(path.stat().st_size for path in Path(f"{cache}/{side}").rglob("*.sqlite"))
                      for side in sides}
        for number in range(max(rounds // 5, 3)):
            with closing(sqlite3.connect(store / "catalog.sqlite")) as db:
                db.execute("UPDATE captures SET hold = 1 WHERE id = ?", (ids[number],))
                db.commit()
            plain = store.parent / "bucket of the snapshot alone"
            note("a push of one change", "snapshot", seconds(lambda plain=plain: push(store, plain.as_uri())))
            note("a push of one change", "postgres", seconds(lambda: push(store, url, catalog=catalog)))
            for side, reader in readers.items():
                note("refresh, and a list", side, seconds(lambda reader=reader: (reader.refresh(), reader.captures())))
        for reader in readers.values():
            reader.close()
    found: dict[str, Any] = {what: {**{side: statistics.median(values) for side, values in by.items()},
                                    "ratio": statistics.median(by["postgres"]) / statistics.median(by["snapshot"])}
                             for what, by in took.items()}
    return {**found, "bytes of the catalog in a reader's cache": bytes_kept}


@contextmanager
def database(url: str | None) -> Iterator[str]:
    """The database to measure with."""
    if url is not None:
        yield url
        return
    with postgres_server() as server:
        yield server.database()


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser("python -m bench.catalogs", description=__doc__.splitlines()[0])
    parser.add_argument("--captures", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--catalog", metavar="URL")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, database(args.catalog) as catalog:
        store, url = Path(folder) / "store", (Path(folder) / "bucket").as_uri()
        ids = fill(store, args.captures)
        push(store, (Path(folder) / "bucket of the snapshot alone").as_uri())
        took = seconds(lambda: push(store, url, catalog=catalog))
        print(json.dumps({"captures": args.captures, "first push, both": took,
                          **measure(store, ids, url, catalog, args.rounds)}, indent=1))


if __name__ == "__main__":
    main()
