"""Slices read, joined and encoded: what they will take is known from the manifest before anything is read."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from api.auth.limits import fits, share
from api.config import Config
from api.errors import ApiError, BadParam, several_captures
from api.service import ApiService
from api.slices.formats import Arrays, encode, itemsize, narrow
from api.slices.query import SliceQuery
from schemas import limits
from schemas.bucket.reader import AnyReader
from schemas.codecs import identified
from schemas.errors import LimitError
from schemas.manifest import Manifest, Missing
from schemas.read.reader import Slice

__all__ = ["JSON_TIMES", "TIMES", "EncodedSlice", "SliceMemory", "captured", "encoded", "read_slices", "slice_bytes",
           "sole"]

# While it is made, a slice lies in memory as stored, as float32 and as what is sent; measured, per float32.
TIMES, JSON_TIMES = 4, 20
_CAST_NUMBERS = 1 << 17  # at a time: few enough that they stay in the processor's cache


def end_of(manifest: Manifest) -> int:
    """One past the last position that has a row, or should have one."""
    return max(manifest.end, manifest.total_len - 1)


def past_the_end(name: str, start: int, end: int) -> ApiError:
    """The refusal of a ``start``, given by the parameter ``name``, that lies past everything."""
    return ApiError(416, "out_of_range", f"{name} = {start}: the capture has {end} positions, from 0 on", name,
                    {"Content-Range": f"positions */{end}"})


def sole(reader: AnyReader, ref: str, owner: str) -> Manifest:
    """The manifest of the one capture that a name stands for; ApiError 400 where it stands for several."""
    found = reader.sole(ref, owner)
    if isinstance(found, list):
        raise several_captures(ref, found)
    return found


def captured(manifest: Manifest) -> dict[str, list[int]]:
    """The layers of each site that the capture asked for."""
    layers: dict[str, list[int]] = manifest.resolved.get("layers", {})
    return layers


def slice_bytes(config: Config, manifest: Manifest, chosen: dict[str, list[int]], query: SliceQuery) -> int:
    """Bytes of memory that the slice takes, from the manifest alone; LimitError where they are too many."""
    widths = {info.site: info.decoded_width for info in manifest.sites}
    rows = {(row.site, row.layer): row.rejected if query.rejected else row.captured for row in manifest.rows}
    numbers = 0
    for site, layers in chosen.items():
        most = max((rows.get((site, layer), 0) for layer in layers), default=0)
        if not query.rejected:  # else a position may have several
            most = min(most, sum(stop - start for start, stop in query.ranges))
        numbers += most * len(layers) * widths.get(site, 0)
    if query.format == "json" and numbers > limits.slice_json_numbers_max:
        raise LimitError("numbers in a json slice", numbers, limits.slice_json_numbers_max, "use format=safetensors")
    if numbers * itemsize(query.dtype) > config.slice_bytes_max:
        raise LimitError("bytes of the slice", numbers * itemsize(query.dtype), config.slice_bytes_max,
                         "ask for fewer positions (start, stop), layers or sites at a time")
    return numbers * 4 * (JSON_TIMES if query.format == "json" else TIMES)


class SliceMemory:
    """Memory that a slice takes until its last byte is sent; ApiError 429 where all together would be too much.

    For any thread.
    """

    def __init__(self, service: ApiService, owner: str, nbytes: int) -> None:
        self.service, self.owner, self.nbytes = service, owner, 0
        held, limit = service.slice_bytes, service.config.slices_in_flight_bytes_max
        with service.slice_lock:
            if not fits(held, owner, nbytes, limit):
                raise ApiError(429, "too_many_slices", f"{held.total()} bytes of slices are being sent, of yours "
                               f"{held[owner]}; limit {limit}, for one key {share(limit, owner)}; ask again in a "
                               "moment", headers={"Retry-After": "1"})
            self._set(nbytes)

    def only(self, nbytes: int) -> None:
        """Keeps no more than the answer takes, once it is made."""
        with self.service.slice_lock:
            self._set(nbytes)

    def _set(self, nbytes: int) -> None:
        self.service.slice_bytes[self.owner] += nbytes - self.nbytes
        self.service.metrics.slices_in_flight.set(self.service.slice_bytes.total())
        self.nbytes = nbytes

    def release(self) -> None:
        self.only(0)


@dataclass(frozen=True, slots=True)
class EncodedSlice:
    """Encoded rows and what the headers say of them."""

    buffers: list[bytes | memoryview]
    rows: int
    start: int
    stop: int
    missing: list[Missing]
    about: dict[str, str]  # what the numbers are, JSON by site

    @property
    def size(self) -> int:
        """Bytes of all buffers."""
        return sum(len(buffer) for buffer in self.buffers)

    def xxh3(self) -> str:
        """XXH3-64 of the bytes, in hex: 20 GB/s, so it always comes along."""
        digest = xxhash.xxh3_64()
        for buffer in self.buffers:
            digest.update(buffer)
        return digest.hexdigest()

    def sha256(self) -> str:
        """SHA-256 of the bytes, as a Repr-Digest has it (RFC 9530)."""
        digest = hashlib.sha256()
        for buffer in self.buffers:
            digest.update(buffer)
        return f"sha-256=:{base64.b64encode(digest.digest()).decode()}:"

    def headers(self, manifest: Manifest, query: SliceQuery) -> dict[str, str]:
        text, told = "[]", 0
        for told in range(len(self.missing) + 1):
            longer = json.dumps([msgspec.to_builtins(gap) for gap in self.missing[:told]], separators=(",", ":"))
            if len(longer) > limits.header_missing_bytes_max:
                told -= 1
                break
            text = longer
        return {
            "X-Tap-Capture": manifest.id, "X-Tap-Status": manifest.status,
            "X-Tap-Start": str(self.start), "X-Tap-Stop": str(self.stop), "X-Tap-Rows": str(self.rows),
            "X-Tap-Clipped": "true" if query.stop is not None and self.stop < query.stop else "false",
            "X-Tap-Missing": text, "X-Tap-Missing-Rows": str(sum(gap.rows for gap in self.missing)),
            "X-Tap-Missing-Truncated": "true" if told < len(self.missing) else "false",
            **{f"X-Tap-{name.replace('_', '-').title()}": text for name, text in self.about.items()},
        }


def read_slices(reader: AnyReader, manifest: Manifest, chosen: dict[str, list[int]], query: SliceQuery,
                owner: str) -> EncodedSlice:
    """Rows present at every site and layer asked for, encoded."""
    shared = sorted(info.site for info in manifest.sites if info.site in chosen and info.shared_out)
    if query.dtype == "codes" and shared:
        raise BadParam("dtype", "codes", f"ranks share out the columns of {', '.join(shared)}, and each encodes its "
                                         f"own; ask for decoded rows: float32, float16 or bfloat16")
    return encoded(manifest, [
        _joined([reader.slice(manifest.id, site, layers, start, stop, owner, query.rejected)
                 for start, stop in query.ranges]) for site, layers in chosen.items()], query)


def encoded(manifest: Manifest, slices: Sequence[Slice], query: SliceQuery) -> EncodedSlice:
    """The rows that all of the slices have, one after the other in one format."""
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
            rows = {"": _numbers(piece, query.dtype)}
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
    return EncodedSlice(encode(query.format, arrays, index, query.dtype, meta), len(positions), start, stop, missing,
                   about)


def _numbers(piece: Slice, dtype: str) -> npt.NDArray[Any]:
    """The rows as ``narrow`` makes them, ``[layers, n, decoded width]``; narrow ones are never all there as float32."""
    codec = identified(piece.codec)
    if (found := codec.decode_as(piece.pieces, piece.width, piece.dtype, dtype)) is not None:
        return found
    if dtype == "float32":
        return piece.values()
    shape = len(piece.layers), len(piece.positions), codec.decoded_width(piece.width)
    numbers = np.empty(shape, np.float16 if dtype == "float16" else np.uint16)
    count, few = shape[0] * shape[1], max(1, _CAST_NUMBERS // max(1, shape[2]))
    flat = {name: array.reshape(count, *array.shape[2:]) for name, array in piece.pieces.items()}
    into = numbers.reshape(count, shape[2])
    for begin in range(0, count, few):
        rows = slice(begin, begin + few)
        some = {name: array[rows] for name, array in flat.items()}
        narrow(codec.decode(some, piece.width, piece.dtype), dtype, into[rows])
    return numbers


def _joined(parts: Sequence[Slice]) -> Slice:
    """Slices of one site at ascending ranges as one."""
    if len(parts) == 1:
        return parts[0]
    stop = max((part.stop for part in parts if part.stop > part.start), default=parts[0].stop)
    return replace(
        parts[0], stop=stop, clipped=any(part.clipped for part in parts),
        positions=np.concatenate([part.positions for part in parts]),
        token_ids=np.concatenate([part.token_ids for part in parts]),
        flags=np.concatenate([part.flags for part in parts]),
        missing=[gap for part in parts for gap in part.missing],
        pieces={name: np.concatenate([part.pieces[name] for part in parts], axis=1) for name in parts[0].pieces},
    )


def _about(slices: Sequence[Slice]) -> dict[str, str]:
    """Meaning of the numbers, as JSON by site: a projection's are not the row's own, and little may be kept."""
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


def merged(gaps: Iterable[Missing]) -> list[Missing]:
    """The gaps of several sites as one sorted list without doubles; neighbours of one reason become one."""
    out: list[Missing] = []
    for gap in sorted(set(gaps), key=lambda gap: (gap.reason, gap.start, gap.stop)):
        if out and out[-1].reason == gap.reason and gap.start <= out[-1].stop:
            out[-1] = Missing(out[-1].start, max(out[-1].stop, gap.stop), gap.reason)
        else:
            out.append(gap)
    return sorted(out, key=lambda gap: gap.start)
