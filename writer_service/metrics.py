"""The writer's metrics for Prometheus."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import fields
from socketserver import ThreadingMixIn
from typing import Final, Protocol
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from schemas.wire.messages import TapState
from writer_service.counters import Counters
from writer_service.journal.journal import Journal

requests_max: Final = 16  # at a time
PREFIX: Final = "vllm_tap_writer_"
HELP: Final = {
    "frames": "Frames appended.",
    "rows": "Rows in them; a row is a position with all layers of its frame.",
    "frames_checksummed": "Frames whose rows got checksums as they came; others are read again to be sealed.",
    "records": "Control records accepted.",
    "payload_bytes": "Bytes of rows in frames.",
    "acks": "Acknowledgements sent.",
    "duplicates": "Messages that came again and were dropped.",
    "gaps": "Messages that came before one that is missing.",
    "malformed": "Messages that break the protocol.",
    "refused": "Records and greetings that were refused.",
    "rows_not_indexed": "Rows of captures that are closed, deleted or unknown.",
    "rows_over_quota": "Rows that were not taken because the store was over its quota.",
    "disk_errors": "File operations that failed.",
    "commits": "Group commits that reached the disk.",
    "sealed": "Segments that became blocks.",
    "expired": "Captures deleted by retention.",
    "rows_erased": "Rows of deleted captures that were erased inside blocks.",
    "erasures_failed": "Erasures that could not be ended; they are tried again.",
    "blocks_removed": "Blocks taken away whole.",
    "dropped": "Rows (position x layer) that engines say they did not keep.",
    "connections_refused": "Connections that were refused: no room, too many handshakes, one too slow, "
                           "too many of an address.",
}

TAP_PREFIX: Final = "vllm_tap_engine_"
TAP_HELP: Final = {
    "steps": "Steps of the model with rows taken.",
    "rows": "Rows taken, each layer counted.",
    "bytes": "Encoded bytes of them.",
    "dropped": "Rows that found no room.",
    "failures": "Failures in capture, beside which generation went on.",
    "position_mismatches": "Frames whose positions were not the expected ones; the model's own were stored.",
    "waits": "Steps that waited for room (on_full = wait).",
    "captures_refused": "Captures not begun, because too much waited for a writer that was away.",
}


class State(Protocol):
    """What is looked at besides the counters."""

    counters: Counters
    recovery_s: float
    recovery_cut_bytes: int

    @property
    def journal(self) -> Journal: ...

    @property
    def used_bytes(self) -> int: ...

    @property
    def taps(self) -> dict[str, TapState]: ...


class _Reader(Collector):
    """Reads plain numbers of the main loop when asked: nothing is counted twice, nothing is locked."""

    def __init__(self, state: State) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        state, counters = self._state, self._state.counters
        for field in fields(counters):
            value = getattr(counters, field.name)
            by_reason = isinstance(value, dict)
            family = CounterMetricFamily(PREFIX + field.name, HELP[field.name], labels=["reason"] if by_reason else [])
            for labels, number in [([key], n) for key, n in dict(value).items()] if by_reason else [([], value)]:
                family.add_metric(labels, number)
            yield family
        journal = state.journal
        for name, text, number in (
            ("lag_seconds", "Age of the oldest thing received that is not durable.", journal.lag_s(time.monotonic())),
            ("catalog_lag_commits", "Durable commits that readers do not see yet.", journal.catalog.backlog),
            ("store_bytes", "What the store takes of the disk.", state.used_bytes),
            ("recovery_seconds", "How long the start took to make journal and catalog whole.", state.recovery_s),
            ("recovery_cut_bytes", "Bytes that the start cut off because they were not whole.",
             state.recovery_cut_bytes),
        ):
            yield GaugeMetricFamily(PREFIX + name, text, number)
        yield from journal.sync_seconds.collect()
        yield from _of_taps(state.taps)


def _of_taps(taps: dict[str, TapState]) -> Iterator[Metric]:
    """What engines say of themselves, each under its stream's name."""
    for name, text in TAP_HELP.items():
        counter = CounterMetricFamily(TAP_PREFIX + name, text, labels=["engine"])
        for stream, tap in taps.items():
            counter.add_metric([stream], getattr(tap.counters, name))
        yield counter
    for name, text in (("ring_bytes", "Memory for rows on their way to the writer."),
                       ("ring_used_bytes", "How much of it is taken."),
                       ("waiting", "Messages that are not durable yet.")):
        gauge = GaugeMetricFamily(TAP_PREFIX + name, text, labels=["engine"])
        for stream, tap in taps.items():
            gauge.add_metric([stream], getattr(tap, name))
        yield gauge


class _Server(ThreadingMixIn, WSGIServer):
    """A thread a request, so many at a time: each takes a descriptor, and no key is asked."""

    daemon_threads = True
    room: Final = threading.BoundedSemaphore(requests_max)

    def process_request(self, request: socket.socket, client_address: tuple[str, int]) -> None:  # type: ignore[override]
        if self.room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: socket.socket, client_address: tuple[str, int]) -> None:  # type: ignore[override]
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.room.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """Who asks and goes, or says nothing, is none of ours."""


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = 5.0  # seconds between two words of a request

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


def serve_metrics(host: str, port: int, state: State) -> None:
    """Answer on ``host``:``port`` from a thread until the process ends; OSError where that cannot be."""
    registry = CollectorRegistry()
    registry.register(_Reader(state))
    server = make_server(host, port, make_wsgi_app(registry), _Server6 if ":" in host else _Server, _Handler)
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
