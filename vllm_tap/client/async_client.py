"""The client for programs that run on asyncio; what it asks and how it reads answers is ``Client``'s too.

>>> async with AsyncClient() as client:                                           # doctest: +SKIP
...     generation = await client.generate("Hello", capture={"sites": ["resid_post"]})
...     rows = await generation.capture.slice("resid_post", 12)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal, overload

import httpx

from schemas import limits
from schemas.attended import Attention, AttentionAsked
from schemas.attention import AttentionRule
from schemas.errors import TapError
from schemas.manifest import FINAL, Manifest
from schemas.read.reader import CaptureRow
from schemas.sites import BY_MODEL, PROBE
from vllm_tap.client import http
from vllm_tap.client.answers import Answer
from vllm_tap.client.attention import whole_attention
from vllm_tap.client.captures import (
    F32,
    Key,
    Layers,
    Rows,
    check_range,
    drop_layer_axis,
    only_layer,
    require_whole,
    site_and_layers,
    site_on_model,
)
from vllm_tap.client.listing import Filters, Page
from vllm_tap.client.sweep_plan import Metric, SweepAsked
from vllm_tap.client.sweep_result import PatchSweep
from vllm_tap.client.sweep_run import sweep
from vllm_tap.errors import NotFound, not_complete
from vllm_tap.progress import ProgressReport, reporting

__all__ = ["AsyncCapture", "AsyncClient", "AsyncGeneration"]


class AsyncCapture:
    """A capture by any of its names, as ``Capture`` but awaited; nothing is read before it is asked for."""

    def __init__(self, client: AsyncClient, ref: str, wait_s: float = 30.0) -> None:
        self.id, self.wait_s, self._client = ref, wait_s, client

    def __repr__(self) -> str:
        return f"AsyncCapture({self.id!r})"

    async def manifest(self) -> Manifest:
        """Rows asked for, stored and missed; waits until the capture is final, at most ``wait_s`` seconds."""
        return await self._client.manifest(self.id, self.wait_s)

    async def status(self) -> str:
        """pending, running, complete, empty, incomplete or failed, as of now."""
        return (await self._client.manifest(self.id)).status

    async def get(self, *key: Any) -> F32:
        """``Capture.__getitem__``: all rows of a site and layer, float32 ``[rows, width]``."""
        found: Key = key if len(key) > 1 else key[0]
        name, layer = found if isinstance(found, tuple) else (found, None)
        return drop_layer_axis((await self.slice(name, layer)).values, layer)

    async def probe(self, name: str) -> F32:
        """``Capture.probe``: all scores of a registered probe, float32 ``[rows, k]``."""
        return await self.get(f"{PROBE}{name}")

    async def slice(self, site: str, layer: Layers = None, start: int = 0, stop: int | None = None,
                    allow_missing: bool = False) -> Rows:
        """``Capture.slice``."""
        name, (site, layers) = site, site_and_layers(site, layer)
        if site in BY_MODEL:
            manifest = await self.manifest()
            site = site_on_model(site, name, lambda: manifest)
        if layers is None:
            layers = only_layer(site, await self.manifest())
        rows = await self._client.rows(self.id, site, layers, start, stop, None if allow_missing else self.wait_s)
        return require_whole(rows, allow_missing)

    async def attention(self, layer: int, rule: AttentionRule | None = None, top: int = 8, start: int = 0,
                        stop: int | None = None, allow_missing: bool = False, check: bool = False,
                        heads: Sequence[int] | None = None) -> Attention:
        """``Capture.attention``."""
        check_range(start, stop)
        return await self._client.attention(self.id, AttentionAsked(
            layer=layer, rule=rule, top=top, spans=[(start, stop)], heads=heads, allow_missing=allow_missing,
            check=check), self.wait_s)


@dataclass(frozen=True, slots=True)
class AsyncGeneration(Answer):
    """An answer with its captures, one for each choice captured."""

    captures: list[AsyncCapture] = field(default_factory=list)

    @property
    def capture(self) -> AsyncCapture:
        """The one capture; TapError where there is none or there are several."""
        return self._only(self.captures)


class AsyncClient:
    """A connection to the service; everything as in ``Client``, awaited."""

    _connection: ClassVar[type[Any]] = httpx.AsyncClient

    def __init__(self, base_url: str = "http://127.0.0.1:8100", timeout_s: float = 600.0, wait_s: float = 30.0, *,
                 api_key: str | None = None, retries: int = 4, engine: str | None = None) -> None:
        self.base_url, self.wait_s = http.root(base_url), wait_s
        self._http = self._connection(**http.settings(self.base_url, timeout_s, api_key, engine))
        self._retries = retries
        self._model: str | None = None

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        trace: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.aclose()

    async def generate(self, prompt: http.AnyPrompt, max_tokens: int = 16, capture: http.Spec | None = None, *,
                       edit: http.Edits | None = None, **fields: Any) -> AsyncGeneration:
        """``Client.generate``."""
        model = fields.pop("model", None) or await self.model()
        request = http.generate_request(prompt, max_tokens, http.Asked(capture, edit), model, fields)
        response = http.read_generation(await self._send(request), capture is not None or bool(edit))
        ids = Answer(response).capture_ids
        return AsyncGeneration(response, [AsyncCapture(self, capture_id, self.wait_s) for capture_id in ids])

    @overload
    async def generate_all(self, prompts: Iterable[http.AnyPrompt], max_tokens: int = 16,
                           capture: http.Spec | None = None, *, edit: http.Edits | None = None,
                           at_once: int = 64, progress: ProgressReport = False,
                           return_exceptions: Literal[False] = False, **fields: Any) -> list[AsyncGeneration]: ...

    @overload
    async def generate_all(self, prompts: Iterable[http.AnyPrompt], max_tokens: int = 16,
                           capture: http.Spec | None = None, *, edit: http.Edits | None = None,
                           at_once: int = 64, progress: ProgressReport = False,
                           return_exceptions: bool, **fields: Any) -> list[AsyncGeneration | Exception]: ...

    async def generate_all(self, prompts: Iterable[http.AnyPrompt], max_tokens: int = 16,
                           capture: http.Spec | None = None, *, edit: http.Edits | None = None,
                           at_once: int = 64, progress: ProgressReport = False,
                           return_exceptions: bool = False, **fields: Any
                           ) -> list[AsyncGeneration] | list[AsyncGeneration | Exception]:
        """``Client.generate_all``."""
        http.check_all(prompts, at_once)
        asked = list(prompts)
        free, done = asyncio.Semaphore(at_once), 0
        await self.model()
        with reporting(progress, "generating") as tell:

            async def one(number: int, prompt: http.AnyPrompt) -> AsyncGeneration | Exception:
                nonlocal done
                made: AsyncGeneration | Exception
                async with free:
                    try:
                        made = await self.generate(prompt, max_tokens, capture, edit=edit, **fields)
                    except Exception as error:
                        error.add_note(f"of prompts[{number}]")
                        if not return_exceptions:
                            raise
                        made = error
                done += 1
                tell(done, len(asked))
                return made

            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(one(number, prompt)) for number, prompt in enumerate(asked)]
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def patch_sweep(self, clean: http.AnyPrompt, corrupted: http.AnyPrompt, sites: Sequence[str], metric: Metric,
                          *, layers: Sequence[int] | None = None, positions: Sequence[int] | None = None,
                          results: str | Path | None = None, progress: ProgressReport = False) -> PatchSweep:
        """``Client.patch_sweep``."""
        return await sweep(self, SweepAsked(clean, corrupted, sites, layers, positions, metric), results, progress)

    async def model(self) -> str:
        """The name of the served model."""
        self._check_open()
        if self._model is None:
            self._model = str((await self._json(http.Request("GET", "/v1/models")))["data"][0]["id"])
        return self._model

    def capture(self, ref: str) -> AsyncCapture:
        """A capture by its id, the response id or the X-Request-Id; looked up when it is read."""
        return AsyncCapture(self, ref, self.wait_s)

    def captures(self, status: str | None = None, *, tags: Mapping[str, str | None] | None = None,
                 model: str | None = None, site: str | None = None, since: datetime | str | None = None,
                 until: datetime | str | None = None, text: str | None = None, limit: int | None = None,
                 before: str | None = None) -> AsyncIterator[CaptureRow]:
        """``Client.captures``, for ``async for``."""
        filters = Filters(status, tags or {}, model, site, since, until, text)
        return filters.apages(partial(self.page, filters), limit, before)

    async def page(self, filters: Filters, count: int, before: str | None) -> Page:
        """A page of ``captures``: at most ``count`` of those older than ``before``."""
        return http.read_captures(await self._send(http.captures_request(filters, count, before)))

    async def wait(self, refs: Iterable[str], timeout_s: float = 60.0, *, progress: ProgressReport = False
                   ) -> list[Manifest]:
        """``Client.wait``."""
        names, end_s = list(refs), time.monotonic() + timeout_s
        found: list[Manifest] = []
        with reporting(progress, "waiting") as tell:
            for ref in names:
                found.append(await self.final(ref, end_s - time.monotonic()))
                tell(len(found), len(names))
        return found

    async def delete(self, ref: str) -> None:
        """``Client.delete``."""
        await self._send(http.Request("DELETE", http.path(ref), again=False))

    async def hold(self, ref: str) -> None:
        """``Client.hold``."""
        await self._send(http.Request("PUT", http.path(ref) + "/hold"))

    async def release(self, ref: str) -> None:
        """``Client.release``."""
        await self._send(http.Request("DELETE", http.path(ref) + "/hold"))

    async def put_vector(self, name: str, vector: Any) -> str:
        """``Client.put_vector``."""
        return str((await self._json(http.put_vector_request(name, vector)))["digest"])

    async def vectors(self) -> dict[str, str]:
        """``Client.vectors``."""
        return http.read_vectors(await self._send(http.Request("GET", "/v1/vectors")))

    async def delete_vector(self, name: str) -> None:
        """``Client.delete_vector``."""
        await self._send(http.Request("DELETE", http.vector_path(name), again=False))

    async def capabilities(self) -> dict[str, Any]:
        """``Client.capabilities``."""
        return await self._json(http.Request("GET", "/v1/capabilities"))

    # ── what an AsyncCapture reads from ─────────────────────────────────────────────────────────────────────────

    async def manifest(self, ref: str, wait_s: float | None = None) -> Manifest:
        """``Client.manifest``."""
        end_s = time.monotonic() + (wait_s or 0.0)
        while True:  # an answer is waited for so long at most
            left_s = None if wait_s is None else max(end_s - time.monotonic(), 0.0)
            found = http.read_manifest(ref, await self._send(http.manifest_request(ref, left_s)))
            if found.status in FINAL or time.monotonic() >= end_s:
                return found

    async def final(self, ref: str, wait_s: float) -> Manifest:
        """``Client.final``."""
        if (found := await self.manifest(ref, wait_s)).status in FINAL:
            return found
        raise not_complete(found, wait_s)

    async def rows(self, ref: str, site: str, layers: Sequence[int], start: int, stop: int | None,
                   wait_s: float | None, rejected: bool = False) -> Rows:
        """``Client.rows``."""
        if wait_s is not None and wait_s > limits.wait_timeout_s_max:
            await self.final(ref, wait_s)
        return http.read_rows(site, layers, await self._send(
            http.rows_request(ref, site, layers, start, stop, wait_s, rejected)))

    async def zarr_value(self, ref: str, key: str, span: slice) -> bytes | None:
        """``Client.zarr_value``."""
        if {"", ".", ".."} & set(key.split("/")):  # would reach another route
            return None
        try:
            found = (await self._send(http.zarr_request(ref, key, span))).content
        except NotFound as error:
            if error.code == "no_such_key":
                return None
            raise
        return found if span.stop is None else found[:span.stop - (span.start or 0)]

    async def attention(self, ref: str, asked: AttentionAsked, wait_s: float) -> Attention:
        """``Client.attention``."""
        if not asked.allow_missing:
            await self.final(ref, wait_s)
        answer = await self._send(http.attention_request(ref, asked))
        return whole_attention(http.read_attention(answer), asked)

    async def _json(self, request: http.Request) -> dict[str, Any]:
        return http.read_object(await self._send(request))

    def _check_open(self) -> None:
        if self._http.is_closed:
            raise TapError("this client was closed")

    async def _send(self, request: http.Request) -> httpx.Response:
        self._check_open()
        attempts = http.Attempts(self._retries, self.base_url, request)
        while True:
            try:
                answer: httpx.Response = await self._http.request(request.method, request.path, params=request.params,
                                                                  json=request.body, headers=request.headers)
            except httpx.HTTPError as error:
                wait_s = attempts.failed(error)
            else:
                if not answer.is_error:
                    return answer
                wait_s = attempts.refused(answer)
            await self._sleep(wait_s)

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
