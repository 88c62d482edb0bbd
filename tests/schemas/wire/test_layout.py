"""Layouts: every column of everything that is armed belongs to exactly one rank, or the layout is refused by name."""

from __future__ import annotations

import pytest

from schemas.errors import ProtocolError
from schemas.wire.layout import Columns, Part, Share, check_layout, places_of, share_of

WIDTHS = {"resid_post": 96, "q": 64}
ARMED = [("resid_post", 0), ("resid_post", 1), ("q", 0), ("q", 1)]
BOTH = [0, 1]


def whole(layer: int) -> list[Share]:
    return [Share([layer], 0, 96)]


def layout(*columns: list[Share]) -> list[Part]:
    """Layer l of resid_post is of rank l; of q as given."""
    return [Part(rank, {"resid_post": whole(rank), "q": shares}) for rank, shares in enumerate(columns)]


GOOD = layout([Share(BOTH, 0, 32)], [Share(BOTH, 32, 64)])


def test_every_column_has_its_rank() -> None:
    check_layout(GOOD, ARMED, WIDTHS)
    places = places_of(GOOD)
    assert places["q", 1] == (Columns(0, 0, 32), Columns(1, 32, 64)) and places["resid_post", 1] == (Columns(1, 0, 96),)
    assert share_of(GOOD[1], "q", BOTH) == Share(BOTH, 32, 64) and share_of(GOOD[1], "resid_post", BOTH) is None
    crossed = layout([Share([0], 0, 32), Share([1], 32, 64)], [Share([0], 32, 64), Share([1], 0, 32)])
    check_layout(crossed, ARMED, WIDTHS)
    check_layout([], [], {})


@pytest.mark.parametrize(("parts", "says"), [
    (layout([Share(BOTH, 0, 32)], [Share([1], 32, 64)]), "columns 32 to 64 of q.0 are sent by no rank"),
    (layout([Share(BOTH, 0, 32)], [Share(BOTH, 48, 64)]), "columns 32 to 48 of q.0 are sent by no rank"),
    (layout([Share(BOTH, 8, 32)], [Share(BOTH, 32, 64)]), "columns 0 to 8 of q.0 are sent by no rank"),
    (layout([Share(BOTH, 0, 40)], [Share(BOTH, 32, 64)]), "columns 32 to 40 of q.0 are sent by ranks 0 and 1"),
    (layout([Share(BOTH, 0, 64)], [Share([1], 0, 64)]), "columns 0 to 64 of q.1 are sent by ranks 0 and 1"),
    (layout([Share(BOTH, 0, 64)]), "columns 0 to 96 of resid_post.1 are sent by no rank"),
    (layout([Share(BOTH, 0, 65)], []), "rank 0, q: columns 0 to 65; valid: 0 to 64"),
    (layout([Share(BOTH, 32, 32)], []), "rank 0, q: columns 32 to 32; valid: 0 to 64"),
    (layout([Share(BOTH, -1, 32)], []), "rank 0, q: columns -1 to 32; valid: 0 to 64"),
    (layout([Share([0], 0, 32), Share([0], 32, 64)], []), "layers must be named, each once"),
    (layout([Share([], 0, 32)], []), "layers must be named, each once"),
    ([GOOD[1]], "ranks are [1], they must be 0, 1"),
    ([GOOD[0], GOOD[0]], "ranks are [0, 0], they must be 0, 1"),
    ([Part(0, {"nothing": [Share([0], 0, 1)]})], "rank 0 names the unknown site 'nothing'"),
    ([*GOOD[:1], Part(1, {**GOOD[1].shares, "k": [Share([0], 0, 8)]})], "rank 1, k: columns 0 to 8; valid: 0 to 0"),
])
def test_what_does_not_cover_or_overlaps_is_refused_by_name(parts: list[Part], says: str) -> None:
    with pytest.raises(ProtocolError) as raised:
        check_layout(parts, ARMED, WIDTHS)
    assert says in str(raised.value)
