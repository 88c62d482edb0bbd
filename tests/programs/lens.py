"""Runs TransformerLens on a model and compares its hooks with captured rows; prints ``ERRORS`` and JSON.

Run in TransformerLens's own environment as ``python tests/programs/lens.py MODEL ROWS.npz``: ``tokens`` [n], and by
TransformerLens name rows [n, width]. Weights are taken as they are: nothing folded, nothing centred.
"""

from __future__ import annotations

import json
import sys
import tempfile

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformer_lens.model_bridge import TransformerBridge
from transformers import PreTrainedTokenizerFast


def bridge_of(model: str) -> TransformerBridge:
    """The model; it insists on a tokenizer in files, and any will do: tokens come as ids."""
    words = Tokenizer(WordLevel({"<s>": 0}, unk_token="<s>"))
    with tempfile.TemporaryDirectory() as folder:
        PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="<s>", pad_token="<s>",
                                add_bos_token=True).save_pretrained(folder)
        return TransformerBridge.boot_transformers(model, device="cpu", dtype=torch.float32,
                                                   tokenizer=PreTrainedTokenizerFast.from_pretrained(folder))


def errors(model: str, file: str) -> dict[str, float | None]:
    """By name the worst row's error over its length; None for a name that this model does not know."""
    bridge = bridge_of(model)
    with np.load(file) as captured:
        tokens = torch.from_numpy(captured["tokens"].astype(np.int64))
        with torch.inference_mode():
            _, cache = bridge.run_with_cache(tokens[None])
        found: dict[str, float | None] = {}
        for name in captured.files:
            if name == "tokens":
                continue
            try:
                x = cache[name].float().reshape(len(tokens), -1).numpy()
            except KeyError:
                found[name] = None
                continue
            if name.endswith("hook_expert_indices"):  # in the order of a router's own
                x, captured_rows = np.sort(x, axis=-1), np.sort(captured[name], axis=-1)
            else:
                captured_rows = captured[name]
            length = np.linalg.norm(x, axis=-1)
            found[name] = float((np.linalg.norm(captured_rows - x, axis=-1) / np.where(length > 0, length, 1)).max())
    return found


if __name__ == "__main__":
    print("ERRORS", json.dumps(errors(*sys.argv[1:])))
