"""``vllm-tap verify``: passes on an engine that is right, and fails by name on one that is broken on purpose."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from engine_side import worker
from schemas.read.reader import StoreReader
from tests.engine.conftest import ENVIRONMENT
from tests.support.engines.engines import DTYPE, ON_GPU, in_this_process, shut_down
from tests.support.models.common import COMMON
from tests.support.models.families import FAMILIES, family_model
from tests.support.models.imaged import NO_VISION
from tests.support.store_helpers import ROOT
from vllm_tap import open_store
from vllm_tap.tiny_model import cache_dir
from vllm_tap.verify.checks import Outcome, verify
from vllm_tap.verify.faults import FAULTS, SALT
from vllm_tap.verify.laboratory import Laboratory

pytestmark = [pytest.mark.skipif(ON_GPU, reason="an engine in this process")]

LAYERS = list(range(COMMON["num_hidden_layers"]))
PLACE = ("resid_post", 1)


@pytest.fixture(scope="module")
def lab(reader: StoreReader) -> Iterator[Laboratory]:
    from vllm import LLM

    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"ARM": "resid_post,z,final_norm", "EDIT": "resid_post.1,z.2", "EDIT_ROWS": "400"}.items():
            patch.setenv(f"VLLM_TAP_{name}", value)
        with in_this_process():
            llm: Any = LLM(str(family_model("qwen3", DTYPE)), dtype=DTYPE, skip_tokenizer_init=True, max_model_len=256,
                           max_num_seqs=8, block_size=32, seed=0)
    with open_store(reader.path) as store:
        yield Laboratory(llm.llm_engine, store, {"resid_post": LAYERS, "z": LAYERS, "final_norm": [0]})
    shut_down(llm)


def broken(lab: Laboratory) -> Outcome:
    found = verify(lab, [PLACE])
    assert not found.ok
    return found


def test_what_is_put_back_changes_nothing(lab: Laboratory) -> None:
    told: list[tuple[int, int]] = []
    found = verify(lab, tell=lambda done, total: told.append((done, total)))
    assert found.ok and [(place.site, place.layer, place.rows) for place in found.places] == [
        ("resid_post", 1, 32), ("z", 2, 32)]
    assert all(not place.unedited for place in found.places)  # float32: an edit that changes nothing is none
    assert told == [(number, 6) for number in range(1, 7)]
    for site in found.faults:
        assert set(site.told) == set(FAULTS) and not site.left_out
    told_by = {name: "; ".join(by) for name, by in found.faults[0].told.items()}
    for sign in ("log-probabilities", "32 of 32 rows of resid_post.1", "rows of final_norm.0", "the K/V cache of"):
        assert sign in told_by["wrong row"], told_by
    assert "; 1 of 32 rows of resid_post.1" in f"; {told_by['one flipped bit']}"
    assert "K/V cache of 1 of 3 layers, first model.layers.2." in told_by["one flipped bit"]
    assert found.cache.startswith("every block") and found.salt == (
        "the edited prompt asked again read 32 tokens of its own; without an edit 0")


def test_an_engine_that_sets_rows_a_position_late_fails(lab: Laboratory, monkeypatch: pytest.MonkeyPatch) -> None:
    assert worker.CURRENT is not None
    editor: Any = worker.CURRENT.editor
    right = editor.before_forward
    monkeypatch.setattr(editor, "before_forward", lambda requests, starts, at: right(requests, starts, at + 1))
    place, = broken(lab).places
    assert not place.ok and any("rows of resid_post.1" in what for what in place.differs)


def test_an_engine_that_edits_nothing_finds_no_fault(lab: Laboratory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is equal then: what shows it are the faults."""
    assert worker.CURRENT is not None
    monkeypatch.setattr(worker.CURRENT.editor, "before_forward", lambda *step: None)
    found = broken(lab)
    assert found.places[0].ok and found.faults[0].missed == list(FAULTS)
    assert any("not told" in wrong for wrong in found.failed)


def test_an_engine_without_a_salt_fails(lab: Laboratory, monkeypatch: pytest.MonkeyPatch) -> None:
    processor = lab.engine.input_processor
    original = processor.process_inputs

    def unsalted(*args: Any, **kwargs: Any) -> Any:
        request = original(*args, **kwargs)
        request.cache_salt = None
        return request

    monkeypatch.setattr(processor, "process_inputs", unsalted)
    found = broken(lab)
    assert found.places[0].ok and not found.faults[0].missed
    assert [wrong.split(": ")[0] for wrong in found.failed] == [SALT, SALT]
    assert "read 32 tokens that an edited one had left" in found.failed[0]


def by_the_command(family: str, *more: str) -> dict[str, Any]:
    """What the command says of every place that a family has."""
    environment = {name: value for name, value in (os.environ | ENVIRONMENT).items()
                   if not name.startswith("VLLM_TAP_") and name != "VLLM_CPU_CI_ENV"}
    run = subprocess.run([sys.executable, "-m", "vllm_tap", "verify", str(family_model(family, DTYPE)), "--json", "--",
                          "--dtype", DTYPE, "--max-model-len", "256", "--block-size", "32", "--max-num-seqs", "8",
                          *more], env=environment | {"VLLM_CACHE_ROOT": str(cache_dir() / "vllm")}, cwd=ROOT, text=True,
                         capture_output=True, timeout=880)
    assert run.returncode == 0, (run.stdout + run.stderr)[-6000:]
    found: dict[str, Any] = json.loads(run.stdout)
    assert found["ok"] and len(found["places"]) >= 3 * len(LAYERS)
    assert {site["site"] for site in found["faults"]} == {place["site"] for place in found["places"]}
    return found


@pytest.mark.soak  # a process each
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_by_the_command(family: str) -> None:
    """Compiled as by default, every place that the family has."""
    assert not by_the_command(family)["left_out"]


@pytest.mark.soak
@pytest.mark.parametrize(("family", "fixed"), [
    ("glm4", ["resid_mid"]), ("granite", ["resid_mid", "attn_out", "mlp_out"]),
    pytest.param("qwen2_5_vl", ["resid_mid"], marks=pytest.mark.skipif(bool(NO_VISION), reason=NO_VISION))])
def test_of_a_model_in_no_table_what_cannot_be_edited_is_left_out_by_name(family: str, fixed: list[str]) -> None:
    found = by_the_command(family, "--enforce-eager")
    assert sorted(found["left_out"]) == sorted(fixed)
    assert not {place["site"] for place in found["places"]} & set(fixed)
