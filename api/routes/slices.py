"""GET /v1/captures/{ref}/activations: rows of a capture, by site, layer and position."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Query, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from api.config import Config
from api.errors import ApiError, BadParam
from api.service import Service, check_ref, owner_of, service_of
from api.slice_formats import DTYPES, FORMATS, MEDIA_TYPES, Arrays, cast, encode, itemsize
from api.slice_query import SliceQuery, parse_slice_query
from api.waiting import FINAL, poll
from schemas import limits
from schemas.codecs import identified
from schemas.errors import LimitError
from schemas.manifest import Manifest, Missing
from schemas.reader import Slice
from schemas.sites import SITES

router = APIRouter()
log = logging.getLogger("vllm_tap.api")

_PIECE_BYTES = 1 << 20  # of one write to the socket
# While it is made, a slice lies in memory as stored, as float32 and as what is sent; measured, per float32.
_TIMES, _JSON_TIMES = 4, 20


@router.get("/v1/captures/{ref}/activations", tags=["captures"], response_class=Response)
async def activations(
    request: Request,
    ref: str,
    site: Annotated[list[str] | None, Query(description="Site or TransformerLens name; repeatable.")] = None,
    layer: Annotated[list[str] | None, Query(description='"3", "0,2", "a:b:c" or "all"; repeatable.')] = None,
    start: Annotated[str | None, Query(description="First position.")] = None,
    stop: Annotated[str | None, Query(description="Position past the last one.")] = None,
    format: Annotated[str | None, Query(description=", ".join(FORMATS))] = None,
    dtype: Annotated[str | None, Query(description=", ".join(DTYPES))] = None,
    wait: Annotated[str | None, Query(description="complete, rows")] = None,
    timeout: Annotated[str | None, Query(description="Seconds to wait at most.")] = None,
    rows: Annotated[str | None, Query(description="accepted (default); rejected: the drafts of speculative decoding "
                                                  "that were not accepted.")] = None,
) -> Response:
    """A slice; what is missing is named in X-Tap-Missing and never filled in."""
    service, owner = service_of(request), owner_of(request)
    query = parse_slice_query(request.query_params, request.headers.get("accept"))
    ref = check_ref(ref)
    manifest = await _manifest(service, ref, owner, query)
    if not manifest.resolved:
        # Never begun, or failed: the reader knows which, and its NotFoundError says so.
        await service.read(lambda reader: reader.slice(manifest.id, next(iter(SITES)), [0], owner=owner))
    chosen = query.choose(_captured(manifest), int(manifest.engine.get("n_layers", 0)))
    if query.format == "npy" and [len(layers) for layers in chosen.values()] != [1]:
        raise BadParam("format", "npy", "holds one array: name one site and one layer, or use safetensors or npz")
    if query.rejected and len(chosen) != 1:
        raise BadParam("rows", "rejected", f"of one site at a time: name one of {', '.join(chosen)}")
    end = max(manifest.end, manifest.total_len - 1)
    if 0 < query.start >= end and not query.rejected:
        raise ApiError(416, "out_of_range", f"start = {query.start}: the capture has {end} positions, from 0 on",
                       "start", {"Content-Range": f"positions */{end}"})
    held = _Held(service, _bytes(service.config, manifest, chosen, query))
    try:
        answer = await service.read(lambda reader: _read(
            manifest, [reader.slice(manifest.id, site, layers, query.start, _stop(query), owner, query.rejected)
                       for site, layers in chosen.items()], query))
    except BaseException:
        held.release()
        raise
    held.only(answer.size)
    service.metrics.slice_bytes.inc(answer.size)
    return _Sending(answer, held, answer.headers(manifest, query), MEDIA_TYPES[query.format][0])


async def _manifest(service: Service, ref: str, owner: str, query: SliceQuery) -> Manifest:
    """The capture's manifest, after the waiting that was asked for; ApiError 504 where that was in vain."""

    def enough() -> bool:
        reader = service.reader()
        samples = reader.samples(ref, owner)
        if len(samples) > 1:
            shown = ", ".join(samples[:8]) + (", …" if len(samples) > 8 else "")
            raise ApiError(400, "several_captures", f"{ref!r} names {len(samples)} captures; ask for one: {shown}",
                           "ref")
        if query.wait is None or reader.capture(ref, owner).status in FINAL:
            return True
        return query.wait == "rows" and query.stop is not None and _rows_there(reader.manifest(ref, owner), query)

    waited = await poll(service, enough, bool, query.timeout_s if query.wait else 0.0)
    manifest = await service.read(lambda reader: reader.manifest(ref, owner))
    if not waited and manifest.status not in FINAL:
        raise ApiError(504, "timeout", f"capture {manifest.id} is {manifest.status} after {query.timeout_s:g} s; "
                       "ask again, or without wait to get the rows that are there")
    return manifest


def _rows_there(manifest: Manifest, query: SliceQuery) -> bool:
    """Whether every position before ``query.stop`` of what is asked is there, or known to be missing."""
    assert query.stop is not None
    if manifest.end < query.stop:
        return False
    chosen = query.choose(_captured(manifest), int(manifest.engine.get("n_layers", 0)))
    return not any(
        gap.start < query.stop and gap.stop > query.start and gap.reason == "pending"
        for row in manifest.rows if row.layer in chosen.get(row.site, ()) for gap in row.missing
    )


def _captured(manifest: Manifest) -> dict[str, list[int]]:
    """The layers of each site that the capture asked for."""
    layers: dict[str, list[int]] = manifest.resolved.get("layers", {})
    return layers


def _stop(query: SliceQuery) -> int:
    return limits.position_max if query.stop is None else query.stop


def _bytes(config: Config, manifest: Manifest, chosen: dict[str, list[int]], query: SliceQuery) -> int:
    """Bytes of the slice, from the manifest alone; LimitError where they are too many."""
    widths = {info.site: info.decoded_width for info in manifest.sites}
    rows = {(row.site, row.layer): row.rejected if query.rejected else row.captured for row in manifest.rows}
    numbers = 0
    for site, layers in chosen.items():
        most = max((rows.get((site, layer), 0) for layer in layers), default=0)
        if not query.rejected:  # else a position may have several
            most = min(most, _stop(query) - query.start)
        numbers += most * len(layers) * widths.get(site, 0)
    if query.format == "json" and numbers > limits.slice_json_numbers_max:
        raise LimitError("numbers in a json slice", numbers, limits.slice_json_numbers_max, "use format=safetensors")
    if numbers * itemsize(query.dtype) > config.slice_bytes_max:
        raise LimitError("bytes of the slice", numbers * itemsize(query.dtype), config.slice_bytes_max,
                         "ask for fewer positions (start, stop), layers or sites at a time")
    return numbers * 4 * (_JSON_TIMES if query.format == "json" else _TIMES)


class _Held:
    """Memory that a slice takes until its last byte is sent; ApiError 429 where all together would be too much."""

    def __init__(self, service: Service, nbytes: int) -> None:
        if service.slice_bytes and service.slice_bytes + nbytes > service.config.slices_in_flight_bytes_max:
            raise ApiError(429, "too_many_slices", f"{service.slice_bytes} bytes of slices are being sent, limit "
                           f"{service.config.slices_in_flight_bytes_max}; ask again in a moment",
                           headers={"Retry-After": "1"})
        self.service, self.nbytes = service, nbytes
        self._add(nbytes)

    def only(self, nbytes: int) -> None:
        """What is left of it: the answer, once it is made."""
        self._add(nbytes - self.nbytes)
        self.nbytes = nbytes

    def release(self) -> None:
        self.only(0)

    def _add(self, nbytes: int) -> None:
        self.service.slice_bytes += nbytes
        self.service.metrics.slices_in_flight.set(self.service.slice_bytes)


@dataclass(frozen=True, slots=True)
class _Answer:
    """Encoded rows and what the headers say of them."""

    buffers: list[bytes | memoryview]
    rows: int
    start: int
    stop: int
    missing: list[Missing]
    about: dict[str, str]  # what the numbers are, JSON by site

    @property
    def size(self) -> int:
        return sum(len(buffer) for buffer in self.buffers)

    def headers(self, manifest: Manifest, query: SliceQuery) -> dict[str, str]:
        text, told = "[]", 0
        for told in range(len(self.missing) + 1):
            longer = json.dumps([msgspec.to_builtins(gap) for gap in self.missing[:told]], separators=(",", ":"))
            if len(longer) > limits.header_missing_bytes_max:
                told -= 1
                break
            text = longer
        return {
            "Content-Length": str(self.size), "X-Tap-Capture": manifest.id, "X-Tap-Status": manifest.status,
            "X-Tap-Start": str(self.start), "X-Tap-Stop": str(self.stop), "X-Tap-Rows": str(self.rows),
            "X-Tap-Clipped": "true" if query.stop is not None and self.stop < query.stop else "false",
            "X-Tap-Missing": text, "X-Tap-Missing-Rows": str(sum(gap.rows for gap in self.missing)),
            "X-Tap-Missing-Truncated": "true" if told < len(self.missing) else "false",
            **{f"X-Tap-{name.replace('_', '-').title()}": text for name, text in self.about.items()},
        }


def _read(manifest: Manifest, slices: Sequence[Slice], query: SliceQuery) -> _Answer:
    """Rows present at every site and layer asked for, encoded."""
    # While a capture runs, a site that is read later may reach further.
    start, stop = slices[0].start, min(piece.stop for piece in slices)
    positions = reduce(np.intersect1d, (piece.positions for piece in slices)).astype(np.uint32)
    arrays: Arrays = {}
    token_ids = np.zeros(len(positions), np.uint32)
    for piece in slices:
        keep = np.searchsorted(piece.positions, positions)
        whole = len(keep) == len(piece.positions)
        token_ids = piece.token_ids if whole else piece.token_ids[keep]
        if query.dtype == "codes":
            streams: dict[str, Any] = dict(piece.pieces)
            rows = {f".{name}": array for name, array in streams.items()}
        else:
            rows = {"": cast(piece.values(), query.dtype)}
        for suffix, array in rows.items():
            for i, layer in enumerate(piece.layers):
                arrays[f"{piece.site}.{layer}{suffix}"] = array[i] if whole else array[i][keep]
    if query.format == "npy" and len(arrays) != 1:
        raise BadParam("dtype", "codes", f"npy holds one array, this codec has {len(arrays)}; use safetensors")
    index: Arrays = {"positions": positions, "token_ids": token_ids}
    about = _about(slices)
    meta = {"capture": manifest.id, "dtype": query.dtype, "model_dtype": slices[0].dtype, **about}
    missing = merged(Missing(gap.start, min(gap.stop, stop), gap.reason)
                     for piece in slices for gap in piece.missing if gap.start < stop)
    return _Answer(encode(query.format, arrays, index, query.dtype, meta), len(positions), start, stop, missing,
                   about)


def _about(slices: Sequence[Slice]) -> dict[str, str]:
    """What the numbers are, as JSON by site: a projection's are not the row's own, and what was kept may be little."""
    known = {piece.site: identified(piece.codec) for piece in slices}
    energy = {piece.site: kept for piece in slices if (kept := piece.kept_energy()) is not None}
    about: dict[str, dict[str, Any]] = {
        "codecs": {piece.site: piece.codec for piece in slices},
        "widths": {piece.site: piece.width for piece in slices},
        "decoded": {site: codec.family.decoded for site, codec in known.items()},
    }
    if energy:
        about["kept_energy"] = {site: _mean(kept) for site, kept in energy.items()}
    return {name: json.dumps(value) for name, value in about.items()}


def _mean(shares: npt.NDArray[np.float32]) -> float | None:
    """Over all layers and rows; None where there is none, or one with a number that is none."""
    mean = float(shares.mean()) if shares.size else math.nan
    return round(mean, 6) if math.isfinite(mean) else None


def merged(gaps: Any) -> list[Missing]:
    """The gaps of several sites as one sorted list without doubles; neighbours of one reason become one."""
    out: list[Missing] = []
    for gap in sorted(set(gaps), key=lambda gap: (gap.reason, gap.start, gap.stop)):
        if out and out[-1].reason == gap.reason and gap.start <= out[-1].stop:
            out[-1] = Missing(out[-1].start, max(out[-1].stop, gap.stop), gap.reason)
        else:
            out.append(gap)
    return sorted(out, key=lambda gap: gap.start)


class _Sending(StreamingResponse):
    """The answer on its way, piece by piece; its memory counts until the caller has it, has left or takes no more."""

    def __init__(self, answer: _Answer, held: _Held, headers: dict[str, str], media_type: str) -> None:
        super().__init__(self._pieces(answer), headers=headers, media_type=media_type)
        self.held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stall_s, stalled = self.held.service.config.slice_stall_s, False

        async def bounded(message: Message) -> None:
            nonlocal stalled
            try:
                await asyncio.wait_for(send(message), stall_s)
            except TimeoutError:
                stalled = True
                raise

        try:
            await super().__call__(scope, receive, bounded)
        except Exception:
            if not stalled:
                raise
            # The answer has begun: leaving it unfinished makes the server cut the connection.
            log.warning("%s: the caller took nothing for %g s and was cut off", scope["path"], stall_s)
        finally:
            self.held.release()

    @staticmethod
    async def _pieces(answer: _Answer) -> AsyncIterator[memoryview]:
        for buffer in answer.buffers:
            view = memoryview(buffer)
            for at in range(0, len(view), _PIECE_BYTES):
                yield view[at : at + _PIECE_BYTES]
