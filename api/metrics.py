"""Prometheus metrics of the API process, and the middleware that counts requests."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from schemas.wire.control_channel import ControlChannel

__all__ = ["CountRequests", "Metrics"]


class Metrics:
    """The metrics of one application, in a registry of its own.

    ``multiprocess_mode`` says what is shown of several processes, where they tell their metrics together
    (PROMETHEUS_MULTIPROC_DIR), as front ends of one model server do.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("vllm_tap_api_requests_total", "Requests answered.",
                                ["route", "method", "status"], registry=self.registry)
        self.seconds = Histogram("vllm_tap_api_request_seconds", "Time from a request to the end of its answer.",
                                 ["route"], registry=self.registry)
        self.captures = Counter("vllm_tap_api_captures_total", "Captures asked for, by how the asking ended.",
                                ["outcome"], registry=self.registry)
        self.slice_bytes = Counter("vllm_tap_api_slice_bytes_total", "Bytes of slices handed out.",
                                   registry=self.registry)
        self.slices_in_flight = Gauge("vllm_tap_api_slices_in_flight_bytes", "Memory held by slices being answered.",
                                      registry=self.registry, multiprocess_mode="livesum")
        self.upstream_failures = Counter("vllm_tap_api_upstream_failures_total",
                                         "Requests that the upstream server failed.", ["kind"], registry=self.registry)
        self.writer_alive = Gauge("vllm_tap_api_writer_alive", "Whether the writer answers.", registry=self.registry,
                                  multiprocess_mode="mostrecent")  # of who is asked, who has just looked
        self.control_pending = Gauge("vllm_tap_api_control_pending", "Control records not yet durable.",
                                     registry=self.registry, multiprocess_mode="livesum")

    def look(self, channel: ControlChannel) -> None:
        """Sets what is known only when one looks; to be called before the metrics are told."""
        self.writer_alive.set(channel.alive)
        self.control_pending.set(channel.pending)


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
