"""Random mixes of requests on random engines, every capture and every row checked, the same again from the seed.

``make soak``; ``make soak SEEDS=17`` or ``SEEDS=20:40`` chooses engines. One engine in ten has random weights, for
Hugging Face to agree with; the others have the model whose rows say whose they are.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import numpy as np
import pytest

from schemas.read.reader import StoreReader
from tests.engine.conftest import Store
from tests.support.engines.accounts import F32, I64, Rows, tell
from tests.support.engines.draws import mix, setting
from tests.support.engines.engines import row_errors
from tests.support.engines.play import counted, engine, prove
from tests.support.models.reference import Reference

DRAWS = 10  # an engine


def seeds() -> list[int]:
    first, colon, last = os.environ.get("TAP_SOAK_SEEDS", "0:20").partition(":")
    return list(range(int(first), int(last))) if colon else [int(first)]


def agree(reference: Reference) -> Rows:
    """Rows are what Hugging Face makes of the same tokens, as near as their codec keeps them."""
    lossy = {"raw16": 0.01, "int8b64": 0.05}  # of a row's length

    def rows(tokens: tuple[int, ...], site: str, layer: int, codec: str, at: I64, values: F32) -> None:
        of = reference.rows(tokens)[site, layer][at]
        error = row_errors(values, of) if codec == "raw" else (
            np.linalg.norm(values - of, axis=-1) / np.linalg.norm(of, axis=-1) / lossy[codec])
        assert (error <= 1).all(), f"{site}.{layer} in {codec}: {error.max()} times the tolerance"

    return rows


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", seeds())
def test_random_requests_on_a_random_engine(
    seed: int, store: Store, reader: StoreReader, reference_of: Callable[[str], Reference]
) -> None:
    chosen = setting(seed)
    print(f"\nengine {seed}: {chosen}", flush=True)
    rows = tell if chosen.family == "coded" else agree(reference_of(chosen.family))
    with engine(chosen) as llm:
        for draw in range(DRAWS):
            begin, before = time.monotonic(), counted(llm, "vllm:num_preemptions")
            requests = mix(seed, draw, chosen)
            frozen = store.writer.pid if chosen.drops and draw % 2 else None
            try:
                played = prove(llm, reader, requests, chosen.circumstances(requests), rows, frozen)
            except BaseException as error:
                error.add_note(f"engine {seed}, draw {draw}; again with: make soak SEEDS={seed}")
                raise
            manifests = [reader.manifest(capture) for one in played for capture in one.captures]
            dropped = sum(gap.rows for manifest in manifests for entry in manifest.rows for gap in entry.missing
                          if gap.reason == "dropped")
            print(f"engine {seed}, draw {draw}: {len(played)} requests, {len(manifests)} captures, "
                  f"{sum(manifest.captured for manifest in manifests)} rows, {dropped} dropped, "
                  f"{counted(llm, 'vllm:num_preemptions') - before} preemptions, "
                  f"{time.monotonic() - begin:.1f} s", flush=True)
        if chosen.drafts:
            print(f"engine {seed}: {counted(llm, 'vllm:spec_decode_num_accepted_tokens')} of "
                  f"{counted(llm, 'vllm:spec_decode_num_draft_tokens')} drafts accepted", flush=True)
