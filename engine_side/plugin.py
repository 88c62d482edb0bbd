"""The entry point of ``vllm.general_plugins``: called in every vLLM process, sometimes more than once."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
from pathlib import Path

from schemas.errors import StartError

_registered = False


def register() -> None:
    """Install the seams where VLLM_TAP_ENDPOINT is set; otherwise do nothing."""
    global _registered
    from engine_side.config import DRAWN, GROUP, from_environment
    from schemas.ids import new_ulid

    config = from_environment()  # a setting that is no good ends the start here
    if config is None:
        return
    if config.own_group:
        _leave_group()
    os.environ.setdefault(GROUP, f"{DRAWN}{new_ulid()}")  # vLLM's processes inherit it
    if _registered:
        return
    _check_own_packages()
    from engine_side.codecs import check_encoders
    from schemas.codecs import check_installed

    check_installed()
    check_encoders()
    from engine_side.seams import front_end, http_routes, loader, runner, scheduler

    loader.connect()
    runner.connect()
    scheduler.connect()
    front_end.connect()
    http_routes.connect()
    _registered = True


def _leave_group() -> None:
    """Leave the terminal's process group, which gets Ctrl-C; the process that started vLLM's processes ends them in
    order.
    """
    if multiprocessing.parent_process() is not None:
        with contextlib.suppress(PermissionError):  # it leads a session: it is in a group of its own
            os.setpgid(0, 0)


def _check_own_packages() -> None:
    """``schemas`` is a common name: another package of that name on the path would shadow ours."""
    ours = Path(__file__).resolve().parent.parent
    found = Path(str(importlib.import_module("schemas").__file__)).resolve().parent.parent
    if found != ours:
        raise StartError(f"vllm-tap: the package 'schemas' was imported from {found}, expected {ours}; "
                         "another project's 'schemas' shadows it on the Python path")
