"""A real Postgres server, and a store in a bucket whose catalog is there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from schemas.ids import new_ulid
from schemas.read.reader import StoreReader
from schemas.wire.records import Hold
from tests.schemas.postgres.server import BIN, NO_POSTGRES, PostgresServer, postgres_server
from tests.support.ranks import Ranks
from tests.support.store_helpers import SITE, Sender, WriterProcess, engine_info, until
from tests.vllm_tap.bucket.conftest import cold, s3, sample, server, store, url
from tests.writer_service.upkeep.test_erasing import look_after

__all__ = ["cold", "s3", "sample", "server", "store", "url"]


@pytest.fixture(scope="session")
def running() -> Iterator[PostgresServer]:
    if BIN is None:
        pytest.skip(NO_POSTGRES)
    pytest.importorskip("psycopg")
    with postgres_server() as server:
        yield server


@pytest.fixture
def postgres(running: PostgresServer) -> PostgresServer:
    """The server, up."""
    if running.process.poll() is not None:
        running.start()
    return running


@pytest.fixture
def catalog(postgres: PostgresServer) -> str:
    """The URL of an empty database."""
    return postgres.database()


ODD = ["it's", 'say "so"', "100%", "a_b%c", "back\\slash", "\\u0000", "\\\\u0000", "nul\0in it", "\0", "\U0010ffff",
       "\U0010ffff\U0010fffe", "new\nline\ttab", "Ünïcödé ÄÖ", "äö", "日本語 😀", "'; DROP TABLE captures; --",
       "$1 $$ %s ?", "\x01\x1f\x7f", " ", "x" * 512, "é" * 512]
NAMES = ["chatcmpl-a", "chatcmpl-B", "shared", "shared.0", "x.1", "a_c", "a%c"]


@pytest.fixture(scope="session")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of captures of several owners, with odd tags, names of several, held, deleted, in samples, in parts."""
    store = tmp_path_factory.mktemp("postgres") / "store"
    with WriterProcess(store, "--seal-idle-s", "0.3", "--keep-s", "1000") as writer:
        other = replace(engine_info(), model="it's \0 \U0010ffff \"other\"", name="second")
        with Sender(writer.endpoint, role="api") as api, Sender(writer.endpoint, engine=engine_info()) as first, Sender(
                writer.endpoint, engine=other) as second, Ranks(writer.endpoint, 2) as ranks:
            at = 1_700_000_000_000
            made = [new_ulid() for _ in range(len(ODD) + len(NAMES) + 6)]
            for number, capture in enumerate(made):
                name = [NAMES[number - len(ODD)]] if len(ODD) <= number < len(ODD) + len(NAMES) else []
                tags = {"t": ODD[number], f"k.{number % 3}": "v"} if number < len(ODD) else {"run": str(number % 4)}
                api.own(capture, owner=("", "ann", "bob's")[number % 3], aliases=[*name, f"r-{number}"], tags=tags,
                        created_ms=at + number // 3)
            api.own(several := new_ulid(), count=3, owner="ann", aliases=["several", "shared"], created_ms=at)
            api.own(beside := new_ulid(), owner="bob's", aliases=["shared"], created_ms=at)
            api.wait()
            captures = [*made, *(f"{several}.{sample}" for sample in range(3)), beside]
            for number, capture in enumerate(captures):
                engine = second if number % 5 == 0 else first
                engine.open(capture, prompt_len=4, codec="raw16" if number % 7 == 0 else "int8b64",
                            layers={SITE: [1, 3]} if number % 4 == 0 else None)
                engine.frame([(capture, number, range(6))], codec="raw16" if number % 7 == 0 else "int8b64",
                             layers=[1, 3] if number % 4 == 0 else (0, 1, 2, 3))
                if number % 6 == 0:
                    engine.dropped(capture, 6, 8, layers=[1, 3])
                engine.finish(capture, end=8 if number % 6 == 0 else 6, output=2,
                              reason=("stop", "length", "abort")[number % 3])
            first.open(empty := new_ulid(), prompt_len=4, positions=[[100, 101]])
            first.finish(empty, end=4)
            ranks.begin(4)
            ranks.step(range(6), 1)
            ranks.end(6, 2)
            for each in (first, second, api):
                each.wait()
            ranks.wait()
            api.send(Hold(api.next(), made[1], True))
            for gone in (made[0], made[10], f"{several}.1"):
                api.delete(gone)
            api.wait()

            def settled() -> bool:  # nothing is to come
                with StoreReader(store) as reader:
                    return not list((store / "writers" / "w0" / "journal").glob("*.open")) and all(
                        row.status not in ("pending", "running") for row in reader.captures(limit=1000))

            assert until(settled)
        writer.stop()
    look_after(store)
    return store
