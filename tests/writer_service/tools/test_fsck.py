"""fsck names what is bad, down to the row; rebuild makes the catalog that was there."""

from __future__ import annotations

import json
import shutil
import signal
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from schemas.catalog.records import connect_read
from schemas.errors import StartError
from schemas.ids import new_ulid
from schemas.read.reader import StoreReader
from tests.support.forked import tap
from tests.support.store_helpers import SITE, Sender, WriterProcess, assert_rows, until
from writer_service import fs
from writer_service.recover.recovery import recover
from writer_service.tools.findings import Finding, ranges
from writer_service.tools.fsck import fsck
from writer_service.tools.rebuild import rebuild


@dataclass(frozen=True)
class Sample:
    """A store with block 1 (frames of ``one`` at 0–4 and of both at 5–8) and the open segment 2 (``two`` at 0–5)."""

    store: Path
    one: str
    two: str


def cataloged(store: Path, segment: int) -> int:
    """Frames of a segment that the catalog has."""
    with closing(connect_read(store / "catalog.sqlite")) as db:
        count: int = db.execute("SELECT count(*) FROM frames WHERE segment = ?", (segment,)).fetchone()[0]
        return count


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    made = Sample(tmp_path_factory.mktemp("fsck") / "store", new_ulid(), new_ulid())
    with WriterProcess(made.store, "--seal-idle-s", "2") as writer, Sender(writer.endpoint) as engine:
        engine.open(made.one, prompt_len=9)
        engine.open(made.two, prompt_len=9)
        engine.frame([(made.one, 1, range(5))], runs=[2, 3])
        engine.frame([(made.one, 1, range(5, 9)), (made.two, 2, range(5, 9))])
        engine.wait()
        assert until(lambda: list((made.store / "blocks").glob("w0-*.zarr")))
        engine.frame([(made.two, 2, range(3))])
        engine.frame([(made.two, 2, range(3, 5))])
        engine.wait()
        assert until(lambda: cataloged(made.store, 2) == 2)  # which follows what is acknowledged
        writer.process.send_signal(signal.SIGSTOP)  # however long this takes, it seals nothing more
        assert fsck(made.store).bad == []  # beside a writer that runs
        writer.kill()
    return made


@pytest.fixture
def store(sample: Sample, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sample.store, tmp_path / "store"))


def edit(path: Path, change: Callable[[bytearray], object]) -> None:
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)


def flip(at: int) -> Callable[[bytearray], object]:
    def change(data: bytearray) -> None:
        data[at] ^= 1

    return change


def cut(nbytes: int) -> Callable[[bytearray], object]:
    def change(data: bytearray) -> None:
        del data[-nbytes:]

    return change


BLOCK = "blocks/w0-00000001.zarr"
MAIN = f"{BLOCK}/q/c/0/0/0"
OPEN = "writers/w0/journal/00000002.open"
ALL = (0, 1, 2, 3)
# which file, edit, (offset, capture, layers, positions) of each row that must be named, words of the finding
Rows = set[tuple[int | None, str, tuple[int, ...], tuple[int, ...]]]
EDITS: dict[str, tuple[str, Callable[[bytearray], object], Rows, str]] = {
    # The second frame begins at 12288: head, sides and main stream take a page each.
    "one_piece": (MAIN, flip(12288 + 8192 + 64 * (8 * 2 + 5)), {(12288, "two", (2,), (6,))}, "checksum"),
    "a_scale": (MAIN, flip(4096 + 1), {(0, "one", (0,), (0,))}, "checksum"),
    "a_head": (MAIN, flip(12288 + 70), {(12288, "one", ALL, (5, 6, 7, 8)), (12288, "two", ALL, (5, 6, 7, 8))}, "head"),
    "a_position": (f"{BLOCK}/position/c/0", flip(4 * 3), {(None, "one", ALL, (2,))}, "array"),
    "a_sealed_scale": (f"{BLOCK}/scale/c/0/0/0", flip(2 * (13 + 4)), {(None, "one", (1,), (4,))}, "array"),
    "a_checksum": (f"{BLOCK}/checksum/c/0/0", flip(0), {(None, "one", (0,), (0,))}, "array"),
    "the_index": (MAIN, flip(-20), set(), "index"),
    "metadata": (f"{BLOCK}/zarr.json", cut(5), {(0, "one", ALL, (0, 1, 2, 3, 4)), (12288, "one", ALL, (5, 6, 7, 8)),
                                                (12288, "two", ALL, (5, 6, 7, 8))}, "cannot be read"),
    "open_payload": (OPEN, flip(8192), {(0, "two", ALL, (0, 1, 2))}, "checksum"),
    "open_torn": (OPEN, cut(100), {(12288, "two", ALL, (3, 4))}, "its rows are lost"),
    "open_gone": (OPEN, lambda data: data.clear(), {(0, "two", ALL, (0, 1, 2)), (12288, "two", ALL, (3, 4))}, ""),
    "a_log": ("writers/w0/journal/control-00000001.log", flip(-1), set(), "not whole"),
}


def named(sample: Sample, bad: list[Finding]) -> Rows:
    names = {sample.one: "one", sample.two: "two"}
    return {(found.offset, names[found.capture], found.layers, found.positions) for found in bad if found.capture}


@pytest.mark.parametrize("name", EDITS)
def test_what_is_bad_is_named(sample: Sample, store: Path, name: str) -> None:
    file, change, rows, words = EDITS[name]
    edit(store / file, change)
    report = fsck(store)
    assert named(sample, report.bad) == rows
    assert any((words in found.what and found.file.startswith(file.removesuffix("/zarr.json").removesuffix("/c/0")))
               or name in ("a_position", "a_sealed_scale", "a_checksum") for found in report.bad), report.bad
    assert report.bad and all(found.site == SITE for found in report.bad if found.capture)


def test_a_block_that_is_gone_and_one_that_nobody_knows(sample: Sample, store: Path) -> None:
    (store / BLOCK).rename(store / "blocks" / "w0-00000009.zarr")
    report = fsck(store)
    assert named(sample, report.bad) == EDITS["metadata"][2]
    assert {found.what for found in report.bad} >= {"the segment is not there", "not in the catalog; rebuild it"}


def test_a_catalog_that_says_other_rows(sample: Sample, store: Path) -> None:
    db = sqlite3.connect(store / "catalog.sqlite")
    ((rows,),) = db.execute("SELECT rows FROM extents WHERE capture = ? AND offset = 0 AND segment = 1", (sample.one,))
    wrong = np.frombuffer(rows, "<u4").copy()
    wrong[1] = 4  # the row of position 0
    db.execute("UPDATE extents SET rows = ? WHERE capture = ? AND offset = 0", (wrong.tobytes(), sample.one))
    db.commit()
    db.close()
    (bad,) = fsck(store).bad
    assert bad.capture == sample.one and bad.positions == (0, 1, 2, 3, 4) and "catalog" in bad.what
    done = rebuild(store)
    fs.close(done.state.lock)
    assert done.compared and done.differences == {"extents": (1, 1)}
    assert fsck(store).bad == []


def test_the_commands(sample: Sample, store: Path) -> None:
    whole = tap("fsck", "--store", store)
    assert (whole.returncode, whole.stderr) == (0, "") and whole.stdout.startswith("nothing is wrong (2 segments, 4 ")
    before = (store / "catalog.sqlite").read_bytes()
    made = tap("rebuild", "--store", store)
    assert (made.returncode, made.stdout) == (0, "2 captures; the same as before\n"), made
    assert (store / "catalog.sqlite").read_bytes() != before and not list(store.glob("catalog.re*"))
    edit(store / MAIN, EDITS["one_piece"][1])
    bad = tap("fsck", "--store", store)
    assert bad.returncode == 1
    assert f"{MAIN} at byte 12288: capture {sample.two} {SITE} layers 2 positions 6: " in bad.stdout
    report = json.loads(tap("fsck", "--store", store, "--json").stdout)
    assert not report["ok"] and report["bad"][0]["capture"] == sample.two and report["bad"][0]["positions"] == [6]
    nothing = tap("fsck", "--store", store / "blocks")
    assert nothing.returncode == 2 and "no store.json" in nothing.stderr


def lose(name: str) -> Callable[[Path], object]:
    return lambda block: (block / name).unlink()


BLOCKS: dict[str, tuple[Callable[[Path], object], bool]] = {  # what happens to block 1, whether it is skipped
    "no_attributes": (lose("zarr.json"), True),
    "unknown_codec": (lambda block: (block / "zarr.json").write_text(
        (block / "zarr.json").read_text().replace("int8b64", "int7b64")), True),
    "no_rows": (lose("q/c/0/0/0"), True),
    "no_offsets": (lose("frame/c/0"), False),
    "zeros_for_offsets": (lambda block: (block / "frame/c/0").write_bytes(bytes(16)), False),
    "half_an_offset": (lambda block: (block / "frame/c/0").write_bytes(bytes(12)), False),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_bad_block_stops_nothing(sample: Sample, store: Path, name: str) -> None:
    change, is_skipped = BLOCKS[name]
    with sqlite3.connect(store / "catalog.sqlite") as db:
        extents = db.execute("SELECT * FROM extents WHERE segment = 1").fetchall()
    change(store / "blocks/w0-00000001.zarr")
    done = rebuild(store)
    fs.close(done.state.lock)
    assert done.state.skipped == (["w0-00000001.zarr"] if is_skipped else []) and done.state.next_segment == 3
    with sqlite3.connect(store / "catalog.sqlite") as db:
        assert db.execute("SELECT * FROM extents WHERE segment = 1").fetchall() == ([] if is_skipped else extents)
    with StoreReader(store) as reader:
        assert_rows(reader.slice(sample.two, SITE, [0, 3], 0, 5), 2, range(5))
    if is_skipped:
        state = recover(store)  # and every start after it
        fs.close(state.lock)
        assert state.skipped == ["w0-00000001.zarr"]


def test_no_rebuild_beside_a_writer(store: Path) -> None:
    with WriterProcess(store), pytest.raises(StartError, match="another writer"):
        rebuild(store)
    assert (store / "catalog.sqlite").exists()


def test_positions_as_ranges() -> None:
    assert ranges([5, 1, 2, 3, 9, 8]) == [(1, 4), (5, 6), (8, 10)] and ranges([]) == []
