"""Prometheus metrics of the API process, and the middleware that counts requests."""

from __future__ import annotations

import time
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from schemas.store.pushing import Pushing
from schemas.wire.control_channel import ControlChannel

__all__ = ["BucketMetrics", "CountRequests", "Metrics"]


class Metrics:
    """The metrics of one application, in a registry of its own.

    ``multiprocess_mode`` says what is shown of several processes, where they tell their metrics together
    (PROMETHEUS_MULTIPROC_DIR), as front ends of one model server do.
    """

    def __init__(self, engines: Sequence[str] = (), bucket: bool = False, also: bool = False) -> None:
        """``engines``: names of those that requests are shared out to, none where there is but one; ``bucket``: whether
        one is read, with no writer and no engine; ``also``: whether one is read beside the writer's store.
        """
        self.registry = CollectorRegistry()
        self.requests = Counter("vllm_tap_api_requests_total", "Requests answered.",
                                ["route", "method", "status"], registry=self.registry)
        self.seconds = Histogram("vllm_tap_api_request_seconds", "Seconds from a request to the end of its answer.",
                                 ["route"], registry=self.registry)
        self.slice_bytes = Counter("vllm_tap_api_slice_bytes_total", "Bytes of slices handed out.",
                                   registry=self.registry)
        self.slices_in_flight = Gauge("vllm_tap_api_slices_in_flight_bytes",
                                      "Bytes of memory held by slices being answered.",
                                      registry=self.registry, multiprocess_mode="livesum")
        self.bucket = BucketMetrics(self.registry) if bucket or also else None
        if bucket:
            return
        self.captures = Counter("vllm_tap_api_captures_total", "Requests with a capture, by how they ended: answered, "
                                "streamed, client_gone, abandoned (never reached the engine), impossible (served, not "
                                "captured).",
                                ["outcome"], registry=self.registry)
        self.upstream_failures = Counter("vllm_tap_api_upstream_failures_total",
                                         "Requests that the upstream server failed.", ["kind"], registry=self.registry)
        self.writer_alive = Gauge("vllm_tap_api_writer_alive", "1 if the writer answers, else 0.",
                                  registry=self.registry,
                                  multiprocess_mode="mostrecent")  # of who is asked, who has just looked
        self.control_pending = Gauge("vllm_tap_api_control_pending", "Control records not yet durable.",
                                     registry=self.registry, multiprocess_mode="livesum")
        self.asked_bytes = Gauge("vllm_tap_api_asked_bytes_per_second", "Bytes of rows a second that captures in "
                                 "flight make, by the speed of their engines.", registry=self.registry,
                                 multiprocess_mode="livesum")
        self.captures_pressed = Counter("vllm_tap_api_captures_pressed_total", "Captures that began while captures in "
                                        "flight asked for more than the store takes.", registry=self.registry)
        self.push_up = Gauge("vllm_tap_api_push_up", "1 if the last turn of the pushes to a bucket succeeded, else 0.",
                             ["url"], registry=self.registry, multiprocess_mode="mostrecent")
        self.pushed_seconds = Gauge("vllm_tap_api_pushed_seconds", "When the last turn that succeeded began, in "
                                    "seconds since 1970; 0 before the first. What was sealed then is in the bucket.",
                                    ["url"], registry=self.registry, multiprocess_mode="mostrecent")
        self._pushing = ""
        if engines:
            self._of_engines(engines)

    def _of_engines(self, engines: Sequence[str]) -> None:
        self.engine_up = Gauge("vllm_tap_api_engine_up", "1 if requests go to the engine, else 0.", ["engine"],
                               registry=self.registry)
        self.engine_in_flight = Gauge("vllm_tap_api_engine_in_flight", "Requests of this gateway that the engine has.",
                                      ["engine"], registry=self.registry)
        self.engine_requests = Counter("vllm_tap_api_engine_requests_total", "Requests that were sent to the engine.",
                                       ["engine"], registry=self.registry)
        self.engine_failures = Counter("vllm_tap_api_engine_failures_total", "Requests that the engine failed.",
                                       ["engine", "kind"], registry=self.registry)
        for name in engines:
            self.engine_up.labels(name)
            self.engine_in_flight.labels(name)
            self.engine_requests.labels(name)

    def look(self, channel: ControlChannel | None) -> None:
        """Sets what is known only when one looks; to be called before the metrics are told."""
        if channel is None:
            return
        self.writer_alive.set(channel.alive)
        self.control_pending.set(channel.pending)

    def tell_pushes(self, state: Pushing | None) -> None:
        """Set what is known of a store's pushes to a bucket; None: nothing pushes."""
        url = "" if state is None else state.url
        if self._pushing not in ("", url):
            self.push_up.clear()
            self.pushed_seconds.clear()
        if state is not None:
            self.push_up.labels(url).set(bool(state.pushed_ms) and not state.failed)
            self.pushed_seconds.labels(url).set(state.pushed_ms / 1000)
        self._pushing = url


class BucketMetrics:
    """The metrics of a service that reads a bucket."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.up = Gauge("vllm_tap_api_bucket_up", "Whether the last look at the bucket's heads succeeded.",
                        registry=registry)
        self.generation = Gauge("vllm_tap_api_bucket_generation", "Generation of the head that is read; of several "
                                "stores the sum.", registry=registry)
        self.pushed = Gauge("vllm_tap_api_bucket_pushed_seconds", "When that head was pushed, in seconds since 1970; "
                            "of several stores the newest.", registry=registry)
        self.stores = Gauge("vllm_tap_api_bucket_stores", "Stores that are read.", registry=registry)
        self.requests = Counter("vllm_tap_api_bucket_requests_total", "Requests that read from the bucket.",
                                registry=registry)


class CountRequests:
    """ASGI middleware: counts by the route's template, so that ids never become labels."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status, started_s = "none", time.perf_counter()

        async def count(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        try:
            await self.app(scope, receive, count)
        finally:
            route = getattr(scope.get("route"), "path", "none")
            method = scope["method"] if scope["method"] in ("GET", "POST", "DELETE") else "other"
            self.metrics.requests.labels(route, method, status).inc()
            self.metrics.seconds.labels(route).observe(time.perf_counter() - started_s)
