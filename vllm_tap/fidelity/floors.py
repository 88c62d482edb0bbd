"""Noise of the arithmetic: how the same model differs between bfloat16 and float32, in Hugging Face's classes."""

from __future__ import annotations

from typing import Final

import numpy as np
import psutil

from vllm_tap.fidelity.distributions import I64, compare, log_softmax

__all__ = ["arithmetic_floor"]

_PROMPTS: Final = 64
_SHARE: Final = 0.4  # of the memory that is free


def arithmetic_floor(model: str, tokens: I64) -> tuple[list[float], str]:
    """The KL by prompt of a bfloat16 forward to a float32 one, and how it was measured; ([], why) where it was not.

    It is of the first 64 of ``tokens`` [prompts, positions], without position 0.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
        need = sum(each.numel() for each in empty.parameters()) * 6  # both at once
        if need > _SHARE * psutil.virtual_memory().available:
            return [], f"not measured: the model in float32 and bfloat16 takes {need / 2**30:.1f} GiB of memory"
        exact, rounded = (AutoModelForCausalLM.from_pretrained(model, dtype=kind).eval()
                          for kind in (torch.float32, torch.bfloat16))
    except (ValueError, OSError, ImportError, KeyError) as error:
        return [], f"not measured: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
    found = []
    with torch.inference_mode():
        for row in tokens[:_PROMPTS]:
            given = torch.from_numpy(row[None])
            one, other = (log_softmax(net(given).logits[0].float().numpy()) for net in (exact, rounded))
            found.append(float(compare(one, other, row).kl[1:].mean()))
    return found, f"bfloat16 against float32, Hugging Face, {len(found)} prompts, {float(np.mean(found)):.3g} nats"
