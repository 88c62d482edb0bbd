"""Every answer of a reader is the same from SQLite's snapshot and from Postgres."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schemas import limits
from schemas.bucket.reader import BucketReader
from schemas.catalog.filters import CaptureFilter
from schemas.errors import TapError
from schemas.ids import new_ulid
from schemas.postgres.connection import escaped
from schemas.postgres.layout import schema_of, tables
from schemas.read.reader import StoreReader
from tests.schemas.postgres.conftest import NAMES, ODD
from tests.schemas.postgres.server import PASSWORD, PostgresServer
from tests.support.pages.readme import blocks
from tests.support.store_helpers import SITE
from tests.vllm_tap.bucket.conftest import Sample
from tests.vllm_tap.bucket.test_open import answers, fill
from vllm_tap import open_store, rows
from vllm_tap.bucket.push import push
from writer_service.tools.compaction import compact

OWNERS = (None, "", "ann", "bob's", "nobody")


@contextmanager
def both(url: str, folder: Path, catalog: str) -> Iterator[tuple[BucketReader, BucketReader]]:
    """Readers of the snapshot and of Postgres."""
    with BucketReader(url, folder / "sqlite") as one, BucketReader(url, folder / "postgres", catalog=catalog) as other:
        yield one, other


def answer(call: Callable[[], Any]) -> Any:
    """What it gives, or the error that it ends with."""
    try:
        return call()
    except (TapError, UnicodeError) as error:
        return type(error), str(error)


def pages(one: BucketReader, other: BucketReader, *asked: Any) -> tuple[int, int]:
    """How many captures a list has, and how many pages, each of them the same."""
    owner, status, limit, wanted = asked
    before, captures, count = None, 0, 0
    while True:
        mine, its = (reader.page(owner, status, limit, before, wanted) for reader in (one, other))
        assert mine == its, (asked, before)
        captures, count, before = captures + len(mine[0]), count + 1, mine[1]
        if before is None:
            return captures, count


@pytest.mark.parametrize("how", ["sealed", "cold"])
def test_rows_are_those_of_the_local_store(sample: Sample, store: Path, url: str, tmp_path: Path, catalog: str, how: str
                                           ) -> None:
    if how == "cold":
        compact(store)
    done = push(store, url, catalog=catalog)
    assert done.catalog is not None and done.catalog.whole
    with StoreReader(store) as local, BucketReader(url, tmp_path / "a", catalog=catalog) as reader:
        assert answers(reader) == answers(local)
        assert reader.is_deleted(sample.captures["gone"]) and not reader.erasing()
        assert not list((tmp_path / "a").rglob("*.sqlite"))


def test_every_row_of_every_table_is_there_as_it_is(many: Path, tmp_path: Path, catalog: str, postgres: PostgresServer
                                                    ) -> None:
    url = (tmp_path / "bucket").as_uri()
    done = push(many, url, catalog=catalog).catalog
    assert done is not None
    with BucketReader(url, tmp_path / "cache") as reader:
        snapshot, = (tmp_path / "cache").glob("*/catalogs/*.sqlite")
        schema, count = schema_of(reader.head.store), 0
    with closing(sqlite3.connect(snapshot)) as db:
        for table in tables():
            columns = ", ".join(f'"{name}"' for name in table.columns)
            mine = db.execute(f"SELECT {columns} FROM {table.name}").fetchall()
            its = postgres.sql(f"SELECT {columns} FROM {schema}.{table.name}", catalog.rpartition("/")[2])
            assert sorted(map(repr, its)) == sorted(repr(tuple(map(escaped, row))) for row in mine), table.name
            count += len(mine)
    assert done.sent == count and not done.removed


def test_every_list_is_the_same(many: Path, tmp_path: Path, catalog: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url = (tmp_path / "bucket").as_uri()
    push(many, url, catalog=catalog)
    with StoreReader(many) as local:
        models = {engine.model for engine in [local.engine()] if engine}
    filters = [None, CaptureFilter(site=SITE), CaptureFilter(site="q"), CaptureFilter(site="nosuch"),
               CaptureFilter(since_ms=1_700_000_000_003), CaptureFilter(until_ms=1_700_000_000_005),
               *(CaptureFilter(model=model) for model in ("tiny", "it's \0 \U0010ffff \"other\"", "no'", *models)),
               *(CaptureFilter(tags=[("t", value)]) for value in (None, *ODD)),
               CaptureFilter(tags=[("run", "1"), ("run", None)]), CaptureFilter(tags=[("t' OR 1=1 --", None)]),
               *(CaptureFilter(text=text) for text in (*ODD, *NAMES, "NUL", "ünïc", "ÜNÏC", "DROP", "CHATCMPL", "r-1",
                                                       "%", "_", "01", "run", "ab\0CD"))]
    seen = 0
    with both(url, tmp_path, catalog) as (one, other):
        for wanted in filters:
            for owner in OWNERS if wanted is None else (None, "ann"):
                for status in (None, "complete", "empty", "incomplete", "deleted", "running", "'"):
                    for limit in (3, 1000) if wanted is None else (1000,):
                        seen += pages(one, other, owner, status, limit, wanted)[0]
        assert seen > 1000
        assert answer(partial(one.page, before="nosuch")) == answer(partial(other.page, before="nosuch"))
        monkeypatch.setattr(limits, "captures_scan_max", 5)  # a page that looks at but some, and goes on
        for wanted in (CaptureFilter(text="日本"), CaptureFilter(tags=[("run", "2")])):
            assert pages(one, other, None, None, 4, wanted)[1] > 3


def test_every_other_answer_is_the_same(many: Path, tmp_path: Path, catalog: str) -> None:
    url = (tmp_path / "bucket").as_uri()
    push(many, url, catalog=catalog)
    refs = [*NAMES, *ODD[:12], *ODD[-6:], "r-0", "r-5", "several", "several.0", "several.1", "several.9", "'", "%", ""]
    with both(url, tmp_path, catalog) as (one, other), StoreReader(many) as local:
        ids = [row.id for row in one.captures(limit=1000)]
        refs += [*ids, *{name.partition(".")[0] for name in ids}]
        for owner in OWNERS:
            for ref in refs:
                for ask in ("capture", "samples", "target", "manifest", "progress", "sole", "engine_name", "probes",
                            "names"):
                    found = [answer(partial(getattr(reader, ask), ref, owner)) for reader in (one, other)]
                    assert found[0] == found[1], (ask, ref, owner)
            if owner is not None:
                ulids = sorted({name.partition(".")[0] for name in ids})
                assert one.owner_bytes(owner) == other.owner_bytes(owner)
                assert one.request_bytes(owner, ulids) == other.request_bytes(owner, ulids)
        assert answers(one) == answers(other)
        assert any(manifest.parts for manifest in map(one.manifest, ids)) and any(row.hold for row in one.captures())
        in_parts, = [ref for ref in ids if one.manifest(ref).parts]
        for site in ("q", "k"):
            mine, its, there = (each.slice(in_parts, site, [0, 2]) for each in (one, other, local))
            assert mine.values().tobytes() == its.values().tobytes() == there.values().tobytes()
        for ask in (one.engine("second"), one.engine("nosuch"), one.lost_of_server("x"), one.erasing()):
            assert ask in (other.engine("second"), other.engine("nosuch"), other.lost_of_server("x"), other.erasing())
        engine = one.engine("second")
        assert engine is not None and engine == other.engine("second") and "\0" in engine.model


def test_a_store_is_opened_and_trained_on_as_from_the_snapshot(sample: Sample, cold: Path, tmp_path: Path, catalog: str
                                                              ) -> None:
    url = (tmp_path / "bucket").as_uri()
    push(cold, url, catalog=catalog)
    with open_store(url, tmp_path / "a") as one, open_store(url, tmp_path / "b", catalog=catalog) as other:
        some = [(sample.captures["long"], 3), (sample.captures["other"], 17)]
        assert np.array_equal(one.rows_at(some, SITE, 2), other.rows_at(some, SITE, 2))
        make, arguments = other.__reduce__()
        with make(*arguments) as again:
            assert np.array_equal(again[sample.captures["long"]][SITE, 2], one[sample.captures["long"]][SITE, 2])
        batches = [list(rows(store, SITE, 2, batch=64, seed=3, codec="int8b64")) for store in (one, other)]
        for mine, its in zip(*batches, strict=True):
            assert all(np.array_equal(mine[key], its[key]) for key in mine)
        assert other.refresh() is False
    assert not list((tmp_path / "b").rglob("*.sqlite"))


def test_text_that_postgres_does_not_take_comes_back_as_it_was() -> None:
    from schemas.postgres.connection import _plain
    for text in (*ODD, "\0\U0010ffff\0\0", "\U0010fffe\U0010ffff", ""):
        assert _plain(escaped(text)) == text and "\0" not in escaped(text)


def test_the_page(tmp_path: Path, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks of SQL and Python as they stand, but for names and URLs."""
    import psycopg
    page = "docs/howto/postgres.md"
    made, rights = (block.replace("tap_push", "page_push").replace("tap_read", "page_read").replace("…", PASSWORD)
                    .replace("DATABASE tap", "DATABASE page") for block in blocks("sql", page))
    for text, database in ((made, "postgres"), (rights, "page")):
        for statement in filter(None, map(str.strip, text.split(";"))):
            postgres.sql(statement, database)
    store, url = tmp_path / "store", (tmp_path / "bucket").as_uri()
    fill(store, [new_ulid()], 8, "int8b64")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert push(store, url, catalog=postgres.url("page", "page_push")).catalog
    space: dict[str, Any] = {}
    for block in blocks("python", page):
        text = block.replace("s3://bucket/prefix", url).replace("postgresql://tap_read@db.internal/tap",
                                                                 postgres.url("page", "page_read"))
        exec(compile(text, "page", "exec"), space)  # noqa: S102
    space["store"].close()
    assert space["found"].values.shape == (1, 8, 1024)
    for role, table in (("page_read", "CREATE SCHEMA mine"), ("page_read", "CREATE TABLE public.mine (a int)"),
                        ("reader", "SELECT 1")):
        with pytest.raises(psycopg.Error, match="permission denied"), psycopg.connect(postgres.url("page", role)) as db:
            db.execute(table)
