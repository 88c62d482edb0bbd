"""The process that loads a model to prove its sites: ``python -m vllm_tap.sites.child RESULT MODEL [ARGUMENTS]``.

The arguments are vLLM's. It ends as soon as the model has its weights and was searched: no cache is made, and nothing
is compiled.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from schemas.errors import StartError
from vllm_tap.offline.engine import engine_args
from vllm_tap.serve.model_config import without_tokenizer

if TYPE_CHECKING:
    from torch import nn
    from vllm import EngineArgs

    from engine_side.discovery.outcome import Outcome


class _Searched(Exception):
    """The model was searched."""


def proved(model: str, words: Sequence[str]) -> Outcome:
    """The outcome of the search on ``model``, loaded by vLLM in this process with the arguments ``words``."""
    from vllm import LLMEngine

    from engine_side.seams.loader import when_loaded
    from engine_side.seams.recorded_step import search

    arguments = engine_args(model, (*without_tokenizer(model), *words))
    _check(arguments)
    found: list[Outcome] = []

    def search_it(loaded: nn.Module, vllm_config: Any) -> None:
        found.append(search(loaded, vllm_config))
        raise _Searched

    when_loaded(search_it)
    try:
        LLMEngine.from_engine_args(arguments)
    except Exception:
        if not found:
            raise
    if not found:
        raise StartError(f"vllm-tap: --load-format = {str(arguments.load_format)!r} after --: this loader does not "
                         "come by BaseModelLoader.load_model, so that nothing was searched; choose another")
    return found[0]


def _check(arguments: EngineArgs) -> None:
    if str(arguments.load_format) == "dummy":
        raise StartError("vllm-tap: --load-format = 'dummy' after --: weights of chance within ±1e-3 leave next to "
                         "nothing of what a block adds, and prove nothing; leave it out")
    for flag in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        if (ranks := getattr(arguments, flag)) > 1:
            raise StartError(f"vllm-tap: --{flag.replace('_', '-')} = {ranks} after --: a model is proved on one "
                             "device; leave it out")


def main() -> None:
    """Write the outcome where the first argument says."""
    result, model, *words = sys.argv[1:]
    Path(result).write_bytes(msgspec.json.encode(proved(model, words)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # an engine that was left in the middle of its start has nothing to end in order


if __name__ == "__main__":
    main()
