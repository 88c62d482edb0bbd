"""A catalog's server that is away, is started anew, refuses, or has something else: named, never waited for without an
end, and no password in any of it.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from schemas.bucket import segments
from schemas.bucket.reader import BucketReader, Cataloged, open_reader
from schemas.catalog.filters import CaptureFilter
from schemas.errors import ArgumentError, CatalogError, StoreError, TapError
from schemas.postgres import view
from schemas.postgres.connection import CatalogUrl
from schemas.postgres.layout import schema_of
from schemas.read.captures import read_store_uuid
from schemas.read.reader import StoreReader
from tests.schemas.postgres.server import PASSWORD, PostgresServer
from tests.schemas.postgres.test_push import name_of
from tests.support.processes import free_port
from tests.support.store_helpers import SITE, until
from tests.vllm_tap.bucket.conftest import Sample, erase, grow
from tests.vllm_tap.bucket.test_open import answers
from vllm_tap import open_store
from vllm_tap.bucket.push import push


@contextmanager
def named(pattern: str, kind: type[TapError] = CatalogError) -> Iterator[None]:
    """Ends with such an error, in which no secret is."""
    with pytest.raises(kind, match=pattern) as caught:
        yield
    assert PASSWORD not in str(caught.value) and "tap:" not in str(caught.value)


def test_a_server_that_is_started_anew_under_reads(sample: Sample, store: Path, tmp_path: Path, catalog: str,
                                                   postgres: PostgresServer) -> None:
    url = (tmp_path / "bucket").as_uri()
    push(store, url, catalog=catalog)
    long, wrong, good, done = sample.captures["long"], list[object](), [0, 0, 0], threading.Event()
    away = list[CatalogError]()
    with BucketReader(url, tmp_path / "cache", catalog=catalog) as reader:
        wanted = answers(reader)
        rows = reader.slice(long, SITE, [2]).values().tobytes()

        def read(number: int) -> None:
            while not done.is_set():
                try:
                    if number == 2:
                        assert len(reader.page(wanted=CaptureFilter(text=long))[0]) == 1
                    elif reader.slice(long, SITE, [2]).values().tobytes() != rows or reader.manifest(long).id != long:
                        wrong.append("rows")
                    good[number] += 1
                except CatalogError as error:
                    away.append(error)
                except BaseException as error:
                    wrong.append(error)

        threads = [threading.Thread(target=read, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        assert until(lambda: min(good) > 3)
        for _ in range(2):
            before = len(away)
            postgres.stop()
            assert until(lambda before=before: len(away) > before + 3)
            postgres.start()
            assert until(lambda before=list(good): all(now > then for now, then in zip(good, before, strict=True)))
        done.set()
        for thread in threads:
            thread.join()
        assert not wrong and not any(PASSWORD in str(error) for error in away)
        assert answers(reader) == wanted
        postgres.sql(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name_of(catalog)}'")
        assert answers(reader) == wanted  # a connection that was cut off between two reads is not noticed


def test_what_is_in_the_way_is_named(store: Path, tmp_path: Path, catalog: str, postgres: PostgresServer,
                                     monkeypatch: pytest.MonkeyPatch) -> None:
    url, schema = (tmp_path / "bucket").as_uri(), schema_of(read_store_uuid(store).hex())
    shown, cache = f"postgresql://127.0.0.1:{postgres.port}/{name_of(catalog)}", tmp_path / "cache"
    push(store, url)
    with named(rf"read {shown}: it has no catalog of this store \(vllm-tap push STORE URL --catalog brings it\)"):
        BucketReader(url, cache, catalog=catalog)
    for bad, why in ((catalog.replace(PASSWORD, f"{PASSWORD}x"), "password authentication failed"),
                     (catalog.replace(str(postgres.port), str(free_port())), "refused"),
                     (f"{catalog}nosuch", "does not exist"),
                     (f"{catalog}?nosuch=1", 'invalid URI query parameter: "nosuch"'),
                     (f"{catalog}?{PASSWORD}", "its URL cannot be read"),
                     (catalog.replace(PASSWORD, f"{PASSWORD}%zz"), "its URL cannot be read"),
                     (postgres.url("latin"), r"encoding is LATIN1 \(make one with ENCODING 'UTF8'")):
        for call in (lambda bad=bad: BucketReader(url, cache, catalog=bad),
                     lambda bad=bad: push(store, url, catalog=bad)):
            with named(rf"connect to postgresql://127\.0\.0\.1:.*{why}"):
                call()
    for bad in ("mysql://h/d", "host=h password=secret1", f"postgresql://tap:{PASSWORD}@@h/d", "", "postgresql://u:p/x@h/d",
                f"postgresql://u:{PASSWORD}@h:port/d", "postgresql://h/a/b"):
        for call in (lambda bad=bad: CatalogUrl(bad), lambda bad=bad: open_store(url, cache, catalog=bad)):
            with named(r"catalog = 'a URL \(not shown: it may hold a password\)'.*valid: postgresql://", ArgumentError):
                call()
    for folder in (lambda: open_store(store, catalog=catalog), lambda: open_reader(Cataloged(str(store), catalog))):
        with named(rf"catalog = '{shown}': it is of a bucket, and .* is a folder", ArgumentError):
            folder()
    stranger = catalog.replace("//tap:", "//nobody:")
    with named(r"this role may not make a schema there \(GRANT CREATE ON DATABASE"):
        push(store, url, catalog=stranger)
    push(store, url, catalog=catalog)
    for call in (lambda: push(store, url, catalog=stranger), lambda: BucketReader(url, cache, catalog=stranger)):
        with named("permission denied for schema vllm_tap_.* USAGE on the store's schema"):
            call()
    reading = catalog.replace("//tap:", "//reader:")
    with StoreReader(store) as local, BucketReader(url, cache, catalog=reading) as reader:
        assert answers(reader) == answers(local)
    grow(store)
    with named("permission denied.*: push again"):  # a role that reads brings nothing; the bucket has it
        push(store, url, catalog=reading)
    assert push(store, url, catalog=catalog).changed is False
    other = "0" * 32
    head = msgspec.json.decode(postgres.sql(f"SELECT head FROM {schema}.head", name_of(catalog))[0][0])
    said = msgspec.json.encode({**head, "store": other}).decode()
    postgres.sql(f"UPDATE {schema}.head SET head = %s", name_of(catalog), (said,))
    with named(f"is of store {other}, not {read_store_uuid(store).hex()}"):
        BucketReader(url, cache, catalog=catalog)
    monkeypatch.setitem(sys.modules, "psycopg", None)
    for call in (lambda: push(store, url, catalog=catalog), lambda: BucketReader(url, cache, catalog=catalog)):
        with pytest.raises(TapError, match=r"needs psycopg: pip install 'vllm-tap\[postgres\]'"):
            call()


def test_nothing_is_waited_for_without_an_end(store: Path, tmp_path: Path, catalog: str, postgres: PostgresServer,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    import psycopg
    url, schema = (tmp_path / "bucket").as_uri(), schema_of(read_store_uuid(store).hex())
    push(store, url, catalog=catalog)
    with socket.socket() as silent:  # takes connections, and says nothing
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        mute = catalog.replace(str(postgres.port), str(silent.getsockname()[1]))
        with named("connect to .*timeout"):
            BucketReader(url, tmp_path / "cache", catalog=f"{mute}?connect_timeout=2")
    monkeypatch.setattr(view, "_STATEMENT_S", 1)
    with BucketReader(url, tmp_path / "cache", catalog=catalog) as reader:
        with psycopg.connect(catalog) as other:
            other.execute(f"LOCK TABLE {schema}.aliases IN ACCESS EXCLUSIVE MODE")
            with named(r"canceling statement due to statement timeout \(it took too long"):
                reader.captures()
            other.rollback()
        assert reader.captures()


def test_readers_hold_two_connections_and_write_nothing(sample: Sample, store: Path, tmp_path: Path, catalog: str,
                                                        postgres: PostgresServer) -> None:
    url = (tmp_path / "bucket").as_uri()
    push(store, url, catalog=catalog)
    count = (f"SELECT count(*) FROM pg_stat_activity WHERE datname = '{name_of(catalog)}' "
             "AND application_name = 'vllm-tap'")
    with BucketReader(url, tmp_path / "cache", catalog=catalog) as reader:
        threads = [threading.Thread(target=lambda: (reader.captures(), reader.page(wanted=CaptureFilter(text="x")),
                                                    reader.manifest(sample.captures["long"]))) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert postgres.sql(count) == [(2,)]
        with reader._catalog.moment() as now, pytest.raises(CatalogError, match="read-only transaction"):
            now.db.execute("DELETE FROM captures")
        assert reader.captures()
        pids = count.replace("count(*)", "pid")
        backends = set(postgres.sql(pids))
        child = os.fork()
        if not child:
            status = 9
            try:
                reader.captures()
            except CatalogError as error:
                status = 7 if "forked after" in str(error) else 8
            reader.close()
            os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert reader.captures() and postgres.sql(count) == [(2,)]  # the child took nothing of its connections
        assert backends == set(postgres.sql(pids))
    assert until(lambda: postgres.sql(count) == [(0,)])
    with pytest.raises(StoreError, match="this reader was closed"):
        reader.captures()


@pytest.mark.parametrize("how", ["snapshot", "postgres"])
def test_a_block_that_was_opened_while_the_head_moved_is_opened_anew(
    sample: Sample, store: Path, tmp_path: Path, catalog: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, long, moved = (tmp_path / "bucket").as_uri(), sample.captures["long"], list[bool]()
    push(store, url, catalog=catalog)
    real = segments.open_objects

    def opened(*arguments: Any) -> Any:
        found = real(*arguments)
        if not moved:
            moved.append(True)
            erase(store, sample.captures["other"])  # rows in the same blocks: they lie elsewhere then
            push(store, url, catalog=catalog)
            assert reader.refresh()
        return found

    with BucketReader(url, tmp_path / "cache", catalog=None if how == "snapshot" else catalog) as reader:
        monkeypatch.setattr(segments, "open_objects", opened)
        for _ in range(2):
            with StoreReader(store) as local:
                assert reader.slice(long, SITE, [0, 2]).values().tobytes() == local.slice(
                    long, SITE, [0, 2]).values().tobytes()
        assert moved
