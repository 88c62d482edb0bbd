"""The application: routes, errors in one shape, metrics, and what is opened and closed with the process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from fastapi import FastAPI

from api import errors
from api.auth.guard import AccessGuard, Who, by_key
from api.auth.keys import KeyFile
from api.config import Config, is_loopback
from api.description import REFUSED, describe
from api.generate.upstream import new_client
from api.metrics import CountRequests, Metrics
from api.routes import about, captures, generate, holds, live, maps, page, slices, vectors, zarr
from api.service import ApiService
from schemas.wire.control_channel import ControlChannel

__all__ = ["create_app"]


def create_app(config: Config, who: Who | None = None, transport: httpx.AsyncBaseTransport | None = None) -> FastAPI:
    """The ASGI application; connects to the writer when it starts, and needs neither writer nor upstream to start.

    ``who`` says whose a request is (default: by the keys of ``config``); ``transport`` leads to upstream where that is
    no other process. StartError where it needs keys and has none.
    """
    metrics = Metrics()
    keys = None
    if who is None:
        keys = KeyFile(config.keys_file, needed=config.keys is not None or not is_loopback(config.host))
        who = by_key(keys)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.service = ApiService(config, metrics, ControlChannel(config.endpoint, "api"),
                                    new_client(config.upstream, config.upstream_connect_s, transport))
        if keys is not None:
            app.state.service.quotas.of = keys.quota_bytes
        app.state.service.spawn(app.state.service.keep_tidy())
        try:
            yield
        finally:
            await app.state.service.close()

    app = FastAPI(title="vllm-tap", summary="Read the inside of large language models while they serve.",
                  lifespan=lifespan, redirect_slashes=False, docs_url=None, redoc_url=None, responses=REFUSED)
    errors.install(app)
    describe(app)
    # What is asked most is found first.
    for part in (slices, zarr, generate, captures, holds, live, maps, vectors, about, page):
        app.include_router(part.router)
    app.add_middleware(AccessGuard, config=config, who=who)
    app.add_middleware(CountRequests, metrics=metrics)
    return app
