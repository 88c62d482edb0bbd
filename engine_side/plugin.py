"""The entry point of ``vllm.general_plugins``: called in every vLLM process, sometimes more than once."""

from __future__ import annotations

import importlib
from pathlib import Path

from schemas.errors import StartError

_registered = False


def register() -> None:
    """Install the seams where VLLM_TAP_ENDPOINT is set; otherwise do nothing."""
    global _registered
    from engine_side.config import from_environment

    if _registered or from_environment() is None:  # a setting that is no good ends the start here
        return
    _check_own_packages()
    from engine_side.seams import compile_cache, front_end, loader, runner, scheduler

    compile_cache.connect()
    loader.connect()
    runner.connect()
    scheduler.connect()
    front_end.connect()
    _registered = True


def _check_own_packages() -> None:
    """``schemas`` is a common name: another package of that name on the path would shadow ours."""
    ours = Path(__file__).resolve().parent.parent
    found = Path(str(importlib.import_module("schemas").__file__)).resolve().parent.parent
    if found != ours:
        raise StartError(f"vllm-tap: the package 'schemas' was imported from {found}, expected {ours}; "
                         "another project's 'schemas' shadows it on the Python path")
