"""Random mixes of edited and plain requests on random engines, every row of every capture held against Hugging Face
with the same edits, the same again from the seed: ``make soak``, ``make soak SEEDS=17``.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from schemas.read.reader import StoreReader
from tests.engine.test_random import DRAWS, seeds
from tests.support.engines.accounts import F32, I64, Request, Rows, check
from tests.support.engines.draws import MODEL_LEN, mix, setting
from tests.support.engines.engines import ON_GPU
from tests.support.engines.play import Played, counted, engine, play, settle
from tests.support.models.edited import moved, vector
from tests.support.models.reference import Reference
from vllm_tap.tiny_model import HIDDEN, LAYERS

PLACES = ("resid_post", "attn_out.1", "mlp_out.2")
BARS = {"raw": 2e-4, "raw16": 0.01, "int8b64": 0.05}  # of a row's length


def edits_of(rng: random.Random) -> list[dict[str, Any]]:
    """One to four edits, at most two of a place."""
    found: list[dict[str, Any]] = []
    for _ in range(rng.randint(1, 4)):
        site = rng.choice((f"resid_post.{rng.randrange(LAYERS)}", *PLACES[1:]))
        if sum(one["site"] == site for one in found) == 2:
            continue
        v = vector(HIDDEN, rng.randrange(10_000)).tolist()
        one: dict[str, Any] = {"site": site, **rng.choice((
            {"op": "add", "vector": v, "scale": round(rng.uniform(-2, 2), 3)},
            {"op": "scale", "by": rng.choice((0, 0.5, -1, 1.5))}, {"op": "ablate", "vector": v},
            {"op": "set", "vector": v},
            {"op": "cap", "vector": v, "low": -0.2, "high": round(rng.uniform(-0.1, 1), 3)}))}
        where = rng.choice(("default", "all", "prompt", "generated", "list", "ranges"))
        if where == "list":
            one["positions"] = rng.sample(range(rng.choice((20, 160))), rng.randint(1, 9))
            if one["op"] == "set" and rng.random() < 0.5:
                one["rows"] = [vector(HIDDEN, rng.randrange(10_000)).tolist() for _ in one["positions"]]
                del one["vector"]
        elif where == "ranges":
            starts = [rng.randint(0, 120) for _ in range(rng.randint(1, 3))]
            one["positions"] = [[start, min(MODEL_LEN, start + rng.randint(1, 60))] for start in starts]
        elif where != "default":
            one["positions"] = where
        found.append(one)
    return found


def edited_mix(seed: int, draw: int, requests: list[Request]) -> list[Request]:
    """Two of three are edited, some alike."""
    rng = random.Random(f"edits {seed} {draw}")
    found: list[Request] = []
    for request in requests:
        before = [each.edits for each in found if each.edits is not None]
        edits = None if rng.random() < 0.33 else rng.choice(before) if before and rng.random() < 0.3 else edits_of(rng)
        found.append(replace(request, edits=edits))
    return found


def agree(reference: Reference, request: Request) -> Rows:
    """Rows are what Hugging Face makes of the same tokens with the same edits."""
    @lru_cache(maxsize=8)
    def right(tokens: tuple[int, ...]) -> dict[tuple[str, int], F32]:
        return reference.edited(tokens, moved(request.edits or (), len(request.prompt)))[0]

    def rows(tokens: tuple[int, ...], site: str, layer: int, codec: str, at: I64, values: F32) -> None:
        of = right(tokens)[site, layer][at]
        off = np.linalg.norm(values - of, axis=-1) / np.linalg.norm(of, axis=-1).clip(1e-3)
        assert (off <= BARS[codec]).all(), f"{site}.{layer} in {codec} is off by {off.max()}"

    return rows


def hold(reader: StoreReader, reference: Reference, one: Played, under: Any) -> int:
    """Every capture of a request; what its manifest counts; what it said, where it says the likeliest token."""
    held = 0
    for capture, seen in zip(one.captures, one.seen, strict=bool(one.captures)):
        held += check(reader, capture, one.request, seen, under, agree(reference, one.request))
        for edit in reader.manifest(capture).edits:
            for layers in edit["rows"] if seen.reason is not None else ():
                assert layers["missing"] == 0 and layers["applied"] + layers["cached"] == layers["expected"], edit
    return held


@pytest.mark.soak
@pytest.mark.skipif(ON_GPU, reason="held against float32")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", seeds())
def test_random_edits_on_a_random_engine(seed: int, reader: StoreReader, reference_of: Callable[[str], Reference],
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = replace(setting(seed), family="qwen3", drops=False)
    monkeypatch.setenv("VLLM_TAP_EDIT", ",".join(PLACES))
    monkeypatch.setenv("VLLM_TAP_EDIT_ROWS", "400")
    print(f"\nengine {seed}: {chosen}", flush=True)
    with engine(chosen) as llm:
        for draw in range(DRAWS):
            preempted = counted(llm, "vllm:num_preemptions")
            requests = edited_mix(seed, draw, mix(seed, draw, chosen))
            played = play(llm, requests)
            settle(reader, played)
            preempted = counted(llm, "vllm:num_preemptions") - preempted
            under, held = replace(chosen.circumstances(requests), preemptions=preempted > 0), 0
            for one in played:
                try:
                    held += hold(reader, reference_of("qwen3"), one, under)
                except BaseException as error:
                    error.add_note(f"engine {seed}, draw {draw}, {one.request}; again with: make soak SEEDS={seed}")
                    raise
            print(f"engine {seed}, draw {draw}: {sum(each.edits is not None for each in requests)} of {len(requests)} "
                  f"requests edited, {held} rows, {preempted} preemptions", flush=True)
