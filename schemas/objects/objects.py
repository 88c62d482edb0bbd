"""Objects below a URL, by obstore: S3, GCS, Azure, a folder. Requests that read are counted."""

from __future__ import annotations

import fcntl
import importlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import unquote, urlsplit

from schemas.errors import BucketError, OutrunError, TapError

__all__ = ["Listed", "Objects", "Version", "keeps_versions"]

T = TypeVar("T")
Version = dict[str, Any]  # what a conditional put names an object's content by
_TRIES: Final = 3  # of a read whose bytes were cut, beside the client's own of requests that were refused
_AT_ONCE: Final = 16
_DELETED_AT_ONCE: Final = 1000  # what S3 takes in one request
_PART_BYTES: Final = 8 << 20
# What the environment may say of a client, as AWS_ALLOW_HTTP does: options that are given take its place.
_CLIENT_OPTIONS: Final = ("allow_http", "allow_invalid_certificates", "connect_timeout", "http1_only", "http2_only",
                          "pool_idle_timeout", "proxy_ca_certificate", "proxy_excludes", "proxy_url", "user_agent")
_RETRIES: Final = 6  # of a request that was refused
_RETRY_S: Final = 60.0  # within which they are made
_process: int | None = None  # that has used the client


@dataclass(frozen=True, slots=True)
class Listed:
    """An object of a listing; when it was written, by the service's clock."""

    key: str
    nbytes: int
    modified_ms: int


class Objects:
    """Objects by keys below ``url``; credentials are those of the environment, as obstore reads them.

    FileNotFoundError of an object that is not there; BucketError where the service refuses or does not answer. With
    ``answer_s`` nothing is tried again after so many seconds, and no request takes longer.
    """

    def __init__(self, url: str, make: bool = False, answer_s: float | None = None) -> None:
        self.url = url.rstrip("/")
        self._store, stores, self._errors = (_need(name) for name in ("obstore", "obstore.store", "obstore.exceptions"))
        self._folder = Path(unquote(urlsplit(url).path)) if urlsplit(url).scheme == "file" else None
        if make and self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
        self._answer_s = answer_s
        options: dict[str, Any] = {} if self._folder is not None else {"retry_config": {
            "max_retries": _RETRIES, "retry_timeout": timedelta(seconds=answer_s or _RETRY_S)}}
        if answer_s is not None and self._folder is None:
            options["client_options"] = {**_client_options(), "timeout": timedelta(seconds=answer_s)}
        if urlsplit(url).scheme in ("s3", "s3a") and "AWS_CHECKSUM_ALGORITHM" not in os.environ:
            options["config"] = {"checksum_algorithm": "SHA256"}  # a body that was changed on its way is refused
        with self._told("open", ""):
            self._at = stores.from_url(self.url, **options)
        self._requests, self._lock = 0, threading.Lock()
        self._pool = ThreadPoolExecutor(_AT_ONCE, "vllm-tap-bucket")

    @property
    def requests(self) -> int:
        """The number of requests that have read or written an object so far; each further try counts again."""
        return self._requests

    def close(self) -> None:
        """Release the connections."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def get(self, key: str, bytes_max: int) -> tuple[bytes, Version]:
        """An object whole, and its version; BucketError where it is larger than ``bytes_max``."""
        return self._again("read", key, lambda: self._get(key, bytes_max))

    def _get(self, key: str, bytes_max: int) -> tuple[bytes, Version]:
        found = self._store.get(self._at, key)
        if found.meta["size"] > bytes_max:
            raise BucketError("read", self._name(key), f"{found.meta['size']:,} bytes, at most {bytes_max:,} are taken")
        data = bytes(found.bytes())
        _whole(len(data), found.meta["size"])
        return data, {name: found.meta[name] for name in ("e_tag", "version") if found.meta[name] is not None}

    def stream(self, key: str, nbytes: int, take: Callable[[Iterator[bytes]], T]) -> T:
        """The result of ``take`` on an object of ``nbytes`` in pieces; it is called again where they were cut."""

        def once() -> T:
            found = self._store.get(self._at, key)
            _whole(found.meta["size"], nbytes)
            return take(bytes(piece) for piece in found.stream())

        return self._again("read", key, once)

    def ranges(self, key: str, spans: Sequence[tuple[int, int]]) -> list[memoryview]:
        """The bytes ``[start, stop)`` of an object for each of ``spans``, a request each, several at once."""
        if len(spans) == 1:
            return [self._range(key, spans[0])]
        return list(self._pool.map(lambda span: self._range(key, span), spans))

    def _range(self, key: str, span: tuple[int, int]) -> memoryview:
        start, stop = span

        def once() -> memoryview:
            data = memoryview(self._store.get_range(self._at, key, start=start, end=stop)).cast("B")
            _whole(len(data), stop - start)
            return data

        return self._again("read", f"{key} at bytes {start} to {stop}", once)

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Bytes of every object whose key begins with the folder ``prefix``."""
        return self._again("list", prefix, lambda: {one.key: one.nbytes for page in self.pages(prefix) for one in page})

    def pages(self, prefix: str = "") -> Iterator[list[Listed]]:
        """Every object whose key begins with the folder ``prefix``, about a thousand at a time."""
        with self._told("list", prefix):
            for page in self._store.list(self._at, prefix or None):
                yield [Listed(entry["path"], entry["size"], _ms(entry["last_modified"])) for entry in page]

    def folders(self, prefix: str = "") -> list[str]:
        """The folders below the folder ``prefix``, one level deep, by their names."""
        found = self._again("list", prefix, lambda: self._store.list_with_delimiter(self._at, prefix or None))
        return sorted(path.rstrip("/").rpartition("/")[2] for path in found["common_prefixes"])

    def modified_ms(self, key: str) -> int:
        """When an object was written, in milliseconds since 1970 by the service's clock."""
        with self._told("read", key):
            return _ms(self._store.head(self._at, key)["last_modified"])

    def delete(self, keys: list[str]) -> None:
        """Remove objects; of those that are not there nothing is said."""
        with self._told("delete", keys[0] if keys else ""):
            for begin in range(0, len(keys), _DELETED_AT_ONCE):
                part = keys[begin:begin + _DELETED_AT_ONCE]
                try:
                    self._store.delete(self._at, part)
                except FileNotFoundError:  # a folder tells, and stops there
                    for key in part:
                        with suppress(FileNotFoundError):
                            self._store.delete(self._at, [key])

    def put(self, key: str, data: bytes | Callable[[], Iterator[bytes]]) -> None:
        """Write an object, whatever is there; one that is given in pieces goes in parts of 8 MiB. They are asked for
        again where an answer was cut.
        """

        def once() -> None:
            if isinstance(data, bytes):
                self._store.put(self._at, key, data, use_multipart=False)
            else:
                self._store.put(self._at, key, data(), use_multipart=True, chunk_size=_PART_BYTES)

        self._again("write", key, once)

    def swap(self, key: str, data: bytes, seen: Version | None) -> None:
        """Write an object where it is still the version that was ``seen``, None: where there is none.

        OutrunError where it is not. Where no answer comes it may have been written: who asks has to look.
        """
        with self._told("write", key), self._locked():
            if self._folder is not None:  # a folder knows no condition but "there is none"
                try:
                    now = self._get(key, 1 << 20)[1]
                except FileNotFoundError:
                    now = None
                if now != seen:
                    raise OutrunError("write", self._name(key), "another was written since")
                self._store.put(self._at, key, data)
                return
            try:
                self._store.put(self._at, key, data, use_multipart=False, mode="create" if seen is None else seen)
            except (self._errors.AlreadyExistsError, self._errors.PreconditionError):
                raise OutrunError("write", self._name(key), "another was written since") from None

    def check_conditions(self, key: str) -> None:
        """TapError where the service writes although a condition is not met: of two pushes at once both would seem
        first. ``key`` is that of an object that says nothing.
        """
        if self._folder is not None:
            return
        self.put(key, b"{}")
        for mode in ("create", {"e_tag": '"0"'}):
            with self._told("write", key):
                try:
                    self._store.put(self._at, key, b"{}", use_multipart=False, mode=mode)
                except (self._errors.AlreadyExistsError, self._errors.PreconditionError):
                    continue
            raise TapError(f"{self.url}: this service writes objects although the condition of the write is not met "
                           "(If-None-Match, If-Match), so that of two pushes at once both would seem to be first; use "
                           "one that heeds conditions, as S3, GCS and Azure do")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """The folder's lock, where the store is one."""
        if self._folder is None:
            yield
            return
        with (self._folder / ".head.lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _name(self, key: str) -> str:
        return f"{self.url}/{key}"

    def _again(self, op: str, key: str, once: Callable[[], T]) -> T:
        """The result of ``once``, tried again where bytes were cut on the way."""
        began_s = time.monotonic()
        for number in range(_TRIES):
            with self._lock:
                self._requests += 1
            try:
                with self._told(op, key):
                    return once()
            except BucketError as error:
                late = self._answer_s is not None and time.monotonic() - began_s >= self._answer_s
                if not error.passing or late or number + 1 == _TRIES:
                    raise
                time.sleep(0.1 * 4**number)
        raise AssertionError

    @contextmanager
    def _told(self, op: str, key: str) -> Iterator[None]:
        """Raise errors of the client as ours, in one line. TapError in a process that was forked from one with a
        client: the client's threads stayed behind, so every request would wait for ever.
        """
        global _process
        if _process not in (None, os.getpid()):
            raise TapError(f"{self.url}: a bucket was used before this process was forked, which its client does not "
                           "stand: start processes with spawn or forkserver (multiprocessing_context of a DataLoader)")
        _process = os.getpid()
        try:
            yield
        except (TapError, FileNotFoundError):
            raise
        except NotImplementedError:
            raise BucketError(op, self._name(key), "this kind of store cannot do it",
                              "name a bucket of S3, GCS or Azure, or a folder as file:///path") from None
        except (self._errors.BaseError, OSError, ValueError) as error:
            text = " ".join(str(error).partition("Debug source:")[0].split())[:400]
            refused = isinstance(error, (self._errors.PermissionDeniedError, self._errors.UnauthenticatedError,
                                         self._errors.UnknownConfigurationKeyError))
            raise BucketError(op, self._name(key), text, "look at the credentials, region and endpoint of the "
                              "environment (AWS_…, GOOGLE_…, AZURE_…)" if refused else "", not refused) from None


def keeps_versions(version: Version) -> bool:
    """Whether a bucket keeps what is deleted or replaced, by the version of an object in it."""
    return version.get("version") not in (None, "null")


def _client_options() -> dict[str, Any]:
    return {name: value for name in _CLIENT_OPTIONS for prefix in ("AWS", "GOOGLE", "AZURE")
            if (value := os.environ.get(f"{prefix}_{name.upper()}")) is not None}


def _ms(when: datetime) -> int:
    return int(when.timestamp() * 1000)


def _whole(found: int, wanted: int) -> None:
    if found != wanted:
        raise OSError(f"{found:,} bytes came, {wanted:,} were expected")


def _need(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise TapError("a store in a bucket needs obstore: pip install 'vllm-tap[buckets]'") from None
