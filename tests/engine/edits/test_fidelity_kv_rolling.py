"""Codecs of keys and values behind a window that rolls, on a real engine: what Hugging Face's cache says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from schemas.errors import ArgumentError, StartError
from schemas.read.reader import StoreReader
from tests.engine.edits.test_fidelity_kv import CONTEXT, MADE, PROMPTS, TOKENS, costs, running
from tests.support.engines.engines import DTYPE, ON_GPU
from tests.support.models.families import family_model
from vllm_tap.fidelity.bench import Bench
from vllm_tap.fidelity.distributions import compare, log_softmax
from vllm_tap.fidelity.job import FidelityJob
from vllm_tap.fidelity.kv.codecs import chosen
from vllm_tap.fidelity.kv.job import KVJob, study
from vllm_tap.fidelity.kv.modes import Window, window_of
from vllm_tap.fidelity.kv.terms import terms_of
from vllm_tap.fidelity.reports.report import Report

pytestmark = [pytest.mark.soak, pytest.mark.skipif(ON_GPU, reason="an engine in this process")]

CODECS = ("kv8", "k8v4", "kv4", "rot2")
WINDOW = window_of(TOKENS, CONTEXT)


@pytest.fixture(scope="module")
def bench(reader: StoreReader) -> Iterator[Bench]:
    with running(reader, family_model("qwen3", DTYPE), step=WINDOW.step) as found:
        yield found


@pytest.fixture(scope="module")
def measured(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> Report:
    out = tmp_path_factory.mktemp("rolling")
    return study(KVJob(FidelityJob(str(family_model("qwen3", DTYPE)), out), ("rolling", "snapshot", "in-forward"),
                       codecs=CODECS), MADE, bench)


def test_the_controls_behave_and_the_window_spares_what_is_within_it(measured: Report) -> None:
    assert Window(exact=6, first=4, step=4) == WINDOW
    assert measured.settings["window"] == {"exact": 6, "first": 4, "step": 4}
    for part in ("kv", "k", "v"):
        place = next(one for one in measured.places if one.site == f"rolling/{part}")
        assert place.harness == [0.0] * PROMPTS  # exactly
        assert place.told["identity"] == "the same bits"
        assert place.told["one wrong row"] == (
            "written at position 7 of prompt 3, first difference at 16, in no other prompt")
        assert place.told["shuffled"].endswith("nats, worse than every codec")
        rolling, forward = costs(measured, f"rolling/{part}"), costs(measured, f"in-forward/{part}")
        assert all(0 < rolling[name] < forward[name] for name in CODECS)
        assert rolling["kv8"] < rolling["kv4"] < rolling["rot2"] < rolling["shuffled"]
    terms = {one.name: one.kl.value for one in terms_of(measured) if one.codec == "kv4"}
    assert terms["= rolling"] + terms["+ what the window keeps exact: in-forward, beyond rolling"] == pytest.approx(
        terms["in-forward"])


def test_what_a_codec_costs_is_what_hugging_faces_cache_says(measured: Report) -> None:
    """A forward pass for every step, before which what has left the window is coded where it lies."""
    from transformers import AutoModelForCausalLM, DynamicCache

    net: Any = AutoModelForCausalLM.from_pretrained(family_model("qwen3", DTYPE), dtype=torch.float32).eval()
    coder, theirs = chosen(("k8v4",), {})[0], list[float]()

    def logits(tokens: torch.Tensor, coded: bool) -> Any:
        cache, found, done = DynamicCache(), [], WINDOW.first
        for start in range(0, TOKENS, WINDOW.step):
            stop = start - WINDOW.exact
            for layer in cache.layers if coded and stop > done else ():
                for name, what in (("keys", "k"), ("values", "v")):
                    rows = getattr(layer, name)[0, :, done:stop].transpose(0, 1)
                    getattr(layer, name)[0, :, done:stop] = coder.round_trip(rows, what).transpose(0, 1)
            done = max(done, stop)
            found.append(net(tokens[:, start : start + WINDOW.step], past_key_values=cache).logits[0].numpy())
        return np.concatenate(found)

    with torch.inference_mode():
        for row in MADE.judged.tokens:
            tokens = torch.from_numpy(row[None])
            before, after = (log_softmax(logits(tokens, coded)) for coded in (False, True))
            theirs.append(float(compare(before, after, row).kl[CONTEXT:].mean()))
    place = next(one for one in measured.places if one.site == "rolling/kv")
    ours = next(one for one in place.patched if one.name == "k8v4")
    assert ours.prompts["kl"] == pytest.approx(theirs, rel=0.02)


def test_an_engine_whose_steps_are_longer_is_refused(bench: Bench, tmp_path: Path,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """This one comes last: a step is ended by an exception."""
    from vllm_tap.fidelity.kv import job

    asked = KVJob(FidelityJob(str(family_model("qwen3", DTYPE)), tmp_path), ("rolling",), ("kv",), ("kv8",))
    with pytest.raises(ArgumentError, match=r"--window = 30: in prompts of 24 tokens hardly a row leaves it"):
        study(KVJob(asked.common, asked.modes, asked.parts, asked.codecs, window=30), MADE, bench)
    monkeypatch.setattr(job, "window_of", lambda *asked: Window(6, 4, 1))
    with pytest.raises(StartError, match=r"a step has 4 positions of one prompt, and 1 are exact beside the window"):
        study(asked, MADE, bench)
