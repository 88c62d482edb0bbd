"""Compaction: the same rows in fewer, sorted blocks, whatever is cut short, damaged or deleted on the way."""

from __future__ import annotations

import re
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from api.live.follower import Follower
from api.slices.query import SiteQuery
from schemas import codecs
from schemas.catalog.records import connect_write
from schemas.errors import CorruptError, NotFoundError, SpecError, StartError, StoreError
from schemas.ids import new_ulid
from schemas.read import row_reader as reader_module
from schemas.read.reader import LiveRows, StoreReader, read_store_uuid
from schemas.store.cold_block import CHUNK_ROWS, ColdBlock, open_cold
from tests.support.consistency import assert_consistent, dump
from tests.support.forked import tap
from tests.support.processes import PATIENCE_S
from tests.support.store_helpers import (
    PROGRAMS,
    SITE,
    Sender,
    WriterProcess,
    assert_rows,
    engine_info,
    is_erased,
    until,
)
from tests.support.writers.power import Certain
from tests.writer_service.tools.test_fsck import edit, flip
from tests.writer_service.upkeep.test_erasing import Killed, cut_short, look_after
from vllm_tap.loader.dataset import RowDataset
from vllm_tap.loader.dataset import rows as training_rows
from writer_service import fs
from writer_service.journal.group_commit import Waker
from writer_service.recover.recovery import recover
from writer_service.tools.compaction import compact
from writer_service.tools.fsck import fsck
from writer_service.upkeep import cold_block_writer, cold_blocks
from writer_service.upkeep.upkeep import Upkeep

WIDTH = 192
ROWS = 150  # of a long capture: more than two chunks
Answers = dict[tuple[str, bool], dict[int, Any]]


@dataclass(frozen=True)
class Sample:
    """A store of several blocks of a kind. ``long`` and ``other`` come in turns, a row or a few a frame; ``guessed``
    has drafts, ``dropped`` a drop between its frames, ``again`` positions computed twice, ``few`` two layers alone,
    ``plain`` is raw16, ``late`` is another engine's, whose last message its frame is, and ``gone`` is deleted but not
    erased.
    """

    store: Path
    captures: dict[str, str]


def fill(engine: Sender, second: Sender, names: dict[str, str], store: Path) -> None:
    args: dict[str, Any] = {"width": WIDTH}
    sealed = 0

    def seal() -> None:
        nonlocal sealed
        engine.wait()
        sealed += 1
        assert until(lambda: len(list((store / "blocks").glob("w0-*.zarr"))) >= sealed)

    for name, capture in names.items():
        sender = second if name == "late" else engine
        sender.open(capture, prompt_len=8, codec="raw16" if name == "plain" else "int8b64",
                    layers={SITE: [1, 3]} if name == "few" else None)
    long, other, gone = names["long"], names["other"], names["gone"]
    engine.frame([(long, 1, range(40)), (other, 2, range(30)), (gone, 7, range(9000, 9050))], runs=[50, 70], **args)
    for at in range(40, 100):
        engine.frame([(long, 1, [at]), (other, 2, [at - 10])], **args)
    engine.frame([(names["plain"], 3, range(70))], codec="raw16", **args)
    engine.frame([(names["dropped"], 6, range(10))], **args)
    engine.dropped(names["dropped"], 4, 12)
    seal()
    engine.frame([(names["dropped"], 6, range(10, 20))], **args)
    engine.frame([(names["guessed"], 5, range(8))], **args)
    engine.frame([(names["guessed"], 5, [8, 9, 10])], drafts={9: 1001, 10: 77}, **args)
    engine.frame([(names["guessed"], 5, [10, 11])], drafts={11: 5}, version=1, **args)
    engine.frame([(names["again"], 4, range(12))], **args)
    engine.frame([(names["again"], 4, range(6, 14))], version=1, **args)
    engine.frame([(names["few"], 8, range(5))], layers=[1, 3], **args)
    for at in range(100, ROWS):
        engine.frame([(long, 1, [at]), (other, 2, [at - 10]), (gone, 7, [at + 9000])], **args)
    engine.frame([(names["plain"], 3, range(70, 75))], codec="raw16", **args)
    second.frame([(names["late"], 9, range(5))], **args)
    second.wait()
    seal()
    for name, capture in names.items():
        if name == "late":
            continue
        end = {"long": ROWS, "other": ROWS - 10, "gone": 9200, "plain": 75, "few": 5, "again": 14, "guessed": 11,
               "dropped": 20}[name]
        engine.finish(capture, end=end, output=max(end - 8, 0) % 3000)
    engine.wait()


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    store = tmp_path_factory.mktemp("compaction") / "store"
    names = {name: new_ulid() for name in
             ("long", "other", "guessed", "dropped", "again", "few", "plain", "late", "gone")}
    with WriterProcess(store, "--seal-idle-s", "0.3", "--keep-s", "1000") as writer:
        info = engine_info(WIDTH)
        with Sender(writer.endpoint, engine=info) as engine, Sender(writer.endpoint, engine=info) as second:
            fill(engine, second, names, store)
            engine.delete(names["gone"])
            engine.wait()
            assert until(lambda: dump(store)["doomed"])
        writer.stop()
    assert len(list((store / "blocks").glob("w0-*.zarr"))) == 4
    return Sample(store, {name: capture for name, capture in names.items() if name != "gone"})


@pytest.fixture
def store(sample: Sample, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sample.store, tmp_path / "store"))


def answers(store: Path, captures: dict[str, str]) -> Answers:
    """Everything that can be asked of captures, but where it lies."""
    found: Answers = {}
    with StoreReader(store) as reader:
        for name, capture in captures.items():
            manifest = msgspec.to_builtins(reader.manifest(capture))
            for site in manifest["sites"]:
                del site["extents"]
            layers = [1, 3] if name == "few" else [0, 1, 2, 3]
            for rejected in (False, True):
                got = reader.slice(capture, SITE, layers, rejected=rejected)
                found[name, rejected] = {"manifest": manifest, "positions": got.positions.tolist(),
                                         "tokens": got.token_ids.tolist(), "flags": got.flags.tolist(),
                                         "missing": got.missing,
                                         "pieces": {name: array.tobytes() for name, array in got.pieces.items()}}
    return found


def cold_blocks_of(store: Path) -> list[ColdBlock]:
    return [open_cold(path) for path in sorted((store / "blocks").glob("w0-*.zarr"))]


def test_the_same_answers_from_fewer_blocks(sample: Sample, store: Path) -> None:
    before, extents = answers(store, sample.captures), dump(store)["extents"]
    assert before["guessed", True]["positions"] and before["dropped", False]["missing"]
    assert before["long", False]["positions"] == list(range(ROWS))
    with StoreReader(store) as early:  # its maps are of the old blocks
        early.slice(sample.captures["other"], SITE, [2])
        told: list[tuple[int, int]] = []
        done = compact(store, progress=lambda *now: told.append(now))
        assert (done.blocks, done.cold, done.failed) == (4, 2, []) and told[-1][0] == told[-1][1] > 0
        assert_rows(early.slice(sample.captures["long"], SITE, [1, 2]), 1, range(ROWS))
    assert answers(store, sample.captures) == before
    tables = dump(store)
    assert not tables["frames"] and not tables["doomed"] and len(tables["extents"]) < len(extents) / 5
    assert sorted(path.name for path in (store / "blocks").iterdir()) == ["w0-00000005.zarr", "w0-00000006.zarr"]
    gone = np.arange(14_000, 14_008, dtype="<u4").tobytes()  # token ids of what was deleted and not erased yet
    for path, there in ((sample.store, True), (store, False)):
        assert any(gone in file.read_bytes() for file in path.rglob("*") if file.is_file()) is there
    assert_consistent(store)
    assert compact(store).blocks == 0


def test_rows_of_a_capture_lie_together(sample: Sample, store: Path) -> None:
    compact(store)
    block = next(block for block in cold_blocks_of(store) if block.attributes["codec"]["name"] == "int8b64")
    owner = block.row["capture"]
    assert 1 + int((np.diff(owner) != 0).sum()) == len(set(owner.tolist()))
    assert block.attributes["replaces"] == [1, 3]
    # All chunks of a layer, then those of the next; where nobody asked for a layer there is none.
    there = block.chunk.T[block.chunk.T >= 0]
    assert there.tolist() == list(range(len(there))) and len(block.chunk) > 4


def test_strangers_read_it(sample: Sample, store: Path) -> None:
    import tensorstore as ts
    import zarr

    compact(store)
    for block in cold_blocks_of(store):
        group = zarr.open_group(str(block.folder), mode="r")
        present = np.asarray(group["present"][...])
        position, owner = np.asarray(group["position"][...]), np.asarray(group["capture"][...])
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(block.folder / block.declared[0].name)}}
        main = np.asarray(group[block.declared[0].name][...])
        assert np.array_equal(np.asarray(ts.open(spec, open=True).result().read().result()), main)
        fill = np.asarray(block.declared[0].fill, block.declared[0].dtype)
        assert (main[~present] == fill).all() and present.any()
        with StoreReader(store) as reader:
            for index, capture in enumerate(block.attributes["captures"]):
                layers = [1, 3] if capture == sample.captures["few"] else [0, 1, 2, 3]
                got = reader.slice(capture, SITE, layers)
                for stream in block.declared:
                    array = np.asarray(group[stream.name][...])
                    for number, at in enumerate(got.positions.tolist()):
                        mine = np.flatnonzero((owner == index) & (position == at))
                        wanted = got.pieces[stream.name][:, number].tobytes()
                        assert any(array[row, layers].tobytes() == wanted for row in mine.tolist())


def test_the_loader(sample: Sample, store: Path) -> None:
    def seen() -> dict[tuple[str, int], bytes]:
        data = training_rows(store, SITE, [1, 3], codec="int8b64", batch=32, verify=True)
        return {(data.captures[capture], position): x.numpy().tobytes() + y.numpy().tobytes()
                for batch in data for capture, position, x, y in zip(
                    batch["capture"].tolist(), batch["position"].tolist(), batch[f"{SITE}.1"], batch[f"{SITE}.3"],
                    strict=True)}

    before = seen()
    compact(store)
    assert seen() == before and len(before) > 2 * ROWS


def test_where_what_unpacks_is_not_installed(sample: Sample, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compressed rows cannot be looked at then. They are not called lost, and the writer says so once, at its start."""
    with monkeypatch.context() as bare:
        bare.setitem(sys.modules, "numcodecs", None)
        assert fsck(store).bad == []  # nothing is compressed
        assert "numcodecs" not in bare_start(store)
    compact(store, compress=True)
    with monkeypatch.context() as bare:
        bare.setitem(sys.modules, "numcodecs", None)
        with pytest.raises(StoreError, match=r"\.zarr: numcodecs is not installed \(pip install 'vllm-tap\[zstd\]'\)"):
            fsck(store)
    assert bare_start(store).count("pip install 'vllm-tap[zstd]'") == 1
    assert fsck(store).bad == []


def bare_start(store: Path) -> str:
    """What a writer without numcodecs says from its start to its end."""
    with WriterProcess(store, "--keep-s", "1000", script=PROGRAMS / "bare_writer.py") as writer:
        writer.process.send_signal(signal.SIGTERM)
        return writer.process.communicate(timeout=PATIENCE_S)[1]


def test_a_training_state_of_before_is_refused_after(sample: Sample, store: Path) -> None:
    """Its rows are the same, but not in that order: going on would repeat some and leave out others."""
    def dataset() -> RowDataset:
        few = sample.captures["few"]
        return training_rows(store, SITE, [1, 3], where=lambda row: row.id != few, codec="int8b64", batch=32,
                             window=64, seed=3)

    early = dataset()
    begun = iter(early)
    next(begun)
    state = early.state_dict()
    dataset().load_state_dict(state)
    compact(store)
    late = dataset()
    assert late.rows == early.rows
    with pytest.raises(SpecError, match=r"order.*compacted.*set_epoch"):
        late.load_state_dict(state)
    next(begun)  # one that lives keeps its order, and so do its states
    with pytest.raises(SpecError, match="set_epoch"):
        late.load_state_dict(early.state_dict())
    early.load_state_dict(early.state_dict())
    dataset().load_state_dict(late.state_dict())


@pytest.mark.parametrize("packed", [False, True])
def test_the_loader_goes_on(sample: Sample, store: Path, packed: bool) -> None:
    """A dataset of before finds its rows where they lie now, in the order that it had."""
    def batches() -> Iterator[bytes]:
        for batch in data:
            yield b"".join(batch[name].numpy().tobytes() for name in (f"{SITE}.1", f"{SITE}.3", "capture", "position"))

    few = sample.captures["few"]
    data = training_rows(store, SITE, [1, 3], where=lambda row: row.id != few, codec="int8b64", batch=32, window=64,
                         seed=3)
    before, begun = list(batches()), batches()
    seen = [next(begun) for _ in range(3)]
    compact(store, compress=packed)
    assert seen + list(begun) == before and len(before) > 8
    assert list(batches()) == before
    with WriterProcess(store, "--keep-s", "0.05") as writer, Sender(writer.endpoint, role="api") as api:
        api.delete(few)  # its neighbours move once more
        api.wait()
        with StoreReader(store) as reader:
            assert until(lambda: is_erased(reader, few))
        assert list(batches()) == before
        api.delete(sample.captures["long"])
        api.wait()
        with StoreReader(store) as reader:
            assert until(lambda: is_erased(reader, sample.captures["long"]))
        with pytest.raises(NotFoundError):
            list(batches())
        writer.stop()


def test_windows_of_any_size(sample: Sample, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = answers(store, sample.captures)
    monkeypatch.setattr(cold_block_writer, "gather_bytes", CHUNK_ROWS * WIDTH)  # a chunk at a time
    assert compact(store).cold == 2
    assert answers(store, sample.captures) == before
    assert fsck(store).bad == []


def changes_of_the_disk(store: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a compaction does to the disk, one after the other."""
    made: list[str] = []
    with monkeypatch.context() as patch:
        for name in ("open_new", "write_at", "rename", "write_new", "datasync", "sync_dir", "remove"):
            real = getattr(fs, name)
            patch.setattr(fs, name, lambda *args, name=name, real=real: (made.append(name), real(*args))[1])
        compact(store)
    return made


@pytest.mark.parametrize("every", [60, pytest.param(4, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
def test_cut_at_every_change_of_the_disk(
    sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    """At the renames, at what follows them, and at every ``every``-th of all; left undone, and writes half done."""
    monkeypatch.setattr(reader_module, "settle_s_max", 0.02)
    before = answers(sample.store, sample.captures)
    made = changes_of_the_disk(Path(shutil.copytree(sample.store, tmp_path / "whole")), monkeypatch)
    chosen = [at for at in range(1, len(made) + 1) if "rename" in made[max(at - 2, 0) : at] or at % every == 0]
    left = set[int]()
    for turn, at in enumerate(chosen):
        store = Path(shutil.copytree(sample.store, tmp_path / "cut"))
        with monkeypatch.context() as patch:
            calls = cut_short(patch, at, torn=turn % 2 == 0)
            with pytest.raises(Killed):
                compact(store)
            assert calls() == at, "nothing may go on after the process is gone"
        assert answers(store, sample.captures) == before  # also for who reads before the next start
        store = Path(shutil.copytree(store, tmp_path / "after"))  # the lock is still held in this process
        if turn % 3 == 0:
            (store / "catalog.sqlite").unlink()
        fs.close(recover(store).lock)
        assert answers(store, sample.captures) == before
        assert fsck(store).bad == [] and not list((store / "blocks").glob(".*"))
        left.add(len(dump(store)["segments"]))
        shutil.rmtree(store)
        shutil.rmtree(tmp_path / "cut")
    assert left == {4, 3, 2} and len(chosen) > 15


def test_a_power_loss_after_it(sample: Sample, store: Path, tmp_path: Path) -> None:
    """The old blocks are gone by then."""
    before = answers(store, sample.captures)
    disk = Certain(store, tmp_path / "certain")
    with disk.watching():
        assert not compact(store).failed
    disk.lose()
    fs.close(recover(store).lock)
    assert answers(store, sample.captures) == before
    assert_consistent(store)


@pytest.mark.parametrize("victim", ["long", "few"])
def test_deletes_make_the_block_anew(sample: Sample, store: Path, victim: str) -> None:
    before = answers(store, sample.captures)
    compact(store)
    old = {path.name for path in (store / "blocks").iterdir()}
    with WriterProcess(store, "--keep-s", "0.05") as writer, StoreReader(store) as reader:
        with Sender(writer.endpoint, role="api") as api:
            api.delete(sample.captures[victim])
            api.wait()
            assert_rows(reader.slice(sample.captures["other"], SITE, [0, 2]), 2, range(ROWS - 10))
            assert until(lambda: is_erased(reader, sample.captures[victim]))
            assert_rows(reader.slice(sample.captures["other"], SITE, [0, 2]), 2, range(ROWS - 10))
            with pytest.raises(NotFoundError):
                reader.slice(sample.captures[victim], SITE, [1])
        with Sender(writer.endpoint, engine=engine_info(WIDTH)) as engine:  # numbers go on
            more = new_ulid()
            engine.open(more, prompt_len=3)
            engine.frame([(more, 9, range(3))], width=WIDTH)
            engine.finish(more, end=3)
            engine.wait()
        writer.stop()
    left = {name: capture for name, capture in sample.captures.items() if name != victim}
    assert answers(store, left) == {key: value for key, value in before.items() if key[0] != victim}
    new = {path.name for path in (store / "blocks").iterdir()}
    assert len(old - new) == 1 and len(new - old) == 2
    assert not any(sample.captures[victim].encode() in path.read_bytes() for path in (store / "blocks").rglob("*.json"))
    assert_consistent(store)


def test_a_delete_cut_short(sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "settle_s_max", 0.02)
    template = Path(shutil.copytree(sample.store, tmp_path / "template"))
    compact(template)
    with WriterProcess(template, "--keep-s", "1000") as writer, Sender(writer.endpoint, role="api") as api:
        api.delete(sample.captures["again"])
        api.wait()
        assert until(lambda: dump(template)["doomed"])
        writer.stop()
    left = {name: capture for name, capture in sample.captures.items() if name != "again"}
    before, at, finished = answers(template, left), 1, False
    while not finished:
        store = Path(shutil.copytree(template, tmp_path / "cut"))
        with monkeypatch.context() as patch:
            upkeep = Upkeep(store, read_store_uuid(store), Waker())
            cut_short(patch, at, False)
            try:
                upkeep.round()
                finished = True
            except Killed:
                pass
            upkeep.close()
        assert answers(store, left) == before
        look_after(store)
        assert answers(store, left) == before and not dump(store)["doomed"]
        assert fsck(store).bad == [] and len(list((store / "blocks").iterdir())) == 2
        shutil.rmtree(store)
        at += 20
    assert at > 40


def test_what_is_damaged_is_named_and_costs_nothing_else(sample: Sample, store: Path) -> None:
    compact(store)
    block = next(block for block in cold_blocks_of(store) if block.attributes["codec"]["name"] == "int8b64")
    number = block.attributes["captures"].index(sample.captures["other"])
    row = int(np.flatnonzero(block.row["capture"] == number)[0])
    piece = int(block.chunk[row // CHUNK_ROWS, 2]) * CHUNK_ROWS + row % CHUNK_ROWS
    edit(block.main, flip(piece * WIDTH + 5))
    (bad,) = fsck(store).bad
    assert (bad.capture, bad.layers, bad.positions) == (sample.captures["other"], (2,), (0,))
    with StoreReader(store) as reader:
        with pytest.raises(StoreError, match="checksum"):
            reader.slice(sample.captures["other"], SITE, [2])
        assert_rows(reader.slice(sample.captures["other"], SITE, [0, 1]), 2, range(ROWS - 10))
    edit(block.main, flip(piece * WIDTH + 5))
    edit(block.folder / "token_id" / "c" / "0", flip(4 * row))
    found = fsck(store).bad
    assert {one.capture for one in found} == {sample.captures["other"]} and 0 in found[0].positions
    with StoreReader(store) as reader:
        with pytest.raises(StoreError, match="what the block says"):
            reader.slice(sample.captures["other"], SITE, [1], 0, 1)
        assert_rows(reader.slice(sample.captures["long"], SITE, [0, 1]), 1, range(ROWS))
    edit(block.folder / "token_id" / "c" / "0", flip(4 * row))
    edit(block.folder / "scale" / "c" / "0" / "0" / "0", flip(-20))
    assert any("index" in one.what and "scale" in one.file for one in fsck(store).bad)


def test_damage_does_not_keep_a_delete_from_the_disk(sample: Sample, store: Path) -> None:
    compact(store)
    block = next(block for block in cold_blocks_of(store) if block.attributes["codec"]["name"] == "int8b64")
    owner = [block.attributes["captures"][index] for index in block.row["capture"].tolist()]
    row = owner.index(sample.captures["other"])
    piece = int(block.chunk[row // CHUNK_ROWS, 2]) * CHUNK_ROWS + row % CHUNK_ROWS
    edit(block.main, flip(piece * WIDTH + 5))
    edit(block.folder / "token_id" / "c" / "0", flip(4 * owner.index(sample.captures["few"])))
    with WriterProcess(store, "--keep-s", "0.05") as writer, Sender(writer.endpoint, role="api") as api:
        api.delete(sample.captures["long"])
        api.wait()
        with StoreReader(store) as reader:
            assert until(lambda: is_erased(reader, sample.captures["long"]))
            with pytest.raises(StoreError, match="checksum"):
                reader.slice(sample.captures["other"], SITE, [2])
            assert_rows(reader.slice(sample.captures["other"], SITE, [0, 1]), 2, range(ROWS - 10))
            assert not len(reader.slice(sample.captures["few"], SITE, [1]).positions)
        writer.stop()
    assert not block.folder.exists()
    (bad,) = fsck(store).bad
    assert (bad.capture, bad.layers, bad.positions) == (sample.captures["other"], (2,), (0,))


def test_a_damaged_block_is_left_as_it_is(sample: Sample, store: Path) -> None:
    main = store / "blocks/w0-00000001.zarr/q/c/0/0/0"
    before = answers(store, {"again": sample.captures["again"]})
    view_at = 4096 * 2 + 40 * WIDTH  # in the main stream of the first frame
    edit(main, flip(view_at))
    done = compact(store)
    assert done.cold == 2 and len(done.failed) == 1 and "checksum" in done.failed[0]
    names = sorted(path.name for path in (store / "blocks").iterdir())
    assert names == ["w0-00000001.zarr", "w0-00000005.zarr", "w0-00000006.zarr"]
    assert answers(store, {"again": sample.captures["again"]}) == before


def test_the_command(sample: Sample, store: Path) -> None:
    young = tap("compact", "--store", store, "--older-than", "1")
    assert (young.returncode, young.stderr) == (0, "") and young.stdout.startswith("0 blocks became 0: "), young
    with WriterProcess(store):
        refused = tap("compact", "--store", store)
        assert refused.returncode == 2 and "another writer has it" in refused.stderr
        assert len(refused.stderr.splitlines()) == 1
        with pytest.raises(StartError):
            compact(store)
    done = tap("compact", "--store", store)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("4 blocks became 2: "), done
    assert tap("fsck", "--store", store).returncode == 0


def test_a_reader_meets_it(sample: Sample, store: Path) -> None:
    """Between the catalog's commit and the removal, and after it, with maps of before."""
    uuid = recover(store)
    fs.close(uuid.lock)
    db = connect_write(store / "catalog.sqlite")
    change = cold_blocks.build(store, uuid.uuid, db, cold_blocks.free_number(store), [1, 3])
    db.close()
    assert fsck(store).bad[0].what.startswith("not in the catalog")
    assert_rows(StoreReader(store).slice(sample.captures["long"], SITE, [3]), 1, range(ROWS))
    assert len(change.frames) < 15 and codecs.is_identity(change.made.codec)


@pytest.fixture(scope="module")
def packed(sample: Sample, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compacted, and the rows that are stored as they are compressed."""
    store = Path(shutil.copytree(sample.store, tmp_path_factory.mktemp("packed") / "store"))
    compact(store, compress=True)
    return store


def test_compressed_rows_are_the_same(sample: Sample, packed: Path, tmp_path: Path) -> None:
    before = answers(sample.store, sample.captures)
    assert answers(packed, sample.captures) == before
    assert_consistent(packed)
    assert [block.attributes.get("compression") for block in cold_blocks_of(packed)].count("blosc") == 1
    plain = Path(shutil.copytree(sample.store, tmp_path / "plain"))
    compact(plain)
    done = compact(plain, compress=True)  # of what is cold already, what can be smaller
    assert (done.blocks, done.cold, done.failed) == (1, 1, []) and done.bytes_after < done.bytes_before
    assert compact(plain, compress=True).blocks == 0
    assert answers(plain, sample.captures) == before
    assert_consistent(plain)


def test_strangers_read_compressed_rows(sample: Sample, packed: Path) -> None:
    import tensorstore as ts
    import zarr
    import zarrs  # noqa: F401

    block, = (block for block in cold_blocks_of(packed) if block.compressed is not None)
    path = block.folder / block.declared[0].name
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path)}}
    found = [np.asarray(zarr.open_array(str(path), mode="r")[...]),
             np.asarray(ts.open(spec, open=True).result().read().result())]
    with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
        found.append(np.asarray(zarr.open_array(str(path), mode="r")[...]))
    with StoreReader(packed) as reader:
        got = reader.slice(sample.captures["plain"], SITE, [0, 1, 2, 3])
    for array in found:
        assert array.transpose(1, 0, 2).tobytes() == got.pieces["x"].tobytes()


@pytest.mark.soak
def test_a_damaged_compressed_byte_is_found(sample: Sample, packed: Path, tmp_path: Path) -> None:
    store = Path(shutil.copytree(packed, tmp_path / "store"))
    block, = (block for block in cold_blocks_of(store) if block.compressed is not None)
    whole, rng = block.main.read_bytes(), np.random.default_rng(0)
    right = answers(store, {"plain": sample.captures["plain"]})
    outcomes = set()
    for at in [0, 4, 12, 16, 20, *rng.integers(0, len(whole), 150).tolist()]:
        data = bytearray(whole)
        data[at] ^= 1 << int(rng.integers(8))
        block.main.write_bytes(data)
        try:
            outcomes.add(answers(store, {"plain": sample.captures["plain"]}) == right)
        except StoreError as error:
            outcomes.add(type(error).__name__)
        else:  # a byte that no reader of rows needs, such as the index's own checksum
            assert True in outcomes
            continue
        assert fsck(store).bad
    assert False not in outcomes and "CorruptError" in outcomes


def test_a_delete_leaves_compressed_rows_compressed(sample: Sample, tmp_path: Path) -> None:
    """Also where one of the chunks is damaged: its rows stay damaged, and the others what they were."""
    store, kept, gone = tmp_path / "store", new_ulid(), new_ulid()
    with WriterProcess(store) as writer, Sender(writer.endpoint, engine=engine_info(WIDTH)) as engine:
        for number, capture in enumerate((kept, gone)):
            engine.open(capture, prompt_len=8, codec="raw16")
            engine.frame([(capture, number, range(ROWS))], codec="raw16", width=WIDTH)
            engine.finish(capture, end=ROWS, output=ROWS - 8)
        engine.wait()
        writer.stop()
    compact(store, compress=True)
    block, = cold_blocks_of(store)
    assert block.compressed is not None
    with block.main.open("r+b") as file:
        file.seek(int(block.compressed.starts[1]) + 4)
        file.write(b"\xff")
    with WriterProcess(store, "--keep-s", "0.05") as writer, StoreReader(store) as reader:
        with Sender(writer.endpoint, role="api") as api:
            api.delete(gone)
            api.wait()
            assert until(lambda: is_erased(reader, gone))
            assert until(lambda: block.folder not in [other.folder for other in cold_blocks_of(store)])
        writer.stop()
    made, = cold_blocks_of(store)
    assert made.compressed is not None and len(made.present) == ROWS
    with StoreReader(store) as reader:
        assert_rows(reader.slice(kept, SITE, [0, 1, 2, 3], 0, CHUNK_ROWS), 0, range(CHUNK_ROWS))
        assert_rows(reader.slice(kept, SITE, [1, 2, 3]), 0, range(ROWS))
        with pytest.raises(CorruptError):
            reader.slice(kept, SITE, [0], CHUNK_ROWS, CHUNK_ROWS + 1)


def test_the_command_says_what_was_gained(sample: Sample, store: Path) -> None:
    done = tap("compact", "--store", store, "--zstd")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"4 blocks became 2: .* GB, now .* GB \([-+][0-9.]+ %\)\n", done.stdout), done


@pytest.mark.parametrize("packed", [False, True])
def test_who_follows_a_capture_meets_it(sample: Sample, store: Path, packed: bool) -> None:
    """Found before, taken after: the rows are the same, wherever they lie by then; so are those of an open reader."""
    wanted = dict[str, dict[int, Any]]()
    followers = {name: Follower(capture, "", SiteQuery(site=["resid_post"], layer=["1"]), 0, event)
                 for name, capture in sample.captures.items()}
    with StoreReader(store) as reader:
        for name, capture in sample.captures.items():
            got = reader.slice(capture, SITE, [1])
            wanted[name] = dict(zip(got.positions.tolist(), got.values()[0], strict=True))
            followers[name].look(reader)
        with StoreReader(store) as late:  # who has mapped nothing yet
            begun = followers["long"].take(late)
            compact(store, compress=packed)
            for name in sample.captures:
                sent = begun if name == "long" else b""
                while followers[name].todo:
                    sent += followers[name].take(late)
                rows = dict(map(bytes.split, sent.splitlines()))  # the later one counts
                for position, values in wanted[name].items():
                    assert rows[b"%d" % position] == values.tobytes().hex().encode(), (name, position)
        for name, capture in sample.captures.items():
            again = reader.slice(capture, SITE, [1])
            assert again.values()[0].tobytes() == b"".join(values.tobytes() for values in wanted[name].values())


def event(site: str, rows: LiveRows) -> bytes:
    """A line for every row: its position, and its numbers in hex."""
    return b"".join(b"%d %s\n" % (position, values.tobytes().hex().encode())
                    for position, values in zip(rows.positions.tolist(), rows.values[0], strict=True))
