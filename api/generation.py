"""What a generation request with a ``capture`` field means: the spec, how many captures, the body for upstream."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from api.errors import ApiError, BadParam
from api.service import is_alias
from schemas import limits
from schemas.control import EngineInfo
from schemas.errors import LimitError
from schemas.ids import new_ulid, sample_id
from schemas.spec import CaptureSpec, parse_spec, resolve

__all__ = ["Plan", "parse_body", "plan"]

_OURS = ("capture", "capture_count")  # the keys of vllm_xargs that carry a spec to the engine


@dataclass(frozen=True, slots=True)
class Plan:
    """One generation with captures: what the writer is told, what upstream is sent."""

    ulid: str
    count: int
    response_id: str
    aliases: list[str]
    tags: dict[str, str]
    body: bytes

    @property
    def ids(self) -> list[str]:
        """The capture ids, in the order of the response's choices."""
        return [sample_id(self.ulid, i, self.count) for i in range(self.count)]


def parse_body(data: bytes) -> dict[str, Any]:
    """The JSON object of a request; BadParam otherwise, and where it carries a spec past the ``capture`` field."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, "malformed_json", f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ApiError(400, "malformed_json", "the body must be a JSON object")
    xargs = body.get("vllm_xargs")
    if isinstance(xargs, dict):
        for key in _OURS:
            if key in xargs:
                # It would reach the engine unchecked, and with an owner of nobody's choosing.
                raise BadParam(f"vllm_xargs.{key}", xargs[key], 'reserved; put the spec into the field "capture"')
    return body


def plan(body: dict[str, Any], chat: bool, engine: EngineInfo | None, request_id: str | None) -> Plan:
    """The plan for a parsed body that has a ``capture`` field, which is taken out of it.

    Raises SpecError, NotArmedError, LimitError or ApiError before anything is asked of the writer or of upstream.
    """
    spec = parse_spec(body.pop("capture"))
    if spec.return_ == "inline":
        raise BadParam("capture.return", "inline", 'not yet available; valid: "reference"')
    if body.get("use_beam_search"):
        raise BadParam("use_beam_search", body["use_beam_search"],
                       "beam search cannot be captured: every beam step is a request of its own, without the spec")
    if body.get("prompt_embeds") is not None:
        raise BadParam("prompt_embeds", "…", "prompts given as embeddings cannot be captured; send text or token ids")
    count = (1 if chat else _prompts(body.get("prompt"))) * _n(body.get("n"))
    if count > limits.capture_samples_max:
        raise LimitError("captures of one request (prompts × n)", count, limits.capture_samples_max,
                         "send several requests")
    if engine is None:
        raise ApiError(503, "no_engine", "no engine has connected to the writer yet, so it is not known what can be "
                       "captured; is vLLM running with the plugin and VLLM_TAP_ENDPOINT?", headers={"Retry-After": "2"})
    resolve(spec, engine.armed)
    ulid = spec.id or new_ulid()
    response_id = f"{'chatcmpl' if chat else 'cmpl'}-{ulid}"
    return Plan(ulid, count, response_id, _aliases(request_id, response_id), dict(spec.tags),
                _upstream_body(body, spec, ulid, count))


def _upstream_body(body: dict[str, Any], spec: CaptureSpec, ulid: str, count: int) -> bytes:
    xargs = body.get("vllm_xargs") or {}
    if not isinstance(xargs, dict):
        raise BadParam("vllm_xargs", xargs, "must be an object")
    ours: dict[str, Any] = {"capture": spec.model_copy(update={"id": ulid}).to_json()}
    if count > 1:
        ours["capture_count"] = count
    return json.dumps({**body, "vllm_xargs": {**xargs, **ours}}, ensure_ascii=False).encode()


def _n(value: object) -> int:
    if value is None:
        return 1
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BadParam("n", value, "valid with a capture: a number of samples, 1 or more")
    return value


def _prompts(prompt: object) -> int:
    """How many prompts a completion has: text or one list of token ids is one; a list of those is many."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        return len(prompt)
    return 1


def _aliases(request_id: str | None, response_id: str) -> list[str]:
    if request_id is None:
        return [response_id]
    if not is_alias(request_id):
        raise BadParam("X-Request-Id", request_id, "with a capture it becomes a name of the capture: 1 to "
                       f"{limits.alias_chars_max} of A-Z a-z 0-9 . _ : @ + = ~ -")
    return [response_id, request_id]
