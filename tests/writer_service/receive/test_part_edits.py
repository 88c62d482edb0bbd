"""Edits that the stages of a pipeline count, each those of its layers: a manifest has all, or says who has not told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from schemas.read.reader import StoreReader
from schemas.store.paths import journal_folder
from schemas.wire.engine_info import Editable, EngineInfo
from tests.support.ranks import Ranks, info_of
from tests.support.store_helpers import WriterProcess, until
from writer_service import fs
from writer_service.tools.rebuild import rebuild

END = 8
COUNTED = [{"resid_post": [0, 1]}, {"resid_post": [2, 3], "z": [3]}, {}]  # the last rank counts nothing
TOLD = [{"site": "resid_post", "layers": [0, 1, 2, 3], "op": "scale", "by": 2},
        {"site": "resid_pre", "layers": [2], "op": "scale", "by": 3},  # of what the first stage hands on
        {"site": "z", "layers": [3], "op": "scale", "by": 5}]


def rows(layers: list[int], applied: int, reason: str = "") -> dict[str, Any]:
    return {"layers": layers, "expected": END, "applied": applied, "cached": 0, "missing": END - applied,
            **({"reason": reason} if reason else {})}


LEADER = json.dumps([
    {**TOLD[0], "rows": [rows([0, 1], END), rows([2, 3], 0, "not_counted")]}, {**TOLD[1], "rows": [rows([2], END)]},
    {**TOLD[2], "rows": [rows([3], 0, "not_counted")]}])
SECOND = json.dumps([[rows([2], END), rows([3], END - 1, "not_applied")], [], [rows([3], END)]])
TOGETHER = [{**TOLD[0], "rows": [rows([0, 1, 2], END), rows([3], END - 1, "not_applied")]},
            {**TOLD[1], "rows": [rows([2], END)]}, {**TOLD[2], "rows": [rows([3], END)]}]


def without(reason: str) -> list[dict[str, Any]]:
    """What a manifest says where the second rank has told nothing."""
    return [{**TOLD[0], "rows": [rows([0, 1], END), rows([2, 3], 0, reason)]}, {**TOLD[1], "rows": [rows([2], END)]},
            {**TOLD[2], "rows": [rows([3], 0, reason)]}]


class Case(Ranks):
    """A store, its writer and the ranks of an engine that edits, and captures nothing."""

    def __init__(self, store: Path, writer: WriterProcess) -> None:
        super().__init__(writer.endpoint, len(COUNTED))
        self.store, self.writer = store, writer
        edits = Editable({"resid_post": [0, 1, 2, 3], "z": [3]}, 2, [], 0, COUNTED)
        info: EngineInfo = msgspec.structs.replace(info_of(len(COUNTED)), edits=edits)
        for rank in self.all:
            rank.engine = info

    def open(self, told: list[dict[str, Any]] | None = None) -> None:
        self.leader.open(self.capture, 5, {"resid_post": []}, edits=json.dumps(TOLD if told is None else told))

    def finish(self, told: str = LEADER) -> None:
        self.leader.finish(self.capture, END, END - 4, edits=told)


@contextmanager
def playing(tmp_path: Path, *flags: str) -> Iterator[Case]:
    with WriterProcess(tmp_path / "store", *flags) as writer, Case(tmp_path / "store", writer) as made:
        yield made


@pytest.mark.parametrize("order", ["leader first", "leader last", "between"])
def test_what_each_rank_counted_is_put_together(order: str, tmp_path: Path) -> None:
    """In any order, twice the same, and from the logs alone; one that counts nothing is not waited for."""
    with playing(tmp_path) as case, StoreReader(case.store) as reader:
        second = case.all[1]
        leads, joins = [case.open, case.finish], [lambda: second.join(case.capture),
                                                  lambda: second.part_finish(case.capture, SECOND)]
        for word in {"leader first": [*leads, *joins], "leader last": [*joins, *leads],
                     "between": [leads[0], *joins, leads[1]]}[order]:
            word()
            case.wait()
            if word is case.finish and order == "leader first":
                assert until(lambda: reader.manifest(case.capture).edits == without("pending"))
                assert reader.capture(case.capture).status == "running"
        for said in [second.kept[seq] for seq in sorted(second.kept)]:
            second.socket.send_multipart(said)
        second.wait()
        assert until(lambda: reader.manifest(case.capture).status == "empty")
        manifest = reader.manifest(case.capture)
        assert manifest.edits == TOGETHER
        assert [(part.rank, part.state) for part in manifest.parts] == [(0, "finished"), (1, "finished")]
        case.writer.stop()
        fs.close(rebuild(case.store).state.lock)
        with StoreReader(case.store) as again:
            assert again.manifest(case.capture) == manifest


@pytest.mark.parametrize("joined", [True, False])
def test_a_rank_that_never_tells_is_named(joined: bool, tmp_path: Path) -> None:
    """It is missing for that reason, and its capture is not complete; what it may still tell counts."""
    with playing(tmp_path, "--engine-lost-s", "1") as case, StoreReader(case.store) as reader:
        second = case.all[1]
        case.open()
        if joined:
            second.join(case.capture)
        case.wait()
        if joined:
            second.bye()
            second.sync()
            second.close()
        case.finish()

        def ended() -> bool:
            for rank in case.all:
                if rank is not second:
                    rank.sync()
            return reader.capture(case.capture).status == "incomplete"
        assert until(ended)
        manifest = reader.manifest(case.capture)
        assert manifest.edits == without("part_lost")
        assert {part.rank: part.state for part in manifest.parts} == {0: "finished", 1: "lost"}
        if not joined:
            second.join(case.capture)
            second.part_finish(case.capture, SECOND)
            second.wait()
            assert until(lambda: reader.manifest(case.capture).status == "empty")
            assert reader.manifest(case.capture).edits == TOGETHER


def test_a_rank_that_ends_without_a_word_of_them_is_named(tmp_path: Path) -> None:
    with playing(tmp_path) as case, StoreReader(case.store) as reader:
        case.open()
        case.all[1].join(case.capture)
        case.all[1].part_finish(case.capture)
        case.finish()
        case.wait()
        assert until(lambda: reader.capture(case.capture).status == "incomplete")
        assert reader.manifest(case.capture).edits == without("not_counted")


def test_edits_of_one_stage_wait_for_no_other(tmp_path: Path) -> None:
    """The place before a stage's first layer is the last of the stage before."""
    with playing(tmp_path) as case, StoreReader(case.store) as reader:
        case.open(TOLD[1:2])
        told = [{**TOLD[1], "rows": [rows([2], END)]}]
        case.finish(json.dumps(told))
        case.wait()
        assert until(lambda: reader.manifest(case.capture).status == "empty")
        assert reader.manifest(case.capture).edits == told and reader.manifest(case.capture).parts[1:] == []


def test_what_a_rank_told_goes_with_its_capture(tmp_path: Path) -> None:
    """Out of the log too."""
    with playing(tmp_path, "--keep-s", "0.05") as case, StoreReader(case.store) as reader:
        case.open()
        case.all[1].join(case.capture)
        case.all[1].part_finish(case.capture, SECOND)
        case.finish()
        case.wait()
        assert until(lambda: reader.manifest(case.capture).status == "empty")
        journal = case.store / journal_folder()

        def left() -> bool:
            return any(b"not_applied" in path.read_bytes() for path in journal.iterdir() if path.is_file())
        assert left()
        case.leader.delete(case.capture)
        case.leader.wait()
        assert until(lambda: not left())
