"""One engine of ``bench.interference``, in a process of its own: ``python -m bench.interference_run JSON``."""

from __future__ import annotations

import json
import os
import random
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from bench.configurations import CONFIGURATIONS, DETERMINISTIC

GENERATED = 24


def main() -> None:
    """Generate idle, twice, and, where sites are armed, captured; print what came out as the last line, of JSON."""
    asked = json.loads(sys.argv[1])
    chosen = CONFIGURATIONS[asked["configuration"]]
    options: dict[str, Any] = {"dtype": "bfloat16", **chosen.options}
    if asked["deterministic"]:
        options["compilation_config"] = {**options.get("compilation_config", {}),
                                         "inductor_compile_config": DETERMINISTIC}
    if asked["on_gpu"]:
        options |= {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 1 << 30}
    import vllm_tap

    with vllm_tap.recording(asked["store"], arm=asked["arm"]) if asked["arm"] else nullcontext() as tape:
        from vllm import LLM

        # Without its prefix cache: it would do less the second time.
        llm: Any = LLM(asked["model"], skip_tokenizer_init=True, max_model_len=1024, seed=0, disable_log_stats=True,
                       enable_prefix_caching=False, **options)
        found: dict[str, Any] = {way: _said(_outputs(llm, asked, None)) for way in ("idle", "again")}
        if tape is not None:
            found["captured"], found["rows"] = _captured(llm, asked, tape)
        if asked["on_gpu"] and chosen.ranks == 1:  # others run in processes of their own
            found["kernels"] = _kernels(llm)
        print("\nFOUND " + json.dumps(found), flush=True)
        os._exit(0)  # an engine in this process has nothing to say at its end


def _prompts(many: int) -> list[list[int]]:
    draw = random.Random(7)
    lengths = [draw.choice([1, 7, 40, 300, 700]) for _ in range(many)] if many <= 12 else [
        draw.randrange(1, 40) for _ in range(many)]
    prompts = [[draw.randrange(10, 8000) for _ in range(length)] for length in lengths]
    # What repeats itself is what drafts of n-grams guess.
    return [(ids * 3)[:700] if number < 4 and len(ids) < 300 else ids for number, ids in enumerate(prompts)]


def _outputs(llm: Any, asked: dict[str, Any], spec: dict[str, Any] | None) -> Any:
    from vllm import SamplingParams

    import vllm_tap

    prompts: Any = [{"prompt_token_ids": ids} for ids in
                    _prompts(300 if asked["configuration"] == "400 sequences" else 12)]
    params = [SamplingParams(temperature=0, max_tokens=GENERATED, ignore_eos=True, detokenize=False, logprobs=0,
                             extra_args=None if spec is None else vllm_tap.capture_args(**spec)) for _ in prompts]
    more: dict[str, Any] = {}
    if asked["adapter"]:
        from vllm.lora.request import LoRARequest

        more["lora_request"] = [LoRARequest("adapter", 1, asked["adapter"]) if number % 2 else None
                                for number in range(len(prompts))]
    return llm.generate(prompts, params, use_tqdm=False, **more)


def _said(outputs: Any) -> list[dict[str, list[Any]]]:
    """Tokens and their log-probabilities, a request."""
    return [{"tokens": list(output.outputs[0].token_ids),
             "logprobs": [next(iter(step.values())).logprob for step in output.outputs[0].logprobs]}
            for output in outputs]


def _captured(llm: Any, asked: dict[str, Any], tape: Any) -> tuple[Any, dict[str, Any]]:
    """What was said while everything armed was captured; how many rows, and how far they miss what must add up."""
    import numpy as np

    outputs = _outputs(llm, asked, {"codec": "raw"})
    rows: dict[str, Any] = {"captured": 0, "missing": 0, "worst": {}}

    def hold(name: str, made: Any, expected: Any) -> None:
        apart = np.linalg.norm(made - expected, axis=-1) / (np.linalg.norm(expected, axis=-1) + 1e-9)
        rows["worst"][name] = max(rows["worst"].get(name, 0.0), float(apart.max()))

    for output in outputs[:12]:
        capture = tape.capture(output)
        manifest = capture.manifest()
        rows["captured"] += manifest.captured
        rows["missing"] += manifest.expected - manifest.captured
        have = capture.sites
        at = {(site, layer): capture[site, layer].astype(np.float64) for site in have for layer in have[site]}
        for (site, layer), row in at.items():
            assert np.isfinite(row).all(), (site, layer)
            for name, parts in {"resid_mid": ("resid_pre", "attn_out"), "resid_post": ("resid_mid", "mlp_out")}.items():
                if site == name and all((part, layer) in at for part in parts):
                    hold(f"{name} = {' + '.join(parts)}", at[parts[0], layer] + at[parts[1], layer], row)
            if site == "resid_pre" and ("resid_post", layer - 1) in at:
                hold("resid_pre = resid_post before", row, at["resid_post", layer - 1])
    return _said(outputs), rows


def _kernels(llm: Any) -> float:
    """Kernels that the device runs a step of decode of one request."""
    import torch
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=GENERATED + 1, ignore_eos=True, detokenize=False)
    prompt: Any = [{"prompt_token_ids": [11, 12, 13]}]
    counts = []
    for tokens in (1, GENERATED + 1):
        params.max_tokens = tokens
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            llm.generate(prompt, params, use_tqdm=False)
            torch.cuda.synchronize()
        counts.append(sum(event.count for event in profile.key_averages()
                          if event.device_type == torch.autograd.DeviceType.CUDA and "Mem" not in event.key))
    return (counts[1] - counts[0]) / GENERATED


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
