"""Settings of the API process, all defaults visible."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from schemas import limits
from schemas.bucket.places import check_places
from schemas.checks import check_name, check_port, check_seconds
from schemas.errors import StartError, TapError
from schemas.postgres.connection import check_catalog
from schemas.spec import parse_spec
from schemas.store.paths import KEYS_FILE

__all__ = ["Config"]

_NAMED: Final = re.compile(r"([^:/=]*)=(.*)", re.DOTALL)  # NAME=URL, which no URL alone is


def keys_file(store: Path, keys: Path | None) -> Path:
    """Path of a store's keys, if nobody says otherwise."""
    return keys or store / KEYS_FILE


@dataclass(frozen=True, slots=True)
class Config:
    """Places of store, writer and upstream, or of a bucket, and limits of a request. Times in seconds."""

    store: Path  # read where no bucket is named
    endpoint: str  # the writer's, ipc://…: it is on this host, as its store is; "" with a bucket
    upstream: Sequence[str] = ("http://127.0.0.1:8101",)  # vLLM's OpenAI server; of several each as NAME=URL
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
    upstream_look_s: float = 2.0  # between two looks at each of several, whether it serves and which models
    capture_all: str = ""  # the spec, as JSON, of requests that bring none
    status_wait_s: float = 2.0  # how long an answer waits for its capture to become final
    inline_wait_s: float = 30.0  # … where it is to hold the rows
    settle_s: float = 30.0  # after this, a capture that no engine has begun is closed as failed
    buckets: Sequence[str] = ()  # URLs of stores that are read in place of the store; only reading is served then
    also: Sequence[str] = ()  # URLs of other stores that are read beside the store
    cache: Path | None = None  # of a bucket's rows and catalogs, on a local disk; None: ~/.cache/vllm-tap
    cache_bytes: int = limits.bucket_cache_bytes
    catalog: str = field(default="", repr=False)  # of a bucket: the URL of the Postgres database that has its catalog
    deletes: bool = False  # of a bucket: whether DELETE of a capture is served too
    bucket_look_s: float = 5.0  # between two looks for a newer head
    bucket_answer_s: float = 20.0  # a read of the bucket that takes longer is given up
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
        for name in ("slice_stall_s", "head_s", "body_s", "bucket_look_s", "bucket_answer_s"):
            check_seconds(name, getattr(self, name))
        for name in ("requests_in_flight_max", "generations_in_flight_max"):
            if getattr(self, name) < 1:
                raise StartError(f"{name} = {getattr(self, name)}: at least 1")
        if self.cache_bytes < limits.bucket_cache_bytes_min:
            raise StartError(f"cache_bytes = {self.cache_bytes}: at least {limits.bucket_cache_bytes_min:,}")
        if self.buckets:
            self._check_buckets()
            return
        if self.also:
            self._check_urls(self.also)
        for name in ("catalog", "deletes"):
            if getattr(self, name) and not self.also:
                raise StartError(f"{name}: taken with a bucket's URL as --store or --also alone")
        _check_engines(self.upstream)
        if not self.endpoint.startswith("ipc://"):
            raise StartError(f"endpoint = {self.endpoint!r}: valid: the writer's, such as "
                             f"ipc:///tmp/vllm-tap/writer.sock")

    def _check_urls(self, urls: Sequence[str]) -> None:
        try:
            check_places(urls)
        except TapError as error:
            raise StartError(str(error)) from None
        if self.catalog:
            check_catalog(self.catalog)

    def _check_buckets(self) -> None:
        self._check_urls(self.buckets)
        for name in ("endpoint", "upstream", "capture_all", "also"):
            if value := getattr(self, name):
                raise StartError(f"{name} = {value!r}: an API that reads a bucket has no writer and no engine; valid: "
                                 f"none with store = {', '.join(self.buckets)!r}")
        if self.keys is None and not is_loopback(self.host):
            raise StartError(f"keys = None: beyond loopback (host = {self.host!r}) a bucket is read with keys alone; "
                             "name a file of keys whose names are the owners of its captures, such as the keys.json "
                             "of the store that pushes")

    @property
    def engines(self) -> dict[str, str]:
        """URLs of the model servers by their names; "" names the only one, where it was given none."""
        return dict(_engine(text) for text in self.upstream)

    @property
    def keys_file(self) -> Path:
        """Path of the API keys."""
        return keys_file(self.store, self.keys)


def _engine(text: str) -> tuple[str, str]:
    """Name and URL of a model server, given as NAME=URL or as a URL alone."""
    named = _NAMED.fullmatch(text)
    return (named[1], named[2]) if named else ("", text)


def _check_engines(given: Sequence[str]) -> None:
    """StartError where a model server has no URL, or several cannot be told apart."""
    if not 1 <= len(given) <= limits.engines_max:
        raise StartError(f"upstream: {len(given)} model servers; valid: 1 to {limits.engines_max}")
    names, urls = set[str](), set[str]()
    for text in given:
        name, url = _engine(text)
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise StartError(f"upstream = {text!r}: valid: a URL such as http://127.0.0.1:8101")
        if name or "=" in text.partition(":")[0]:
            check_name(f"upstream = {text!r}: NAME", name)
        elif len(given) > 1:
            raise StartError(f"upstream = {text!r}: each of several needs a name, as in a={url}: the one that its "
                             f"engine was started with (VLLM_TAP_ENGINE)")
        if name in names or url.rstrip("/") in urls:
            raise StartError(f"upstream = {text!r}: {'this name' if name in names else 'this URL'} was given before")
        names.add(name)
        urls.add(url.rstrip("/"))


def is_loopback(host: str) -> bool:
    """Whether nobody but this machine can reach a socket bound to ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
