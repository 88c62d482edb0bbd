"""Stores to push, and places to push them to: a folder, a bucket of a real S3 server, Azure's emulator where it is
installed, and yours (TAP_S3_TEST_URL).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from schemas.catalog.records import connect_read
from schemas.ids import new_ulid, sample_id
from tests.support.buckets import AZURITE, NO_SERVER, SERVER, FaultProxy, azure_server, s3_server
from tests.support.store_helpers import Sender, WriterProcess, engine_info, until
from tests.writer_service.tools.test_compaction import WIDTH, fill
from tests.writer_service.upkeep.test_erasing import look_after
from writer_service.tools.compaction import compact

YOURS = os.environ.get("TAP_S3_TEST_URL", "")


@dataclass(frozen=True)
class Sample:
    """A store in sealed blocks; rows of ``gone`` were erased from them. ``late`` never ended."""

    store: Path
    captures: dict[str, str]


def grow(store: Path, count: int = 1, **said: Any) -> str:
    """One request more, in a block of its own: of ``count`` samples; ``said`` of it by the API, if anything is."""
    capture, before = new_ulid(), len(list((store / "blocks").glob("*.zarr")))
    with WriterProcess(store, "--seal-idle-s", "0.3", "--keep-s", "1000") as writer:
        with Sender(writer.endpoint, role="api") as api, Sender(writer.endpoint, engine=engine_info(WIDTH)) as engine:
            if said or count > 1:
                api.own(capture, count, **said)
                api.wait()
            for each in [sample_id(capture, index, count) for index in range(count)]:
                engine.open(each, prompt_len=8, codec="raw16")
                engine.frame([(each, 11, range(8))], codec="raw16", width=WIDTH)
                engine.finish(each, end=8, output=0)
            engine.wait()
            assert until(lambda: len(list((store / "blocks").glob("*.zarr"))) > before)
        writer.stop()
    return capture


def _is_erased(store: Path, capture: str) -> bool:
    with closing(connect_read(store / "catalog.sqlite")) as db:
        return bool(db.execute("SELECT deleted AND NOT EXISTS (SELECT 1 FROM doomed) FROM captures WHERE id = ?",
                               (capture,)).fetchone()[0])


def erase(store: Path, capture: str) -> None:
    with WriterProcess(store, "--keep-s", "0.1") as writer, Sender(writer.endpoint) as engine:
        engine.delete(capture)
        engine.wait()
        assert until(lambda: _is_erased(store, capture))
        writer.stop()


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    store = tmp_path_factory.mktemp("bucket") / "store"
    names = {name: new_ulid() for name in
             ("long", "other", "guessed", "dropped", "again", "few", "plain", "late", "gone")}
    with WriterProcess(store, "--seal-idle-s", "0.3", "--keep-s", "1000") as writer:
        info = engine_info(WIDTH)
        with Sender(writer.endpoint, engine=info) as engine, Sender(writer.endpoint, engine=info) as second:
            fill(engine, second, names, store)
            engine.delete(names["gone"])
            engine.wait()
        writer.stop()
    look_after(store)
    return Sample(store, names)


@pytest.fixture
def store(sample: Sample, tmp_path: Path) -> Path:
    """A copy of the sample's store."""
    return Path(shutil.copytree(sample.store, tmp_path / "store"))


@pytest.fixture
def cold(store: Path) -> Path:
    """The same, compacted."""
    assert compact(store).cold >= 1
    return store


@pytest.fixture(scope="session")
def server() -> Iterator[FaultProxy]:
    """A real S3 server behind a proxy that may fail."""
    if SERVER is None:
        pytest.skip(NO_SERVER)
    with s3_server() as between:
        yield between


@pytest.fixture
def s3(server: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """The same, without faults, its count at nothing; the environment names it."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    server.fault = lambda method, path: None
    server.seen.clear()
    server.unsigned.clear()
    yield server
    server.fault = lambda method, path: None


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Azure's emulator; the variables that name it."""
    with azure_server(tmp_path_factory.mktemp("azurite")) as environment:
        yield environment


@pytest.fixture
def azure(azurite: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, named by the environment."""
    for name, value in azurite.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(params=[pytest.param("folder", marks=pytest.mark.soak), "s3", *(["azure"] if AZURITE else []),
                        *(["yours"] if YOURS else [])])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty prefix."""
    if request.param == "folder":
        return (tmp_path / "a bucket" / "prefix").as_uri()
    if request.param == "yours":
        return f"{YOURS.rstrip('/')}/{new_ulid()}"
    request.getfixturevalue(request.param)
    return f"{'az' if request.param == 'azure' else 's3'}://bucket/{new_ulid()}"
