"""What is read of a K/V cache: the blocks of a request, whatever the layout; or that it cannot be told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine_side.seams.kept import finite
from engine_side.seams.kept.cache import Unread, _of_groups


def kept(tensor: Any, blocks: list[int], count: int = 7) -> str:
    config = SimpleNamespace(num_blocks=count, kv_cache_groups=[SimpleNamespace(layer_names=["l"])])
    return _of_groups({"l": SimpleNamespace(kv_cache=tensor)}, config, [blocks])["l"]


@pytest.mark.parametrize("shape", [(7, 2, 4, 6), (2, 7, 4, 6), (14, 2, 2, 6)])
def test_a_block_is_found_in_every_layout(shape: tuple[int, ...]) -> None:
    tensor = torch.arange(336).view(shape).float()
    axis = 1 if shape[1] == 7 else 0
    pieces = shape[axis] // 7
    before = kept(tensor, [3, 5])
    tensor.narrow(axis, 4 * pieces, pieces).zero_()  # another's
    assert kept(tensor, [3, 5]) == before != kept(tensor, [5, 3])
    tensor.narrow(axis, 5 * pieces, pieces).add_(1)
    assert kept(tensor, [3, 5]) != before


def test_blocks_that_were_given_back_are_left_out() -> None:
    tensor = torch.arange(336).view(7, 48)
    assert kept(tensor, [0, 0, 3]) == kept(tensor, [3]) == kept([tensor[:, :24], tensor[:, 24:]], [3])


@pytest.mark.parametrize("shape", [(7, 7, 6), (5, 6), (7, 14)])
def test_a_layout_that_cannot_be_told_is_not_read(shape: tuple[int, ...]) -> None:
    with pytest.raises(Unread, match="which of it counts the 7 blocks is not to be told"):
        kept(torch.zeros(shape), [1])


def test_what_goes_into_the_cache_is_finite() -> None:
    """Whether the cache has its own kernel or attention's writes it; what is finite keeps its bits."""
    given = torch.tensor([[1.5, -0.0, 3e-39], [torch.nan, torch.inf, -torch.inf], [3e38, -3e38, 1e29]])
    right = torch.tensor([[1.5, -0.0, 3e-39], [0, 0, 0], [1e30, -1e30, 1e29]])
    seen: list[Any] = []

    class Apart:
        def do_kv_cache_update(self, layer: Any, key: Any, value: Any, kv_cache: Any) -> None:
            seen.append((key, value, kv_cache))

        def forward(self, query: Any) -> None:
            seen.append(query)

    class Together:
        def forward(self, query: Any, kv_c_normed: Any, k_pe: Any = None, output: Any = None) -> None:
            seen.append((query, kv_c_normed, k_pe, output))

    model = torch.nn.ModuleList([torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)])
    model[0].impl, model[1].impl = Apart(), Together()
    finite.guard(model)
    before = given.clone()
    model[0].impl.do_kv_cache_update(None, given, value=given, kv_cache=given)
    model[0].impl.forward(given)
    model[1].impl.forward(given, given, output=given)
    (key, value, cache), query, (second, latent, nothing, output) = seen
    for one in (key, value, latent):
        assert torch.equal(one, right) and torch.equal(one.signbit(), right.signbit())
    assert nothing is None and all(each is given for each in (cache, query, second, output))
    assert torch.equal(given.nan_to_num(), before.nan_to_num()), "the model goes on with what it has"
    assert finite.bounded(torch.tensor([torch.inf, 60_000], dtype=torch.float16)).tolist() == [0, 60_000]
