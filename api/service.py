"""The service behind every request: the store's reader, the channel to the writer, the model servers, the metrics."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import anyio
import httpx
from fastapi import Request

from api.auth.limits import Quotas, share
from api.bucket.followed import FollowedBuckets
from api.config import Config
from api.engines.pressure import Pressure
from api.engines.upstreams import Upstreams
from api.errors import ApiError, stopped
from api.feed import Feed
from api.metrics import Metrics
from schemas import limits
from schemas.bucket.reader import AnyReader
from schemas.errors import NotFoundError, StoreError, TapError
from schemas.ids import split_capture_id
from schemas.lru import Lru
from schemas.read.reader import StoreReader
from schemas.wire.control_channel import ControlChannel
from schemas.wire.records import Abandon, Record

__all__ = ["ApiService", "owner_of", "service_of"]

log = logging.getLogger("vllm_tap.api")
T = TypeVar("T")

_TIDY_S: Final = 5.0  # between two looks for files that were removed
_BUCKET_READS: Final = 32  # slices at a time, where each may wait for a bucket
_MAPS: Final = 2  # that are computed at a time, each by a core
_TOKEN_TEXTS_MAX: Final = 1 << 16


@dataclass(slots=True)
class ApiService:
    """The parts of one running API process; made when it starts, closed when it stops."""

    config: Config
    metrics: Metrics
    channel: ControlChannel | None  # None where a bucket is read
    upstreams: Upstreams
    bucket: FollowedBuckets | None = None
    others: FollowedBuckets | None = None  # stores that are read beside this one
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    streams: set[httpx.Response] = field(default_factory=set)  # answers being passed on
    unsettled: dict[str, str] = field(default_factory=dict)  # captures that no engine began yet → why none may
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    feed: Feed = field(init=False)
    pressure: Pressure = field(init=False)
    quotas: Quotas = field(init=False)
    salt_secret: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    slice_bytes: Counter[str] = field(default_factory=Counter)  # by owner; ``slice_lock`` is held to change it
    slice_lock: threading.Lock = field(default_factory=threading.Lock)
    token_texts: Lru[tuple[str, str, int], str] = field(default_factory=lambda: Lru(_TOKEN_TEXTS_MAX))
    map_limit: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(_MAPS))
    map_turns: dict[str, anyio.CapacityLimiter] = field(default_factory=dict)  # by owner
    # Decoding is work for a core: more of it at a time than there are cores makes every answer as late as the last.
    slice_limit: anyio.CapacityLimiter = field(
        default_factory=lambda: anyio.CapacityLimiter(max(2, os.cpu_count() or 2)))
    _reader: StoreReader | None = None
    _catalog: tuple[int, int] = (0, 0)  # device and inode of the file that the reader has open
    _reader_lock: threading.Lock = field(default_factory=threading.Lock)
    others_limit: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(_BUCKET_READS))
    # Each writes a bucket's head: only one at a time can succeed, and those that wait hold no thread.
    delete_limit: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(1))
    # A writer that does not answer holds a thread for seconds: these must not starve the readers' threads.
    _submit_limit: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(64))

    def __post_init__(self) -> None:
        if self.bucket is not None:  # most of the time a read waits for bytes
            self.slice_limit.total_tokens = max(_BUCKET_READS, self.slice_limit.total_tokens)
        self.feed = Feed(self.reader)
        self.pressure = Pressure(self.channel, self.upstreams, self.metrics, self.spawn)
        self.quotas = Quotas(self.reader)

    def reader(self) -> AnyReader:
        """The store's reader; opened on first use, since the writer makes the store. StoreError while there is none.

        A writer that had to rebuild the catalog puts a new file in its place: then a new reader is opened. The old one
        closes when the last request that uses it ends. Of a bucket that of its newest head; BucketError while there is
        none.
        """
        return self.local() if self.bucket is None else self.bucket.reader()

    def local(self) -> StoreReader:
        """``reader`` of the store on this host."""
        with self._reader_lock:
            try:
                found = (self.config.store / "catalog.sqlite").stat()
            except OSError:
                raise StoreError("open the store", self.config.store, "there is none yet",
                                 "the writer makes it when it starts") from None
            if self._reader is None or self._catalog != (found.st_dev, found.st_ino):
                config = self.config
                self._reader = StoreReader(config.store, config.cache, config.cache_bytes, config.bucket_answer_s)
                self._catalog = (found.st_dev, found.st_ino)
            return self._reader

    async def read(self, call: Callable[[AnyReader], T], limiter: anyio.CapacityLimiter | None = None) -> T:
        """``call(reader)`` in a thread, since reading blocks."""
        return await anyio.to_thread.run_sync(lambda: self._read(call), limiter=limiter)

    def _read(self, call: Callable[[AnyReader], T], others: FollowedBuckets | None = None) -> T:
        followed = others or self.bucket
        return call(self.reader()) if followed is None else followed.read(call)

    async def read_capture(self, ref: str, owner: str, call: Callable[[AnyReader], T],
                           limiter: anyio.CapacityLimiter | None = None) -> T:
        """``read`` of the store that has a capture: this one, or else one of the others."""
        others = await self.elsewhere(ref, owner)
        return await anyio.to_thread.run_sync(lambda: self._read(call, others),
                                              limiter=limiter if others is None else self.others_limit)

    async def is_here(self, ref: str, owner: str) -> bool:
        """Whether the store that this service writes to has a capture, or no other one is read."""
        return self.others is None or await anyio.to_thread.run_sync(lambda: _has(self.reader(), ref, owner))

    async def waits_for(self, ref: str, owner: str) -> bool:
        """Whether a capture may still be made: what other stores have is final."""
        return await self.is_here(ref, owner) or await self.elsewhere(ref, owner) is None

    async def elsewhere(self, ref: str, owner: str) -> FollowedBuckets | None:
        """The other stores, if one of them has a capture, or layers of it, and this one has not. BucketError where
        that cannot be told.
        """
        others = self.others
        if others is None:
            return None
        if await self.is_here(ref, owner):
            return others if await anyio.to_thread.run_sync(lambda: is_divided(self.reader(), ref, owner)) else None
        found = await anyio.to_thread.run_sync(lambda: others.read(lambda reader: _has(reader, ref, owner)),
                                               limiter=self.others_limit)
        return others if found else None

    async def read_all(self, call: Callable[[AnyReader], T]) -> T:
        """``read`` of this store and the others as one."""
        return await anyio.to_thread.run_sync(lambda: self._read(call, self.others),
                                              limiter=None if self.others is None else self.others_limit)

    async def read_map(self, ref: str, owner: str, call: Callable[[AnyReader], T]) -> T:
        """``read_capture``, for what takes a core for a while, wherever its rows are: an owner's calls take turns
        before they wait for a core.
        """
        turns = self.map_turns.setdefault(owner, anyio.CapacityLimiter(share(_MAPS, owner)))
        async with turns:
            others = await self.elsewhere(ref, owner)
            return await anyio.to_thread.run_sync(lambda: self._read(call, others), limiter=self.map_limit)

    async def submit(self, make: Callable[[int], Record]) -> None:
        """The record, durable with the writer; raises what ``ControlChannel.submit`` raises, and 503 at a stop."""
        channel = self.channel
        if channel is None:
            raise StoreError("change the store", ", ".join(self.config.buckets), "a bucket is read only")
        work = asyncio.ensure_future(anyio.to_thread.run_sync(
            lambda: channel.submit(make, self.config.submit_s), limiter=self._submit_limit,
            abandon_on_cancel=True))
        stopping = asyncio.ensure_future(self.stopping.wait())
        try:
            await asyncio.wait({work, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise stopped()  # the record stays with the channel, whose end ends the thread too
            work.result()
        finally:
            for each in (work, stopping):
                each.cancel()
            await asyncio.gather(work, stopping, return_exceptions=True)

    @property
    def writer_alive(self) -> bool:
        """Whether there is a writer that answers."""
        return self.channel is not None and self.channel.alive

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs ``work`` beside the requests; cancelled when the process stops."""
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def keep_tidy(self) -> None:
        """Lets go of files that others removed, also while nobody reads."""
        while True:
            await asyncio.sleep(_TIDY_S)
            if self._reader is not None:
                try:
                    await anyio.to_thread.run_sync(self._reader.tidy)
                except (TapError, OSError) as error:
                    log.warning("files that others removed are still held: %s", error)

    async def stop(self) -> None:
        """Ends the generations in flight, which makes the engine close their captures."""
        self.stopping.set()
        for answer in list(self.streams):
            await answer.aclose()

    def abandon(self, capture: str, reason: str) -> None:
        """Closes a capture that no engine began; the writer refuses it, harmlessly, where one did."""
        if self.channel is None:
            return
        with contextlib.suppress(TapError):  # the writer is away and its queue full: no more can be done
            self.channel.post(lambda seq: Abandon(seq=seq, capture=capture, reason=reason[:500]))

    async def close(self) -> None:
        """Ends what runs beside, flushes the channel, closes reader and client."""
        for capture, reason in self.unsettled.items():
            self.abandon(capture, reason)
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.feed.close()
        await self.upstreams.close()
        if self.channel is not None:
            await anyio.to_thread.run_sync(self.channel.close)
        for followed in (self.bucket, self.others):
            if followed is not None:
                followed.close()
        if self._reader is not None:
            self._reader.close()


def service_of(request: Request) -> ApiService:
    """The service behind a request."""
    service = request.app.state.service
    assert isinstance(service, ApiService)
    return service


def _has(reader: AnyReader, ref: str, owner: str) -> bool:
    try:
        return bool(reader.samples(ref, owner))
    except NotFoundError:
        return False


def is_divided(reader: AnyReader, ref: str, owner: str) -> bool:
    """Whether a capture of this node has layers in stores of other nodes."""
    ulid, _ = split_capture_id(reader.samples(ref, owner)[0]) or ("", None)
    return isinstance(reader, StoreReader) and (found := reader.division(ulid)) is not None and found.is_partial


def owner_of(request: Request) -> str:
    """Whose captures the caller may see: the name of its key, "" on a service without keys."""
    owner = request.state.owner
    assert isinstance(owner, str)
    return owner


def check_ref(ref: str, param: str = "ref") -> str:
    """``ref`` if it can name a capture, else 404: it never becomes part of a path or of SQL text."""
    if split_capture_id(ref) is None and not is_alias(ref):
        raise ApiError(404, "not_found", f"no capture {ref[:100]!r}; a capture is named by its id (a ULID), "
                       "the response id or the X-Request-Id", param)
    return ref


def is_alias(text: str) -> bool:
    """Whether ``text`` may name a capture beside its id: short, and safe in a URL's path."""
    return (0 < len(text) <= limits.alias_chars_max and text.isascii()
            and all(char.isalnum() or char in "._:@+=~-" for char in text) and text.strip(".") != "")
