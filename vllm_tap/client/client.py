"""The client of the HTTP service: generate with a capture, read captures, delete them.

>>> client = Client("http://127.0.0.1:8100")                                      # doctest: +SKIP
>>> generation = client.generate("The capital of France is", max_tokens=8, capture={"sites": ["resid_post"]})
...                                                                               # doctest: +SKIP
>>> generation.text, generation["resid_post", 12].shape                          # doctest: +SKIP
(' Paris…', (13, 4096))

``AsyncClient`` builds requests and reads answers. ``Client`` runs its coroutines over a blocking connection. They never
wait for an event loop: no thread is needed, and a program may have a loop of its own (Jupyter).
"""

from __future__ import annotations

import time
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar, overload

import httpx

from schemas.attended import Attention, AttentionAsked
from schemas.manifest import Manifest
from schemas.read.reader import CaptureRow
from vllm_tap.client import http
from vllm_tap.client.answers import Generation
from vllm_tap.client.async_client import AsyncClient
from vllm_tap.client.captures import Capture, Rows
from vllm_tap.client.listing import Filters
from vllm_tap.client.sweep_plan import Metric, SweepAsked
from vllm_tap.client.sweep_result import PatchSweep
from vllm_tap.client.sweep_run import sweep_in_threads
from vllm_tap.progress import ProgressReport, reporting

__all__ = ["Client"]

T = TypeVar("T")


class _BlockingConnection:
    """The used part of ``httpx.AsyncClient`` over ``httpx.Client``: its coroutines block, and never suspend."""

    def __init__(self, **settings: Any) -> None:
        self._http = httpx.Client(**settings)

    @property
    def is_closed(self) -> bool:
        return self._http.is_closed

    async def request(self, *asked: Any, **options: Any) -> httpx.Response:
        return self._http.request(*asked, **options)

    async def aclose(self) -> None:
        self._http.close()


class _BlockingClient(AsyncClient):
    _connection = _BlockingConnection

    async def _sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine of ``_BlockingClient``."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise AssertionError(f"{coroutine} waits for an event loop")


class Client:
    """A connection to the service at ``base_url``, with ``/v1`` or without. Safe to use from several threads.

    ``timeout_s`` bounds one generation, ``wait_s`` one capture. ``api_key`` (default: the environment's
    ``VLLM_TAP_API_KEY``) goes along as a bearer token. A request that is refused for now (429, 503) or does not connect
    is tried ``retries`` more times. Each attempt comes after a growing pause, or after the time that the answer's
    ``Retry-After`` asks for; none comes if that is over 30 s. A generation that may have begun is never sent twice.
    Where the service has several engines, ``engine`` names the one that all requests go to.
    """

    def __init__(self, base_url: str = "http://127.0.0.1:8100", timeout_s: float = 600.0, wait_s: float = 30.0, *,
                 api_key: str | None = None, retries: int = 4, engine: str | None = None) -> None:
        self._client = _BlockingClient(base_url, timeout_s, wait_s, api_key=api_key, retries=retries, engine=engine)
        self.base_url, self.wait_s = self._client.base_url, wait_s

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        _run(self._client.close())

    def generate(self, prompt: http.AnyPrompt, max_tokens: int = 16, capture: http.Spec | None = None, *,
                 edit: http.Edits | None = None, **fields: Any) -> Generation:
        """Generate text for a prompt (text, token ids, or a list of either), or an answer to chat messages.

        Args:
            prompt: text, token ids, a list of either, or chat messages.
            max_tokens: tokens to generate at most.
            capture: the spec; ``{}`` captures everything that is armed, None nothing.
            edit: the edits, whose vectors may be arrays.
            fields: fields of OpenAI and vLLM, such as ``temperature``, ``n``, ``seed``; ``model`` is the served one by
                default.

        Raises:
            BadRequest: the spec or a field cannot be had.
            Conflict: the capture id is taken.
            Unavailable: a part of the service is away.
        """
        answer = _run(self._client.generate(prompt, max_tokens, capture, edit=edit, **fields))
        return Generation(answer.response, [self.capture(capture_id) for capture_id in answer.capture_ids])

    @overload
    def generate_all(self, prompts: Iterable[http.AnyPrompt], max_tokens: int = 16, capture: http.Spec | None = None, *,
                     edit: http.Edits | None = None, at_once: int = 16, progress: ProgressReport = False,
                     return_exceptions: Literal[False] = False, **fields: Any) -> list[Generation]: ...

    @overload
    def generate_all(self, prompts: Iterable[http.AnyPrompt], max_tokens: int = 16, capture: http.Spec | None = None, *,
                     edit: http.Edits | None = None, at_once: int = 16, progress: ProgressReport = False,
                     return_exceptions: bool, **fields: Any) -> list[Generation | Exception]: ...

    def generate_all(self, prompts: Iterable[http.AnyPrompt], max_tokens: int = 16, capture: http.Spec | None = None, *,
                     edit: http.Edits | None = None, at_once: int = 16, progress: ProgressReport = False,
                     return_exceptions: bool = False, **fields: Any) -> list[Generation] | list[Generation | Exception]:
        """``generate`` for every prompt, ``at_once`` at a time, so that the engine's batches are full.

        In the order of the prompts. ``progress``: True for a bar, or a function of (done, total). The first error ends
        it, once what is under way has ended, with a note that names its prompt; with ``return_exceptions`` errors take
        the places of their generations instead.
        """
        http.check_all(prompts, at_once)
        asked = list(prompts)
        self.model()
        with reporting(progress, "generating") as tell, ThreadPoolExecutor(at_once) as pool:
            futures = [pool.submit(self.generate, prompt, max_tokens, capture, edit=edit, **fields) for prompt in asked]
            try:
                for done, future in enumerate(as_completed(futures), 1):
                    if (error := future.exception()) is not None:
                        error.add_note(f"of prompts[{futures.index(future)}]")
                        if not (return_exceptions and isinstance(error, Exception)):
                            raise error
                    tell(done, len(asked))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
            return [error if isinstance(error := future.exception(), Exception) else future.result()
                    for future in futures]

    def patch_sweep(self, clean: http.AnyPrompt, corrupted: http.AnyPrompt, sites: Sequence[str], metric: Metric, *,
                    layers: Sequence[int] | None = None, positions: Sequence[int] | None = None,
                    results: str | Path | None = None, progress: ProgressReport = False) -> PatchSweep:
        """Activation patching: the effect of each row of the clean prompt on the corrupted one.

        For every site, layer and position the corrupted prompt runs with that row set to the clean one's. ``metric``
        measures the answer: ``LogitDifference(right, wrong)``, or a function of the answer. The measures are scaled so
        that the clean prompt has 1 and the corrupted one 0.

        Both prompts have the same number of tokens. ``layers`` None: every layer armed for edits. ``positions`` None:
        every position. ``results`` names a file that every measure is written to; the same call goes on from there.
        ``progress``: True for a bar, or a function of (done, total). ArgumentError, before any cell, where the sweep
        cannot be had.
        """
        asked = SweepAsked(clean, corrupted, sites, layers, positions, metric)
        return sweep_in_threads(self._client, _run, asked, results, progress)

    def model(self) -> str:
        """Return the name of the served model."""
        return _run(self._client.model())

    def capture(self, ref: str) -> Capture:
        """Name a capture by its id, the response id or the X-Request-Id; it is looked up when it is read."""
        return Capture(self, ref, self.wait_s)

    def captures(self, status: str | None = None, *, tags: Mapping[str, str | None] | None = None,
                 model: str | None = None, site: str | None = None, since: datetime | str | None = None,
                 until: datetime | str | None = None, text: str | None = None, limit: int | None = None,
                 before: str | None = None) -> Iterator[CaptureRow]:
        """The captures that the filters let through, newest first, page by page as they are taken.

        A capture must have all ``tags`` (value None: any) and have captured ``site``. It must have been made at
        ``since`` or later, and before ``until``. ``text`` is part of an id, a name or a tag. ``before`` is the id that
        an earlier list ended with.
        """
        filters = Filters(status, tags or {}, model, site, since, until, text)
        return filters.pages(lambda count, after: _run(self._client.page(filters, count, after)), limit, before)

    def wait(self, refs: Iterable[str], timeout_s: float = 60.0, *, progress: ProgressReport = False) -> list[Manifest]:
        """Return the manifests of captures once all are final; raises NotComplete after ``timeout_s`` seconds."""
        return _run(self._client.wait(refs, timeout_s, progress=progress))

    def delete(self, ref: str) -> None:
        """Delete a capture: hidden at once, erased from the disk within seconds.

        Raises NotFound if there is none, Conflict while it is held.
        """
        _run(self._client.delete(ref))

    def hold(self, ref: str) -> None:
        """Keep a capture from being deleted or expired until it is released."""
        _run(self._client.hold(ref))

    def release(self, ref: str) -> None:
        """End a hold."""
        _run(self._client.release(ref))

    def put_vector(self, name: str, vector: Any) -> str:
        """Stores a vector (an array, a tensor, a list) under a name for edits; its digest. The same numbers may be put
        again; Conflict where the name has others, or is one that the engine was started with.
        """
        return _run(self._client.put_vector(name, vector))

    def vectors(self) -> dict[str, str]:
        """Digests of the stored vectors by name."""
        return _run(self._client.vectors())

    def delete_vector(self, name: str) -> None:
        """Delete a stored vector; raises NotFound if there is none."""
        _run(self._client.delete_vector(name))

    def capabilities(self) -> dict[str, Any]:
        """Return the sites that can be captured, the codecs, the formats and the limits."""
        return _run(self._client.capabilities())

    # ── what a Capture reads from ───────────────────────────────────────────────────────────────────────────────

    def manifest(self, ref: str, wait_s: float | None = None) -> Manifest:
        """Return the manifest; with ``wait_s``, once the capture is final or after so many seconds."""
        return _run(self._client.manifest(ref, wait_s))

    def final(self, ref: str, wait_s: float) -> Manifest:
        """Return the manifest once the capture is final; raises NotComplete after ``wait_s`` seconds."""
        return _run(self._client.final(ref, wait_s))

    def rows(self, ref: str, site: str, layers: Sequence[int], start: int, stop: int | None,
             wait_s: float | None, rejected: bool = False) -> Rows:
        """Return decoded rows; raises NotComplete if the capture is not final after ``wait_s`` s (None: as it is)."""
        return _run(self._client.rows(ref, site, layers, start, stop, wait_s, rejected))

    def zarr_value(self, ref: str, key: str, span: slice) -> bytes | None:
        """Some bytes of what lies under a key of a capture's Zarr view; None where nothing does."""
        return _run(self._client.zarr_value(ref, key, span))

    def attention(self, ref: str, asked: AttentionAsked, wait_s: float) -> Attention:
        """``Capture.attention``; raises NotComplete if the capture is not final after ``wait_s`` s."""
        return _run(self._client.attention(ref, asked, wait_s))
