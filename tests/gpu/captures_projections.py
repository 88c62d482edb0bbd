"""A user's own script that captures q, k and v: ``python -m tests.gpu.captures_projections STORE straight|copied``.

Prints what was generated, digests of the rows, and whether projections wrote them straight into staging. ``copied``
takes the way of models whose projections cannot.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_DISABLE_COMPILE_CACHE": "1", "VLLM_NO_USAGE_STATS": "1"}


def main(store: str, way: str) -> None:
    """Generate for a few prompts, then say what was found."""
    from vllm import LLM, SamplingParams

    import vllm_tap
    from bench.shapes import make_model
    from engine_side import worker
    from engine_side.seams import projections

    if way == "copied":
        projections.find = lambda *_: {}
    with vllm_tap.recording(store, arm="q,k,v,resid_post") as tape:
        llm = LLM(str(make_model("small", Path(store).parent)), load_format="dummy", skip_tokenizer_init=True,
                  dtype="bfloat16", seed=0, max_model_len=512, gpu_memory_utilization=0.2)
        assert worker.CURRENT is not None
        straight = sum(hasattr(module, projections.BUFFER) for module in worker.CURRENT.model.modules())
        prompts = [{"prompt_token_ids": list(range(10 + n, 10 + n + n * 31))} for n in (1, 2, 7)]
        outputs = llm.generate(prompts, SamplingParams(
            temperature=0, max_tokens=24, ignore_eos=True, detokenize=False,
            extra_args=vllm_tap.capture_args(sites=["q", "k", "v", "resid_post"], codec="raw16")), use_tqdm=False)
        digests = []
        for output in outputs:
            capture = tape.capture(output)
            digests.append({f"{site}.{layer}": hashlib.sha256(capture[site, layer].tobytes()).hexdigest()
                            for site in ("q", "k", "v", "resid_post") for layer in (0, 11)})
    print("SEEN", json.dumps({"straight": straight, "digests": digests,
                              "tokens": [list(output.outputs[0].token_ids) for output in outputs]}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
