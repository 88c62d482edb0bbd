"""What is said of models that take images or sound: by the commands before a start, and by the engine at its own."""

from __future__ import annotations

from typing import Final

EMBEDDED_OUTSIDE: Final = (
    "this model takes images or sound, and vLLM embeds its prompts outside of the step; resid_pre of layer 0 has the "
    "rows that the first block gets, those of images too; or start vLLM with --language-model-only")
NOT_EDITED: Final = ("edits of models that take images or sound have not been shown to be right; leave --edit "
                     "(VLLM_TAP_EDIT) out, or serve the text model alone, where it is published")
EXPERTS_APART: Final = (
    "this model takes images or sound, and some of their kind route images' rows by themselves, so that rows of "
    "experts are not those of the step; leave router_logits and experts out")
DECODER_READS: Final = ("its decoder reads what an encoder has made of the prompt, which has no positions of its own "
                        "in the stream; take a model that has a decoder alone")
