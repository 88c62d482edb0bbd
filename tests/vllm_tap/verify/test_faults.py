"""Faults and comparisons of ``vllm-tap verify`` without an engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from schemas.errors import ArgumentError, StartError
from vllm_tap.verify.checks import Outcome, PlaceOutcome, SiteFaults
from vllm_tap.verify.faults import FAULTS, Material, injected
from vllm_tap.verify.laboratory import Seen, control, differences, patched
from vllm_tap.verify.run import VerifyJob

PLACE = ("resid_post", 1)
ROWS = np.random.default_rng(0).standard_normal((6, 8)).astype(np.float32)


def material(dtype: str = "float32", other: bool = True) -> Material:
    return Material(ROWS, ROWS + 1 if other else None, ROWS - 1, ROWS * np.float32(1.001), dtype)


def test_every_fault_is_one() -> None:
    found = dict(injected(material()))
    assert list(found) == list(FAULTS) and len(found) == 7
    for name, rows in found.items():
        assert rows is not None and rows.shape == ROWS.shape and not np.array_equal(rows, ROWS), name
    for name, changed in {"wrong row": 6, "neighbour's row": 1, "one flipped bit": 1, "padding row": 1}.items():
        rows = found[name]
        assert rows is not None and (rows != ROWS).any(axis=1).sum() == changed, name
    assert dict(injected(material(other=False)))["wrong layer"] is None


@pytest.mark.parametrize(("dtype", "bit"), [("float32", 0), ("bfloat16", 16), ("float16", 13)])
def test_the_bit_that_is_flipped_is_the_dtypes_lowest(dtype: str, bit: int) -> None:
    flipped = dict(injected(material(dtype)))["one flipped bit"]
    assert flipped is not None
    changed = (flipped.view(np.uint32) ^ ROWS.view(np.uint32)).ravel()
    assert changed[changed != 0].tolist() == [1 << bit]


def test_differences_are_told_by_what_differs() -> None:
    one = Seen((3, 4), ({3: -0.5}, {4: -0.25}), {PLACE: ROWS}, {"layer.0": "a", "layer.1": "b"})
    assert differences(one, replace(one, rows={PLACE: ROWS.copy()})) == []
    assert differences(one, replace(one, tokens=(3, 5))) == ["token 1 of the answer"]
    assert differences(one, replace(one, chances=({3: -0.5}, {4: -0.26}))) == ["log-probabilities"]
    assert differences(one, replace(one, rows={PLACE: ROWS[:5]})) == ["6 of 6 rows of resid_post.1"]
    assert differences(one, replace(one, cache={"layer.0": "a", "layer.1": "c"})) == [
        "the K/V cache of 1 of 2 layers, first layer.1"]


def test_zeros_of_both_signs_are_told_apart_unless_asked() -> None:
    zeros = Seen((), (), {PLACE: np.zeros((2, 3), np.float32)})
    negative = replace(zeros, rows={PLACE: -np.zeros((2, 3), np.float32)})
    assert differences(zeros, negative) == ["2 of 2 rows of resid_post.1"]
    assert differences(zeros, negative, signs=False) == []


def test_edits_of_a_place() -> None:
    assert control(PLACE, 6) == {"site": "resid_post.1", "op": "scale", "by": 1, "positions": [[0, 6]]}
    edit = patched(PLACE, ROWS)
    assert edit["positions"] == [[0, 6]] and len(edit["rows"]["base64"]) == 4 * ROWS.size * 4 // 3


def test_nothing_is_ok_where_anything_is_not() -> None:
    good = PlaceOutcome("z", 0, 6, [], [], True)
    found = SiteFaults("z", 0, {name: ["log-probabilities"] for name in FAULTS}, {})
    assert Outcome("float32", "0", places=[good], faults=[found]).ok
    assert not Outcome("float32", "0", places=[replace(good, differs=["log-probabilities"])], faults=[found]).ok
    assert not Outcome("float32", "0", places=[replace(good, unedited=["log-probabilities"])], faults=[found]).ok
    rounded = replace(good, unedited=["log-probabilities"], must_equal_unedited=False)
    assert Outcome("bfloat16", "0", places=[rounded], faults=[found]).ok
    missed = replace(found, told={**found.told, "stale buffer": []})
    assert missed.missed == ["stale buffer"] and not Outcome("float32", "0", places=[good], faults=[missed]).ok
    assert not Outcome("float32", "0", places=[good], faults=[found], failed=["missing salt: …"]).ok
    assert not Outcome("float32", "0", faults=[found]).ok and not Outcome("float32", "0", places=[good]).ok


@pytest.mark.parametrize(("edit", "words", "error", "says"), [
    ("router_logits", (), StartError, r"--edit = 'router_logits': 'router_logits' cannot be edited"),
    ("", ("--speculative-config", "{}"), ArgumentError, r"--speculative-config = '{}': after --: .* leave it out"),
])
def test_what_cannot_be_verified_is_refused_before_anything_starts(
    edit: str, words: tuple[str, ...], error: type[Exception], says: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    with pytest.raises(error, match=says):
        VerifyJob(str(tmp_path), edit, words)


@pytest.mark.parametrize("words", [(), ("--enforce-eager",), ("--max-model-len", "64")])
def test_a_model_is_verified_with_any_number_of_arguments(words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    assert VerifyJob(str(tmp_path), engine_args=words).engine_args == words
