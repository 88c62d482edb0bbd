"""A user's own script that captures before and after sleeps: ``python -m tests.gpu.captures_around_sleep STORE``.

Prints, for each round, digests of what was generated and captured, and how far projected rows are from those of the
first round. The first rows of a projection are the reference's, until its kernels are compiled. Those add in another
order.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from vllm_tap.tiny_model import HIDDEN, LAYERS, tiny_model

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_DISABLE_COMPILE_CACHE": "1", "VLLM_NO_USAGE_STATS": "1"}

SITES = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "mlp_post", "q", "k", "v", "z")
EDIT = [{"site": "resid_post.1", "op": "add", "vector": "tone", "scale": 0.8},
        {"site": "attn_out.2", "op": "scale", "by": 0.5, "positions": "prompt"}]
ASKED: tuple[dict[str, Any], ...] = (
    {"sites": list(SITES), "codec": "raw16"}, {"sites": list(SITES), "codec": "int8b64"},
    {"sites": ["resid_post"], "codec": "rp8"}, {"sites": [], "probe": ["mood"]}, {"sites": ["resid_post", "attn_out"]})


def deep(llm: Any) -> None:
    """The weights are given away, not kept on the host."""
    llm.sleep(level=2)
    llm.wake_up(tags=["weights"])
    llm.collective_rpc("reload_weights")
    llm.wake_up(tags=["kv_cache"])


def light(llm: Any) -> None:
    """The weights wait on the host."""
    llm.sleep(level=1)
    llm.wake_up()


ROUNDS: dict[str, Callable[[Any], Any]] = {
    "before": lambda _: None, "light sleep": light, "weights loaded anew": lambda llm: llm.collective_rpc(
        "reload_weights"), "deep sleep": deep, "light sleep after it": light}


def main(store: str) -> None:
    """Generate the same in each round."""
    from vllm import LLM, SamplingParams

    import vllm_tap

    folder, draw = Path(store).parent, np.random.default_rng(3).standard_normal
    save_file({"vector": draw(HIDDEN).astype("f4")}, folder / "tone.safetensors")
    save_file({"directions": draw((2, HIDDEN)).astype("f4")}, folder / "mood.safetensors",
              {"site": "resid_post", "layer": "2"})
    with vllm_tap.recording(store, arm=",".join(SITES), edit="resid_post,attn_out", probes={
            "mood": folder / "mood.safetensors"}, vectors={"tone": folder / "tone.safetensors"}) as tape:
        llm = LLM(str(tiny_model(dtype="bfloat16")), skip_tokenizer_init=True, seed=0, max_model_len=512,
                  gpu_memory_utilization=0.1, kv_cache_memory_bytes=1 << 28, enable_prefix_caching=False,
                  enable_sleep_mode=True)
        projected: dict[int, Any] = {}
        for name, change in ROUNDS.items():
            change(llm)
            prompts = [{"prompt_token_ids": list(range(10 + n, 40 + 8 * n))} for n in range(len(ASKED))]
            params = [SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False, extra_args={
                **vllm_tap.capture_args(**spec), **({"edit": EDIT} if spec is ASKED[-1] else {})}) for spec in ASKED]
            digests, off = {}, 0.0
            for spec, output in zip(ASKED, llm.generate(prompts, params, use_tqdm=False), strict=True):
                capture = tape.capture(output)
                for site, layer in itertools.product(spec["sites"], range(LAYERS)):
                    rows = np.asarray(capture[site, layer])
                    if spec.get("codec") == "rp8":
                        first = projected.setdefault(layer, rows)
                        code = np.abs(first).max(axis=-1, keepdims=True) / 127
                        off = max(off, float((np.abs(rows - first) / code).max()))
                    else:
                        digests[f"{spec.get('codec')} {site}.{layer}"] = hashlib.sha256(rows.tobytes()).hexdigest()
                for probe in spec.get("probe", ()):
                    scores = np.ascontiguousarray(capture[f"probe.{probe}", 2])
                    digests[f"probe {probe}"] = hashlib.sha256(scores.tobytes()).hexdigest()
                digests[f"tokens beside {spec}"] = str(list(output.outputs[0].token_ids))
            print("SEEN", json.dumps({"round": name, "digests": digests, "codes off": off}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
