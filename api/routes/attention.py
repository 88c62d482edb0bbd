"""GET /v1/captures/{ref}/attention: what heads attend to, computed here, so that no queries and keys travel."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Final, Literal

import msgspec
import xxhash
from fastapi import APIRouter, Query, Request
from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema
from starlette.responses import Response

from api.description import answers, json_content
from api.errors import ApiError, BadParam, NotCaptured
from api.live.waiting import FINAL
from api.parameters import ULID, Ref, Route, digits
from api.service import ApiService, owner_of, service_of
from api.slices.entity_tags import same_entity
from api.slices.formats import MEDIA_TYPES, encode
from api.slices.parts import asked_part, sent_part
from api.slices.query import RangesQuery, accepted_format
from api.slices.reading import JSON_TIMES, TIMES, SliceMemory, end_of, past_the_end, sole
from schemas import limits
from schemas.attended import Attention, AttentionAsked, LackingRows, Needs, attend, needs_of, reading
from schemas.attention import AttentionRule
from schemas.bucket.reader import AnyReader
from schemas.errors import ArgumentError, LimitError, NotFoundError
from schemas.errors import Missing as NoValue
from schemas.manifest import Manifest

router = APIRouter(route_class=Route)

_ENCODING: Final = 1  # grows when the same rows become other bytes
_RULE: Final = ("head_size", "scale", "window", "soft_cap")
_BY_RULE: Final = "leave head_size, scale, window and soft_cap out where the engine told them, else give all four"
_HEADS: Final = r"^[0-9]{1,4}(,[0-9]{1,4})*$"
_NUMBER: Final = r"^(none|[0-9]{1,18}(\.[0-9]{1,30})?([eE][+-]?[0-9]{1,3})?)$"
_COUNT: Final = r"^(none|[0-9]{1,10})$"
_SHAPES: Final = {"positions": [0, 1], "token_ids": [9707, 11], "keys": [[[0, -1], [1, 0]]],
                  "weights": [[[1.0, 0.0], [0.75, 0.25]]], "entropy": [[0.0, 0.5623]]}
_EXAMPLE: Final = {"capture": ULID, "status": "complete", "layer": 2, "heads": [0], "unattended": [], "z_error": None,
                   "rule": {"head_size": 128, "scale": 0.08838834764831845, "window": None, "soft_cap": None},
                   "codecs": {"q_rot": "raw", "k_rot": "raw"}, "cache": "", **_SHAPES}
_CONTENT: Final = {MEDIA_TYPES["safetensors"][0]: {"schema": {"type": "string", "format": "binary"}},
                   **json_content(_EXAMPLE)}
_ANSWERS: Final = {**answers(_CONTENT, 400, 404, 406, 409, 413, 416), 304: {"description": "It is as it was."},
                   206: {"description": "A part of it.", "content": _CONTENT}}


def _known_heads(text: str) -> str:
    if not re.fullmatch(_HEADS, text, re.ASCII) or text.count(",") >= limits.attention_heads_max:
        raise ValueError("no numbers of heads")
    return text


_Number = Annotated[str, Field(pattern=_NUMBER), WithJsonSchema({"type": "string", "pattern": _NUMBER})]
_Heads = Annotated[str, AfterValidator(_known_heads), WithJsonSchema({"type": "string", "pattern": _HEADS})]


class AttentionQuery(RangesQuery):
    """A layer's heads and queries, and how it weighs keys where its engine did not tell that."""

    layer: Annotated[int, Field(ge=0, le=limits.layers_max), BeforeValidator(digits)] = Field(
        description="one layer's number, counted from 0", examples=[2])
    heads: _Heads | None = Field(default=None, examples=["0,5"], description=(
        f"query heads by number, at most {limits.attention_heads_max}; default: all"))
    top: Annotated[int, Field(ge=1, le=limits.position_max), BeforeValidator(digits)] = Field(
        default=8, description="keys of each head and query, at least 1", examples=[8])
    missing: Literal["refuse", "leave_out"] = Field(default="refuse", description=(
        "refuse, leave_out (queries that lack a row are named in unattended)"))
    check: Literal["true", "false"] = Field(default="false", description=(
        "true, false: whether to compare with z, from the layer's v"))
    head_size: Annotated[int, Field(ge=1, le=limits.width_max), BeforeValidator(digits)] | None = Field(
        default=None, description="columns of a head, from 1", examples=[128])
    scale: _Number | None = Field(default=None, description="what q·k is multiplied by, above 0", examples=["0.125"])
    window: Annotated[str, Field(pattern=_COUNT)] | None = Field(
        default=None, description='keys that a query sees, from 1, or "none" where it sees all', examples=["none"])
    soft_cap: _Number | None = Field(default=None, description='above 0, or "none"', examples=["none"])
    format: Literal["safetensors", "json"] = Field(default="safetensors", description=(
        "safetensors, json; default by Accept, else safetensors"))

    def accepting(self, accept: str | None) -> AttentionQuery:
        """The query in the format of an Accept header, where it names none itself; ApiError 406."""
        if not accept or "format" in self.model_fields_set:
            return self
        return self.model_copy(update={"format": accepted_format(accept, ("safetensors", "json"))})

    @property
    def rule(self) -> AttentionRule | None:
        """The rule, None where none of its numbers is given; ArgumentError where some are, or one cannot be."""
        given = {name: getattr(self, name) for name in _RULE}
        if not any(value is not None for value in given.values()):
            return None
        if lacking := [name for name, value in given.items() if value is None]:
            raise ArgumentError(lacking[0], NoValue, _BY_RULE)
        numbers = [None if given[name] == "none" else float(given[name]) for name in ("scale", "soft_cap")]
        window = None if given["window"] == "none" else int(given["window"])
        return AttentionRule(head_size=given["head_size"], scale=numbers[0],  # type: ignore[arg-type]  # it refuses None
                             window=window, soft_cap=numbers[1])

    def asked(self) -> AttentionAsked:
        """The same for ``attend``."""
        heads = None if self.heads is None else [int(head) for head in self.heads.split(",")]
        return AttentionAsked(layer=self.layer, rule=self.rule, top=self.top, spans=self.ranges, heads=heads,
                              allow_missing=self.missing == "leave_out", check=self.check == "true",
                              weights_max=limits.attention_weights_max)


@router.get("/v1/captures/{ref}/attention", tags=["captures"], response_class=Response, responses=_ANSWERS)
async def attention(request: Request, ref: Ref, query: Annotated[AttentionQuery, Query()]) -> Response:
    """The ``top`` keys of each head and query of a layer, their weights, and the entropy of all weights, in nats."""
    service, owner = service_of(request), owner_of(request)
    wanted = query.accepting(request.headers.get("accept"))
    return await service.read_map(ref, owner, lambda reader: _answer(request, reader, sole(reader, ref, owner), wanted))


def _answer(request: Request, reader: AnyReader, manifest: Manifest, query: AttentionQuery) -> Response:
    """Reads, computes and encodes; runs in a thread."""
    service, owner, media_type = service_of(request), owner_of(request), MEDIA_TYPES[query.format][0]
    asked, needs = _asked(manifest, query)
    if 0 < query.start >= (end := end_of(manifest)):
        raise past_the_end("start" if query.positions is None else "positions", query.start, end)
    tag = _tag(manifest, query, needs)
    if tag and same_entity(request, tag):
        return Response(status_code=304, headers={"ETag": tag, "Vary": "Accept"})
    held = SliceMemory(service, owner, _bytes(service, manifest, asked, needs, query.format))
    try:
        try:
            found = attend(manifest, asked, reading(reader, manifest.id, asked.layer, owner))
        except LackingRows as error:
            raise ApiError(409, "missing_rows", f"{error}; missing=leave_out leaves out the queries that need them",
                           "missing") from None
        buffers = _encoded(manifest, found, query.format)
        size = sum(map(len, buffers))
        part = asked_part(request, size, tag)
    except BaseException:
        held.release()
        raise
    held.only(size)
    headers = {"X-Tap-Capture": manifest.id, "X-Tap-Status": manifest.status, "Vary": "Accept",
               **({"ETag": tag, "Accept-Ranges": "bytes"} if tag else {})}
    return sent_part(request, buffers, part, held, headers, media_type)


def _asked(manifest: Manifest, query: AttentionQuery) -> tuple[AttentionAsked, Needs]:
    """The question and the data that it needs, refused under the names of the query's parameters."""
    try:
        asked = query.asked()
        return asked, needs_of(manifest, asked)
    except NotFoundError as error:
        raise NotCaptured("layer", str(query.layer), f"{error}; capture q_rot and k_rot of all positions") from None
    except ArgumentError as error:
        if error.field == "rule":
            raise ArgumentError("head_size", NoValue, "the engine of this capture did not tell how its attention "
                                "weighs keys: give head_size, scale, window and soft_cap, of the model's config.json "
                                "(none where there is no window or no cap)") from None
        raise BadParam(error.field.removeprefix("rule."), error.value, error.reason) if (
            error.value is not NoValue) else error from None


def _bytes(service: ApiService, manifest: Manifest, asked: AttentionAsked, needs: Needs, format_: str) -> int:
    """Bytes of memory that the answer takes while it is made, from the manifest alone; LimitError for too many."""
    rows = {row.site: row.captured for row in manifest.rows if row.layer == asked.layer}
    wanted = sum((limits.position_max if stop is None else stop) - start for start, stop in asked.spans)
    queries = min(wanted, rows.get(needs.sites[0].site, 0))
    read = sum((queries if number in (0, 3) else rows.get(site.site, 0)) * site.width
               for number, site in enumerate(needs.sites))  # of keys and values all, though a window needs fewer
    if read * 4 > service.config.slice_bytes_max:
        raise LimitError("bytes of rows to read", read * 4, service.config.slice_bytes_max,
                         "ask for fewer positions (start, stop)")
    made = len(needs.heads) * queries * (2 * asked.top + 1)
    if format_ == "json" and made > limits.slice_json_numbers_max:
        raise LimitError("numbers in json", made, limits.slice_json_numbers_max, "use format=safetensors")
    if made * 4 > service.config.slice_bytes_max:
        raise LimitError("bytes of attention summaries", made * 4, service.config.slice_bytes_max,
                         "ask for fewer positions or heads, or a smaller top")
    keys = rows.get(needs.sites[1].site, 0)
    return (read * 4 * TIMES + made * 4 * (JSON_TIMES if format_ == "json" else 2) + limits.attention_bytes_max
            + 8 * 3 * keys * needs.rule.head_size)


def _encoded(manifest: Manifest, found: Attention, format_: str) -> list[bytes | memoryview]:
    about: dict[str, Any] = {
        "layer": found.layer, "heads": found.heads, "rule": {name: getattr(found.rule, name) for name in _RULE},
        "codecs": dict(zip(("q_rot", "k_rot"), found.codecs, strict=True)),
        "cache": found.cache, "unattended": msgspec.to_builtins(found.unattended), "z_error": found.z_error}
    arrays = {"keys": found.keys, "weights": found.weights, "entropy": found.entropy}
    index = {"positions": found.positions, "token_ids": found.token_ids}
    if format_ == "safetensors":
        return encode("safetensors", arrays, index, "float32", {
            "capture": manifest.id, "status": manifest.status, "attention": json.dumps(about)})
    return [msgspec.json.encode({"capture": manifest.id, "status": manifest.status, **about,
                                 **{name: array.tolist() for name, array in {**index, **arrays}.items()}})]


def _tag(manifest: Manifest, query: AttentionQuery, needs: Needs) -> str:
    """The entity tag of a final capture's answer, "" of one that may yet get rows."""
    if manifest.status not in FINAL:
        return ""
    used = {site.site for site in needs.sites}
    rows = [(row.site, row.captured, [(gap.start, gap.stop, gap.reason) for gap in row.missing])
            for row in manifest.rows if row.site in used and row.layer == query.layer]
    what = (manifest.id, manifest.created_ms, manifest.status, manifest.end, rows, query.layer, needs.rule, needs.heads,
            query.ranges, query.top, query.missing, query.check, query.format, _ENCODING)
    return f'"{xxhash.xxh3_128_hexdigest(repr(what).encode())}"'
