"""``vllm-tap fsck --bucket URL --catalog …``: every row of the catalog in Postgres against the head's snapshot."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from schemas.errors import ArgumentError, CatalogError
from schemas.postgres.connection import CatalogUrl
from schemas.postgres.layout import schema_of
from schemas.read.captures import read_store_uuid
from tests.schemas.postgres.server import PostgresServer
from tests.support.forked import tap
from tests.support.processes import free_port
from tests.vllm_tap.bucket.conftest import Sample, grow
from vllm_tap.bucket.check import BucketReport, check
from vllm_tap.bucket.push import push


def faults(url: str, catalog: str) -> list[str]:
    """The findings, each of which must be one of the catalog."""
    report = check(url, catalog=catalog)
    assert all(bad.key == str(CatalogUrl(catalog)) == report.catalog and bad.head is None for bad in report.bad)
    return [bad.what for bad in report.bad]


def change(postgres: PostgresServer, catalog: str, store: Path, *statements: str) -> None:
    """Statements in the store's schema; ``{}`` is its name."""
    for statement in statements:
        postgres.sql(statement.replace("{}", schema_of(read_store_uuid(store).hex())), catalog.rpartition("/")[2])


command = partial(tap, "fsck")


def test_what_was_pushed_is_the_same_whatever_the_rows_are(many: Path, tmp_path: Path, catalog: str) -> None:
    """NUL and the last character of Unicode in tags, names and keys too, which Postgres has in another form."""
    url = (tmp_path / "bucket").as_uri()
    push(many, url, catalog=catalog)
    report = check(url, catalog=catalog)
    assert report.bad == [] and report.catalog_rows > 100
    assert "@" not in report.catalog and isinstance(check(url), BucketReport) and check(url).catalog == ""


@pytest.mark.parametrize(("statement", "says"), [
    ("DELETE FROM {}.extents WHERE ctid = (SELECT min(ctid) FROM {}.extents)",
     "extents: 1 rows are missing; the first is '"),
    ("DELETE FROM {}.aliases", "aliases: "),
    ("UPDATE {}.captures SET hold = 1 - hold WHERE id = (SELECT max(id) FROM {}.captures)", "captures: 1 differ; the"),
    ("""UPDATE {}.captures SET tags = '{"t": "x"}' WHERE id = (SELECT max(id) FROM {}.captures)""",
     "captures: 1 differ"),
    ("UPDATE {}.segments SET number = number + 1000000 WHERE number = (SELECT max(number) FROM {}.segments)",
     "segments: 1 rows are missing, 1 are too many; the first is "),
])
def test_each_kind_of_difference_is_named(many: Path, tmp_path: Path, catalog: str, postgres: PostgresServer,
                                          statement: str, says: str) -> None:
    url = (tmp_path / "bucket").as_uri()
    push(many, url, catalog=catalog)
    change(postgres, catalog, many, statement)
    (found,) = faults(url, catalog)
    assert found.startswith(says) and "CASCADE, then vllm-tap push STORE URL --catalog brings it" in found
    change(postgres, catalog, many, "DROP SCHEMA {} CASCADE")
    assert faults(url, catalog) == ["it has no catalog of this store; vllm-tap push STORE URL --catalog brings it"]
    push(many, url, catalog=catalog)
    assert faults(url, catalog) == [], "what the finding says helps"


def test_a_catalog_of_another_head_is_none_of_this(sample: Sample, store: Path, tmp_path: Path, catalog: str,
                                                   postgres: PostgresServer) -> None:
    url, other = (tmp_path / "bucket").as_uri(), (tmp_path / "other").as_uri()
    push(store, url, catalog=catalog)
    grow(store)
    push(store, url, without_catalog=True)
    (found,) = faults(url, catalog)
    assert found.startswith("its catalog is of generation 1, and the head is of generation 2")
    push(store, other, take_over=True)
    (found,) = faults(other, catalog)
    assert found == f"it has this store's catalog of {url}, not of {other}"
    push(store, url, take_over=True, catalog=catalog)
    assert faults(url, catalog) == []
    change(postgres, catalog, store, "UPDATE {}.head SET version = 1")
    (found,) = faults(url, catalog)
    assert found.startswith("its catalog is of version 1, this program knows ")
    change(postgres, catalog, store, "DELETE FROM {}.head")
    (found,) = faults(url, catalog)
    assert found.startswith("its catalog of this store has no head")


def test_a_server_that_does_not_answer_is_no_finding(sample: Sample, store: Path, tmp_path: Path, catalog: str,
                                                     postgres: PostgresServer) -> None:
    url = (tmp_path / "bucket").as_uri()
    push(store, url)
    with pytest.raises(CatalogError, match="connect to"):
        check(url, catalog=catalog.replace(str(postgres.port), str(free_port())))
    with pytest.raises(ArgumentError, match="catalog = 'a URL"):
        check(url, catalog="sqlite:///there")


def test_the_command(sample: Sample, store: Path, tmp_path: Path, catalog: str, postgres: PostgresServer) -> None:
    url = (tmp_path / "bucket").as_uri()
    push(store, url, catalog=catalog)
    done = command("--bucket", url, "--catalog", catalog)
    assert done.returncode == 0 and f"{CatalogUrl(catalog)}: " in done.stdout and "rows compared" in done.stdout
    change(postgres, catalog, store, "DELETE FROM {}.extents")
    done = command("--bucket", url, "--catalog", catalog, "--json")
    told = json.loads(done.stdout)
    assert done.returncode == 1 and not told["ok"] and told["bad"][0]["what"].startswith("extents: ")
    assert "s3cret" not in done.stdout + done.stderr
    for words, says in ((("--catalog", catalog), "name it with --bucket URL"),
                        (("--bucket", url, "--catalog", catalog, "--remove-orphans"), "exclude each other")):
        done = command(*words)
        assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr, done.stderr
