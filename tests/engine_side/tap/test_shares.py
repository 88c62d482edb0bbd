"""Shares of ranks: every column of every layer is sent by one of them, and each sends as much as the others."""

from __future__ import annotations

from typing import Any

import pytest

from engine_side.tap.shares import layers_sent, layout_of
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


def test_one_rank_has_no_layout_and_sends_all() -> None:
    assert layout_of({"q": LAYERS}, {"q": 64}, {"q": 64}, 1) == []
    assert layers_sent(None, "q", [1, 5]) == [1, 5] and share_widths(None, {"q": 64}) == {"q": 64}


@pytest.mark.parametrize(("width", "whole", "ranks"), [(48, 64, 2), (64, 32, 2), (16, 64, 2), (32, 48, 3)])
def test_rows_that_do_not_make_up_whole_ones_are_refused(width: int, whole: int, ranks: int) -> None:
    layers: dict[str, Any] = {"mlp_post": LAYERS}
    with pytest.raises(StartError, match=f"columns of mlp_post a rank has: {width} of {whole}.*size={ranks}"):
        layout_of(layers, {"mlp_post": width}, {"mlp_post": whole}, ranks)
