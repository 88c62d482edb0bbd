"""Attention computed from a capture's queries and keys against the weights of Hugging Face's eager attention."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from schemas.attended import AttentionAsked, attend, reading
from schemas.errors import ArgumentError
from schemas.read.reader import StoreReader
from tests.engine.conftest import Store
from tests.engine.test_architectures import SITES, OneAtATime, started
from tests.support.engines.engines import DTYPE, ON_GPU, Engine, prompt
from tests.support.models.families import CONFIGURATIONS, family_model
from tests.support.models.families import FAMILIES as FAMILIES_OF_TABLE
from tests.support.models.reference import Reference
from tests.support.pages.readme import blocks
from vllm_tap import AttentionRule, Capture, open_store

pytestmark = [pytest.mark.skipif(ON_GPU, reason="a GPU's rows are no float32")]

TOP, LENGTH, BAR = 8, 90, 1e-5
# A factor of its own, a soft cap that bites, and a window shorter than the prompt, in one layer or in all.
FAMILIES = {
    "mistral, wide heads": lambda layer: AttentionRule(head_size=64, scale=0.125, window=32, soft_cap=None),
    "qwen3": lambda layer: AttentionRule(head_size=32, scale=32**-0.5, window=None, soft_cap=None),
    "gemma2, biases": lambda layer: AttentionRule(head_size=64, scale=0.1, window=32 if layer == 1 else None,
                                                  soft_cap=2.0),
}


@pytest.fixture(scope="module")
def engines(reader: StoreReader) -> Iterator[OneAtATime]:
    kept = OneAtATime(lambda family: started(family, "eager", reader))
    yield kept
    kept.close()


def captured(engine: Engine, store: Store, **spec: Any) -> tuple[Capture, tuple[int, ...]]:
    tokens = [t % 500 + 3 for t in prompt(LENGTH, seed=29)]
    (one,) = engine.run([tokens], [{"max_tokens": 4, "ignore_eos": True, "detokenize": False}],
                        [{"codec": "raw", "sites": ["q_rot", "k_rot", "v", "z"], **spec}])
    return open_store(store.path)[one.id], one.tokens[:-1]  # the last token is never put through the model


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_and_entropy_are_those_of_hugging_face(family: str, engines: OneAtATime, store: Store) -> None:
    engine = engines.of(family)
    capture, tokens = captured(engine, store)
    assert isinstance(engine.reference, Reference)
    for layer, weights in enumerate(engine.reference.attentions(tokens)):
        expected = weights.astype(np.float64)
        found = capture.attention(layer, top=TOP, check=True)  # by the rule that the engine told
        assert found.rule == FAMILIES[family](layer)
        assert found.positions.tolist() == list(range(len(tokens))) and not found.unattended
        assert found.token_ids.tolist() == list(tokens) and found.codecs == ("raw", "raw")
        there = found.keys >= 0
        assert (there.sum(-1) == np.minimum(np.arange(len(tokens)) + 1, TOP)).all()
        theirs = np.take_along_axis(expected, np.where(there, found.keys, 0), -1)
        assert np.abs(np.where(there, theirs - found.weights, 0)).max() <= BAR
        assert np.abs(np.sort(expected, -1)[..., : -TOP - 1 : -1] - found.weights).max() <= BAR  # the largest, in order
        logs = np.log(expected, where=expected > 0, out=np.zeros_like(expected))
        assert found.z_error is not None and found.z_error <= BAR  # what vLLM's own kernel made of the values
        assert np.abs(-(expected * logs).sum(-1) - found.entropy).max() <= BAR


@pytest.mark.parametrize("name", [*FAMILIES_OF_TABLE, *CONFIGURATIONS])
def test_the_rule_of_a_configuration_is_what_hugging_face_makes_of_it(name: str) -> None:
    folder = family_model(name, DTYPE)
    config = json.loads((folder / "config.json").read_text())
    if name.startswith(("opt", "gpt_neox")):
        with pytest.raises(ArgumentError, match=r"config\.model_type = '(opt|gpt_neox)': valid: llama, "):
            AttentionRule.of_config(config, 0)
        return
    for layer, block in enumerate(Reference(folder).model.model.layers):
        made, theirs = AttentionRule.of_config(config, layer), block.self_attn
        window = getattr(theirs, "sliding_window", None) or getattr(theirs.config, "sliding_window", None)
        types = getattr(theirs.config, "layer_types", None)
        if types is not None and types[layer] == "full_attention":
            window = None
        assert (made.head_size, made.window) == (theirs.head_dim, window)
        assert made.scale == pytest.approx(theirs.scaling, rel=1e-12)
        assert made.soft_cap == getattr(theirs, "attn_logit_softcapping", None)
    if name in FAMILIES:
        assert made == FAMILIES[name](layer)


def test_the_page(engines: OneAtATime, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                  capsys: pytest.CaptureFixture[str]) -> None:
    capture, tokens = captured(engines.of("qwen3"), store)
    capsys.readouterr()  # of the engine's start, where this test is the first
    monkeypatch.chdir(tmp_path)
    Path("captures").symlink_to(store.path)
    block, = blocks("python", "docs/howto/attention.md")
    space: dict[str, Any] = {"id": capture.id}
    exec(compile(block, "docs/howto/attention.md", "exec"), space)  # noqa: S102
    assert space["seen"].keys.shape == (4, len(tokens), 4) and space["seen"].z_error <= BAR
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_another_rule_gives_other_weights(engines: OneAtATime, store: Store) -> None:
    """What the comparison above can see: each part of a rule moves weights by more than a thousand bars. So another one
    than the engine told is refused.
    """
    capture, _ = captured(engines.of("gemma2, biases"), store)
    right = capture.attention(1, FAMILIES["gemma2, biases"](1), top=TOP, check=True)
    assert right.z_error is not None and right.z_error <= BAR
    reader, manifest = open_store(store.path).reader, capture.manifest()
    untold = structs.replace(manifest, engine={**manifest.engine, "attention": []})
    for wrong in ({"scale": 0.125}, {"window": 31}, {"window": None}, {"soft_cap": None}):
        rule = AttentionRule(**{"head_size": 64, "scale": 0.1, "window": 32, "soft_cap": 2.0, **wrong})
        with pytest.raises(ArgumentError, match=rf"rule\.{next(iter(wrong))} = .*: the engine that made this capture"):
            capture.attention(1, rule)
        asked = AttentionAsked(layer=1, rule=rule, top=TOP, check=True)
        found = attend(untold, asked, reading(reader, capture.id, 1))
        assert np.abs(found.entropy - right.entropy).max() > 1000 * BAR, wrong
        assert found.z_error is not None and found.z_error > 1000 * BAR, wrong


@pytest.mark.parametrize(("family", "beyond"), [
    ("gpt_oss", "attention sinks"), pytest.param("bloom", "ALiBi", marks=pytest.mark.soak)])
def test_what_no_rule_says_is_told_and_refused(family: str, beyond: str, engines: OneAtATime, reader: StoreReader,
                                               store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    engines.close()  # one at a time
    monkeypatch.setitem(SITES, family, ["q_rot", "k_rot", "v", "z"])
    engine = started(family, "eager", reader)
    try:
        capture, _ = captured(engine, store)
        rule = AttentionRule(head_size=32, scale=32**-0.5, window=None, soft_cap=None)
        for layer in range(3):
            for given in (None, rule):
                with pytest.raises(ArgumentError, match=rf"layer = {layer}: its attention has {beyond}, which no rule"):
                    capture.attention(layer, given)
    finally:
        engine.close()


def test_from_codes_the_heaviest_keys_are_mostly_the_same(engines: OneAtATime, store: Store) -> None:
    engine = engines.of("qwen3")
    exact, coded = (captured(engine, store, codec=codec)[0] for codec in ("raw", {"q_rot": "qk8", "k_rot": "qk8"}))
    rule = FAMILIES["qwen3"](0)
    a, b = (each.attention(1, rule, top=TOP, start=16) for each in (exact, coded))
    assert b.codecs == ("qk8:head=32", "qk8:head=32")
    same = [len(set(x) & set(y)) for x, y in zip(a.keys.reshape(-1, TOP), b.keys.reshape(-1, TOP), strict=True)]
    assert np.mean(same) / TOP >= 0.98
    assert 0 < np.abs(a.entropy - b.entropy).max() < 0.05
