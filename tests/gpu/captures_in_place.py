"""A user's own script that captures every site: ``python -m tests.gpu.captures_in_place STORE in_place|copied``.

Prints what was generated, digests of the rows, and how much lay in staging without a copy. ``copied`` takes the way of
models that cannot do so.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_DISABLE_COMPILE_CACHE": "1", "VLLM_NO_USAGE_STATS": "1"}

SITES = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "mlp_post", "q", "k", "v", "z")


def main(store: str, way: str) -> None:
    """Generate for a few prompts, then say what was found."""
    from vllm import LLM, SamplingParams

    import vllm_tap
    from bench.shapes import make_model
    from engine_side import worker
    from engine_side.seams import projections
    from engine_side.seams.compiled import residuals
    from engine_side.tap import taps

    if way == "copied":
        projections.find_writers = lambda *_: {}
        residuals.functional = lambda _: False
        taps.RULES["operand"] = taps.RULES["argument"]
    with vllm_tap.recording(store, arm=",".join(SITES)) as tape:
        llm = LLM(str(make_model("small", Path(store).parent)), load_format="dummy", skip_tokenizer_init=True,
                  dtype="bfloat16", seed=0, max_model_len=512, gpu_memory_utilization=0.1,
                  kv_cache_memory_bytes=1 << 30)  # not measured: two of these run side by side
        assert worker.CURRENT is not None
        modules = list(worker.CURRENT.model.modules())
        in_place = {name: sum(hasattr(module, name) for module in modules)
                    for name in (projections.BUFFER, taps.STREAM)}
        prompts = [{"prompt_token_ids": list(range(10 + n, 10 + n + n * 31))} for n in (1, 2, 7)]
        outputs = llm.generate(prompts, SamplingParams(
            temperature=0, max_tokens=24, ignore_eos=True, detokenize=False, logprobs=0,
            extra_args=vllm_tap.capture_args(sites=list(SITES), codec="raw16")), use_tqdm=False)
        digests = []
        for output in outputs:
            capture = tape.capture(output)
            digests.append({f"{site}.{layer}": hashlib.sha256(capture[site, layer].tobytes()).hexdigest()
                            for site in SITES for layer in range(12)})
    print("SEEN", json.dumps({
        "in_place": in_place, "digests": digests, "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "logprobs": [[next(iter(step.values())).logprob for step in output.outputs[0].logprobs] for output in outputs],
    }), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
