"""The client of the HTTP service: generate with a capture, read captures, delete them.

>>> client = Client("http://127.0.0.1:8100")                                      # doctest: +SKIP
>>> generation = client.generate("The capital of France is", max_tokens=8, capture={"sites": ["resid_post"]})
...                                                                               # doctest: +SKIP
>>> generation.text, generation["resid_post", 12].shape                          # doctest: +SKIP
(' Paris…', (13, 4096))
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any
from urllib.parse import quote, urlsplit

import httpx
import msgspec
import numpy as np
from safetensors.numpy import load

from schemas import limits
from schemas.errors import TapError
from schemas.manifest import Manifest
from schemas.spec import CaptureSpec
from vllm_tap.captures import F32, Capture, Key, Rows, missing_of
from vllm_tap.errors import NotComplete, Unavailable, service_error

__all__ = ["Client", "Generation"]

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Generation:
    """The answer of one request: ``response`` as the server gave it, one entry of ``captures`` per choice captured."""

    response: dict[str, Any]
    captures: list[Capture] = field(default_factory=list)

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
    def capture_id(self) -> str:
        """The capture's id; where the request made several, the id they share."""
        if not self.captures:
            raise TapError("this generation was asked for without a capture; pass capture={…} to generate()")
        return str(self.response["capture"]["id"])

    @property
    def capture(self) -> Capture:
        """The one capture; TapError where there is none or there are several."""
        if self.capture_id and len(self.captures) > 1:
            raise TapError(f"this generation has {len(self.captures)} captures; use .captures[i]")
        return self.captures[0]

    def manifest(self) -> Manifest:
        """``Capture.manifest`` of the one capture."""
        return self.capture.manifest()

    def __getitem__(self, key: Key) -> F32:
        """``Capture.__getitem__`` of the one capture."""
        return self.capture[key]

    def slice(self, site: str, layer: int | Sequence[int] | None = None, start: int = 0, stop: int | None = None,
              allow_missing: bool = False) -> Rows:
        """``Capture.slice`` of the one capture."""
        return self.capture.slice(site, layer, start, stop, allow_missing)


class Client:
    """A connection to the service at ``base_url``; ``timeout_s`` bounds one generation, ``wait_s`` one capture."""

    def __init__(self, base_url: str = "http://127.0.0.1:8100", timeout_s: float = 600.0, wait_s: float = 30.0) -> None:
        self.base_url, self.wait_s = base_url.rstrip("/"), min(wait_s, limits.wait_timeout_s_max)
        # A proxy of the environment is for other machines; it would not find the service on this one.
        here = urlsplit(self.base_url).hostname in ("localhost", "127.0.0.1", "::1")
        self._http = httpx.Client(base_url=self.base_url, timeout=httpx.Timeout(timeout_s, connect=10.0),
                                  trust_env=not here)
        self._model: str | None = None

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def generate(self, prompt: str | Sequence[Any] | Messages, max_tokens: int = 16,
                 capture: Mapping[str, Any] | CaptureSpec | None = None, **fields: Any) -> Generation:
        """Text for a prompt (text, token ids, or a list of either), or an answer to chat messages.

        ``capture`` is the spec (``{}``: everything armed); ``fields`` are OpenAI's and vLLM's, such as ``temperature``,
        ``n``, ``seed``; ``model`` is the served one where not named. Raises BadRequest, Conflict or Unavailable with
        the service's message.
        """
        if fields.get("stream"):
            raise ValueError("stream = True: generate() gives the whole answer; use the openai package to stream")
        chat = not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
        body: dict[str, Any] = {"model": fields.pop("model", None) or self.model(), "max_tokens": max_tokens, **fields,
                                "messages" if chat else "prompt": prompt if isinstance(prompt, str) else list(prompt)}
        if capture is not None:
            body["capture"] = json.loads(capture.to_json()) if isinstance(capture, CaptureSpec) else dict(capture)
        response = self._json("POST", "/v1/chat/completions" if chat else "/v1/completions", json=body)
        ids = response.get("capture", {}).get("ids", [])
        return Generation(response, [Capture(self, capture_id, self.wait_s) for capture_id in ids])

    def model(self) -> str:
        """The name of the served model."""
        if self._model is None:
            self._model = str(self._json("GET", "/v1/models")["data"][0]["id"])
        return self._model

    def capture(self, ref: str) -> Capture:
        """A capture by its id, the response id or the X-Request-Id; looked up when it is read."""
        return Capture(self, ref, self.wait_s)

    def captures(self, status: str | None = None, limit: int = 100, before: str | None = None) -> list[dict[str, Any]]:
        """A page of the list, newest first; ``before`` is the last id of the page before."""
        asked = {"status": status, "limit": limit, "before": before}
        page: list[dict[str, Any]] = self._json(
            "GET", "/v1/captures", params={name: value for name, value in asked.items() if value is not None})["data"]
        return page

    def delete(self, ref: str) -> None:
        """Hides a capture for good; NotFound where there is none, Conflict while it is held."""
        self._send("DELETE", _path(ref))

    def capabilities(self) -> dict[str, Any]:
        """What can be captured, the codecs, the formats, the limits."""
        return self._json("GET", "/v1/capabilities")

    # ── what a Capture reads from ───────────────────────────────────────────────────────────────────────────────

    def manifest(self, ref: str, wait_s: float | None = None) -> Manifest:
        """The manifest; with ``wait_s``, once the capture is final or that many seconds have passed."""
        params = {} if wait_s is None else {"wait": "complete", "timeout": f"{wait_s:g}"}
        body = self._json("GET", _path(ref), params=params)
        if "captures" in body:
            raise TapError(f"{ref} has several captures; ask for one: {', '.join(body['captures'][:8])}")
        return msgspec.convert(body, Manifest)

    def rows(self, ref: str, site: str, layers: Sequence[int], start: int, stop: int | None,
             wait_s: float | None, rejected: bool = False) -> Rows:
        """Decoded rows; NotComplete where the capture is not final after ``wait_s`` seconds (None: as it is)."""
        params: dict[str, Any] = {"site": site, "layer": ",".join(map(str, layers)), "start": start,
                                  "format": "safetensors"}
        if stop is not None:
            params["stop"] = stop
        if rejected:
            params["rows"] = "rejected"
        if wait_s is not None:
            params |= {"wait": "complete", "timeout": f"{wait_s:g}"}
        answer = self._send("GET", f"{_path(ref)}/activations", params=params)
        arrays, headers = load(answer.content), answer.headers
        missing = missing_of(json.loads(headers["X-Tap-Missing"]))
        values = np.stack([arrays[f"{site}.{layer}"] for layer in layers])
        return Rows(headers["X-Tap-Capture"], site, list(layers), int(headers["X-Tap-Start"]),
                    int(headers["X-Tap-Stop"]), arrays["positions"], arrays["token_ids"], values, missing,
                    headers["X-Tap-Clipped"] == "true")

    def _json(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        body = self._send(method, path, **options).json()
        if not isinstance(body, dict):
            raise Unavailable(200, None, f"{self.base_url}{path} answered something else than a JSON object")
        return body

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            answer = self._http.request(method, path, **options)
        except httpx.TimeoutException as error:
            raise NotComplete(f"{method} {self.base_url}{path}: no answer in time ({type(error).__name__})") from None
        except httpx.HTTPError as error:
            raise Unavailable(0, None, f"{method} {self.base_url}{path}: {error or type(error).__name__}; "
                              "is the service running?") from None
        if answer.is_error:
            raise _error(answer)
        return answer


def _path(ref: str) -> str:
    return "/v1/captures/" + quote(ref, safe=":@+=~")  # so that no ref reaches another route


def _error(answer: httpx.Response) -> TapError:
    try:
        error = answer.json()["error"]
        return service_error(answer.status_code, str(error.get("code")), str(error["message"]), error.get("param"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return service_error(answer.status_code, None, f"{answer.status_code}: {answer.text[:500]}", None)
