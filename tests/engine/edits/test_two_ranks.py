"""Two ranks of one model: both edit the same rows, and what only a rank's share could be edited of is refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from schemas.read.reader import StoreReader
from tests.support.engines.engines import ON_GPU, prompt, start
from tests.support.models.edited import moved, vector
from tests.support.models.reference import Reference
from vllm_tap.tiny_model import HIDDEN

pytestmark = [pytest.mark.soak,
              pytest.mark.skipif(ON_GPU, reason="one GPU cannot hold two ranks")]


def test_two_ranks_edit_alike(reader: StoreReader, reference_of: Callable[[str], Reference],
                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("VLLM_TAP_EDIT", "resid_post.1,attn_out.2,resid_mid.3,resid_pre.0")
    reference = reference_of("qwen3")
    engine = start(reader, reference, "qwen3", here=False, tensor_parallel_size=2)
    edits = [{"site": "resid_post.1", "op": "ablate", "vector": vector(HIDDEN, 8).tolist(), "positions": "generated"},
             {"site": "attn_out.2", "op": "add", "vector": vector(HIDDEN, 9).tolist()},
             {"site": "resid_pre.0", "op": "scale", "by": 0.5, "positions": [[2, 60]]},
             {"site": "resid_mid.3", "op": "cap", "vector": vector(HIDDEN, 10).tolist(), "high": 0.1}]
    processor = engine.llm.llm_engine.input_processor
    original = processor.process_inputs

    def second_is_edited(request_id: str, given: object, params: object, *args: object, **kwargs: object) -> object:
        if params.extra_args["capture"]["tags"]["edited"] == "yes":  # type: ignore[attr-defined]
            params.extra_args["edit"] = edits  # type: ignore[attr-defined]
        return original(request_id, given, params, *args, **kwargs)

    processor.process_inputs = second_is_edited
    try:
        captured = engine.run([prompt(length, seed=length) for length in (5, 90, 31)],
                              [{"max_tokens": 7, "ignore_eos": True}] * 3,
                              [{"codec": "raw", "tags": {"edited": said}} for said in ("no", "yes", "no")])
        for number, one in enumerate(captured):
            rows, _ = reference.edited(one.tokens, moved(edits, one.prompt_len) if number == 1 else {})
            for entry in one.manifest.rows:
                found = engine.reader.slice(one.id, entry.site, [entry.layer])
                off = np.abs(found.values()[0] - rows[entry.site, entry.layer][found.positions]).max()
                assert entry.captured and off < 1e-4, (number, entry.site, entry.layer, off)
    finally:
        engine.close()
