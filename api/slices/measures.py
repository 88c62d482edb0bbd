"""Measures of a map: one number for each layer × position, computed from the stored rows.

    norm         |x|, the length of the row.
    cosine       of the row and the one at a chosen position, in the same layer. Against another capture, of the two
                 rows at the same layer and position. No number where either has length 0.
    distance     |x - y|, y the row of another capture at the same layer and position.
    projection   x·d / |d|: how far the row reaches along a direction d.
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from tokenize import TokenError
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load as load_safetensors

from api.errors import BadParam
from api.slices.reading import end_of
from schemas.bucket.reader import AnyReader
from schemas.manifest import Manifest, Missing, SiteInfo
from schemas.spec import intervals

__all__ = ["Cells", "MapRequest", "cells", "read_direction"]

_NUMBERS_AT_ONCE: Final = 1 << 21  # of a block of rows, as float64 16 MiB

F64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class MapRequest:
    """The part of a capture that a map shows: positions ``[start, stop)`` of some layers of a site, by a measure.

    ``against`` is the capture that the shown one is compared with. ``position`` is the one that ``cosine`` compares
    with.
    """

    shown: Manifest
    against: Manifest | None
    site: str
    layers: list[int]
    start: int
    stop: int
    measure: str
    position: int | None = None

    @property
    def info(self) -> SiteInfo:
        """The site as the shown capture stored it."""
        return next(info for info in self.shown.sites if info.site == self.site)


@dataclass(frozen=True, slots=True)
class Cells:
    """A map over positions ``[start, stop)``.

    ``values`` is float64 ``[layers, n]``, NaN where there is no number. ``token_ids`` is int64 ``[n]``, -1 where
    unknown. ``missing`` names the rows that are not there: by entry the layer, the range and the reason, and the
    capture. Capture 0 is the one shown, 1 the one that it is compared with.
    """

    values: F64
    token_ids: npt.NDArray[np.int64]
    missing: list[tuple[int, Missing, int]]


def cells(reader: AnyReader, owner: str, asked: MapRequest, direction: F64 | None = None) -> Cells:
    """The numbers of a map, read block by block so that little of it is in memory at a time.

    ``direction`` float64 ``[width]`` or ``[layers, width]``. BadParam where a row that is needed for every cell is
    missing, or a direction does not fit.
    """
    shown, site, start = asked.shown, asked.site, asked.start
    values = np.full((len(asked.layers), asked.stop - start), np.nan)
    token_ids = _known_tokens(shown, start, asked.stop)
    if direction is not None:
        direction = _fitting(direction, asked)
    for rows, layers in _alike(asked):
        step = max(1, _NUMBERS_AT_ONCE // (max(1, asked.info.decoded_width) * len(layers)))
        anchor = None
        if direction is not None:
            anchor = direction[rows][:, None]
        elif asked.position is not None:
            anchor = _row_at(reader, owner, asked, layers)
        for first in range(start, asked.stop, step):
            last = min(first + step, asked.stop)
            here = reader.slice(shown.id, site, layers, first, last, owner)
            x, positions = here.values().astype(np.float64), here.positions.astype(np.int64)
            token_ids[positions - start] = here.token_ids
            other = anchor
            if asked.against is not None:
                there = reader.slice(asked.against.id, site, layers, first, last, owner)
                positions, mine, theirs = np.intersect1d(positions, there.positions, True, True)
                x, other = x[:, mine], there.values().astype(np.float64)[:, theirs]
                if x.shape[-1] != other.shape[-1]:
                    raise BadParam("against", asked.against.id, f"its rows of {site} have {other.shape[-1]} numbers, "
                                   f"those of {shown.id} {x.shape[-1]}")
            values[np.ix_(np.array(rows), positions - start)] = _measured(asked.measure, x, other)
    return Cells(values, token_ids, _missing(asked))


def read_direction(data: bytes) -> F64:
    """An uploaded direction, ``[width]`` or ``[layers, width]``, from npy or from safetensors with one tensor in it."""
    try:
        if data.startswith(b"\x93NUMPY"):
            array: npt.NDArray[Any] = _load_npy(data)
        else:
            tensors = load_safetensors(data)
            if len(tensors) != 1:
                raise BadParam("body", sorted(tensors)[:8], "a safetensors file with exactly one tensor, the direction")
            array = next(iter(tensors.values()))
    except (ValueError, SafetensorError, KeyError, TypeError, EOFError) as error:
        raise BadParam("body", data[:16], "a direction as npy, or safetensors with one tensor in float16, float32 "
                       f"or float64 ({str(error)[:120]})") from None
    if array.ndim not in (1, 2) or array.dtype.kind not in "fiu" or not array.size:
        raise BadParam("body", f"{array.dtype} {list(array.shape)}", "numbers [width] or [layers, width]")
    numbers = array.astype(np.float64)
    if not np.isfinite(numbers).all() or not np.linalg.norm(numbers, axis=-1).all():
        raise BadParam("body", f"{array.dtype} {list(array.shape)}", "finite numbers, with a norm other than 0")
    return numbers


def _load_npy(data: bytes) -> npt.NDArray[Any]:
    """The array of an npy file; ValueError, before memory is taken, where its header tells of more than is there."""
    file, npy = io.BytesIO(data), cast(Any, np.lib.format)  # it has no types
    version = npy.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"npy version {version}, valid: (1, 0), (2, 0)")
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    try:
        shape, _, dtype = read(file)
    except (SyntaxError, TokenError, RecursionError, MemoryError) as error:  # the header is a Python literal
        raise ValueError(f"its header cannot be parsed: {type(error).__name__}") from None
    there = len(data) - file.tell()
    if dtype.hasobject or math.prod(shape) * dtype.itemsize != there:
        raise ValueError(f"{dtype} {list(shape)[:8]} does not fit in the {there} bytes that follow")
    array: npt.NDArray[Any] = np.load(io.BytesIO(data), allow_pickle=False)
    return array


def _measured(measure: str, x: F64, other: F64 | None) -> F64:
    """Numbers ``[layers, n]`` from rows ``[layers, n, width]`` and the rows that they are compared with. These have the
    same shape, or n = 1.
    """
    if measure == "norm" or other is None:
        return _length(x)
    if measure == "distance":
        return _length(x - other)
    along = (x * other).sum(-1)
    lengths = _length(other) * (_length(x) if measure == "cosine" else 1.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        result: F64 = np.where(lengths > 0, along / lengths, np.nan)
    return result


def _length(x: F64) -> F64:
    result: F64 = np.sqrt(np.square(x).sum(-1))
    return result


def _fitting(direction: F64, asked: MapRequest) -> F64:
    """The direction as ``[layers, width]``."""
    site, info, n_layers = asked.site, asked.info, len(asked.layers)
    if info.decoded_width != info.width:
        raise BadParam("measure", "projection", f"{site} is stored as {info.codec}, which decodes to {info.decoded}; a "
                       "direction of the model does not apply to that")
    if direction.shape[-1] != info.width:
        raise BadParam("body", list(direction.shape), f"{site} has rows of {info.width} numbers")
    if direction.ndim == 2 and len(direction) not in (1, n_layers):
        raise BadParam("body", list(direction.shape), f"one direction, or one for each of the {n_layers} layers shown")
    return np.broadcast_to(direction, (n_layers, info.width))


def _row_at(reader: AnyReader, owner: str, asked: MapRequest, layers: list[int]) -> F64:
    position = asked.position or 0
    found = reader.slice(asked.shown.id, asked.site, layers, position, position + 1, owner)
    if not len(found.positions):
        reason = found.missing[0].reason if found.missing else "not a position of this capture"
        raise BadParam("position", position, f"the row of {asked.site} there is missing ({reason}); choose another")
    return found.values().astype(np.float64)


def _alike(asked: MapRequest) -> list[tuple[list[int], list[int]]]:
    """The layers in groups that have the same rows: (their indices in ``asked.layers``, the layers)."""
    groups: dict[object, list[int]] = {}
    gaps = [_gaps(manifest, asked.site) for manifest in (asked.shown, asked.against) if manifest is not None]
    for index, layer in enumerate(asked.layers):
        groups.setdefault(tuple(tuple(of.get(layer, ())) for of in gaps), []).append(index)
    return [(rows, [asked.layers[row] for row in rows]) for rows in groups.values()]


def _gaps(manifest: Manifest, site: str) -> dict[int, list[Missing]]:
    return {row.layer: row.missing for row in manifest.rows if row.site == site}


def _missing(asked: MapRequest) -> list[tuple[int, Missing, int]]:
    """Missing rows, clipped to the range: those that were asked for and are missing, and those that were not asked for.
    """
    found = []
    for of, manifest in enumerate((asked.shown, asked.against)):
        if manifest is None:
            continue
        gaps = _gaps(manifest, asked.site)
        for layer in asked.layers:
            for gap in [*gaps.get(layer, []), *_not_asked(manifest, asked.stop)]:
                first, last = max(gap.start, asked.start), min(gap.stop, asked.stop)
                if first < last:
                    found.append((layer, Missing(first, last, gap.reason), of))
    return found


def _not_asked(manifest: Manifest, stop: int) -> list[Missing]:
    """Positions before ``stop`` that the capture did not ask for, or that its sequence does not reach."""
    end = end_of(manifest)
    found, at = [], 0
    for first, last in sorted(intervals(manifest.resolved["positions"], manifest.prompt_len)):
        found.append(Missing(at, min(first, end), "not_asked"))
        at = max(at, last)
    return [*found, Missing(at, end, "not_asked"), Missing(end, stop, "past_the_end")]


def _known_tokens(manifest: Manifest, start: int, stop: int) -> npt.NDArray[np.int64]:
    known = np.array([*manifest.prompt_token_ids, *manifest.output_token_ids], np.int64)[start:stop]
    return np.concatenate([known, np.full(stop - start - len(known), -1, np.int64)])
