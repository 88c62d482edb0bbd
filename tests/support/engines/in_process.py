"""A user's own script: an engine in its own process, compiled as by default; prints what it generated as JSON.

This vLLM calls itself one that no test has seen, as the next one will.

The request of the last id is aborted, and the engine never asked for anything again; its rows are to be projected, and
how many matrices were made by when it was taken in, before any step of it, is printed.

Run as ``python -m tests.support.engines.in_process CAPTURE_ID …`` (see test_default_compilation.py).
"""

from __future__ import annotations

import json
import os
import sys

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

if __name__ == "__main__":
    import vllm
    from vllm import LLM, SamplingParams

    from schemas.codecs import projection
    from tests.support.engines.engines import DTYPE, model, prompt

    vllm.__version__ = "0.99.0"
    llm = LLM(str(model("qwen3")), max_model_len=512, max_num_batched_tokens=64, max_num_seqs=8, dtype=DTYPE)
    prompts = [{"prompt_token_ids": prompt(length, seed=length)} for length in (5, 90, 31, 140)]
    params = [
        SamplingParams(temperature=0, max_tokens=7, ignore_eos=True,
                       extra_args={"capture": {"id": id_, "codec": "raw"}})
        for id_ in sys.argv[1:]
    ]
    *params, last = params
    outputs = llm.generate(prompts, params, use_tqdm=False)
    print("GENERATED", json.dumps([[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in outputs]), flush=True)

    engine = llm.llm_engine
    last.extra_args["capture"]["codec"] = "rp8:k=8,seed=123"
    before = projection.gaussian.cache_info().misses
    engine.add_request("last", prompts[0], last)
    print("MADE", projection.gaussian.cache_info().misses - before, flush=True)
    for _ in range(3):
        engine.step()
    engine.abort_request(["last"])
