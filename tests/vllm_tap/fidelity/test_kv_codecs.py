"""Codecs of keys and values without a model: their bytes, their error, and what is refused by name."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any, ClassVar

import pytest
import torch

from schemas.errors import ArgumentError
from vllm_tap.fidelity.job import FidelityJob
from vllm_tap.fidelity.kv.codecs import (
    DEFAULT_CODECS,
    Coder,
    Float8,
    Stand,
    chosen,
    fitting,
    lloyd_max,
    own_codec,
    own_codecs,
)
from vllm_tap.fidelity.kv.job import KVJob, _digests
from vllm_tap.fidelity.kv.modes import Coding
from vllm_tap.tiny_model import tiny_model

HEADS, HEAD = 4, 64
ROWS = torch.randn(33, HEADS, HEAD, generator=torch.Generator().manual_seed(0))
OUTLIERS = ROWS * torch.where(torch.arange(HEAD) == 5, 16.0, 1.0) * torch.tensor([1.0, 1.0, 1.0, 20.0])[:, None]


def coder(name: str) -> Coder:
    return chosen((name,), {})[0]


def error(name: str, rows: torch.Tensor, what: str = "k") -> float:
    """Of the worst head, its error over its length."""
    made = coder(name).round_trip(rows, what)
    return float(((made - rows).norm(dim=-1) / rows.norm(dim=-1)).mean(0).max())


@pytest.mark.parametrize(("name", "keys", "values"), [
    ("kv8", 4 * 66, 4 * 66), ("kv8-pooled", 256 + 2, 256 + 2), ("fp8", 256, 256), ("kv4", 4 * 36, 4 * 36),
    ("k8v4", 4 * 66, 4 * 36), ("kv4-pooled", 128 + 4, 128 + 4), ("nf4", 4 * 34, 4 * 34), ("rot4", 4 * 34, 4 * 34),
    ("rot2", 4 * 18, 4 * 18), ("raw16", 512, 512), ("identity", 1024, 1024), ("nf4b64", 168, 168)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_counted_on_packed_codes_scales_and_all(name: str, keys: int, values: int,
                                                          dtype: torch.dtype) -> None:
    assert [coder(name).check(ROWS.to(dtype), what) for what in "kv"] == [keys, values]


def test_more_bits_and_a_scale_a_head_make_less_error() -> None:
    order = ["identity", "kv8", "fp8", "kv4", "rot2"]
    found = [error(name, ROWS) for name in order]
    assert found == sorted(found) and found[0] == 0
    for rows in (ROWS, OUTLIERS):
        assert error("kv8", rows) < error("kv8-pooled", rows) and error("kv4", rows) < error("kv4-pooled", rows)
    assert error("k8v4", ROWS, "k") == error("kv8", ROWS) and error("k8v4", ROWS, "v") == error("kv4", ROWS)


def test_a_rotation_spreads_a_massive_column() -> None:
    assert error("rot4", OUTLIERS) < 0.75 * min(error("kv4", OUTLIERS), error("nf4", OUTLIERS))
    made = coder("rot4").round_trip(OUTLIERS, "k")
    assert torch.allclose(made.norm(dim=-1), OUTLIERS.norm(dim=-1), rtol=5e-3)  # a bfloat16 of it


def test_a_row_of_zeros_comes_back_and_what_is_no_number_is_none() -> None:
    for name in DEFAULT_CODECS:
        assert coder(name).round_trip(torch.zeros(3, HEADS, HEAD), "k").abs().max() == 0, name
        bad = ROWS.clone()
        bad[1, 2, 7] = float("nan")
        assert not coder(name).round_trip(bad, "k")[1].isfinite().all(), name


@pytest.mark.parametrize(("names", "match"), [
    (("zip",), r"--codecs = 'zip': valid: kv8, kv8-pooled, fp8, k8v4"), (("rp8",), r"--codecs = 'rp8': has no rows"),
    (("kv8", "kv8"), r"--codecs = 'kv8,kv8': names kv8 twice"), (("qk8",), r"--codecs = 'qk8': valid for keys")])
def test_codecs_that_there_are_not_are_refused(names: tuple[str, ...], match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        chosen(names, {})


@pytest.mark.parametrize(("text", "match"), [
    ("mine", "valid: NAME=PACKAGE.MODULE:CLASS"), ("mine=no.such.module:C", "cannot be had: ModuleNotFoundError"),
    ("mine=json:Nothing", "cannot be had: AttributeError"), ("kv8=json:JSONDecoder", "kv8 is the name of a codec"),
    ("../x=json:JSONDecoder", "valid: NAME")])
def test_a_class_that_cannot_be_had_is_refused(text: str, match: str) -> None:
    with pytest.raises(ArgumentError, match=rf"--codec = .*{match}"):
        own_codec(text)


def test_a_class_that_is_no_codec_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"--codec = 'mine': its class has no decode, token_bytes"):
        chosen((), dict([own_codec("mine=json:JSONEncoder")]))


def test_without_names_a_users_own_codec_stands_alone() -> None:
    name, make = own_codec("mine=vllm_tap.fidelity.kv.codecs:Float8")
    assert [one.name for one in chosen((), {name: make})] == ["mine"]
    assert [one.name for one in chosen((), {})] == list(DEFAULT_CODECS)
    assert [one.name for one in chosen(("kv8",), {name: make})] == ["kv8", "mine"]


@pytest.mark.parametrize(("more", "match"), [
    ({"modes": ("turning",)}, "--modes = 'turning': valid: snapshot, direct, in-forward, rolling"),
    ({"parts": ("q",)}, "--parts = 'q': valid: kv, k, v"), ({"parts": ("k", "k")}, "--parts = 'k,k': names one twice"),
    ({"codecs": ("zip",)}, "--codecs = 'zip'")])
def test_arguments_that_cannot_be_met_are_refused(more: dict[str, tuple[str, ...]], match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        KVJob(FidelityJob(str(tiny_model()), tiny_model()), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("word", ["--kv-cache-dtype=fp8", "--max-num-batched-tokens=8", "-tp=2", "-t=2",
                                  "--kv_cache_dtype=fp8", "--kv-cache-d=fp8", "--kv_transfer_config.kv_role=both",
                                  "--max_num_s=9", "--no-enforce-eager", "--no-enable-chunked-prefill",
                                  "--long-prefill-token-threshold-adaptive", "--max_model_len=9"])
def test_arguments_of_vllm_that_change_how_keys_and_values_are_kept_are_refused(word: str) -> None:
    with pytest.raises(ArgumentError, match=rf"{word.partition('=')[0]} = .*leave it out"):
        KVJob(FidelityJob(str(tiny_model()), tiny_model(), engine_args=tuple(itertools.chain(word.split("=")))))


def test_a_rotation_is_left_out_where_heads_are_no_power_of_two_and_refused_where_it_was_asked_for() -> None:
    heads = {0: (4, 64), 1: (4, 80)}
    kept, told = fitting(chosen((), {}), heads, False)
    assert [one.name for one in kept] == [name for name in DEFAULT_CODECS if not name.startswith("rot")]
    assert told == "rot4, rot2: turns heads of a power of two of numbers, and layer 1 has heads of 80"
    assert fitting(chosen((), {}), {0: (4, 64)}, False)[1] == ""
    with pytest.raises(ArgumentError, match=r"--codecs = 'rot4': turns heads of a power of two of numbers, and layer 1 "
                                            r"has heads of 80: leave it out, or take kv4 or nf4"):
        fitting(chosen(("kv8", "rot4"), {}), heads, True)
    for one in kept:
        assert one.check(torch.randn(17, 4, 80, generator=torch.Generator().manual_seed(1)), "k") > 0


def test_a_layer_and_a_codec_of_ones_own_are_named_once() -> None:
    with pytest.raises(ArgumentError, match=r"--layers = '1,1': names one twice"):
        KVJob(FidelityJob(str(tiny_model()), tiny_model(), layers=(1, 1)))
    shipped = "vllm_tap.fidelity.kv.codecs"
    with pytest.raises(ArgumentError, match=r"--codec = 'a=.*:Exact': a is named twice"):
        own_codecs([f"a={shipped}:Float8", f"a={shipped}:Exact"])
    assert list(own_codecs([f"a={shipped}:Float8", f"b={shipped}:Exact"])) == ["a", "b"]
    with pytest.raises(ArgumentError, match=r"--codec = 'nf4b64': is the name of two codecs"):
        chosen(("nf4b64",), {"nf4b64": Float8})


def test_a_codec_of_ones_own_that_is_no_class_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"--codec = 'mine': is a partial, not a class"):
        KVJob(FidelityJob(str(tiny_model()), tiny_model()), own={"mine": partial(Float8)})


def test_a_codec_is_known_by_what_it_makes_as_well_as_by_its_source() -> None:
    """A run is not gone on with where a class that it is built on, or a file that it reads, was changed."""
    class Base(Float8):
        step = 1.0

        def decode(self, pieces: Any, heads: int, head: int, what: str) -> torch.Tensor:
            return self.step * super().decode(pieces, heads, head, what)

    class Mine(Base):
        pass

    def digests() -> dict[str, str]:
        coders = [Coder.of("mine", Mine), coder("kv8"), coder("rot4")]
        return _digests(coders, {0: (4, 64), 1: (4, 64), 2: (2, 32)}, "bfloat16")

    before = digests()
    assert before == digests() and len(set(before.values())) == 3
    Base.step = 2.0
    assert {name for name, one in digests().items() if before[name] != one} == {"mine"}


# ── codecs that do not code each token by itself ────────────────────────────────────────────────────────────────


class OneScale:
    """A scale of all tokens of a call, kept by token."""

    def _largest(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.float().abs().amax()

    def encode(self, rows: torch.Tensor, what: str) -> dict[str, torch.Tensor]:
        scale = (self._largest(rows) / 127).to(torch.bfloat16)
        return {"q": (rows.float() / scale.float()).round().clamp(-127, 127).to(torch.int8),
                "scale": scale.expand(len(rows), 1).clone()}

    def decode(self, pieces: Any, heads: int, head: int, what: str) -> torch.Tensor:
        found: torch.Tensor = pieces["q"].float() * pieces["scale"].float()[:, :, None]
        return found

    def token_bytes(self, heads: int, head: int, what: str) -> int:
        return heads * head + 2


class MoreThanOne(OneScale):
    def encode(self, rows: torch.Tensor, what: str) -> dict[str, torch.Tensor]:
        if len(rows) == 1:
            raise RuntimeError("one token")
        return super().encode(rows, what)


class Running(OneScale):
    """The scale is that of all that came by so far."""

    def __init__(self) -> None:
        self.most = torch.zeros(())

    def _largest(self, rows: torch.Tensor) -> torch.Tensor:
        self.most = torch.maximum(self.most, super()._largest(rows))
        return self.most


class Book(OneScale):
    """Rows are kept in the class, and a number of each in the pieces."""

    kept: ClassVar[list[torch.Tensor]] = []

    def encode(self, rows: torch.Tensor, what: str) -> dict[str, torch.Tensor]:
        first = len(self.kept)
        self.kept.extend(rows.clone())
        return {"id": torch.arange(first, len(self.kept), dtype=torch.int32)}

    def decode(self, pieces: Any, heads: int, head: int, what: str) -> torch.Tensor:
        return torch.stack([self.kept[at] for at in pieces["id"].tolist()])

    def token_bytes(self, heads: int, head: int, what: str) -> int:
        return 4


class KeepsItBack(Book):
    """The rows that came last are kept in the class, and nothing in the pieces."""

    last: ClassVar[list[torch.Tensor]] = []

    def encode(self, rows: torch.Tensor, what: str) -> dict[str, torch.Tensor]:
        self.last[:] = rows.clone()
        return {"x": torch.zeros(len(rows), 1, dtype=torch.int32)}

    def decode(self, pieces: Any, heads: int, head: int, what: str) -> torch.Tensor:
        return torch.stack(self.last)


class InPlace:
    """Steps of a half, made in the rows that it is given."""

    def encode(self, rows: torch.Tensor, what: str) -> dict[str, torch.Tensor]:
        return {"x": rows.mul_(2).round_().div_(2)}

    def decode(self, pieces: Any, heads: int, head: int, what: str) -> torch.Tensor:
        found: torch.Tensor = pieces["x"]
        return found

    def token_bytes(self, heads: int, head: int, what: str) -> int:
        return 4 * heads * head


@pytest.mark.parametrize(("kind", "match"), [
    (OneScale, "encodes a token otherwise beside others than alone"),
    (MoreThanOne, "fails on 33 tokens: RuntimeError: one token"),
    (Running, "packs the same tokens otherwise when others came before"),
    (Book, "packs the same tokens otherwise when others came before"),
    (KeepsItBack, "decodes to something else from the packed codes alone")])
def test_a_codec_that_does_not_code_each_token_by_itself_is_refused(kind: Any, match: str) -> None:
    rows = ROWS * torch.logspace(-2, 1, len(ROWS))[:, None, None]
    with pytest.raises(ArgumentError, match=rf"--codec = 'mine': {match}"):
        Coder.of("mine", kind).check(rows, "k")


def test_an_encoder_that_writes_in_place_changes_nothing_but_what_it_was_given() -> None:
    rows, made = ROWS.clone(), Coder.of("mine", InPlace)
    assert made.check(rows, "k") == 4 * HEADS * HEAD
    coding = Coding("in-forward", "k", frozenset({0}), 1, made.coded, int)
    coded = coding._one(rows, Stand(torch.zeros(len(rows)).long(), 0, torch.arange(len(rows)), "k"))
    assert torch.equal(rows, ROWS) and not torch.equal(coded, ROWS) and coding.changed == len(rows)


@pytest.mark.parametrize(("bits", "optimum"), [(2, 0.1175), (4, 0.0095), (8, 4.13e-5)])
def test_levels_are_the_nearest_that_a_normal_distribution_has(bits: int, optimum: float) -> None:
    """Also many of them, whose outer ones rounds alone leave too near."""
    levels, bounds = lloyd_max(bits)
    rows = torch.randn(1 << 22, generator=torch.Generator().manual_seed(0))
    assert float((levels[torch.bucketize(rows, bounds)] - rows).square().mean()) < 1.05 * optimum
