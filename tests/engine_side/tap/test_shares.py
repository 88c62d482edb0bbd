"""Shares of ranks: every column of every layer is sent by one of them, and each sends as much as the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine_side.tap.shares import layers_sent, layout_of
from engine_side.tap.stages import Has, Stage, of_engine
from schemas.errors import StartError
from schemas.wire.layout import Share, check_layout, places_of, share_widths

LAYERS = [0, 1, 2, 3, 4, 5, 6, 7]
HEAD = 16


def kv(heads: int, ranks: int) -> tuple[int, int]:
    """Columns of K or V that a rank has, and all: vLLM gives each rank a head of its own or one that others have."""
    return max(heads // ranks, 1) * HEAD, heads * HEAD


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16])
def test_every_column_is_sent_once_and_each_rank_sends_as_much(heads: int, ranks: int) -> None:
    share, whole = kv(heads, ranks)
    widths, wholes = {"resid_post": 64, "q": 64, "k": share}, {"resid_post": 64, "q": 64 * ranks, "k": whole}
    layout = layout_of(dict.fromkeys(widths, LAYERS), widths, wholes, ranks)
    check_layout(layout, [(site, layer) for site in widths for layer in LAYERS], wholes)
    for site, width in wholes.items():
        sent = [sum(len(each.layers) * (each.stop - each.start) for each in part.shares[site]) for part in layout]
        assert set(sent) == {len(LAYERS) * width // ranks}
    for part in layout:
        assert share_widths(part, wholes) == widths


def test_ranks_that_have_the_same_head_deal_its_layers_out() -> None:
    layout = layout_of({"k": [0, 1, 2]}, {"k": HEAD}, {"k": 2 * HEAD}, 4)
    assert [part.shares["k"] for part in layout] == [
        [Share([0, 2], 0, HEAD)], [Share([1], 0, HEAD)], [Share([0, 2], HEAD, 2 * HEAD)],
        [Share([1], HEAD, 2 * HEAD)]]
    assert [(c.part, c.start) for c in places_of(layout)["k", 1]] == [(1, 0), (3, HEAD)]


def test_a_rank_that_has_nothing_of_a_site_does_not_name_it() -> None:
    layout = layout_of({"embed": [0], "probe.tone": [3]}, {"embed": 64, "probe.tone": 2},
                       {"embed": 64, "probe.tone": 2}, 2)
    assert [sorted(part.shares) for part in layout] == [["embed"], ["probe.tone"]]
    assert [layers_sent(part, "embed", [0]) for part in layout] == [[0], []]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("sizes", [(4, 4), (5, 3), (1, 6, 1), (2, 2, 2, 2)])
def test_stages_send_their_layers_and_their_ranks_deal_them_out(sizes: tuple[int, ...], ranks: int) -> None:
    share, whole = kv(2, ranks)
    widths = {"resid_post": 64, "q": 64, "k": share, "embed": 64, "final_norm": 64, "probe.tone": 3}
    wholes = {**widths, "q": 64 * ranks, "k": whole}
    layers = {**dict.fromkeys(widths, LAYERS), "embed": [0], "final_norm": [0], "probe.tone": [6]}
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    stages = [Stage(number, len(sizes), end - size, end)
              for number, (size, end) in enumerate(zip(sizes, ends, strict=True))]
    layout = layout_of(layers, widths, wholes, ranks, stages)
    check_layout(layout, [(site, layer) for site, some in layers.items() for layer in some], wholes)
    places = places_of(layout)
    for layer in LAYERS:
        stage = next(stage for stage in stages if stage.start <= layer < stage.stop)
        for site in ("resid_post", "q", "k"):
            assert {columns.part // ranks for columns in places[site, layer]} == {stage.number}
        assert len(places["q", layer]) == ranks and len(places["resid_post", layer]) == 1
    assert places["embed", 0][0].part // ranks == 0 and places["final_norm", 0][0].part // ranks == len(sizes) - 1
    assert stages[places["probe.tone", 6][0].part // ranks].has("probe.tone", 6)
    sent = [sum(len(each.layers) for each in part.shares.get("q", ())) for part in layout]
    assert sent == [size for size in sizes for _ in range(ranks)]


def test_stages_whose_rows_have_other_widths_are_refused() -> None:
    one, other = (Has([layer], width, width, 0, "", "table") for layer, width in ((0, 64), (1, 32)))
    assert of_engine([{"mlp_post": one}, {}])["mlp_post"].layers == [0]
    assert of_engine([{"mlp_post": one}, {"mlp_post": replace(one, layers=[1])}])["mlp_post"].layers == [0, 1]
    with pytest.raises(StartError, match=r"cannot arm mlp_post: its rows have 64 numbers in some stages .* and 32"):
        of_engine([{"mlp_post": one}, {"mlp_post": other}])


def test_one_rank_has_no_layout_and_sends_all() -> None:
    assert layout_of({"q": LAYERS}, {"q": 64}, {"q": 64}, 1) == []
    assert layers_sent(None, "q", [1, 5]) == [1, 5] and share_widths(None, {"q": 64}) == {"q": 64}


@pytest.mark.parametrize(("width", "whole", "ranks"), [(48, 64, 2), (64, 32, 2), (16, 64, 2), (32, 48, 3)])
def test_rows_that_do_not_make_up_whole_ones_are_refused(width: int, whole: int, ranks: int) -> None:
    layers: dict[str, Any] = {"mlp_post": LAYERS}
    with pytest.raises(StartError, match=f"size={ranks}: cannot tell which {width} of the {whole} columns of mlp_post"):
        layout_of(layers, {"mlp_post": width}, {"mlp_post": whole}, ranks)
