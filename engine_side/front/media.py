"""Statements about models that take images or sound: by the commands before a start, and by the engine at its own."""

from __future__ import annotations

from typing import Final

EMBEDDED_OUTSIDE: Final = (
    "this model takes images or sound, so vLLM embeds its prompts outside of the step; arm resid_pre.0, which has "
    "the input of the first block, rows of images too, or start vLLM with --language-model-only")
EXPERTS_APART: Final = (
    "this model takes images or sound, and some such models route rows of images separately, so rows of experts are "
    "not those of the step; leave router_logits and experts out")
DECODER_READS: Final = ("its decoder reads an encoder's output, which has no positions in the stream; take a model "
                        "with a decoder alone")
