"""The entry point of ``vllm.endpoint_plugins``: the HTTP service on vLLM's own port, for users who run no gateway.

vLLM loads it where ``VLLM_PLUGINS`` names it (``vllm_tap,vllm_tap_http``), in its front end alone. It does nothing
without VLLM_TAP_ENDPOINT. A failure in it does not reach vLLM's own routes.
"""

from __future__ import annotations

import logging
import os
import time
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from fastapi import FastAPI

from api.config import Config
from api.embedded import Embedded, embeddable
from schemas import legacy
from schemas.checks import Setting
from schemas.errors import StartError
from schemas.native import loops
from vllm_tap.serve.writer_process import READY_S, WriterProcess
from writer_service.recover.store_lock import is_free, listens

__all__ = ["SETTINGS", "CaptureRoutes"]

logger = logging.getLogger("vllm.tap")

# Beside those of the engine, which are read here too.
SETTINGS: Final[dict[str, Setting]] = {
    "VLLM_TAP_STORE": Setting(
        "", "folder", "The store behind the routes on vLLM's own port. Needs `VLLM_PLUGINS=vllm_tap,vllm_tap_http`."),
}


class CaptureRoutes:
    """vLLM's ``EndpointPlugin``."""

    name = "vllm_tap_http"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._keyed = False
        self._writer: WriterProcess | None = None

    def attach_router(self, app: FastAPI) -> None:
        """Puts the service before the application, inside whatever asks for keys."""
        if not os.environ.get("VLLM_TAP_ENDPOINT"):
            return
        # The service's lines go where vLLM's go: what the root logger is set to is not ours.
        logging.getLogger("vllm_tap").parent = logging.getLogger("vllm")
        try:
            config = config_of(os.environ)
            loops.begin()
            self._writer = writer_of(config)
            app.add_middleware(Embedded, **embeddable(config, lambda: self._keyed))
        except Exception as error:
            logger.exception("vllm-tap: there are no captures on this server's port")
            app.add_middleware(Embedded, reason=str(error))

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Take from vLLM's arguments whether its server asks for a key."""
        self._keyed = any(getattr(args, "api_key", None) or [os.environ.get("VLLM_API_KEY")])


def config_of(environment: Mapping[str, str]) -> Config:
    """The service's settings; StartError naming the variable that is wrong."""
    store = environment.get("VLLM_TAP_STORE", "")
    if not store:
        raise StartError("VLLM_TAP_STORE is not set: it names the folder of captures")
    endpoint = environment["VLLM_TAP_ENDPOINT"]
    if "tcp://" in endpoint:
        raise StartError(f"VLLM_TAP_ENDPOINT={endpoint!r}: a store that may be on another host; run a "
                         "gateway there (python -m api), in front of this server, or give ipc://PATH alone")
    return Config(store=Path(store).absolute(), endpoint=endpoint, upstream=("http://vllm",),
                  capture_all=legacy.capture_all(environment) or "")


def writer_of(config: Config, ready_s: float = READY_S) -> WriterProcess | None:
    """A writer started for the store, None where another has it.

    The other writer may still be reading what a crash left, for example one that another front end of this server
    started. It is waited for as long as one of our own. If it takes longer, the service goes on without it until it is
    there. A writer that is started here ends when this process does.

    StartError where the running writer listens elsewhere than the engine sends to, or where none can be started.
    """
    deadline = time.monotonic() + ready_s
    while True:
        if is_free(config.store):
            writer = WriterProcess(config.store, config.endpoint, give_up=lambda: logger.error(
                "vllm-tap: the writer cannot be kept running: captures are refused, everything else goes on"))
            try:
                return writer.__enter__()
            except StartError:
                if is_free(config.store):  # else another front end of this server was first
                    raise
        if (found := listens(config.store)) == config.endpoint:
            return None
        if found is not None:
            raise StartError(f"VLLM_TAP_ENDPOINT={config.endpoint!r}: the writer of {config.store} listens at "
                             f"{found}; give the engine that one")
        if time.monotonic() > deadline:
            logger.warning("vllm-tap: the writer of %s did not listen within %g s: captures are refused until it does",
                           config.store, ready_s)
            return None
        time.sleep(0.05)
