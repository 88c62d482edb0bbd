"""Generation requests with a ``capture`` or ``edit`` field: what is asked, how many captures, the body for upstream."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from api.engines.pressure import Demand
from api.errors import ApiError, BadParam
from api.generate.edits import Asked, ask_edits
from api.generate.rank_checks import check_ranks
from api.protocols import PROTOCOLS, RESPONSES, Protocol
from api.service import is_alias
from schemas import limits
from schemas.bodies import check_values, may_name, named
from schemas.catalog.tables import CAPTURE_BYTES
from schemas.codecs import identified, row_bytes
from schemas.errors import LimitError, json_fault
from schemas.ids import new_ulid, sample_id, split_capture_id
from schemas.spec import CaptureSpec, Resolved, intervals, parse_spec, resolve
from schemas.wire.engine_info import EngineInfo

__all__ = ["NOTHING", "CaptureRequest", "Plan", "capture_request", "check_owned", "known", "parse_body", "plan",
           "salt_cache"]

_PREFIXES: Final = ("", *(protocol.id_prefix for protocol in PROTOCOLS.values()))
NOTHING: Final[dict[str, Any]] = {"sites": []}  # the capture of what is edited only: a name and a manifest
_UNTAGGED: Final = re.compile(r"0\.[01]\b.*\.dev")  # as of 0.1.dev9837+g1a2b3c4d5
_TEXT_TOKEN_BYTES: Final = 4  # of text in a token, where only the model server could tell


@dataclass(frozen=True, slots=True)
class Plan:
    """One generation with captures: what the writer is told, what upstream is sent."""

    ulid: str
    count: int
    response_id: str
    aliases: list[str]
    tags: dict[str, str]
    body: bytes
    protocol: Protocol
    inline: bool = False  # whether the answer is to hold the rows too
    probes: tuple[str, ...] = ()  # the names of those asked for
    nbytes: int = 0  # that the captures will take, as far as that can be told
    engine: str = ""  # that it is for, "" where there is but one
    demand: Demand = field(default_factory=Demand)  # on the store, as long as it is in flight

    @property
    def ids(self) -> list[str]:
        """The capture ids, in the order of the response's choices."""
        return [sample_id(self.ulid, i, self.count) for i in range(self.count)]


def parse_body(data: bytes) -> dict[str, Any]:
    """The JSON object of a request; ApiError 400, ``malformed_json``, where the body is none.

    BadParam where it carries a spec outside the field ``capture``, or edits outside ``edit``. BadParam too where the
    name of the field is not quite one of these. LimitError where it has so many values that parsing it would keep
    everybody else waiting.
    """
    check_values(data)
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, "malformed_json", f"the body is not JSON: {json_fault(error)}") from None
    if not isinstance(body, dict):
        raise ApiError(400, "malformed_json", "the body must be a JSON object")
    for each in named(body) if may_name(data) else ():
        param, value = each
        if param in ("capture", "edit"):
            continue
        if each.of_edits and "." not in param and "[" not in param:
            raise BadParam(param, value, 'unknown, and nothing would be edited; did you mean "edit"?')
        if each.of_edits:  # it would reach the engine with nobody's owner, or not at all
            raise BadParam(param, value, 'reserved, nothing else would be edited; put the edits into the body\'s own '
                           'field "edit"')
        if "." in param or "[" in param:  # it would reach the engine unchecked, with nobody's owner, or not at all
            raise BadParam(param, value, 'reserved, nothing else would be captured; put the spec into the body\'s own '
                           'field "capture"')
        raise BadParam(param, value, 'unknown, and nothing would be captured; did you mean "capture"?')
    return body


def salt_cache(body: dict[str, Any], owner: str, secret: bytes) -> bool:
    """Give a generation a prefix cache of its owner's own, and tell whether that changed the body, as it does with keys
    alone.

    Otherwise the cached part of a prompt, which manifest, usage and time show, would tell what others have asked. A
    caller's own ``cache_salt`` divides its cache further. ``secret`` keeps the salt from those who can reach the model
    server.
    """
    if not owner:
        return False
    own = body.get("cache_salt")
    if own is not None and not (isinstance(own, str) and own):
        raise BadParam("cache_salt", own, "valid: a string, not empty")
    body["cache_salt"] = hashlib.blake2b(json.dumps([owner, own]).encode(), key=secret, digest_size=32).hexdigest()
    return True


def check_owned(body: dict[str, Any], protocol: Protocol, owner: str, engine: EngineInfo | None) -> None:
    """Raise BadParam or ApiError for a request that would mix with those of another key, captured or not."""
    if not owner:
        return
    if body.get("previous_response_id") is not None:
        raise BadParam("previous_response_id", body["previous_response_id"], "the model server keeps responses without "
                       "their owners, so with keys none is continued; send the whole conversation as input")
    if protocol.salted_from and _is_before(found := known(engine), protocol.salted_from):
        raise ApiError(400, "invalid_parameter", f"{protocol.path} of vLLM {found.vllm_version} cannot keep the "
                       "prefix caches of keys apart; use /v1/chat/completions, or a newer vLLM")


def known(engine: EngineInfo | None) -> EngineInfo:
    """The engine that serves; ApiError 503 as long as there is none."""
    if engine is None:
        raise ApiError(503, "no_engine", "no engine has connected to the writer yet, so what it can do is unknown; "
                                         "is vLLM still starting? It needs the plugin and VLLM_TAP_ENDPOINT",
                       headers={"Retry-After": "2"})
    return engine


def _is_before(engine: EngineInfo, version: tuple[int, ...]) -> bool:
    """Whether an engine's vLLM is older, as far as its version tells: a build without tags has no number."""
    if _UNTAGGED.match(engine.vllm_version):
        return False
    found = tuple(int(part) for part in re.findall(r"[0-9]+", engine.vllm_version)[:3])
    return bool(found) and found < version


@dataclass(frozen=True, slots=True)
class CaptureRequest:
    """A request with a capture, and edits or none, checked as far as that goes without knowing the engine."""

    spec: CaptureSpec
    count: int
    protocol: Protocol
    request_id: str | None
    body: dict[str, Any]  # without the fields
    edits: Asked = field(default_factory=list)


def capture_request(body: dict[str, Any], protocol: Protocol, request_id: str | None) -> CaptureRequest:
    """Checks a parsed body and takes ``capture`` and ``edit`` out of it; SpecError, LimitError or ApiError."""
    edits = ask_edits(body.pop("edit", None))
    spec = parse_spec(body.pop("capture"))
    if body.get("use_beam_search"):
        raise BadParam("use_beam_search", body["use_beam_search"], "beam search cannot be captured or edited: every "
                       "beam step is a request of its own, without the spec")
    if body.get("prompt_embeds") is not None:
        raise BadParam("prompt_embeds", "…", "prompts given as embeddings cannot be captured or edited; send text or "
                       "token ids")
    protocol.check(body)
    count = protocol.count(body)
    if count > limits.capture_samples_max:
        raise LimitError("captures of one request (prompts × n)", count, limits.capture_samples_max,
                         "send several requests")
    if (lists := count * len(set(spec.probe))) > limits.score_lists_max:
        raise LimitError("lists of scores of one request (captures × probes)", lists, limits.score_lists_max,
                         "send several requests")
    if request_id is not None and not is_alias(request_id):
        raise BadParam("X-Request-Id", request_id, "with a capture it becomes a name of the capture: 1 to "
                       f"{limits.alias_chars_max} of A-Z a-z 0-9 . _ : @ + = ~ -")
    if request_id is not None and any(split_capture_id(request_id.removeprefix(prefix)) is not None
                                      for prefix in _PREFIXES):
        # Whoever asks for that capture would get the rows of this one.
        raise BadParam("X-Request-Id", request_id, "it has the form of a capture or response id, and could be "
                                                   "mistaken for one; send another, or a ULID of your own as "
                                                   "capture.id")
    if not isinstance(body.get("vllm_xargs") or {}, dict):
        raise BadParam("vllm_xargs", body["vllm_xargs"], "must be an object")
    return CaptureRequest(spec, count, protocol, request_id, body, edits)


def plan(asked: CaptureRequest, engine: EngineInfo, edits: str = "",
         lost: Mapping[str, Collection[int]] = MappingProxyType({})) -> Plan:
    """The plan of what the writer is told and upstream is sent. ``edits`` is JSON, ``lost`` the ranks without a sender
    by their engine. SpecError, NotArmedError or ApiError where the engine cannot do it.
    """
    if _is_before(engine, asked.protocol.captured_from):
        raise BadParam("edit" if edits else "capture", "…", f"requests of {asked.protocol.path} have no field "
                       f"for it in vLLM {engine.vllm_version}; use /v1/chat/completions, or a newer vLLM")
    resolved = resolve(asked.spec, engine.armed, engine.widths)
    check_ranks(resolved, engine, lost, "edit" if edits and resolved.empty else "capture")
    if asked.spec.return_ == "inline":
        check_inline(asked, resolved, engine)
    ulid = asked.spec.id or new_ulid()
    response_id = f"{asked.protocol.id_prefix}{ulid}"
    aliases = [response_id] if asked.request_id is None else [response_id, asked.request_id]
    # How the rows come back is this service's business: the engine stores them either way.
    spec = asked.spec.model_copy(update={"id": ulid, "return_": "reference"}).to_json()
    if len(spec) > limits.spec_json_bytes_max:
        raise LimitError("bytes of the capture spec", len(spec), limits.spec_json_bytes_max,
                         "name fewer positions, sites or tags")
    xargs: dict[str, Any] = {**(asked.body.get("vllm_xargs") or {}), "capture": spec}
    if edits:
        xargs["edit"] = edits
    if asked.count > 1:
        xargs["capture_count"] = asked.count
    named_after = {"request_id": response_id} if asked.protocol is RESPONSES else {}  # it heeds no header
    body = json.dumps({**asked.body, **named_after, "vllm_xargs": xargs}).encode()
    return Plan(ulid, asked.count, response_id, aliases, dict(asked.spec.tags), body, asked.protocol,
                asked.spec.return_ == "inline", tuple(dict.fromkeys(asked.spec.probe)),
                stored_bytes(asked, resolved, engine, len(spec)), demand=demand_of(asked, resolved, engine))


def check_inline(asked: CaptureRequest, resolved: Resolved, engine: EngineInfo) -> None:
    """LimitError where the rows are surely too many for the answer, as far as that is known before the tokens are."""
    sizes = asked.protocol.texts(asked.body)
    lengths = [each if isinstance(each, int) else 1 for each in sizes]  # of text at least one token
    rows = _rows(resolved.positions, lengths) * (asked.count // len(lengths))
    numbers = sum(len(layers) * identified(resolved.codec[site]).decoded_width(engine.widths[site])
                  for site, layers in resolved.layers.items())
    if rows * numbers * 4 > limits.inline_bytes_max:
        raise LimitError("bytes of arrays in the answer (capture.return = inline)", rows * numbers * 4,
                         limits.inline_bytes_max, 'ask for fewer layers or positions, or return: "reference"')


def stored_bytes(asked: CaptureRequest, resolved: Resolved, engine: EngineInfo, spec_bytes: int) -> int:
    """Bytes that the captures will take in the store: rows, token ids, tags and spec, as an owner's bytes are counted.

    They are of the prompt and, where the caller bounds them, of generated tokens. Text counts as many tokens as text of
    its length mostly has.
    """
    longest = engine.max_model_len
    lengths, generated = _lengths(asked, longest)
    token_bytes = _token_bytes(resolved, engine)
    # The last token that is generated is never put through the model.
    rows = _rows(resolved.positions, lengths, max(generated - 1, 0), longest)
    tokens = sum(min(length + generated, longest) for length in lengths)
    beside = CAPTURE_BYTES + spec_bytes + len(json.dumps(asked.spec.tags))
    return (rows * token_bytes + tokens * 4) * (asked.count // len(lengths)) + asked.count * beside


def demand_of(asked: CaptureRequest, resolved: Resolved, engine: EngineInfo) -> Demand:
    """Bytes of the selected rows for each token of the prompts, and for each generated token.

    Without a bound an answer may become as long as the model takes it.
    """
    longest, token_bytes = engine.max_model_len, _token_bytes(resolved, engine)
    lengths, bound = _lengths(asked, longest)
    prompt, of_prompt = sum(lengths), _rows(resolved.positions, lengths)
    generated = sum(min(length + (bound or longest), longest) - length for length in lengths)
    of_generated = _rows(resolved.positions, lengths, bound or longest, longest) - of_prompt
    on_full = engine.ring.on_full if engine.ring else ""
    return Demand(asked.count * token_bytes * of_prompt / max(prompt, 1),
                  asked.count * token_bytes * of_generated / max(generated, 1), on_full)


def _token_bytes(resolved: Resolved, engine: EngineInfo) -> int:
    """Bytes of the rows of one token, as they are stored."""
    return sum(len(layers) * row_bytes(resolved.codec[site], engine.widths[site], engine.dtype_of(site))
               for site, layers in resolved.layers.items())


def _lengths(asked: CaptureRequest, longest: int) -> tuple[list[int], int]:
    """Tokens of each prompt, as far as that can be told, and of an answer at most: 0 where the caller does not bound
    them.
    """
    lengths = [min(each if isinstance(each, int) else -(-len(each) // _TEXT_TOKEN_BYTES), longest)
               for each in asked.protocol.texts(asked.body)]
    bounds = [asked.body.get(name) for name in asked.protocol.bounds]
    return lengths, next((bound for bound in bounds if type(bound) is int and bound > 0), 0)


def _rows(positions: str | list[tuple[int, int]], lengths: list[int], generated: int = 0,
          longest: int = limits.position_max) -> int:
    """Number of rows of prompts of so many tokens, and of what is generated after each.

    A caller may send thousands of prompts, and thousands of ranges.
    """
    fixed = np.asarray(positions, np.int64).reshape(-1, 2) if isinstance(positions, list) else None
    rows = 0
    for length, prompts in Counter(lengths).items():
        ranges = np.asarray(intervals(positions, length), np.int64) if fixed is None else fixed
        ends = np.minimum(ranges[:, 1], min(length + generated, longest))
        rows += prompts * int((ends - ranges[:, 0]).clip(0).sum())
    return rows
