"""A user's own script that captures projections: ``python -m tests.gpu.captures_projected STORE``.

Prints how far they are from the product of the same request's rows with the codec's matrix: as the reference encoder
makes them, which serves until there is a kernel, and then as the kernel does.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import numpy as np

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_DISABLE_COMPILE_CACHE": "1", "VLLM_NO_USAGE_STATS": "1"}

CODECS = {"rp8:k=256,seed=3": "gaussian", "sketch:k=256,bits=2,seed=3": "hadamard"}


def main(store: str) -> None:
    """Generate for a few prompts in every codec, twice, then say what was found."""
    from vllm import LLM, SamplingParams

    import vllm_tap
    from bench.shapes import make_model
    from engine_side import worker
    from schemas.codecs import projection

    with vllm_tap.recording(store, arm="resid_post") as tape:
        llm = LLM(str(make_model("small", Path(store).parent)), load_format="dummy", skip_tokenizer_init=True,
                  dtype="bfloat16", seed=0, max_model_len=2048, gpu_memory_utilization=0.1,
                  kv_cache_memory_bytes=1 << 30, enable_prefix_caching=False)
        assert worker.CURRENT is not None and worker.CURRENT.recorder is not None
        compiled = worker.CURRENT.recorder.layouts.kernel_cache

        def rows(codec: str) -> list[np.ndarray]:
            """Of every prompt, [layers, rows, numbers]."""
            prompts = [{"prompt_token_ids": list(range(10 + n, 10 + n + n * 131))} for n in (1, 2, 7)]
            outputs = llm.generate(prompts, SamplingParams(
                temperature=0, max_tokens=24, ignore_eos=True, detokenize=False,
                extra_args=vllm_tap.capture_args(sites=["resid_post"], codec=codec)), use_tqdm=False)
            captures = [tape.capture(output) for output in outputs]
            return [np.stack([capture["resid_post", layer] for layer in range(12)]) for capture in captures]

        raw, found = rows("raw"), {}
        for codec, made in CODECS.items():
            wanted = [one.astype(np.float64) @ getattr(projection, made)(1024, 256, 3) for one in raw]
            for way in ("reference", "kernel"):
                until = time.monotonic() + 90
                while way == "kernel" and not compiled.has(codec, "resid_post") and time.monotonic() < until:
                    time.sleep(0.1)
                there = compiled.has(codec, "resid_post")
                found[f"{codec} {way}"] = {"kernel": there, "error": max(
                    float(np.linalg.norm(one - y) / np.linalg.norm(y))
                    for one, y in zip(rows(codec), wanted, strict=True))}
    print("SEEN", json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
