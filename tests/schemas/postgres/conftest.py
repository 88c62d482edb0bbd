"""A real Postgres server, and a store in a bucket whose catalog is there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.postgres import BIN, NO_POSTGRES, PostgresServer, postgres_server
from tests.vllm_tap.bucket.conftest import cold, s3, sample, server, store, url

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
