"""The application: routes, errors in one shape, metrics, and what is opened and closed with the process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import httpx
from fastapi import FastAPI

from api import errors
from api.auth.guard import AccessGuard, Who, by_address, by_key
from api.auth.keys import KeyFile
from api.bucket.followed import FollowedBuckets, check_bucket
from api.bucket.read_only import ReadOnly
from api.config import Config, is_loopback
from api.description import REFUSED, describe
from api.engines.told import TellEngine
from api.engines.upstreams import Upstreams
from api.metrics import CountRequests, Metrics
from api.routes import about, attention, captures, generate, holds, live, maps, page, slices, vectors, zarr
from api.service import ApiService
from schemas.wire.control_channel import ControlChannel

__all__ = ["create_app"]


def create_app(config: Config, who: Who | None = None, transport: httpx.AsyncBaseTransport | None = None) -> FastAPI:
    """The ASGI application; connects to the writer when it starts, and needs neither writer nor upstream to start.

    ``who`` says whose a request is (default: by the keys of ``config``); ``transport`` leads to upstream where that is
    no other process. With a bucket nothing but reading is served. StartError where it needs keys and has none.
    """
    names = [name for name in config.engines if name]
    metrics = Metrics(names, bool(config.buckets), bool(config.also))
    keys = None
    for setting, urls in (("store", config.buckets), ("also", config.also)):
        for url in urls:
            check_bucket(setting, url)
    if who is None and config.buckets and config.keys is None:
        who = by_address(lambda: False)
    elif who is None:
        keys = KeyFile(config.keys_file, needed=config.keys is not None or not is_loopback(config.host))
        who = by_key(keys)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        urls = config.buckets or config.also
        followed = None if metrics.bucket is None else FollowedBuckets(
            urls, config, metrics.bucket, (lambda: app.state.service.local()) if config.also else None)
        bucket, others = (followed, None) if config.buckets else (None, followed)
        app.state.service = ApiService(config, metrics, ControlChannel(config.endpoint, "api") if bucket is None else
                                       None, Upstreams(config, metrics, transport), bucket, others)
        if keys is not None:
            app.state.service.quotas.of = keys.quota_bytes
        app.state.service.spawn(app.state.service.keep_tidy())
        if followed is not None:
            await anyio.to_thread.run_sync(followed.look)
            app.state.service.spawn(followed.follow())
        if names:
            app.state.service.spawn(app.state.service.upstreams.watch())
        try:
            yield
        finally:
            await app.state.service.close()

    app = FastAPI(title="vllm-tap", summary="Read the inside of large language models while they serve.",
                  lifespan=lifespan, redirect_slashes=False, docs_url=None, redoc_url=None, responses=REFUSED)
    errors.install(app)
    describe(app)
    # What is asked most is found first.
    for part in (slices, zarr, generate, captures, holds, live, maps, attention, vectors, about, page):
        app.include_router(part.router)
    if config.buckets:
        app.add_middleware(ReadOnly, url=", ".join(config.buckets), deletes=config.deletes)
    app.add_middleware(AccessGuard, config=config, who=who)
    app.add_middleware(CountRequests, metrics=metrics)
    if names:
        app.add_middleware(TellEngine)
    return app
