"""A user's own script that captures inside ``recording``: before, in and after it, with an engine in this process.

Run as ``python -m tests.programs.records STORE``; prints what it saw as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def said(call: Any) -> str:
    """The message of the error that a call raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main(store: Path) -> None:
    from vllm import LLM, SamplingParams

    import vllm_tap
    from tests.support.engines.engines import model, prompt, shut_down
    from tests.support.pages.readme import blocks

    options: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 4, "dtype": "float32", "block_size": 32}
    seen: dict[str, Any] = {"outside": said(lambda: vllm_tap.capture_args(sites=["resid_post"]))}
    prompts = [{"prompt_token_ids": prompt(length, seed=length)} for length in (5, 40)]
    untapped = LLM(str(model("qwen3")), **options)
    save_file({"vector": np.ones(256, np.float32)}, ones := store.parent / "ones.safetensors")
    with vllm_tap.recording(store, arm=["resid_post", "mlp_out"], edit="resid_post.1",
                            vectors={"ones": ones}) as tape:
        args = vllm_tap.capture_args(sites=["blocks.1.hook_resid_post", "mlp_out"], codec="raw", tags={"run": "a"})
        greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, extra_args=args)
        seen["untapped"] = said(lambda: untapped.generate(prompts, greedy, use_tqdm=False))
        shut_down(untapped)
        seen["second"] = said(lambda: vllm_tap.recording(store).__enter__())
        seen["bad"] = said(lambda: vllm_tap.capture_args(sites=["resid_poste"]))
        llm = LLM(str(model("qwen3")), **options)
        outputs = llm.generate(prompts, greedy, use_tqdm=False)
        seen["tokens"] = [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in outputs]
        seen["ids"] = [tape.capture(output).id for output in outputs]
        seen["shapes"] = [tape.capture(output)["resid_post", 1].shape for output in outputs]
        seen["manifests"] = [vllm_tap.manifest(output).status for output in outputs]
        both = llm.generate(prompts[:1], SamplingParams(n=2, max_tokens=3, extra_args=args), use_tqdm=False)[0]
        seen["samples"] = [vllm_tap.manifest(both, sample).output_token_ids == list(both.outputs[sample].token_ids)
                           for sample in range(2)]
        plain = llm.generate(prompts[:1], SamplingParams(max_tokens=2), use_tqdm=False)[0]
        seen["plain"] = said(lambda: vllm_tap.manifest(plain))
        edit = [{"site": "resid_post.1", "op": "set", "vector": "ones", "positions": "prompt"}]
        edited = llm.generate(prompts[:1], SamplingParams(max_tokens=2, extra_args={**args, "edit": edit}),
                              use_tqdm=False)[0]
        seen["edited"] = tape.capture(edited)["resid_post", 1][:5].tolist()
        seen["edits"] = vllm_tap.manifest(edited).edits
    seen["after"] = said(lambda: llm.generate(prompts, greedy, use_tqdm=False))
    seen["environment"] = [name for name in os.environ if name.startswith("VLLM_TAP_")]
    seen["goes_on"] = len(llm.generate(prompts[:1], SamplingParams(max_tokens=2), use_tqdm=False)[0].outputs)
    shut_down(llm)
    block, = (block for block in blocks("python", "docs/howto/look-inside.md") if "from vllm import" in block)
    text = block.replace('LLM("Qwen/Qwen3-0.6B")', "LLM(MODEL, **OPTIONS)").replace('"captures"', "STORE")
    space: dict[str, Any] = {"__name__": "__main__", "MODEL": str(model("qwen3")), "OPTIONS": options, "STORE": store}
    exec(compile(text, "docs/howto/look-inside.md", "exec"), space)  # noqa: S102
    seen["page"] = [space["rows"].shape, [*space["outputs"][0].prompt_token_ids,
                                          *space["outputs"][0].outputs[0].token_ids]]
    shut_down(space["llm"])
    save_file({"directions": np.ones((2, 256), np.float32)}, store.parent / "tone.safetensors",
              {"site": "resid_post", "layer": "2"})
    block, = (block for block in blocks("python", "docs/howto/probes.md") if "from vllm import" in block)
    text = block.replace('LLM("Qwen/Qwen3-0.6B")', "LLM(MODEL, **OPTIONS)").replace('"captures"', "STORE")
    space["PROBE"] = store.parent / "tone.safetensors"
    exec(compile(text.replace('"tone.safetensors"', "PROBE"), "docs/howto/probes.md", "exec"), space)  # noqa: S102
    seen["probe"] = [space["tone"].shape, [*space["outputs"][0].prompt_token_ids,
                                           *space["outputs"][0].outputs[0].token_ids], space["tone"].tolist()]
    print("SEEN", json.dumps(seen), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
