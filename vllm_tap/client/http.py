"""Requests and answers of the HTTP service, without any connection: shared by both clients.

Functions named ``…_request`` make a ``Request``, others read its answer; ``Attempts`` says when to send it again.
"""

from __future__ import annotations

import base64
import email.utils
import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import quote, urlsplit

import httpx
import msgspec
import numpy as np
from safetensors.numpy import load

from schemas import limits
from schemas.attended import Attention, AttentionAsked, Unattended
from schemas.attention import AttentionRule
from schemas.catalog.aliases import no_capture
from schemas.checks import Setting, is_name
from schemas.errors import ArgumentError, TapError
from schemas.manifest import Manifest
from schemas.read.reader import CaptureRow
from schemas.spec import CaptureSpec
from vllm_tap.client.captures import Rows, read_missing
from vllm_tap.client.listing import Filters, Page
from vllm_tap.errors import NotComplete, Unavailable, service_error

__all__ = ["API_KEY", "Attempts", "Request"]

logger = logging.getLogger("vllm_tap")

API_KEY: Final = "VLLM_TAP_API_KEY"
SETTINGS: Final[dict[str, Setting]] = {
    "VLLM_TAP_API_KEY": Setting("", "key", "The key that `Client` and `AsyncClient` send, if `api_key` is not given."),
}
ENGINE: Final = "X-VLLM-Tap-Engine"
AnyPrompt = str | Sequence[Any]  # text, token ids, a list of either, or chat messages
Spec = Mapping[str, Any] | CaptureSpec
Edits = Sequence[Mapping[str, Any]]  # as schemas.edits.spec has them, vectors also as arrays
_BUSY: Final = (429, 503)
RULE_FIELDS: Final = ("head_size", "scale", "window", "soft_cap")
_PAUSE_S: Final = 0.25  # before the first attempt that is made again; twice as long before each further one
_PAUSE_S_MAX: Final = 30.0


@dataclass(frozen=True, slots=True)
class Asked:
    """The parts of a generation's request beside its text."""

    capture: Spec | None = None
    edit: Edits | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One request to the service; ``again`` says that asking twice does no harm."""

    method: str
    path: str
    params: dict[str, Any] = field(default_factory=dict)
    body: dict[str, Any] | None = None
    again: bool = True
    headers: dict[str, str] = field(default_factory=dict)


def _retry_after_s(text: str | None) -> float | None:
    """Seconds of a Retry-After header: a number, or an HTTP date."""
    if text is None:
        return None
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except ValueError:
        return None


def root(base_url: str) -> str:
    """The service's URL, also of one given as clients of OpenAI want it: with ``/v1``."""
    return base_url.rstrip("/").removesuffix("/v1")


def check_all(prompts: object, at_once: int) -> None:
    """SpecError where nothing would ever be sent, or every letter of a text for itself."""
    if isinstance(prompts, str):
        raise ArgumentError("prompts", prompts[:40], "valid: a list of prompts, not a text")
    if at_once < 1:
        raise ArgumentError("at_once", at_once, "at least 1")


def settings(base_url: str, timeout_s: float, api_key: str | None, engine: str | None = None) -> dict[str, Any]:
    """Arguments of httpx's clients; the key is that of the environment where none is given."""
    key = os.environ.get(API_KEY) if api_key is None else api_key
    if key and not (key.isascii() and key.isprintable()):
        raise ValueError(f"api_key = {key[:4]!r}…: a key is made of printable ASCII characters")
    # A proxy of the environment is for other machines; it would not find the service on this one.
    if engine is not None and not is_name(engine):
        raise ValueError(f"engine = {engine!r}: valid: a name such as those in capabilities()['engines']")
    url = urlsplit(base_url)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ValueError(f"base_url = {base_url!r}: valid: a URL such as http://127.0.0.1:8100")
    here = url.hostname in ("localhost", "127.0.0.1", "::1")
    return {"base_url": base_url, "timeout": httpx.Timeout(timeout_s, connect=10.0), "trust_env": not here,
            "headers": {**({"Authorization": f"Bearer {key}"} if key else {}), **({ENGINE: engine} if engine else {})}}


# ── requests ────────────────────────────────────────────────────────────────────────────────────────────────────


def path(ref: str) -> str:
    """The path of a capture, quoted; NotFoundError for a name that would reach another route even so."""
    if ref in ("", ".", "..") or "/" in ref:
        raise no_capture(ref)
    return "/v1/captures/" + quote(ref, safe=":@+=~")


def generate_request(prompt: AnyPrompt, max_tokens: int, asked: Asked, model: str, fields: dict[str, Any]) -> Request:
    """A completion or, for messages, a chat."""
    if fields.get("stream"):
        raise ValueError("stream = True: generate() gives the whole answer; use the openai package to stream")
    if not isinstance(prompt, str | Sequence):
        raise ValueError(f"prompt = {prompt!r}: valid: text, token ids, a list of either, or chat messages")
    chat = not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
    body: dict[str, Any] = {"model": model, "max_tokens": max_tokens, **fields,
                            "messages" if chat else "prompt": prompt if isinstance(prompt, str) else list(prompt)}
    if (capture := asked.capture) is not None:
        if not isinstance(capture, CaptureSpec | Mapping):
            raise ArgumentError("capture", capture, 'a mapping such as {"sites": ["resid_post"]}; {}: everything')
        body["capture"] = json.loads(capture.to_json()) if isinstance(capture, CaptureSpec) else dict(capture)
    if asked.edit is not None:
        body["edit"] = _edits(asked.edit)
    return Request("POST", "/v1/chat/completions" if chat else "/v1/completions", body=body, again=False)


def vector_path(name: str) -> str:
    """The path of a stored vector; ArgumentError for a name that could not reach it."""
    if not is_name(name):
        raise ArgumentError("name", name, f"a vector's name is 1 to {limits.probe_name_chars_max} of A-Z a-z 0-9 _ -, "
                            "and does not begin with _ or -")
    return f"/v1/vectors/{name}"


def put_vector_request(name: str, vector: Any) -> Request:
    """A vector to store; ArgumentError where it is no row of numbers."""
    return Request("PUT", vector_path(name), body={"vector": _in_base64("vector", vector)})


def _in_base64(field: str, value: Any) -> Any:
    """Numbers of an array or a tensor, or in a list, as float32 in base64."""
    try:
        if hasattr(value, "detach"):  # a tensor, wherever it is and in whatever dtype
            value = value.detach().float().cpu()
        numbers = np.asarray(value)
        if numbers.dtype.kind not in "fiu" or not numbers.size:
            raise ValueError(f"{numbers.dtype} {list(numbers.shape)}")
    except (TypeError, ValueError) as error:
        raise ArgumentError(field, type(value).__name__, f"valid: an array, a tensor or a list of numbers ({error})"
                            ) from None
    if field == "vector" and numbers.ndim != 1:
        raise ArgumentError(field, list(numbers.shape), "valid: [width]; reshape(-1) makes it so")
    with np.errstate(over="ignore"):
        return {"base64": base64.b64encode(np.ascontiguousarray(numbers, "<f4").tobytes()).decode()}


def _edits(edit: Edits) -> list[dict[str, Any]]:
    """Edits for JSON: arrays and tensors of ``vector`` and ``rows`` in base64, others as lists."""
    if isinstance(edit, str) or not isinstance(edit, Sequence) or not all(isinstance(each, Mapping) for each in edit):
        raise ArgumentError("edit", edit, 'a list such as [{"site": "resid_post.12", "op": "scale", "by": 0}]')
    return [{name: _for_json(f"edit[{number}]", name, value) for name, value in each.items()}
            for number, each in enumerate(edit)]


def _for_json(at: str, name: str, value: Any) -> Any:
    """A field of an edit; the capture of ``from`` may be an object with an id, ArgumentError where it has none."""
    if hasattr(value, "tolist"):
        return _in_base64(name, value) if name in ("vector", "rows") else value.tolist()
    if name != "from" or not isinstance(value, Mapping):
        return value
    source = {key: each.tolist() if hasattr(each, "tolist") else each for key, each in value.items()}
    capture = source.get("capture", "")
    if not isinstance(capture, str):
        source["capture"] = getattr(capture, "id", None)
        if not isinstance(source["capture"], str):
            raise ArgumentError(f"{at}.from.capture", capture, "valid: a capture's id, or what generate() returned")
    return source


def captures_request(filters: Filters, limit: int, before: str | None) -> Request:
    """A page of the list."""
    after = {"before": before} if before else {}
    return Request("GET", "/v1/captures", {**filters.params(), "limit": limit, **after})


def manifest_request(ref: str, wait_s: float | None) -> Request:
    """A manifest, waited for at most ``wait_s`` seconds."""
    return Request("GET", path(ref), _waiting(wait_s))


def rows_request(ref: str, site: str, layers: Sequence[int], start: int, stop: int | None, wait_s: float | None,
                 rejected: bool) -> Request:
    """A slice."""
    params: dict[str, Any] = {"site": site, "layer": ",".join(map(str, layers)), "start": start,
                              "format": "safetensors", **_waiting(wait_s)}
    if stop is not None:
        params["stop"] = stop
    if rejected:
        params["rows"] = "rejected"
    return Request("GET", f"{path(ref)}/activations", params)


def attention_request(ref: str, asked: AttentionAsked) -> Request:
    """Attention of a layer, queries that lack rows left out; ArgumentError for what no request can say."""
    if isinstance(asked.layer, bool) or not isinstance(asked.layer, int | np.integer) or asked.layer < 0:
        raise ArgumentError("layer", asked.layer, "valid: one layer's number, counted from 0")
    params: dict[str, Any] = {"layer": int(asked.layer), "top": asked.top, "missing": "leave_out",
                              "format": "safetensors"}
    if asked.rule is not None:
        if not isinstance(asked.rule, AttentionRule):
            raise ArgumentError("rule", asked.rule, "valid: an AttentionRule, or None for what the engine told")
        params |= {name: "none" if (value := getattr(asked.rule, name)) is None else value for name in RULE_FIELDS}
    if asked.heads is not None:
        params["heads"] = ",".join(map(str, asked.heads))
    if asked.check:
        params["check"] = "true"
    (start, stop), *others = asked.spans
    if others:
        raise ArgumentError("spans", asked.spans, "valid over HTTP: one range of positions")
    params |= {"start": start} if stop is None else {"start": start, "stop": stop}
    return Request("GET", f"{path(ref)}/attention", params)


def zarr_request(ref: str, key: str, span: slice) -> Request:
    """A value of a capture's Zarr view, or some bytes of it; of none at all the first."""
    first, last = span.start or 0, "" if span.stop is None else max(span.stop - 1, span.start or 0)
    ranges = {} if span == slice(None) else {"Range": f"bytes={first}-{last}" if first >= 0 else f"bytes={first}"}
    return Request("GET", f"{path(ref)}/zarr/{quote(key)}", headers=ranges)


def _waiting(wait_s: float | None) -> dict[str, str]:
    return {} if wait_s is None else {"wait": "complete", "timeout": f"{min(wait_s, limits.wait_timeout_s_max):g}"}


# ── answers ─────────────────────────────────────────────────────────────────────────────────────────────────────


def read_object(answer: httpx.Response) -> dict[str, Any]:
    """The JSON object of an answer."""
    try:
        body = answer.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise Unavailable(answer.status_code, None, f"{answer.url} answered something else than a JSON object")
    return body


def read_vectors(answer: httpx.Response) -> dict[str, str]:
    """Digests of stored vectors by name."""
    return {each["name"]: each["digest"] for each in read_object(answer)["data"]}


def read_generation(answer: httpx.Response, captured: bool) -> dict[str, Any]:
    """The answer to a generation; TapError where it was to be ``captured`` and the server that answered cannot."""
    body = read_object(answer)
    if captured and "capture" not in body:
        raise TapError(f"{answer.url} answered without a capture, though one was asked for: is it a model server "
                       "without vllm-tap's service? (that of vllm-tap serve is on --port, 8100 where not named)")
    return body


def read_captures(answer: httpx.Response) -> Page:
    """The lines of a page, and where the next begins."""
    body = read_object(answer)
    return [msgspec.convert(row, CaptureRow) for row in body["data"]], body.get("next")


def read_manifest(ref: str, answer: httpx.Response) -> Manifest:
    """The manifest; TapError where the name stands for several captures."""
    body = read_object(answer)
    if "captures" in body:
        raise TapError(f"{ref} has several captures; ask for one: {', '.join(body['captures'][:8])}")
    return msgspec.convert(body, Manifest)


def read_rows(site: str, layers: Sequence[int], answer: httpx.Response) -> Rows:
    """The rows of a slice."""
    arrays, headers = load(answer.content), answer.headers
    missing = read_missing(json.loads(headers["X-Tap-Missing"]))
    values = np.stack([arrays[f"{site}.{layer}"] for layer in layers])
    return Rows(headers["X-Tap-Capture"], site, list(layers), int(headers["X-Tap-Start"]), int(headers["X-Tap-Stop"]),
                arrays["positions"], arrays["token_ids"], values, missing, headers["X-Tap-Clipped"] == "true")


def read_attention(answer: httpx.Response) -> Attention:
    """The summaries of an answer."""
    content = answer.content
    arrays = load(content)
    told = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
    about = json.loads(told["attention"])
    return Attention(
        told["capture"], about["layer"], AttentionRule(**about["rule"]), tuple(about["codecs"].values()),
        arrays["positions"], arrays["token_ids"], arrays["keys"], arrays["weights"], arrays["entropy"],
        msgspec.convert(about["unattended"], list[Unattended]), about["z_error"], about["heads"],
        about["cache"])


def error_of(answer: httpx.Response) -> TapError:
    """The exception that an error answer stands for."""
    try:
        error = answer.json()["error"]
        message = str(error["message"])
        if answer.status_code == 401:
            message += f" (here: api_key=…, or {API_KEY} in the environment)"
        return service_error(answer.status_code, str(error.get("code")), message, error.get("param"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return service_error(answer.status_code, None, f"{answer.status_code}: {answer.text[:500]}", None)


def failure_of(base_url: str, request: Request, error: httpx.HTTPError) -> TapError:
    """The exception for a request without an answer."""
    what = f"{request.method} {base_url}{request.path}"
    if isinstance(error, httpx.TimeoutException) and not isinstance(error, httpx.ConnectTimeout):
        return NotComplete(f"{what}: no answer in time ({type(error).__name__})")
    return Unavailable(0, None, f"{what}: {error or type(error).__name__}; is the service running?")


# ── again ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Attempts:
    """The attempts at one request: at most ``retries`` more, after 0.25 s, 0.5 s, … or what ``Retry-After`` asks for.

    ``failed`` and ``refused`` give the seconds until the next one; they raise where it would not help or may not be.
    """

    def __init__(self, retries: int, base_url: str, request: Request) -> None:
        self._retries, self._base_url, self._request, self._made = retries, base_url, request, 0

    def failed(self, error: httpx.HTTPError) -> float:
        """There was no answer: a request that may have arrived is sent again only if it may be."""
        unsent = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)
        broken = isinstance(error, httpx.NetworkError | httpx.RemoteProtocolError) and self._request.again
        if self._made >= self._retries or not (unsent or broken):
            raise failure_of(self._base_url, self._request, error) from None
        return self._again(type(error).__name__, self._backoff_s())

    def refused(self, answer: httpx.Response) -> float:
        """The answer is an error."""
        asked = _retry_after_s(answer.headers.get("Retry-After"))
        wait_s = self._backoff_s() if asked is None else asked
        if self._made >= self._retries or answer.status_code not in _BUSY or wait_s > _PAUSE_S_MAX:
            raise error_of(answer)
        return self._again(answer.status_code, wait_s)

    def _backoff_s(self) -> float:
        return min(_PAUSE_S * 2.0**self._made, _PAUSE_S_MAX)

    def _again(self, why: object, wait_s: float) -> float:
        self._made += 1
        logger.info("%s %s: %s; trying again in %.2f s", self._request.method, self._request.path, why, wait_s)
        return wait_s
