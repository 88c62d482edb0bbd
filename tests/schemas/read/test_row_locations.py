"""Any rows of any captures at once: what slices give of them, from open segments, sealed and cold blocks."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from schemas import codecs
from schemas.errors import CorruptError, LimitError, NotFoundError, SpecError
from schemas.ids import new_ulid
from schemas.native import loops as native_loops
from schemas.read import coverage_cache as covered_module
from schemas.read import row_reader as reader_module
from schemas.read import segment_cache, segment_maps
from schemas.read.reader import RowsAt, StoreReader, read_store_uuid
from schemas.read.row_locations import FIRST, LAYERS, PARTS, SEGMENT, STEP, RowLocations, joined
from schemas.read.segment_maps import SegmentMaps
from tests.support.store_helpers import SITE, Sender, WriterProcess, engine_info, expected_pieces, until
from vllm_tap.store import open_store
from writer_service.tools.compaction import compact

WIDTH, ROWS = 192, 40


@dataclass(frozen=True)
class Made:
    """``captures[n]`` has the content n; of the last one layers 0 and 1 lack position 7."""

    store: Path
    captures: list[str]


@pytest.fixture(autouse=True, params=["machine code", "NumPy"])
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the loop that who reads much has, and without."""
    loop = native_loops.load()
    assert loop is not None
    monkeypatch.setattr(native_loops, "_loops", loop if request.param == "machine code" else None)
    monkeypatch.setattr(native_loops, "_maker", threading.Thread())  # which makes none


@pytest.fixture(scope="module", params=["open", "sealed", "cold", "partly"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    """Prompts in frames of their own, then frames of all captures in several runs; sealed at every few frames."""
    store, captures = tmp_path_factory.mktemp("rows") / "store", [new_ulid() for _ in range(6)]
    flags = {"open": ("--seal-idle-s", "600"), "partly": ("--seal-idle-s", "600", "--segment-bytes", "50000")}
    usual = ("--seal-idle-s", "0.2", "--segment-bytes", "120000")
    with WriterProcess(store, *flags.get(request.param, usual)) as writer:
        with Sender(writer.endpoint, engine=engine_info(WIDTH)) as engine:
            for number, capture in enumerate(captures):
                engine.open(capture, prompt_len=ROWS - 10)
                engine.frame([(capture, number, range(ROWS - 10))], width=WIDTH)
            for step in range(ROWS - 10, ROWS, 5):
                engine.frame([(capture, number, range(step, step + 5)) for number, capture in enumerate(captures)],
                             runs=[7, 1, 15, 7], width=WIDTH)
            engine.dropped(captures[-1], 7, 8, layers=[0, 1])
            for capture in captures[:-1]:
                engine.finish(capture, end=ROWS)
            engine.wait()  # the last one is still running
            with StoreReader(store) as reader:
                assert until(lambda: reader.progress(captures[-1]).captured == 4 * ROWS - 2)
            journal = store / "writers" / "w0" / "journal"
            if request.param in ("sealed", "cold"):
                assert until(lambda: not list(journal.glob("[0-9]*.open")))
        if request.param in ("open", "partly"):
            assert request.param == "open" or until(lambda: list((store / "blocks").glob("*.zarr")))
            assert request.param == "partly" or list(journal.glob("[0-9]*.open"))
            yield Made(store, captures)
            return
        writer.stop()
    if request.param == "cold":
        assert compact(store).cold > 0
    yield Made(store, captures)


def assert_content(got: RowsAt, made: Made, wanted: list[tuple[int, int]]) -> None:
    """Bit for bit what was sent, in the order asked for."""
    assert got.token_ids.tolist() == [position + 5000 for _, position in wanted]
    for at, (number, position) in enumerate(wanted):
        truth = expected_pieces(number, [position], got.layers, got.codec, got.width, got.dtype)
        for name, array in got.pieces.items():
            assert np.ascontiguousarray(array[:, at]).view(np.uint8).tobytes() == truth[name].tobytes(), (name, at)


@pytest.mark.parametrize("layers", [[2], [3, 2], [0, 1, 2, 3]])
def test_rows_are_those_asked_for_in_that_order(made: Made, layers: list[int]) -> None:
    rng = random.Random(len(layers))
    wanted = [(rng.randrange(len(made.captures)), rng.randrange(ROWS)) for _ in range(300)]
    last = len(made.captures) - 1
    wanted = [each for each in wanted if not (each == (last, 7) and {0, 1} & set(layers))]
    wanted += wanted[:5]  # twice is no error
    with StoreReader(made.store) as reader:
        for _ in range(2):  # also when it is known where they lie
            got = reader.rows_at([(made.captures[number], position) for number, position in wanted], SITE, layers)
            assert_content(got, made, wanted)
        number, position = wanted[0]
        one = reader.slice(made.captures[number], SITE, layers, position, position + 1)
        assert one.values()[:, 0].tobytes() == np.ascontiguousarray(got.values()[:, 0]).tobytes()


def test_no_rows_are_no_error(made: Made) -> None:
    """Of drafts that were not accepted there are none, of positions that nobody asks for neither."""
    with StoreReader(made.store) as reader:
        for got in (reader.slice(made.captures[0], SITE, [2, 3], rejected=True),
                    reader.slice(made.captures[0], SITE, [2, 3], 5, 5)):
            assert got.values().shape == (2, 0, WIDTH) and not len(got.positions)


def test_what_is_not_there_is_named(made: Made) -> None:
    first, last = made.captures[0], made.captures[-1]
    with StoreReader(made.store) as reader:
        with pytest.raises(NotFoundError, match=f"{last} has no row of {SITE} at position 7: dropped|pending"):
            reader.rows_at([(first, 1), (last, 7)], SITE, [1])
        reader.rows_at([(last, 7)], SITE, [2])
        for position in (ROWS, -1):
            with pytest.raises(NotFoundError, match=f"position {position}: its positions end at {ROWS}"):
                reader.rows_at([(first, position)], SITE, [1])
        with pytest.raises(NotFoundError, match="no layer"):
            reader.rows_at([(first, 1)], SITE, [9])
        with pytest.raises(NotFoundError, match="no capture"):
            reader.rows_at([(first, 1)], SITE, [1], owner="nobody")
        with pytest.raises(SpecError, match="none at all"):
            reader.rows_at([], SITE, [1])
        with pytest.raises(LimitError):
            reader.rows_at([(first, 1)] * (1 << 22), SITE, [0, 1, 2, 3])


def test_a_store_gives_them_as_numbers(made: Made) -> None:
    with open_store(made.store) as store:
        wanted = [(made.captures[3], 5), (made.captures[0], 31)]
        got = store.rows_at(wanted, SITE, 2)
        assert got.shape == (2, WIDTH) and got.dtype == np.float32
        assert got[1].tobytes() == store[made.captures[0]].slice(SITE, 2, 31, 32).values[0, 0].tobytes()
        assert store.rows_at(wanted, SITE, [2, 3]).shape == (2, 2, WIDTH)
        assert store.rows_at(wanted, "blocks.2.hook_resid_post").tobytes() == got.tobytes()
        for one in (np.int64(2), np.array(2)):
            assert store.rows_at(wanted, SITE, one).tobytes() == got.tobytes()
        two = store.rows_at(wanted, SITE, [2, 3])
        for several in ((2, 3), range(2, 4), np.array([2, 3]), np.array([2, 3], np.uint8)):
            assert store.rows_at(wanted, SITE, several).tobytes() == two.tobytes()
        for bad in (True, 2.0, "2", slice(0, 2), {2, 3}, [2.0], np.array([True, False]), [[2, 3]], [[2], [2, 3]]):
            with pytest.raises(SpecError, match=r"^layer = .*: valid: a layer's number, or several"):
                store.rows_at(wanted, SITE, bad)  # type: ignore[arg-type]


def test_it_is_forgotten_where_rows_lie_and_found_again(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(covered_module, "rows_cached_max", 5 * ROWS)
    wanted = [(number, position) for position in range(0, ROWS, 9) for number in range(len(made.captures))]
    with StoreReader(made.store) as reader:
        for _ in range(3):
            got = reader.rows_at([(made.captures[number], position) for number, position in wanted], SITE, [3])
            assert_content(got, made, wanted)
            assert 0 < reader._coverage_cache.rows <= 5 * ROWS


def test_what_is_kept_is_counted_by_group_of_layers(tmp_path: Path) -> None:
    """Where layers have not all the same rows, the same positions are kept for each group of them."""
    store, capture, layers = tmp_path / "store", new_ulid(), list(range(32))
    with WriterProcess(store) as writer, Sender(writer.endpoint, engine=engine_info(WIDTH, len(layers))) as engine:
        engine.open(capture, prompt_len=8, layers={SITE: layers})
        engine.frame([(capture, 0, range(500))], layers=layers, width=WIDTH)
        for layer in layers:
            engine.frame([(capture, 0, [500 + layer])], layers=[layer], width=WIDTH)
        engine.finish(capture, end=540, output=533)
        engine.wait()
        with StoreReader(store) as reader:
            assert until(lambda: reader.capture(capture).total_len == 541)
            reader.slice(capture, SITE, layers, 0, 500)
            assert kept_bytes(reader) < 120 * reader._coverage_cache.rows


def kept_bytes(reader: StoreReader) -> int:
    """Of the arrays, and what each comes with."""
    found = 0
    for _, covered in reader._coverage_cache._cached.items():
        arrays = [array for groups in covered.coverage.sites.values() for group in groups for rows in
                  (group.rows, group.rejected) for array in (rows.positions, rows.extent, rows.row)]
        arrays += [part.table for part in covered.locations.values()]
        found += sum(array.nbytes for array in arrays) + sum(len(extent.table) for extent in covered.extents)
    return found


def spoil(store: Path, number: int, position: int) -> None:
    """Make a byte wrong of a row of layer 2 of a capture."""
    mains = sorted([*store.glob("blocks/*/q/c/0/0/0"), *store.glob("writers/w0/journal/[0-9]*.open")])
    truth = expected_pieces(number, [position], [2], width=WIDTH)["q"].tobytes()
    (main, at), = [(path, path.read_bytes().index(truth)) for path in mains if truth in path.read_bytes()]
    with main.open("r+b") as file:
        file.seek(at + 5)
        file.write(b"\x7b")


def test_a_frame_of_an_open_segment_is_read_whole_once(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From then on the rows that are read are held against what they were, and no others, as those of blocks are."""
    store = Path(shutil.copytree(made.store, tmp_path / "store"))
    monkeypatch.setattr(segment_cache, "proved_bytes_max", 2000)  # one frame's or two: most are proved again
    monkeypatch.setattr(segment_maps, "piece_bytes_min", 1)

    def read(reader: StoreReader, rows: list[tuple[int, int]], layers: list[int]) -> None:
        assert_content(reader.rows_at([(made.captures[n], p) for n, p in rows], SITE, layers), made, rows)

    with StoreReader(store) as reader:
        for number in range(6):
            for position in range(8, ROWS):
                read(reader, [(number, position)], [1, 2])
        assert reader._maps._cache.proofs.total <= 2000
        spoil(store, 5, ROWS - 1)
        beside = [(5, ROWS - 2), (4, ROWS - 1)]
        read(reader, beside, [2])
        with pytest.raises(CorruptError, match="does not match"):
            read(reader, [*beside, (5, ROWS - 1)], [2])
    with StoreReader(store) as reader:
        if list(store.glob("writers/w0/journal/[0-9]*.open")):
            with pytest.raises(CorruptError, match="stream q does not match"):  # it was never right for this one
                read(reader, beside, [2])
        else:
            read(reader, beside, [2])


def test_of_small_rows_in_open_segments_no_checksums_are_kept(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be millions in a frame: it is held against the checksums of its streams at every read."""
    store = Path(shutil.copytree(made.store, tmp_path / "store"))
    monkeypatch.setattr(segment_maps, "piece_bytes_min", 1 << 20)
    rows = [(number, position) for number in range(6) for position in range(8, ROWS)]
    with StoreReader(store) as reader:
        assert_content(reader.rows_at([(made.captures[n], p) for n, p in rows], SITE, [1, 2]), made, rows)
        assert not reader._maps._cache.proofs.total
        spoil(store, 5, ROWS - 1)
        with pytest.raises(CorruptError, match="does not match"):
            reader.rows_at([(made.captures[5], ROWS - 1)], SITE, [2])


def test_a_wrong_byte_costs_its_row_alone(made: Made, tmp_path: Path) -> None:
    store = Path(shutil.copytree(made.store, tmp_path / "store"))
    capture = made.captures[0]
    spoil(store, 0, 3)
    with StoreReader(store) as reader:
        with pytest.raises(CorruptError, match="does not match"):
            reader.rows_at([(capture, 1), (capture, 3)], SITE, [2])
        others = [(number, position) for number in range(1, 6) for position in (1, 3)]
        assert_content(reader.rows_at([(made.captures[n], p) for n, p in others], SITE, [2]), made, others)


@pytest.mark.parametrize(("end", "by"), [(0, -(1 << 40)), (0, -1), (1, 1), (1, 1 << 40)])
def test_places_outside_of_a_file_are_not_read(made: Made, monkeypatch: pytest.MonkeyPatch, end: int, by: int) -> None:
    """Of one row among those of several segments, as a wrong catalog may have it: no memory beside a map is read."""
    rows = [(capture, position) for capture in made.captures for position in (3, ROWS - 1)]
    main = codecs.streams("int8b64", WIDTH, "bfloat16")[0].nbytes
    maps = SegmentMaps(made.store, read_store_uuid(made.store))

    def elsewhere(parts: Sequence[RowLocations]) -> RowLocations:
        """One piece so many bytes before the file's start, or after its end."""
        found = joined(parts)
        table = found.table[:, 5]
        piece = table[FIRST] + found.layer_sets[table[LAYERS]].index(2) * table[STEP]
        size = len(maps.data(reader.segment(found.segments[table[SEGMENT]]))[1])
        table[PARTS] = by - piece * main + end * (size - main)
        return found

    monkeypatch.setattr(reader_module, "joined", elsewhere)
    with StoreReader(made.store) as reader:
        if not list((made.store / "blocks").glob("*/frame_xxh3")):  # rows of cold blocks have no such places
            with pytest.raises(CorruptError, match="rows lie beyond"):
                reader.rows_at(rows, SITE, [2])


def test_what_was_known_of_a_capture_ends_with_it(tmp_path: Path) -> None:
    """A reader that knows where rows lie asks the catalog all the same: deleted is deleted, new rows are there."""
    store, captures = tmp_path / "store", [new_ulid() for _ in range(3)]
    info = engine_info(WIDTH)
    with WriterProcess(store, "--keep-s", "1000") as writer, Sender(writer.endpoint, engine=info) as engine:
        for number, capture in enumerate(captures):
            engine.open(capture, prompt_len=8)
            engine.frame([(capture, number, range(8))], width=WIDTH)
        engine.finish(captures[0], end=8)
        engine.wait()
        made = Made(store, captures)
        with StoreReader(store) as reader:
            assert until(lambda: reader.progress(captures[2]).captured == 32)
            every = [(number, position) for number in range(3) for position in range(8)]
            asked = [(captures[number], position) for number, position in every]
            assert_content(reader.rows_at(asked, SITE, [1]), made, every)
            engine.frame([(captures[1], 1, range(8, 12))], width=WIDTH)
            engine.delete(captures[0])
            engine.wait()
            assert until(lambda: reader.progress(captures[1]).captured == 48)
            with pytest.raises(NotFoundError, match=captures[0]):
                reader.rows_at(asked, SITE, [1])
            assert_content(reader.rows_at([(captures[1], 11)], SITE, [1]), made, [(1, 11)])
            engine.frame([(captures[1], 1, [11])], width=WIDTH, version=1)  # computed again: the newer one counts
            engine.wait()
            newer = expected_pieces(1, [11], [1], width=WIDTH, version=1)["q"].tobytes()
            assert until(lambda: reader.rows_at([(captures[1], 11)], SITE, [1]).pieces["q"].tobytes() == newer)
