"""Captures whose rows several ranks send: whole rows come out, of one computation each, and what is missing is said."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from schemas.errors import CorruptError
from schemas.ids import new_ulid
from schemas.read.reader import StoreReader
from schemas.wire.engine_info import EngineInfo
from schemas.wire.layout import Part, Share
from tests.support.consistency import assert_consistent
from tests.support.ranks import COLUMNS, LAYERS, SITES, Rank, Ranks, info_of, layout_of, values
from tests.support.store_helpers import Sender, WriterProcess, assert_adds_up, until
from writer_service import fs
from writer_service.tools.compaction import compact
from writer_service.tools.fsck import fsck
from writer_service.tools.rebuild import rebuild

RANKS, PROMPT, END = 4, 5, 8
ALL = {site: LAYERS for site in SITES}


class Case(Ranks):
    """A store, its writer and the ranks of an engine."""

    def __init__(self, store: Path, writer: WriterProcess) -> None:
        super().__init__(writer.endpoint, RANKS)
        self.store, self.writer, self.ranks = store, writer, self.all

    def begin(self, prompt_len: int = PROMPT, codec: str = "int8b64") -> None:
        super().begin(prompt_len, codec)

    def end(self, end: int = END, output: int = END + 1 - PROMPT, who: Sequence[Rank] | None = None) -> None:
        super().end(end, output, who)


@contextmanager
def playing(tmp_path: Path, *flags: str) -> Iterator[Case]:
    with WriterProcess(tmp_path / "store", *flags) as writer, Case(tmp_path / "store", writer) as made:
        yield made


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Case]:
    with playing(tmp_path) as made:
        yield made


def final(reader: StoreReader, capture: str) -> str:
    status = until(lambda: (found := reader.capture(capture).status) not in ("pending", "running") and found)
    return str(status)


def gaps(reader: StoreReader, capture: str, site: str, layer: int = 0) -> list[tuple[int, int, str]]:
    while True:  # the catalog follows an Ack a moment later: both are of one moment where nothing came between them
        manifest = reader.manifest(capture)
        (entry,) = [entry for entry in manifest.rows if (entry.site, entry.layer) == (site, layer)]
        got = None if manifest.status == "running" else reader.slice(capture, site, [layer])
        if reader.manifest(capture) == manifest:
            break
    assert_adds_up(manifest)
    if got is not None:
        assert got.missing == entry.missing and len(got.positions) == entry.captured
    return [(m.start, m.stop, m.reason) for m in entry.missing]


def assert_whole(reader: StoreReader, case: Case, codec: str = "int8b64") -> None:
    positions = range(END)
    for site in SITES:
        got = reader.slice(case.capture, site, LAYERS)
        assert got.positions.tolist() == list(positions) and got.width == got.values().shape[2]
        np.testing.assert_array_equal(got.values(), values(RANKS, case.number, site, positions, codec=codec))
        at = [(case.capture, position) for position in reversed(positions)]
        np.testing.assert_array_equal(reader.rows_at(at, site, LAYERS).values(), got.values()[:, ::-1])


@pytest.mark.parametrize("codec", ["int8b64", "raw"])
def test_whole_rows_come_out_of_the_shares_of_all_ranks(case: Case, codec: str) -> None:
    case.begin(codec=codec)
    case.step(range(PROMPT), 1, codec=codec)
    for position in range(PROMPT, END):
        case.step([position], position, codec=codec)
    case.end()
    case.wait()
    with StoreReader(case.store) as reader:
        assert final(reader, case.capture) == "complete"
        assert_whole(reader, case, codec=codec)
        manifest = reader.manifest(case.capture)
        assert_adds_up(manifest)
        assert manifest.expected == manifest.captured == 3 * len(LAYERS) * END
        assert [(part.rank, part.state) for part in manifest.parts] == [(rank, "finished") for rank in range(RANKS)]
        assert {site.site: site.width for site in manifest.sites} == {
            "resid_post": COLUMNS, "q": RANKS * COLUMNS, "k": RANKS // 2 * COLUMNS}
        stored = sum(extent.rows for site in manifest.sites if site.site == "k" for extent in site.extents)
        assert stored == 2 * END, "what two ranks have alike was sent more than once"
    case.writer.stop()
    with StoreReader(case.store) as reader:
        assert_whole(reader, case, codec=codec)
    assert_consistent(case.store)


def test_parts_outlive_sealing_compaction_and_a_catalog_made_again(case: Case) -> None:
    """Steps too: what was computed twice is put together of one computation, wherever it lies."""
    case.begin()
    case.step(range(PROMPT), 1)
    case.step(range(PROMPT), 7, version=1, again=True)
    case.step([3], 8, who=case.ranks[1:], again=True)
    case.step(range(PROMPT, END), 9, version=1)
    case.end()
    case.wait()
    gone = new_ulid()
    case.capture, kept = gone, case.capture
    case.begin()
    case.step(range(PROMPT), 10)
    case.wait()
    api = Sender(case.writer.endpoint, role="api")
    with closing(api):
        api.hello()
        api.delete(gone)
        api.wait()
    case.capture = kept
    case.writer.stop()

    attributes = [json.loads(path.read_text())["attributes"] for path in case.store.glob("blocks/*/zarr.json")]
    said = {stream["rank"]: stream["engine"]["shares"]["k"] for one in attributes for stream in one["streams"]
            if one["site"] == "k"}
    assert said == {rank: msgspec.to_builtins(layout_of(RANKS)[rank].shares["k"]) for rank in (0, 2)}

    def check() -> None:
        assert_consistent(case.store)
        with StoreReader(case.store) as reader:
            assert gaps(reader, kept, "q") == [(3, 4, "dropped")]
            assert gaps(reader, kept, "resid_post", 1) == [] and gaps(reader, kept, "k") == [(3, 4, "dropped")]
            got = reader.slice(kept, "q", LAYERS)
            np.testing.assert_array_equal(got.values(), values(RANKS, 1, "q", got.positions.tolist(), version=1))
            assert [row.id for row in reader.captures()] == [kept]

    check()
    assert compact(case.store).cold
    check()
    fs.close(rebuild(case.store).state.lock)
    check()
    assert fsck(case.store).bad == []


def test_columns_of_two_computations_are_never_put_together(case: Case) -> None:
    """The request was preempted: positions are computed again, and one rank is behind."""
    case.begin()
    case.step(range(PROMPT), 1)
    ahead = [rank for rank in case.ranks if rank.rank != 2]
    case.step(range(PROMPT), 7, who=ahead, version=1, again=True)
    case.wait()
    with StoreReader(case.store) as reader:
        assert until(lambda: gaps(reader, case.capture, "q") == [(0, PROMPT, "pending")])
        assert gaps(reader, case.capture, "k") == [(0, PROMPT, "pending")]  # ranks 0 and 2 have it
        assert not len(reader.slice(case.capture, "q", LAYERS).positions)
        case.step(range(2), 7, who=[case.ranks[2]], version=1, again=True)  # in two messages
        case.step(range(2, PROMPT), 7, who=[case.ranks[2]], version=1, again=True)
        case.wait()
        assert until(lambda: gaps(reader, case.capture, "q") == [])
        np.testing.assert_array_equal(reader.slice(case.capture, "q", LAYERS).values(),
                                      values(RANKS, 1, "q", range(PROMPT), version=1))


def test_what_one_rank_dropped_is_missing_and_an_older_computation_does_not_stand_in(case: Case) -> None:
    case.begin()
    case.step(range(END), 1)
    case.step([3], 9, who=[case.ranks[0], *case.ranks[2:]], version=1, again=True)
    case.ranks[1].drop(case.capture, "q", 3, 4, LAYERS)
    case.ranks[3].drop(case.capture, "resid_post", 6, 8, [3])
    case.end()
    case.wait()
    with StoreReader(case.store) as reader:
        assert final(reader, case.capture) == "incomplete"
        assert gaps(reader, case.capture, "q") == [(3, 4, "dropped")]
        assert gaps(reader, case.capture, "resid_post", 3) == [(6, 8, "dropped")]
        assert gaps(reader, case.capture, "resid_post", 2) == [] and gaps(reader, case.capture, "k") == []


def test_a_recomputation_that_a_rank_never_told_of_is_not_made_up_for(case: Case) -> None:
    """Rank 1 says the end without the second computation of position 3: neither its old columns nor new ones serve."""
    case.begin()
    case.step(range(END), 1)
    case.step([3], 9, who=[rank for rank in case.ranks if rank.rank != 1], version=1, again=True)
    case.end()
    case.wait()
    with StoreReader(case.store) as reader:
        assert final(reader, case.capture) == "incomplete"
        assert gaps(reader, case.capture, "q") == [(3, 4, "dropped")]


@pytest.mark.parametrize("how", ["silence", "bye", "a new epoch"])
def test_the_part_of_a_rank_that_died_is_lost_and_the_others_go_on(tmp_path: Path, how: str) -> None:
    with playing(tmp_path, "--engine-lost-s", "1" if how == "silence" else "600") as case:
        case.begin()
        case.step(range(PROMPT), 1)
        case.wait()
        dead, living = case.ranks[1], [rank for rank in case.ranks if rank.rank != 1]
        if how == "bye":
            dead.bye()
            dead.sync()
        dead.close()
        again = Rank(case.writer.endpoint, 1, dead.engine, stream=dead.stream, epoch=dead.epoch + 1)
        if how == "a new epoch":
            again.hello()
        case.step(range(PROMPT, END), 2, who=living)
        case.end(who=case.ranks[2:])
        with StoreReader(case.store) as reader:
            def ended() -> bool:
                for rank in living:  # those live: they say something now and then
                    rank.sync()
                return reader.capture(case.capture).status == "incomplete"
            assert until(ended)
            assert gaps(reader, case.capture, "q") == [(PROMPT, END, "part_lost")]
            assert gaps(reader, case.capture, "resid_post", 1) == [(PROMPT, END, "part_lost")]
            assert gaps(reader, case.capture, "resid_post", 0) == [] and gaps(reader, case.capture, "k") == []
            assert {part.rank: part.state for part in reader.manifest(case.capture).parts}[1] == "lost"
        again.close()


def test_a_rank_that_never_joins_is_given_up_and_may_still_come(tmp_path: Path) -> None:
    with playing(tmp_path, "--engine-lost-s", "1") as case:
        case.leader.open(case.capture, PROMPT, ALL)
        there = case.ranks[:3]
        for rank in there[1:]:
            rank.join(case.capture)
        case.step(range(END), 1, who=there)
        case.end(who=there[1:])
        with StoreReader(case.store) as reader:
            assert until(lambda: reader.manifest(case.capture).parts[3].state == "awaited")
            assert reader.capture(case.capture).status == "running"

            def ended() -> bool:
                for rank in case.ranks:
                    rank.sync()
                return reader.capture(case.capture).status == "incomplete"
            assert until(ended)
            assert gaps(reader, case.capture, "q") == [(0, END, "part_lost")]
            assert gaps(reader, case.capture, "k") == []
            late = case.ranks[3]
            late.join(case.capture)
            case.step(range(END), 1, who=[late])
            late.part_finish(case.capture)
            late.wait()
            assert until(lambda: reader.capture(case.capture).status == "complete")
            assert_whole(reader, case)


def test_ranks_whose_part_was_not_asked_for_are_not_waited_for(case: Case) -> None:
    case.leader.open(case.capture, PROMPT, {"resid_post": [0], "k": [1]})
    case.ranks[2].join(case.capture)
    case.leader.rows(case.capture, 1, "resid_post", range(END), 1, layers=[0])
    for rank in (case.leader, case.ranks[2]):
        rank.rows(case.capture, 1, "k", range(END), 1, layers=[1])
    case.end(who=[case.ranks[2]])
    case.wait()
    with StoreReader(case.store) as reader:
        assert final(reader, case.capture) == "complete"
        assert [part.rank for part in reader.manifest(case.capture).parts] == [0, 2]


def test_parts_come_in_any_order(case: Case) -> None:
    """All that the others say is there before the leader says a word, and messages come twice."""
    for rank in case.others:
        rank.join(case.capture)
    case.step(range(PROMPT), 1, who=case.others)
    case.step(range(PROMPT, END), 2, who=case.others)
    for rank in case.others:
        rank.part_finish(case.capture)
        said = [rank.kept[seq] for seq in sorted(rank.kept)]
        for word in said:
            rank.socket.send_multipart(word)
        rank.wait()
    with StoreReader(case.store) as reader:
        assert until(lambda: reader.capture(case.capture).status == "pending")
        case.leader.open(case.capture, PROMPT, ALL)
        case.step(range(PROMPT), 1, who=[case.leader])
        case.leader.wait()
        assert until(lambda: reader.capture(case.capture).status == "running")
        assert until(lambda: gaps(reader, case.capture, "q") == [(PROMPT, END, "pending")])
        case.step(range(PROMPT, END), 2, who=[case.leader])
        case.leader.finish(case.capture, END, END + 1 - PROMPT)
        case.wait()
        assert final(reader, case.capture) == "complete"
        assert_whole(reader, case)


def test_ranks_that_name_different_tokens_are_named(case: Case) -> None:
    """At one step, whether a rank has columns of the row or a layer of its own; of another step it may."""
    case.begin()
    case.step(range(PROMPT), 1, sites=("resid_post", "k"))
    case.step(range(PROMPT), 1, who=[rank for rank in case.ranks if rank.rank != 2], sites=("q",))
    case.ranks[2].rows(case.capture, 1, "q", range(PROMPT), 1, token=5001)
    case.ranks[3].rows(case.capture, 1, "resid_post", [5], 2, token=5002)
    case.step([5, 6], 3, sites=("q", "k"))
    case.step([6], 2, sites=("k",), token=7000)
    case.wait()
    case.writer.stop()
    found = [(one.what, one.site, one.capture, one.layers, one.positions) for one in fsck(case.store).bad]
    assert found == [("rank 2 names other tokens than rank 0 in the same steps", "q", case.capture, tuple(LAYERS),
                      tuple(range(PROMPT)))]
    with StoreReader(case.store) as reader, pytest.raises(CorruptError, match="ranks name other tokens"):
        reader.slice(case.capture, "q", LAYERS).values()


def test_when_the_leader_is_lost_the_capture_is(tmp_path: Path) -> None:
    with playing(tmp_path) as case:
        case.begin()
        case.step(range(PROMPT), 1)
        case.wait()
        case.leader.bye()
        case.leader.sync()
        with StoreReader(case.store) as reader:
            assert final(reader, case.capture) == "incomplete"
            assert gaps(reader, case.capture, "q") == []
        case.step([PROMPT], 2, who=case.others)
        case.wait()
        with StoreReader(case.store) as reader:
            assert until(lambda: gaps(reader, case.capture, "q") == [(PROMPT, PROMPT + 1, "engine_lost")])
            assert until(lambda: gaps(reader, case.capture, "resid_post", 1) == [])


def test_drafts_are_judged_alike_on_all_ranks(case: Case) -> None:
    """Position 6 was guessed twice: the first guess was rejected, and both guesses lie there, whole."""
    case.begin()
    case.step(range(PROMPT), 1)
    case.step([5, 6, 7], 2, drafts=[6, 7])
    case.step([6, 7], 3, version=1)
    case.end()
    case.wait()
    with StoreReader(case.store) as reader:
        assert final(reader, case.capture) == "complete"
        got = reader.slice(case.capture, "q", LAYERS, 6, 8)
        np.testing.assert_array_equal(got.values(), values(RANKS, 1, "q", [6, 7], version=1))
        refused = reader.slice(case.capture, "q", LAYERS, rejected=True)
        np.testing.assert_array_equal(refused.values(), values(RANKS, 1, "q", [6, 7]))
        assert {entry.rejected for entry in reader.manifest(case.capture).rows} == {2}


# ── what is refused ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_part_is_taken_once(case: Case) -> None:
    case.begin()
    twin = Rank(case.writer.endpoint, 1, case.leader.engine)
    twin.hello()
    joined = twin.join(case.capture)
    twin.rows(case.capture, 1, "q", range(PROMPT), 1, version=3)
    ended = twin.part_finish(case.capture)
    case.step(range(END), 1)
    case.end()
    case.wait()
    twin.wait()
    assert twin.refused[joined][0] == "conflict" and "rank 1 has already joined" in twin.refused[joined][1]
    assert twin.refused[ended][0] == "conflict"
    with StoreReader(case.store) as reader:
        assert final(reader, case.capture) == "complete"
        assert_whole(reader, case)
    twin.close()


def test_ranks_of_another_engine_and_roles_that_a_rank_does_not_have(case: Case) -> None:
    case.begin()
    stranger, alone = Rank(case.writer.endpoint, 1, info_of(RANKS)), Sender(case.writer.endpoint)
    stranger.hello()
    alone.hello()
    foreign = stranger.join(case.capture)
    opened = case.ranks[1].open(new_ulid(), PROMPT, ALL)
    led = case.leader.join(new_ulid())
    finished = case.ranks[1].finish(case.capture, END)
    part = case.leader.part_finish(case.capture)
    of_none = alone.open(case.capture, PROMPT)
    first = new_ulid()
    case.ranks[1].join(first)
    case.ranks[1].wait()
    taken = alone.open(first, PROMPT)
    for sender in (*case.ranks, stranger, alone):
        sender.wait()
    assert stranger.refused[foreign] == ("conflict", f"capture {case.capture} belongs to another engine")
    assert "Open: must be from rank 0 of a group, not from rank 1" in case.ranks[1].refused[opened][1]
    assert "Join: must be from a rank of a group other than 0, not from rank 0" in case.leader.refused[led][1]
    assert "rank 1 sends PartFinish" in case.ranks[1].refused[finished][1]
    assert "the rank that opened a capture sends Finish" in case.leader.refused[part][1]
    assert alone.refused[of_none][0] == "conflict"
    assert "was joined by ranks of another engine" in alone.refused[taken][1]
    stranger.close()
    alone.close()


@pytest.mark.parametrize(("fields", "says"), [
    ({"width": 32}, "width 32; rank 1 has columns 64 to 128 of q"),
    ({"steps": [1, 2]}, "2 steps of 1 runs"),
    ({"steps": [-1]}, "step out of range"),
])
def test_frames_that_are_not_of_the_share(case: Case, fields: dict[str, Any], says: str) -> None:
    case.begin()
    rank = case.ranks[1]
    seq = rank.rows(case.capture, 1, "q", [0], 1, **fields)
    rank.wait()
    assert rank.refused[seq][0] == "malformed" and says in rank.refused[seq][1]


def test_frames_of_layers_that_another_rank_has_or_without_steps(case: Case) -> None:
    case.begin()
    rank = case.ranks[1]
    other = rank.rows(case.capture, 1, "resid_post", [0], 1, layers=[0, 1])
    rank.rank = 2  # what it says of its frames from now on
    lie = rank.rows(case.capture, 1, "q", [0], 1)
    rank.rank = 1
    frame, parts = rank.frame([(case.capture, 1, [0])], layers=[1], send=False)
    bare = rank.send(frame, *parts)
    rank.wait()
    assert "layers [0, 1] of resid_post are in no share of rank 1" in rank.refused[other][1]
    assert "must tell the steps" in rank.refused[bare][1]
    assert "rank 2, of a sender that is rank 1" in rank.refused[lie][1]


def test_codecs_of_whole_rows_are_refused_where_ranks_share_rows_out(case: Case) -> None:
    for codec in ("topk:k=8", "rp8:k=16,seed=0", "sketch:k=16,bits=2,seed=0"):
        seq = case.leader.open(new_ulid(), PROMPT, ALL, codec)
        fine = case.leader.open(new_ulid(), PROMPT, {"resid_post": LAYERS}, codec)
        case.leader.wait()
        assert "it is of whole rows, and ranks share out the columns of k" in case.leader.refused[seq][1]
        assert fine not in case.leader.refused


def refusal(case: Case, rank: int, info: EngineInfo, **options: Any) -> str:
    sender = Rank(case.writer.endpoint, rank, info, **options)
    with closing(sender), pytest.raises(AssertionError, match="malformed") as raised:
        sender.hello(5)
    return str(raised.value)


@pytest.mark.parametrize(("change", "says"), [
    ({"layout": layout_of(RANKS)[:3]}, "columns 192 to 256 of q.0 are sent by no rank"),
    ({"layout": [*layout_of(RANKS)[:3], Part(3, layout_of(RANKS)[2].shares)]}, "are sent by ranks 2 and 3"),
    ({"group": ""}, "group must be named"),
    ({"group": "g" * 300}, "group: at most 256 characters"),
])
def test_layouts_that_do_not_cover_or_overlap(case: Case, change: dict[str, Any], says: str) -> None:
    info = msgspec.structs.replace(info_of(RANKS), **change)
    assert says in refusal(case, 0, info)


def test_ranks_that_name_different_layouts_or_change(case: Case) -> None:
    group = case.leader.engine.group if case.leader.engine else ""
    crossed = [Part(part.rank, {**part.shares, "resid_post": [Share([3 - part.rank], 0, COLUMNS)]})
               for part in layout_of(RANKS)]
    said = refusal(case, 1, info_of(RANKS, group, crossed))
    assert f"layout: rank 0 of group {group!r} named another one than rank 1" in said
    assert "rank 4 is not in the layout, which has 4 parts" in refusal(case, 4, info_of(RANKS, group))
    one = case.ranks[1]
    one.join(case.capture)
    one.wait()
    changed = refusal(case, 2, info_of(RANKS, group), stream=one.stream, epoch=one.epoch)
    assert f"this stream was rank 1 of group {group!r}, and stays it" in changed
