"""Ranks whose hosts have writers of their own: each layer reaches one store, and no row is divided."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import UNSET, structs

from engine_side.config import EngineConfig
from engine_side.tap.shares import layout_of
from engine_side.tap.stages import Stage
from engine_side.tap.writers import divided
from schemas.errors import StartError
from schemas.probes import Probe
from schemas.spec import Armed
from schemas.wire.engine_info import Attends, Divided, Editable, EngineInfo
from schemas.wire.layout import check_layout, places_of
from tests.support.store_helpers import engine_info

LAYERS = list(range(8))
STAGES = [Stage(0, 2, 0, 5), Stage(1, 2, 5, 8)]
PROBE = Probe("resid_post", 6, ["x", "y", "z"], "", "a" * 16)


def engine(ranks: int = 2, stages: list[Stage] = STAGES) -> EngineInfo:
    """Stages of tensor-parallel ranks that share out the columns of ``q_rot``; a probe in the last one."""
    sites = {"resid_post": LAYERS, "q_rot": LAYERS, "final_norm": [0]}
    places = {**sites, "probe.refusal": [6]}
    widths, whole = {**dict.fromkeys(places, 64), "probe.refusal": 3}, {**dict.fromkeys(places, 64), "probe.refusal": 3,
                                                                     "q_rot": 64 * ranks}
    return structs.replace(
        engine_info(sites=tuple(sites)), armed=Armed(sites, 8, probes={"refusal": PROBE}), widths=whole,
        group="job-17-0", instance="job-17-0", attention=[Attends([0, 6], 16, 1.0)],
        layout=layout_of(places, widths, whole, ranks, stages))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_layer_reaches_one_writer(ranks: int) -> None:
    info, stores = engine(ranks), ["a"] * ranks + ["b"] * ranks
    told = [divided(info, rank, stores) for rank in range(2 * ranks)]
    for number, (mine, rank) in enumerate(told):
        assert rank == number % ranks
        assert isinstance(mine.divided, Divided) and mine.divided.writer == number // ranks
        assert mine == told[number - number % ranks][0], "the ranks of a writer say the same"
        assert mine.layout == [] or len(mine.layout) == ranks
        assert bool(mine.group) == (ranks > 1) and mine.instance
        check_layout(mine.layout or info.layout, [] if not mine.layout else [
            (site, layer) for site, layers in mine.sent.items() for layer in layers], info.widths)
    first, last = told[0][0], told[-1][0]
    assert first.sent == {"resid_post": LAYERS[:5], "q_rot": LAYERS[:5]}
    assert last.sent == {"resid_post": LAYERS[5:], "q_rot": LAYERS[5:], "final_norm": [0], "probe.refusal": [6]}
    assert first.divided == Divided(0, last.sent) and last.divided == Divided(1, first.sent)
    assert [each.layers for each in first.attention] == [[0]] and [each.layers for each in last.attention] == [[6]]
    assert first.armed == last.armed == info.armed and first.called != last.called
    assert first.called.rpartition("-")[0] != last.called.rpartition("-")[0], "no engine of one server"


def test_one_store_is_as_ever() -> None:
    info = engine()
    assert divided(info, 3, ["a"] * 4) == (info, 3) and info.divided is UNSET
    assert info.sent == {"resid_post": LAYERS, "q_rot": LAYERS, "final_norm": [0], "probe.refusal": [6]}
    assert divided(engine_info(), 0, [""]) == (engine_info(), 0)


def test_whole_rows_of_tensor_parallel_ranks_are_dealt_to_their_writers() -> None:
    info = engine(2, [Stage(0, 1, 0, 8)])
    left = {site for site, _ in places_of(info.layout)} - {"q_rot"}
    info = structs.replace(info, armed=Armed({site: layers for site, layers in info.armed.sites.items()
                                              if site in left}, 8, probes=info.armed.probes),
                           layout=[structs.replace(part, shares={site: shares for site, shares in part.shares.items()
                                                                 if site in left}) for part in info.layout])
    here, there = (divided(info, rank, ["a", "b"])[0] for rank in (0, 1))
    assert here.sent["resid_post"] == [0, 2, 4, 6] and there.sent == {"resid_post": [1, 3, 5, 7]}


def test_a_row_is_not_divided() -> None:
    with pytest.raises(StartError, match=r"ranks \[0, 1\] have a share of the columns of q_rot\.0 .* leave q_rot out"):
        divided(engine(2, [Stage(0, 1, 0, 8)]), 0, ["a", "b"])
    with pytest.raises(StartError, match=r"edits are counted for one; leave VLLM_TAP_EDIT out"):
        divided(structs.replace(engine(), edits=Editable({}, 2, [], 0)), 1, ["a", "a", "b", "b"])


def test_a_rank_without_a_writer_starts_no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    from engine_side.seams.ranks import writers

    monkeypatch.setattr(writers, "REACH_S", 0.3)
    several = EngineConfig(f"ipc://{tmp_path}/none.sock", writers="several")
    with pytest.raises(StartError, match=r"no writer answered ranks \[0\] .* start the writer of each host first"):
        writers.stores_reached(several, engine())
    assert writers.stores_reached(several, engine_info()) == [""], "an engine of one rank has one writer"
    assert writers.stores_reached(replace(several, writers="one"), engine()) == [""] * 4
    with pytest.raises(StartError, match="VLLM_TAP_WRITERS"):
        replace(several, writers="two")
