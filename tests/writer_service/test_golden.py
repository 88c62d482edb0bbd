"""Stores that versions of before wrote, bit for bit as they did then, are read, mended and written on."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from schemas.errors import NotFoundError
from schemas.read.reader import StoreReader
from tests.support.consistency import assert_consistent
from tests.support.golden_store import COLD, DELETED, GOLDEN, NAME, OPEN, ROWS, SEALED
from tests.support.store_helpers import SITE, WriterProcess, assert_rows, until
from writer_service import fs
from writer_service.tools.rebuild import rebuild


@pytest.fixture(params=sorted(path.name for path in GOLDEN.glob("*.zip")))
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    with zipfile.ZipFile(GOLDEN / request.param) as file:
        file.extractall(tmp_path / "store")
    return tmp_path / "store"


def assert_content(store: Path) -> None:
    with StoreReader(store) as reader:
        for number, capture in ((0, COLD), (1, SEALED), (3, OPEN)):
            assert_rows(reader.slice(capture, SITE, [0, 1, 2, 3]), number, range(ROWS))
        assert reader.capture(COLD).status == "complete" and reader.capture(SEALED).hold
        assert [(m.start, m.stop, m.reason) for m in reader.slice(SEALED, SITE, [1], 0).missing] == [
            (ROWS, ROWS + 2, "dropped")]
        with pytest.raises(NotFoundError):
            reader.capture(DELETED)


def test_it_has_something_of_every_format(store: Path) -> None:
    names = {path.relative_to(store).as_posix() for path in store.rglob("*")}
    assert any(name.endswith("frame_xxh3") for name in names)  # a cold block
    assert any(name.endswith("checksum") for name in names)  # a sealed one
    assert any(name.startswith("writers/w0/journal/0") and name.endswith(".open") for name in names)
    assert any("control-" in name for name in names) and "store.json" in names


def test_a_catalog_is_made_of_it_and_every_row_is_there(store: Path) -> None:
    fs.close(rebuild(store).state.lock)
    assert_content(store)
    assert_consistent(store)


def test_a_writer_goes_on_with_it(store: Path) -> None:
    with WriterProcess(store, "--seal-idle-s", "0.1", "--engine-lost-s", "0.5") as writer:
        assert_content(store)
        with StoreReader(store) as reader:
            assert until(lambda: reader.capture(OPEN).status == "incomplete")
        assert until(lambda: len(list((store / "blocks").glob("w0-*.zarr"))) == 3)
        writer.stop()
    assert_content(store)
    assert_consistent(store)


def test_this_version_has_one() -> None:
    assert (GOLDEN / NAME).exists(), "python -m tests.support.golden_store makes it"
