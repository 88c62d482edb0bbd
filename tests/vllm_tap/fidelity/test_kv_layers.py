"""Layers whose keys and values cannot be changed, refused by name, and codecs that are another in each: no engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine_side.seams.kept.keys_values import heads_of
from engine_side.seams.kept.rotary import Rotary
from schemas.errors import ArgumentError, StartError
from vllm_tap.fidelity.job import FidelityJob
from vllm_tap.fidelity.kv.codecs import DEFAULT_CODECS, Coded, Stand, chosen
from vllm_tap.fidelity.kv.job import KVJob
from vllm_tap.fidelity.kv.principal import ByLayer, by_layer
from vllm_tap.tiny_model import tiny_model


class Attention:
    """What is asked of a layer of vLLM's."""

    def __init__(self, head_size_v: int = 32) -> None:
        self.num_kv_heads, self.head_size, self.head_size_v = 2, 32, head_size_v
        self.kv_sharing_target_layer_name, self.kv_cache_dtype = None, "auto"
        self.impl = SimpleNamespace(do_kv_cache_update=None)
        self.attn_backend = SimpleNamespace(forward_includes_kv_cache_update=False)


def engine(layers: dict[str, Attention]) -> Any:
    runner = SimpleNamespace(
        kv_cache_config=SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=list(layers))]),
        vllm_config=SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers)))
    return SimpleNamespace(collective_rpc=lambda call: [call(SimpleNamespace(model_runner=runner))])


def test_layers_are_told_by_number() -> None:
    assert heads_of(engine({f"model.layers.{at}.self_attn.attn": Attention() for at in (0, 3)})) == {
        0: (2, 32), 3: (2, 32)}


@pytest.mark.parametrize(("layers", "match"), [
    ({"model.layers.1.self_attn.attn": Attention(16)},
     r"keys and values of model.layers.1.self_attn.attn cannot be changed .*: its values have 16 numbers in a head and "
     r"its keys 32"),
    ({"model.layers.1.self_attn.attn": Attention(), "model.layers.1.cross_attn.attn": Attention()},
     r"keys and values of model.layers.1.cross_attn.attn cannot be changed .*: model.layers.1.self_attn.attn has the "
     r"number 1 too")])
def test_layers_that_their_number_and_heads_do_not_tell_are_refused(layers: dict[str, Attention], match: str) -> None:
    with pytest.raises(StartError, match=match):
        heads_of(engine(layers))


# ── codecs that are another in each layer ───────────────────────────────────────────────────────────────────────

HEADS, HEAD = 2, 16
PLACES = torch.arange(400)
ANGLES = PLACES[:, None] / 50 ** (torch.arange(HEAD // 2) / 8)
TURN = Rotary(torch.cat([ANGLES.cos(), ANGLES.sin()], 1), True)


def drawn(layer: int, what: str, count: int = 400) -> torch.Tensor:
    """Rows [rows, heads, head] that mostly lie in few directions, of each layer, head and kind its own."""
    seed = torch.Generator().manual_seed(10 * layer + ord(what))
    turns = torch.linalg.qr(torch.randn(HEADS, HEAD, HEAD, generator=seed))[0]
    fresh = torch.randn(count, HEADS, HEAD, generator=torch.Generator().manual_seed(count + ord(what)))
    return torch.einsum("nhi,hij->nhj", fresh * 2.0 ** -torch.arange(HEAD), turns) + 3


def of_layers(name: str) -> ByLayer:
    exact = {(layer, 0): (TURN.turned(drawn(layer, "k"), PLACES), drawn(layer, "v")) for layer in (0, 1)}
    return by_layer((name,), exact, (0, 1), {0: TURN, 1: TURN})[0]


def error(coder: Coded, layer: int, what: str) -> float:
    rows, at = drawn(layer, what, 100), PLACES[:100]
    given = TURN.turned(rows, at) if what == "k" else rows
    off: torch.Tensor = coder.coded(given, Stand(torch.zeros_like(at), layer, at, what)) - given
    return float(off.norm() / given.norm())


@pytest.mark.parametrize("what", ["k", "v"])
def test_components_of_the_layer_before_the_rotary_embedding_hold_what_a_fixed_rotation_does_not(what: str) -> None:
    for four, two, layer in ((of_layers("pca4"), of_layers("pca2"), each) for each in (0, 1)):
        assert four.at(layer).check(drawn(layer, what, 100), what) == HEADS * (HEAD // 2 + 2)
        assert two.at(layer).check(drawn(layer, what, 100), what) == HEADS * (HEAD // 4 + 2)
        assert error(four, layer, what) < error(two, layer, what) < error(chosen(("rot2",), {})[0], layer, what) / 3
        assert error(four, layer, what) < error(chosen(("rot4",), {})[0], layer, what) / 4
        elsewhere = ByLayer("pca4", {layer: four.at(1 - layer)}, {layer: TURN})
        assert error(elsewhere, layer, what) > 3 * error(four, layer, what)  # another layer's are none for this one
    if what == "k":
        unturned = ByLayer("pca4", of_layers("pca4").coders, dict.fromkeys((0, 1), Rotary(torch.tensor(
            [[1.0] * (HEAD // 2) + [0.0] * (HEAD // 2)]).expand(400, -1), True)))
        assert error(unturned, 0, what) > 3 * error(of_layers("pca4"), 0, what)


@pytest.mark.parametrize("halves", [True, False])
def test_keys_are_turned_back_by_whatever_length_and_layout_they_were_turned_with(halves: bool) -> None:
    turn = Rotary(1.3 * TURN.table[:, : HEAD // 2 + 4].reshape(400, 2, -1)[..., :6].flatten(1), halves)
    rows = drawn(0, "k")
    made = turn.turned(rows, PLACES)
    assert not torch.allclose(made, rows, atol=0.1) and torch.equal(made[..., 12:], rows[..., 12:])
    assert torch.allclose(turn.turned(made, PLACES, back=True), rows, atol=1e-4)


def test_a_digest_is_of_what_was_fitted_and_too_few_rows_are_refused() -> None:
    exact = {(layer, 0): (drawn(layer, "k"), drawn(layer, "v")) for layer in (0, 1)}
    one, other = of_layers("pca4"), by_layer(("pca4",), exact, (0, 1), {0: TURN, 1: TURN})[0]
    assert one.digest(HEADS, HEAD, torch.float32) == of_layers("pca4").digest(HEADS, HEAD, torch.float32)
    assert one.digest(HEADS, HEAD, torch.float32) != other.digest(HEADS, HEAD, torch.float32)
    with pytest.raises(ArgumentError, match=r"--prompts = 15: rows of heads of 16 numbers are too few for components"):
        by_layer(("pca4",), {(0, 0): (drawn(0, "k", 16), drawn(0, "v", 16))}, (0,), {0: TURN})


@pytest.mark.parametrize(("names", "plain", "principal"), [
    ((), list(DEFAULT_CODECS), ("pca4", "pca2")), (("pca2",), [], ("pca2",)), (("kv8", "pca4"), ["kv8"], ("pca4",))])
def test_codecs_that_are_fitted_stand_beside_the_others(names: tuple[str, ...], plain: list[str],
                                                         principal: tuple[str, ...], tmp_path: Path) -> None:
    job = KVJob(FidelityJob(str(tiny_model()), tmp_path), codecs=names)
    assert [one.name for one in job.plain()] == plain and job.principal == principal
    with pytest.raises(ArgumentError, match="--codecs = 'pca4,pca4': names pca4 twice"):
        KVJob(job.common, codecs=("pca4", "pca4"))
    with pytest.raises(ArgumentError, match="--codec = 'pca4': is the name of a codec that is shipped"):
        KVJob(job.common, own={"pca4": type("Mine", (), {})})
