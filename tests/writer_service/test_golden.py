"""Stores that versions of before wrote, bit for bit as they did then, are read, mended and written on."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

from schemas import limits
from schemas.errors import NotFoundError
from schemas.read.reader import StoreReader
from tests.support.consistency import assert_consistent
from tests.support.golden_store import (
    COLD,
    DELETED,
    GOLDEN,
    NAME,
    OPEN,
    PARTS_COLD,
    PARTS_OPEN,
    RANKS,
    ROWS,
    SEALED,
)
from tests.support.ranks import LAYERS, values
from tests.support.store_helpers import SITE, WriterProcess, assert_rows, until
from writer_service import fs
from writer_service.tools.rebuild import rebuild


@pytest.fixture(params=sorted(path.name for path in GOLDEN.glob("*.zip")))
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    with zipfile.ZipFile(GOLDEN / request.param) as file:
        file.extractall(tmp_path / "store")
    return tmp_path / "store"


def version_of(store: Path) -> int:
    return int(json.loads((store / "store.json").read_text())["version"])


def assert_content(store: Path, has_parts: bool) -> None:
    with StoreReader(store) as reader:
        for number, capture in ((0, COLD), (1, SEALED), (3, OPEN)):
            assert_rows(reader.slice(capture, SITE, [0, 1, 2, 3]), number, range(ROWS))
        assert reader.capture(COLD).status == "complete" and reader.capture(SEALED).hold
        assert [(m.start, m.stop, m.reason) for m in reader.slice(SEALED, SITE, [1], 0).missing] == [
            (ROWS, ROWS + 2, "dropped")]
        with pytest.raises(NotFoundError):
            reader.capture(DELETED)
        for number, capture in ((4, PARTS_COLD), (5, PARTS_OPEN)) if has_parts else ():
            for site in ("resid_post", "q"):
                wanted = values(RANKS, number, site, range(ROWS))
                wanted[:, 2] = values(RANKS, number, site, [2], version=1)[:, 0]
                np.testing.assert_array_equal(reader.slice(capture, site, LAYERS).values(), wanted)


def test_it_has_something_of_every_format(store: Path) -> None:
    names = {path.relative_to(store).as_posix() for path in store.rglob("*")}
    assert any(name.endswith("frame_xxh3") for name in names)  # a cold block
    assert any(name.endswith("checksum") for name in names)  # a sealed one
    assert any(name.startswith("writers/w0/journal/0") and name.endswith(".open") for name in names)
    assert any("control-" in name for name in names) and "store.json" in names


def test_a_catalog_is_made_of_it_and_every_row_is_there(store: Path) -> None:
    has_parts = version_of(store) > 1
    fs.close(rebuild(store).state.lock)
    assert_content(store, has_parts)
    assert_consistent(store)


def test_a_writer_goes_on_with_it(store: Path) -> None:
    has_parts = version_of(store) > 1
    with WriterProcess(store, "--seal-idle-s", "0.1", "--engine-lost-s", "0.5") as writer:
        assert_content(store, has_parts)
        assert version_of(store) == limits.STORE_VERSION, "programs of before must not write to it any more"
        with StoreReader(store) as reader:
            assert until(lambda: reader.capture(OPEN).status == "incomplete")
        assert until(lambda: not list((store / "writers/w0/journal").glob("[0-9]*.open")))
        writer.stop()
    assert_content(store, has_parts)
    assert_consistent(store)


def test_this_version_has_one() -> None:
    assert (GOLDEN / NAME).exists(), "python -m tests.support.golden_store makes it"
