"""Settings of the API process, all defaults visible."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from schemas import limits
from schemas.checks import check_port, check_seconds
from schemas.errors import StartError, TapError
from schemas.spec import parse_spec
from schemas.store.paths import KEYS_FILE

__all__ = ["Config"]


def keys_file(store: Path, keys: Path | None) -> Path:
    """Path of a store's keys, if nobody says otherwise."""
    return keys or store / KEYS_FILE


@dataclass(frozen=True, slots=True)
class Config:
    """Places of store, writer and upstream, and limits of a request. Times in seconds."""

    store: Path
    endpoint: str  # the writer's, ipc://…: it is on this host, as its store is
    upstream: str = "http://127.0.0.1:8101"  # vLLM's OpenAI server
    host: str = "127.0.0.1"
    port: int = 8100
    keys: Path | None = None  # None: the store's, where it has any
    requests_in_flight_max: int = limits.requests_in_flight_max  # of each key
    generations_in_flight_max: int = limits.generations_in_flight_max
    body_bytes_max: int = limits.request_body_bytes_max
    slice_bytes_max: int = limits.slice_bytes_max
    slices_in_flight_bytes_max: int = limits.slices_in_flight_bytes_max
    slice_stall_s: float = 60.0  # a caller who takes nothing of a slice for so long is cut off
    head_s: float = 10.0  # within which a request's head must have come
    body_s: float = 60.0  # … and its body
    upstream_connect_s: float = 5.0
    capture_all: str = ""  # the spec, as JSON, of requests that bring none
    status_wait_s: float = 2.0  # how long an answer waits for its capture to become final
    inline_wait_s: float = 30.0  # … where it is to hold the rows
    settle_s: float = 30.0  # after this, a capture that no engine has begun is closed as failed
    stop_grace_s: float = 1.0  # on a stop, how long requests in flight may still take
    submit_s: float = limits.control_submit_timeout_ms / 1000

    def __post_init__(self) -> None:
        """Raises StartError naming the setting, its value and what would be valid."""
        check_port("port", self.port, zero="any free one")
        if self.capture_all:
            try:
                parse_spec(self.capture_all)
            except TapError as error:
                raise StartError(f"capture_all = {self.capture_all!r}: {error}") from None
        for name in ("slice_stall_s", "head_s", "body_s"):
            check_seconds(name, getattr(self, name))
        for name in ("requests_in_flight_max", "generations_in_flight_max"):
            if getattr(self, name) < 1:
                raise StartError(f"{name} = {getattr(self, name)}: at least 1")
        url = urlsplit(self.upstream)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise StartError(f"upstream = {self.upstream!r}: valid: a URL such as http://127.0.0.1:8101")
        if not self.endpoint.startswith("ipc://"):
            raise StartError(f"endpoint = {self.endpoint!r}: valid: the writer's, such as ipc:///tmp/vllm-tap/writer.sock")

    @property
    def keys_file(self) -> Path:
        """Path of the API keys."""
        return keys_file(self.store, self.keys)


def is_loopback(host: str) -> bool:
    """Whether nobody but this machine can reach a socket bound to ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
