"""The client of the HTTP service: generate with a capture, read captures, delete them.

>>> client = Client("http://127.0.0.1:8100")                                      # doctest: +SKIP
>>> generation = client.generate("The capital of France is", max_tokens=8, capture={"sites": ["resid_post"]})
...                                                                               # doctest: +SKIP
>>> generation.text, generation["resid_post", 12].shape                          # doctest: +SKIP
(' Paris…', (13, 4096))
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from datetime import datetime
from types import TracebackType
from typing import Any, TypeVar

import httpx

from schemas import limits
from schemas.errors import TapError
from schemas.manifest import FINAL, Manifest
from schemas.read.reader import CaptureRow
from vllm_tap.client import http
from vllm_tap.client.captures import F32, Capture, Key, Layers, Rows
from vllm_tap.client.listing import Filters
from vllm_tap.errors import not_complete
from vllm_tap.progress import Report, reporting

__all__ = ["Answer", "Client", "Generation"]

C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class Answer:
    """What the server answered a generation with: ``response`` as it came."""

    response: dict[str, Any]

    @property
    def id(self) -> str:
        """The response id; it names the capture too."""
        return str(self.response["id"])

    @property
    def texts(self) -> list[str]:
        """The text of every choice."""
        return [str(choice["message"]["content"] or "") if "message" in choice else str(choice["text"])
                for choice in self.response["choices"]]

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.texts[0]

    @property
    def capture_ids(self) -> list[str]:
        """The ids of its captures, one a choice; empty where none was asked for."""
        return list(self.response.get("capture", {}).get("ids", []))

    @property
    def capture_id(self) -> str:
        """The capture's id; where the request made several, the id they share."""
        if not self.capture_ids:
            raise TapError("this generation was asked for without a capture; pass capture={…} to generate()")
        return str(self.response["capture"]["id"])

    def _only(self, captures: Sequence[C]) -> C:
        """The one capture; TapError where there is none or there are several."""
        if self.capture_id and len(captures) > 1:
            raise TapError(f"this generation has {len(captures)} captures; use .captures[i]")
        return captures[0]


@dataclass(frozen=True, slots=True)
class Generation(Answer):
    """An answer with its captures, one for each choice captured."""

    captures: list[Capture] = field(default_factory=list)

    @property
    def capture(self) -> Capture:
        """The one capture; TapError where there is none or there are several."""
        return self._only(self.captures)

    def manifest(self) -> Manifest:
        """``Capture.manifest`` of the one capture."""
        return self.capture.manifest()

    def __getitem__(self, key: Key) -> F32:
        """``Capture.__getitem__`` of the one capture."""
        return self.capture[key]

    def probe(self, name: str) -> F32:
        """``Capture.probe`` of the one capture."""
        return self.capture.probe(name)

    def slice(self, site: str, layer: Layers = None, start: int = 0, stop: int | None = None,
              allow_missing: bool = False) -> Rows:
        """``Capture.slice`` of the one capture."""
        return self.capture.slice(site, layer, start, stop, allow_missing)


class Client:
    """A connection to the service at ``base_url``, with ``/v1`` or without; ``timeout_s`` bounds one generation,
    ``wait_s`` one capture.

    ``api_key`` (default: the environment's ``VLLM_TAP_API_KEY``) goes along as a bearer token. What is refused for now
    (429, 503) or does not connect is tried ``retries`` more times, after as long as the answer's ``Retry-After`` asks
    for; a generation that may have begun is never sent twice. Safe to use from several threads.
    """

    def __init__(self, base_url: str = "http://127.0.0.1:8100", timeout_s: float = 600.0, wait_s: float = 30.0, *,
                 api_key: str | None = None, retries: int = 4) -> None:
        self.base_url, self.wait_s = http.root(base_url), wait_s
        self._http = httpx.Client(**http.settings(self.base_url, timeout_s, api_key))
        self._retry = http.Retry(retries)
        self._model: str | None = None

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def generate(self, prompt: str | Sequence[Any] | http.Messages, max_tokens: int = 16,
                 capture: http.Spec | None = None, **fields: Any) -> Generation:
        """Text for a prompt (text, token ids, or a list of either), or an answer to chat messages.

        ``capture`` is the spec (``{}``: everything armed); ``fields`` are OpenAI's and vLLM's, such as ``temperature``,
        ``n``, ``seed``; ``model`` is the served one where not named. Raises BadRequest, Conflict or Unavailable with
        the service's message.
        """
        model = fields.pop("model", None) or self.model()
        response = http.read_generation(self._send(http.ask_generate(prompt, max_tokens, capture, model, fields)),
                                        capture is not None)
        answer = Answer(response)
        return Generation(response, [Capture(self, capture_id, self.wait_s) for capture_id in answer.capture_ids])

    def generate_all(self, prompts: Iterable[str | Sequence[Any] | http.Messages], max_tokens: int = 16,
                     capture: http.Spec | None = None, *, at_once: int = 16, progress: Report = False,
                     **fields: Any) -> list[Generation]:
        """``generate`` for every prompt, ``at_once`` at a time, so that the engine's batches are full.

        In the order of the prompts. ``progress``: True for a bar, or a function of (done, total). The first error ends
        it, once what is under way has ended, with a note that names its prompt.
        """
        http.check_all(prompts, at_once)
        asked = list(prompts)
        self.model()
        with reporting(progress, "generating") as tell, ThreadPoolExecutor(at_once) as pool:
            futures = [pool.submit(self.generate, prompt, max_tokens, capture, **fields) for prompt in asked]
            try:
                for done, future in enumerate(as_completed(futures), 1):
                    if (error := future.exception()) is not None:
                        error.add_note(f"of prompts[{futures.index(future)}]")
                        raise error
                    tell(done, len(asked))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
            return [future.result() for future in futures]

    def model(self) -> str:
        """The name of the served model."""
        http.check_open(self._http)
        if self._model is None:
            self._model = str(self._json(http.Ask("GET", "/v1/models"))["data"][0]["id"])
        return self._model

    def capture(self, ref: str) -> Capture:
        """A capture by its id, the response id or the X-Request-Id; looked up when it is read."""
        return Capture(self, ref, self.wait_s)

    def captures(self, status: str | None = None, *, tags: Mapping[str, str | None] | None = None,
                 model: str | None = None, site: str | None = None, since: datetime | str | None = None,
                 until: datetime | str | None = None, text: str | None = None, limit: int | None = None,
                 before: str | None = None) -> Iterator[CaptureRow]:
        """The captures that the filters let through, newest first, page by page as they are taken.

        ``tags`` must all be there (value None: any); ``site`` must have been captured; ``since`` (included) and
        ``until`` bound when they were made; ``text`` is part of an id, a name or a tag; ``before`` is the id that an
        earlier list ended with.
        """
        filters = Filters(status, tags or {}, model, site, since, until, text)
        return filters.pages(lambda count, after: http.read_captures(
            self._send(http.ask_captures(filters, count, after))), limit, before)

    def wait(self, refs: Iterable[str], timeout_s: float = 60.0, *, progress: Report = False) -> list[Manifest]:
        """The manifests of captures once all are final; NotComplete where that takes longer than ``timeout_s``."""
        names, end_s = list(refs), time.monotonic() + timeout_s
        found = []
        with reporting(progress, "waiting") as tell:
            for ref in names:
                found.append(self.final(ref, end_s - time.monotonic()))
                tell(len(found), len(names))
        return found

    def delete(self, ref: str) -> None:
        """Hides a capture for good; NotFound where there is none, Conflict while it is held."""
        self._send(http.Ask("DELETE", http.path(ref), again=False))

    def hold(self, ref: str) -> None:
        """Keeps a capture from being deleted or expired until it is released."""
        self._send(http.Ask("PUT", http.path(ref) + "/hold"))

    def release(self, ref: str) -> None:
        """Ends a hold."""
        self._send(http.Ask("DELETE", http.path(ref) + "/hold"))

    def capabilities(self) -> dict[str, Any]:
        """What can be captured, the codecs, the formats, the limits."""
        return self._json(http.Ask("GET", "/v1/capabilities"))

    # ── what a Capture reads from ───────────────────────────────────────────────────────────────────────────────

    def manifest(self, ref: str, wait_s: float | None = None) -> Manifest:
        """The manifest; with ``wait_s``, once the capture is final or that many seconds have passed."""
        end_s = time.monotonic() + (wait_s or 0.0)
        while True:  # an answer is waited for so long at most
            left_s = None if wait_s is None else max(end_s - time.monotonic(), 0.0)
            found = http.read_manifest(ref, self._send(http.ask_manifest(ref, left_s)))
            if found.status in FINAL or time.monotonic() >= end_s:
                return found

    def final(self, ref: str, wait_s: float) -> Manifest:
        """The manifest once the capture is final; NotComplete where that takes longer than ``wait_s`` seconds."""
        if (found := self.manifest(ref, wait_s)).status in FINAL:
            return found
        raise not_complete(found, wait_s)

    def rows(self, ref: str, site: str, layers: Sequence[int], start: int, stop: int | None,
             wait_s: float | None, rejected: bool = False) -> Rows:
        """Decoded rows; NotComplete where the capture is not final after ``wait_s`` seconds (None: as it is)."""
        if wait_s is not None and wait_s > limits.wait_timeout_s_max:
            self.final(ref, wait_s)
        return http.read_rows(site, layers, self._send(
            http.ask_rows(ref, site, layers, start, stop, wait_s, rejected)))

    def _json(self, ask: http.Ask) -> dict[str, Any]:
        return http.read_object(self._send(ask))

    def _send(self, ask: http.Ask) -> httpx.Response:
        http.check_open(self._http)
        tries = http.Tries(self._retry, self.base_url, ask)
        while True:
            try:
                answer = self._http.request(ask.method, ask.path, params=ask.params, json=ask.body)
            except httpx.HTTPError as error:
                wait_s = tries.failed(error)
            else:
                if not answer.is_error:
                    return answer
                wait_s = tries.refused(answer)
            time.sleep(wait_s)
