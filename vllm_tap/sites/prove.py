"""Proof of a model's sites: vLLM loads it in a child process, and the search of an engine's start is run on it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from engine_side.discovery.outcome import Outcome
from schemas.errors import StartError
from vllm_tap.serve.causes import Causes, advice_for

__all__ = ["prove"]


def prove(model: str, words: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> Outcome:
    """Load ``model`` with vLLM and the arguments ``words``, and search it; StartError where it cannot be loaded.

    No writer and no store is needed, and nothing is compiled.
    """
    with tempfile.TemporaryDirectory(prefix="vllm-tap-") as folder:
        result, log = Path(folder) / "proved.json", Path(folder) / "log"
        with log.open("wb") as output:
            child = subprocess.Popen(
                [sys.executable, "-m", "vllm_tap.sites.child", str(result), model, *words],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=_environment(environment or {}))
            try:
                status = child.wait()
            finally:
                child.kill()
                child.wait()
        if result.is_file():
            return msgspec.json.decode(result.read_bytes(), type=Outcome)
        causes = Causes()
        lines = [line.rstrip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        for line in lines:
            causes.hear(line)
    cause = causes.cause or (f"its process ended with exit code {status}, and "
                             + (f"said last: {lines[-1][:500]}" if lines else "did not say why"))
    helping = "" if (advice := advice_for(cause)) is None else f"; what helps: {advice}"
    raise StartError(f"MODEL = {model!r}: not loaded: {cause}{helping}")


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    """The environment of the child: its engine lives in its own process, and has no taps."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_TAP_", "VLLM_ACT_"))}
    return {**inherited, **more, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
