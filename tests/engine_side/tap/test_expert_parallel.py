"""Experts on several ranks, each of which has all tokens: what routers say is whole on each, and sent once. Played."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from engine_side.tap.shares import layers_sent, layout_of
from engine_side.tap.stages import Stage
from schemas import codecs
from schemas.ids import new_ulid
from schemas.read.reader import StoreReader
from schemas.wire.layout import LEADER, check_layout, places_of
from tests.support.ranks import Rank
from tests.support.store_helpers import WriterProcess, assert_adds_up, engine_info, key_of, pieces_of, until

LAYERS = [0, 1, 2, 3]
WHOLE = {"resid_post": 64, "mlp_out": 64, "router_logits": 8, "experts": 2, "q": 128}
PROMPT, END = 5, 8


def widths(ranks: int) -> dict[str, int]:
    """Numbers in the rows that a rank has: heads are shared out, but no expert's rows."""
    return {**WHOLE, "q": WHOLE["q"] // ranks}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("stages", [1, 2])
def test_what_routers_say_is_dealt_out_by_layers(ranks: int, stages: int) -> None:
    size = len(LAYERS) // stages
    split = [Stage(number, stages, number * size, (number + 1) * size) for number in range(stages)]
    layout = layout_of(dict.fromkeys(WHOLE, LAYERS), widths(ranks), WHOLE, ranks, split if stages > 1 else ())
    check_layout(layout, [(site, layer) for site in WHOLE for layer in LAYERS], WHOLE)
    places = places_of(layout)
    for site in ("router_logits", "experts", "mlp_out"):
        for layer in LAYERS:
            (columns,) = places[site, layer]
            assert (columns.start, columns.stop) == (0, WHOLE[site])
            assert columns.part == layer // size * ranks + layer % ranks
        sent = [layers_sent(part, site, LAYERS) for part in layout]
        assert sorted(layer for some in sent for layer in some) == LAYERS
    # All that is said of one layer's mixture comes from one rank, so all of it is of one step's word.
    assert all(places["router_logits", layer] and places["experts", layer][0].part == places["mlp_out", layer][0].part
               for layer in LAYERS)


def test_rows_of_routers_come_whole_out_of_the_ranks_that_send_them(tmp_path: Path) -> None:
    ranks, capture = 2, new_ulid()
    layout = layout_of(dict.fromkeys(WHOLE, LAYERS), widths(ranks), WHOLE, ranks)
    info = msgspec.structs.replace(engine_info(64, sites=tuple(WHOLE)), widths=WHOLE, group=new_ulid(), layout=layout)
    with WriterProcess(tmp_path / "store") as writer:
        played = [Rank(writer.endpoint, rank, info) for rank in range(ranks)]
        for rank in played:
            rank.hello()
        played[LEADER].open(capture, PROMPT, dict.fromkeys(WHOLE, LAYERS), "raw")
        played[1].join(capture)
        for rank in played:
            for site in WHOLE:
                rank.rows(capture, 1, site, range(END), 1, codec="raw", width=widths(ranks)[site])
        played[LEADER].finish(capture, END, END + 1 - PROMPT)
        played[1].part_finish(capture)
        for rank in played:
            rank.wait()
        with StoreReader(tmp_path / "store") as reader:
            assert until(lambda: reader.capture(capture).status == "complete")
            manifest = reader.manifest(capture)
            assert_adds_up(manifest)
            assert {site.site: (site.width, site.shared_out) for site in manifest.sites} == {
                site: (width, site == "q") for site, width in WHOLE.items()}
            for site in ("router_logits", "experts", "mlp_out"):
                got = reader.slice(capture, site, LAYERS)
                for layer, rows in zip(LAYERS, got.values(), strict=True):
                    np.testing.assert_array_equal(rows, sent_by(layer % ranks, layer, WHOLE[site]))
        for rank in played:
            rank.close()


def sent_by(rank: int, layer: int, width: int) -> np.ndarray:
    """What a played rank sends of a layer: [END, width], float32."""
    keys = key_of(1, np.arange(END)[None, :], np.asarray([layer])[:, None], 0) + 7919 * rank
    (stream,) = codecs.streams("raw", width, "float32")
    stored = pieces_of("raw", width, "float32", keys)[stream.name].view(stream.dtype)
    found: np.ndarray = stored.reshape(END, width)
    return found
