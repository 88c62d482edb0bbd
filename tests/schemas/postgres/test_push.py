"""What a push does to the catalog in Postgres: only what changed travels, all of it is seen at once or nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from schemas.bucket.reader import BucketReader
from schemas.errors import BucketError, CatalogError, NotFoundError, TapError
from schemas.objects.objects import Objects
from schemas.postgres.connection import CatalogUrl
from schemas.postgres.layout import schema_of
from schemas.read.captures import read_store_uuid
from schemas.read.reader import StoreReader
from tests.schemas.postgres.server import PostgresServer
from tests.support.processes import PATIENCE_S
from tests.support.store_helpers import ROOT, Sender, WriterProcess, until
from tests.vllm_tap.bucket.conftest import Sample, erase, grow
from tests.vllm_tap.bucket.test_open import answers
from vllm_tap.bucket import push as push_module
from vllm_tap.bucket.check import check
from vllm_tap.bucket.deletion import hide
from vllm_tap.bucket.postgres import Brought, PostgresCatalog
from vllm_tap.bucket.push import push
from vllm_tap.cli.main import app


def brought(store: Path, url: str, catalog: str, **more: Any) -> Brought:
    done = push(store, url, catalog=catalog, **more).catalog
    assert done is not None and "s3cret" not in repr(done)
    return done


def name_of(catalog: str) -> str:
    return catalog.rpartition("/")[2]


def held(store: Path, capture: str, on: bool = True) -> None:
    from schemas.wire.records import Hold
    with WriterProcess(store) as writer, Sender(writer.endpoint, role="api") as api:
        api.send(Hold(api.next(), capture, on))
        api.wait()
        with StoreReader(store) as reader:
            assert until(lambda: reader.capture(capture).hold is on)
        writer.stop()


def test_only_what_changed_travels(sample: Sample, store: Path, tmp_path: Path, catalog: str, postgres: PostgresServer
                                   ) -> None:
    url = (tmp_path / "bucket").as_uri()
    first = brought(store, url, catalog)
    assert first.whole and first.sent > 200 and first.removed == 0
    again = brought(store, url, catalog)
    assert (again.sent, again.removed, again.whole, again.outrun) == (0, 0, False, False)
    with BucketReader(url, tmp_path / "cache", catalog=catalog) as reader:
        held(store, sample.captures["long"])
        one = brought(store, url, catalog)
        assert (one.sent, one.removed, one.whole) == (1, 1, False)  # the capture's row
        assert reader.capture(sample.captures["long"]).hold and reader.refresh() is True and reader.refresh() is False
        capture = grow(store)
        more = brought(store, url, catalog)
        # One each of captures, engines, extents, segments and blocks.
        assert not more.whole and more.removed <= 2 and 5 <= more.sent <= 8
        erase(store, sample.captures["few"])
        gone = brought(store, url, catalog)
        assert not gone.whole and gone.removed > 0
        with StoreReader(store) as local:
            assert answers(reader) == answers(local)
        assert reader.is_deleted(sample.captures["few"]) and capture in {row.id for row in reader.captures()}
    schema = schema_of(read_store_uuid(store).hex())
    dead = postgres.sql(f"SELECT prompt_tokens, tags FROM {schema}.captures WHERE id = %s", name_of(catalog),
                        (sample.captures["few"],))
    assert dead == [(b"", "{}")]


def test_pushes_that_left_it_out_are_caught_up_by_what_is_there(sample: Sample, store: Path, tmp_path: Path,
                                                               catalog: str) -> None:
    url = (tmp_path / "bucket").as_uri()
    brought(store, url, catalog)
    grow(store)
    forgotten = f"its catalog is at {CatalogUrl(catalog)} too, .* with --catalog, or push with --no-catalog"
    with pytest.raises(TapError, match=forgotten):
        push(store, url)
    push(store, url, without_catalog=True)
    grow(store)
    push(store, url)  # it was given up
    with pytest.raises(CatalogError, match=r"generation 1, and the head of file://.* is generation 3 \(.*try again "
                                           r"in a moment; else vllm-tap push STORE URL --catalog brings it"):
        BucketReader(url, tmp_path / "cache", catalog=catalog)
    done = brought(store, url, catalog)  # nothing is new in the bucket
    assert not done.whole and 8 <= done.sent <= 16
    with BucketReader(url, tmp_path / "cache", catalog=catalog) as reader, StoreReader(store) as local:
        assert answers(reader) == answers(local)
        grow(store)
        with pytest.raises(TapError, match=forgotten):
            push(store, url)
        push(store, url, without_catalog=True)
        for path in sorted((tmp_path / "bucket" / "catalog").iterdir(), key=lambda path: path.stat().st_mtime_ns)[:-1]:
            path.unlink()  # as removing orphans does
        with pytest.raises(CatalogError, match="generation 4"):
            reader.refresh()
        assert brought(store, url, catalog).whole
        assert answers(reader) == answers(local)


STEPS = ("BEFORE DELETE ON captures", "AFTER INSERT ON captures", "AFTER INSERT ON extents", "AFTER INSERT ON segments",
         "BEFORE UPDATE ON head", "commit")


def test_a_push_that_is_killed_at_any_step_leaves_the_old_or_the_new(
    sample: Sample, store: Path, tmp_path: Path, catalog: str, postgres: PostgresServer
) -> None:
    url, database = (tmp_path / "bucket").as_uri(), name_of(catalog)
    brought(store, url, catalog)
    schema = schema_of(read_store_uuid(store).hex())
    postgres.sql(f"CREATE FUNCTION {schema}.stay() RETURNS trigger LANGUAGE plpgsql AS "
                 "'BEGIN PERFORM pg_sleep(600); RETURN NULL; END'", database)
    with BucketReader(url, tmp_path / "cache", catalog=catalog) as reader:
        old = answers(reader)
        held(store, sample.captures["other"])
        grow(store)
        for step in STEPS:
            table = "head" if step == "commit" else step.split()[-1]
            made = (f"CREATE CONSTRAINT TRIGGER stay AFTER UPDATE ON {schema}.head DEFERRABLE INITIALLY DEFERRED "
                    "FOR EACH ROW" if step == "commit" else
                    f"CREATE TRIGGER stay {step.replace(table, f'{schema}.{table}')} FOR EACH STATEMENT")
            postgres.sql(f"{made} EXECUTE FUNCTION {schema}.stay()", database)
            child = subprocess.Popen([sys.executable, "-m", "vllm_tap", "push", str(store), url, "--catalog", catalog],
                                     cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            asleep = f"FROM pg_stat_activity WHERE datname = '{database}' AND wait_event = 'PgSleep'"
            assert until(lambda asleep=asleep: postgres.sql(f"SELECT 1 {asleep}")), step
            child.kill()
            child.wait()
            assert answers(reader) == old, step
            postgres.sql(f"SELECT pg_terminate_backend(pid) {asleep}")
            assert until(lambda asleep=asleep: not postgres.sql(f"SELECT 1 {asleep}"))
            assert answers(reader) == old, step
            postgres.sql(f"DROP TRIGGER stay ON {schema}.{table}", database)
        done = brought(store, url, catalog)
        assert not done.whole and done.sent < 16
        with StoreReader(store) as local:
            assert answers(reader) == answers(local) != old


def test_a_push_whose_head_is_not_put_brings_nothing(store: Path, tmp_path: Path, catalog: str,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    url = (tmp_path / "bucket").as_uri()
    brought(store, url, catalog)
    with BucketReader(url, tmp_path / "cache", catalog=catalog) as reader:
        old = answers(reader)
        grow(store)

        def refuse(self: Objects, *_: object) -> None:
            raise BucketError("write", self.url, "503", passing=True)

        with monkeypatch.context() as patch:
            patch.setattr(Objects, "swap", refuse)
            with pytest.raises(BucketError, match="503"):
                push(store, url, catalog=catalog)
        assert reader.refresh() is False and answers(reader) == old


def test_of_two_pushes_the_later_head_is_what_stays(store: Path, tmp_path: Path, catalog: str,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    """Another push is whole between the head of one and its catalog: that leaves the catalog to the other."""
    url, others = (tmp_path / "bucket").as_uri(), list[Brought]()
    real = PostgresCatalog.bring

    def bring(self: PostgresCatalog, *arguments: Any) -> Brought:
        if not others:
            others.append(Brought(""))
            grow(store)
            others.append(brought(store, url, catalog))
        return real(self, *arguments)

    monkeypatch.setattr(push_module.PostgresCatalog, "bring", bring)
    mine = brought(store, url, catalog)
    assert mine.outrun and not mine.sent and others[1].whole and not others[1].outrun
    with BucketReader(url, tmp_path / "cache", catalog=catalog) as reader, StoreReader(store) as local:
        assert reader.head.generation == 2 and answers(reader) == answers(local)


def test_two_pushes_wait_for_each_other(store: Path, tmp_path: Path, catalog: str, postgres: PostgresServer) -> None:
    """One that is in the middle of its transaction is waited for; what it brought is what the other compares with."""
    import psycopg
    url = (tmp_path / "bucket").as_uri()
    schema = schema_of(read_store_uuid(store).hex())
    with psycopg.connect(catalog) as other:
        other.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (schema,))
        children = [subprocess.Popen([sys.executable, "-m", "vllm_tap", "push", str(store), url, "--catalog", catalog,
                                      "--json"], cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        waiting = f"SELECT 1 FROM pg_stat_activity WHERE datname = '{name_of(catalog)}' AND wait_event_type = 'Lock'"
        assert until(lambda: len(postgres.sql(waiting)) == 2)
        other.rollback()
    said = [child.communicate(timeout=PATIENCE_S)[0] for child in children]
    assert [child.returncode for child in children] == [0, 0]
    assert sorted('"whole":true' in each for each in said) == [False, True] and "s3cret" not in "".join(said)
    with BucketReader(url, tmp_path / "cache", catalog=catalog) as reader, StoreReader(store) as local:
        assert answers(reader) == answers(local)


def test_a_database_has_a_store_of_one_bucket_and_many_stores(store: Path, many: Path, tmp_path: Path, catalog: str
                                                             ) -> None:
    one, other = (tmp_path / "one").as_uri(), (tmp_path / "other").as_uri()
    brought(store, one, catalog)
    with pytest.raises(CatalogError, match=r"has this store's catalog of file://.*/one, not of file://.*/other \(.*"
                                           r"name another, or DROP SCHEMA vllm_tap_[0-9a-f]{32} CASCADE"):
        push(store, other, catalog=catalog)
    assert not list((tmp_path / "other").glob("*.json"))  # nothing was sent
    assert brought(many, other, catalog).whole
    for url, folder in ((one, store), (other, many)):
        with BucketReader(url, tmp_path / "cache", catalog=catalog) as reader, StoreReader(folder) as local:
            assert {row.id for row in reader.captures(limit=1000)} <= {row.id for row in local.captures(limit=1000)}
            assert reader.captures()


def test_a_take_over_takes_the_catalog_too(store: Path, tmp_path: Path, catalog: str) -> None:
    import shutil
    url = (tmp_path / "bucket").as_uri()
    copy = shutil.copytree(store, tmp_path / "copy")
    capture = grow(store)
    brought(store, url, catalog)
    with BucketReader(url, tmp_path / "cache", catalog=catalog) as reader:
        assert reader.capture(capture)
        done = push(copy, url, catalog=catalog, take_over=True)
        assert done.catalog is not None and not done.catalog.whole and done.catalog.removed > 0 and done.retired
        with StoreReader(copy) as local:
            assert answers(reader) == answers(local)
    with BucketReader(f"{url}#{done.retired}", tmp_path / "cache") as retired:
        assert retired.capture(capture)
    with pytest.raises(ValueError, match="leave out catalog"):
        BucketReader(f"{url}#{done.retired}", tmp_path / "cache", catalog=catalog)


def test_a_catalog_of_another_version_is_named_and_made_anew(store: Path, tmp_path: Path, catalog: str,
                                                             postgres: PostgresServer) -> None:
    url, database, schema = (tmp_path / "bucket").as_uri(), name_of(catalog), schema_of(read_store_uuid(store).hex())
    brought(store, url, catalog)
    postgres.sql(f"UPDATE {schema}.head SET version = 7", database)
    postgres.sql(f"ALTER TABLE {schema}.captures DROP COLUMN tags", database)
    with pytest.raises(CatalogError, match=r"version 7, this program knows [0-9]+ \(vllm-tap push STORE URL --catalog"):
        BucketReader(url, tmp_path / "cache", catalog=catalog)
    assert brought(store, url, catalog).whole
    role = catalog.replace("//tap:", "//reader:")  # its rights are there still
    with BucketReader(url, tmp_path / "cache", catalog=role) as reader, StoreReader(store) as local:
        assert answers(reader) == answers(local)


def test_a_deletion_in_the_bucket_reaches_it(sample: Sample, store: Path, tmp_path: Path, catalog: str,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    url, few, plain = (tmp_path / "bucket").as_uri(), sample.captures["few"], sample.captures["plain"]
    brought(store, url, catalog)
    with BucketReader(url, tmp_path / "cache", catalog=catalog) as reader:
        assert reader.capture(few).id == few
        done = hide(url, [few], catalog).catalog
        assert done is not None and not done.whole and done.removed
        with pytest.raises(NotFoundError):
            reader.capture(few)
        hide(url, [plain])  # without the database: its readers are told, and the next push mends it
        with pytest.raises(CatalogError, match="push"):
            reader.refresh()
        brought(store, url, catalog)
        assert reader.refresh() is True
        for gone in (few, plain):
            with pytest.raises(NotFoundError):
                reader.capture(gone)
        app(["rm", sample.captures["again"], "--store", url, "--catalog", catalog], standalone_mode=False)
        with pytest.raises(NotFoundError):
            reader.capture(sample.captures["again"])
    assert check(url, catalog=catalog).bad == []
