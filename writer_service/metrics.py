"""Counters of the main loop, and the page of metrics for Prometheus."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from socketserver import ThreadingMixIn
from typing import Annotated, Final, Protocol, get_type_hints
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, Histogram, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from schemas.wire.messages import TapState

requests_max: Final = 16  # at a time
PREFIX: Final = "vllm_tap_writer_"


@dataclass(slots=True)
class Counters:
    """Counts of the main loop since the writer's start, each the metric ``vllm_tap_writer_FIELD_total``."""

    frames: Annotated[int, "Frames appended."] = 0
    rows: Annotated[int, "Rows in frames; a row here is a position with all layers of its frame."] = 0
    frames_checksummed: Annotated[
        int, "Frames whose rows got checksums as they came; other frames are read again when they are sealed."] = 0
    records: Annotated[int, "Control records accepted."] = 0
    payload_bytes: Annotated[int, "Bytes of rows in frames."] = 0
    acks: Annotated[int, "Acknowledgements sent."] = 0
    duplicates: Annotated[int, "Messages that came again and were dropped."] = 0
    gaps: Annotated[int, "Messages that came before one that is missing."] = 0
    malformed: Annotated[int, "Messages that break the protocol."] = 0
    refused: Annotated[int, "Records and greetings that were refused."] = 0
    rows_not_indexed: Annotated[int, "Rows of captures that are closed, deleted or unknown."] = 0
    requests_uncaptured: Annotated[
        int, "Requests that engines could not capture, though all were to be; their logs have the reasons."] = 0
    rows_over_quota: Annotated[int, "Rows that were not taken because the store was over its quota."] = 0
    disk_errors: Annotated[int, "File operations that failed."] = 0
    commits: Annotated[int, "Group commits that reached the disk."] = 0
    appending_seconds: Annotated[float, "Seconds in which frames were checked and written to segments."] = 0.0
    syncing_seconds: Annotated[float, "Seconds in which a group commit was synced."] = 0.0
    held_seconds: Annotated[
        float, "Seconds in which nothing was received, because syncing or sealing had to catch up."] = 0.0
    sealed: Annotated[int, "Segments that became blocks."] = 0
    expired: Annotated[int, "Captures deleted by retention."] = 0
    rows_erased: Annotated[int, "Rows of deleted captures that were erased inside blocks."] = 0
    erasures_failed: Annotated[int, "Erasures that could not be ended; they are tried again."] = 0
    blocks_removed: Annotated[int, "Blocks taken away whole."] = 0
    dropped: Annotated[dict[str, int], "Rows (position x layer) that engines say they did not keep."] = field(
        default_factory=dict)  # by reason, as the next
    connections_refused: Annotated[
        dict[str, int], "Connections that were refused: no room, too many handshakes, one too slow, too many of an "
                        "address."] = field(default_factory=dict)


HELP: Final = {name: hint.__metadata__[0] for name, hint in get_type_hints(Counters, include_extras=True).items()}
GAUGES: Final = {
    "lag_seconds": "Age in seconds of the oldest message received that is not durable.",
    "catalog_lag_commits": "Durable commits that readers do not see yet.",
    "store_bytes": "Bytes that the store takes of the disk, measured every second.",
    "store_bytes_per_second": "Bytes of rows a second that the store was measured to take; 0: not measured yet.",
    "ranks_lost": "Ranks of engines whose sender is gone while the others go on.",
    "recovery_seconds": "Seconds that the last start took to make journal and catalog whole.",
    "recovery_cut_bytes": "Bytes that the last start cut off because they were not whole.",
}

SYNC_BUCKETS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)

TAP_PREFIX: Final = "vllm_tap_engine_"
TAP_HELP: Final = {
    "steps": "Steps of the model with rows taken.",
    "rows": "Rows taken, each layer counted.",
    "bytes": "Encoded bytes of those rows.",
    "dropped": "Rows that found no room.",
    "failures": "Failures in capture; generation went on.",
    "position_mismatches": "Frames whose positions were not the expected ones; the model's own were stored.",
    "waits": "Steps that waited for room (--on-full wait).",
    "captures_refused": "Captures not begun, because too much waited for a writer that was away.",
    "waited_copies_seconds": "Seconds of those waits in which copies from the device were under way.",
    "waited_sender_seconds": "Seconds of those waits in which the sender had not taken all rows.",
    "waited_writer_seconds": "Seconds of those waits in which the writer alone had to make room.",
}


def sync_seconds() -> Histogram:
    """The times of syncs, nothing counted yet."""
    return Histogram(f"{PREFIX}sync_seconds", "Seconds of one file's sync.", registry=None, buckets=SYNC_BUCKETS_S)


class State(Protocol):
    """Numbers of a writer besides its counters; ``gauges`` by the names in GAUGES."""

    counters: Counters
    sync_seconds: Histogram

    @property
    def taps(self) -> dict[str, TapState]: ...

    def gauges(self) -> dict[str, float]: ...


class Reader(Collector):
    """Reads plain numbers of the main loop when asked: nothing is counted twice, nothing is locked."""

    def __init__(self, state: State) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        state, counters = self._state, self._state.counters
        for name, text in HELP.items():
            value = getattr(counters, name)
            by_reason = isinstance(value, dict)
            family = CounterMetricFamily(PREFIX + name, text, labels=["reason"] if by_reason else [])
            for labels, number in [([key], n) for key, n in dict(value).items()] if by_reason else [([], value)]:
                family.add_metric(labels, number)
            yield family
        for name, number in state.gauges().items():
            yield GaugeMetricFamily(PREFIX + name, GAUGES[name], number)
        yield from state.sync_seconds.collect()
        yield from _tap_metrics(state.taps)


def _tap_metrics(taps: dict[str, TapState]) -> Iterator[Metric]:
    """Metrics that engines told of themselves, each under its stream's name."""
    for name, text in TAP_HELP.items():
        counter = CounterMetricFamily(TAP_PREFIX + name, text, labels=["engine"])
        for stream, tap in taps.items():
            counter.add_metric([stream], getattr(tap.counters, name))
        yield counter
    for name, text in (("ring_bytes", "Bytes of memory for rows on their way to the writer."),
                       ("ring_used_bytes", "Bytes of that memory that are taken."),
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
        """Ignore clients that go, or say nothing."""


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = 5.0  # seconds between two words of a request

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


def serve_metrics(host: str, port: int, state: State) -> None:
    """Answer on ``host``:``port`` from a thread until the process ends; OSError where that cannot be."""
    registry = CollectorRegistry()
    registry.register(Reader(state))
    server = make_server(host, port, make_wsgi_app(registry), _Server6 if ":" in host else _Server, _Handler)
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
