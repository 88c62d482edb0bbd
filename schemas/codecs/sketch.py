"""``sketch``: k numbers of a randomised Hadamard transform at 1 or 2 bits, for cosines between rows.

y = x @ R with R = projection.hadamard(width, k, seed) in float32. The scale is s = bfloat16(√mean y²). The code of y is
the number of thresholds at or below y / s: {0} at 1 bit, {−T, 0, T} at 2. They have the least squared error on normal
numbers (Lloyd 1982, Max 1960). Codes are packed bit after bit, the lower first, seven bits a byte, lowest bit first. A
byte's highest bit is never set, so 255 is the fill of a missing row. A row with a NaN or an infinity has the scale NaN.
Decoding: y = LEVELS[code] * s. It cannot be undone; ``cosine`` compares rows.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from schemas.codecs.declare import F32, CodecFamily, Parameter, Pieces, Stream, bfloat16_to_float32, float_stream
from schemas.codecs.projection import NUMBERS, SEED, columns, hadamard

LEVELS: Final[dict[int, tuple[float, ...]]] = {1: (-1.0, 1.0), 2: (-1.5104, -0.4528, 0.4528, 1.5104)}
THRESHOLDS: Final[dict[int, tuple[float, ...]]] = {1: (0.0,), 2: (-0.9816, 0.0, 0.9816)}
PACKED: Final = 7  # bits a byte

F64 = npt.NDArray[np.float64]


def streams(width: int, dtype: str, k: int, bits: int, seed: int) -> tuple[Stream, ...]:
    """``q`` packed codes and ``scale`` of the row."""
    packed = -(-columns(width, k, "sketch") * bits // PACKED)
    return Stream("q", "uint8", (packed,), 255), float_stream("scale", "bfloat16", (1,))


def decode(pieces: Pieces, width: int, dtype: str, k: int, bits: int, seed: int) -> F32:
    """The quantised projection, float32 ``[..., k]``."""
    q = pieces["q"].view(np.uint8)
    kept = columns(width, k, "sketch")
    single = np.unpackbits(q[..., None], axis=-1, count=PACKED, bitorder="little")
    single = single.reshape(*q.shape[:-1], -1)[..., : kept * bits]
    codes = single if bits == 1 else single[..., 0::2] + 2 * single[..., 1::2]
    y = np.asarray(LEVELS[bits], np.float32)[codes]
    y *= bfloat16_to_float32(pieces["scale"])
    return y


def cosine(a: F32, b: F32, bits: int) -> F64:
    """Cosines between the rows that decoded sketches ``a`` [n, k] and ``b`` [m, k] stand for: [n, m].

    Quantising draws cosines towards 0 (at 1 bit by the arcsine law): what is larger than chance is drawn back.
    """
    seen = cosines(a, b)
    true, shown = _response(bits)
    back = np.sign(seen) * np.interp(np.abs(seen), shown, true)
    surely = seen**2 / (seen**2 + 1 / a.shape[-1])  # chance alone shows cosines of 1/√k
    estimate: F64 = seen + surely * (back - seen)
    return estimate


def cosines(a: F32, b: F32) -> F64:
    """Plain cosines between the rows of ``a`` [n, k] and ``b`` [m, k]: [n, m]; 0 for a row of zeros."""
    x, y = (_unit(rows) for rows in (a, b))
    seen: F64 = x @ y.T
    return seen


def _unit(rows: F32) -> F64:
    x = rows.astype(np.float64)
    length = np.linalg.norm(x, axis=-1, keepdims=True)
    unit: F64 = x / np.where(length == 0, 1, length)
    return unit


@lru_cache(maxsize=2)
def _response(bits: int) -> tuple[F64, F64]:
    """Correlation of normal numbers, and of their codes' levels: Price's theorem, along sin θ."""
    jumps = np.diff(LEVELS[bits])
    theta = np.linspace(0, np.pi / 2, 4001)[:-1]
    slope = np.zeros_like(theta)
    for t, jump in zip(THRESHOLDS[bits], jumps, strict=True):
        for u, other in zip(THRESHOLDS[bits], jumps, strict=True):
            slope += jump * other * np.exp(-(t * t - 2 * np.sin(theta) * t * u + u * u) / (2 * np.cos(theta) ** 2))
    shown = np.concatenate([[0.0], np.cumsum((slope[1:] + slope[:-1]) / 2), [0.0]])
    shown[-1] = shown[-2] + slope[-1]
    return np.append(np.sin(theta), 1.0), shown / shown[-1]


FAMILY: Final = CodecFamily(
    "sketch", streams, decode, "k numbers of a randomised Hadamard transform at 1 or 2 bits",
    "cosines between rows, by schemas.codecs.sketch.cosine: ±1.15·√((1 − k/width)/k) at 2 bits and k up to width / 4",
    "code j = bits (counted from the lowest, 7 a byte of q) j * bits up to (j + 1) * bits; y[j] = level[code] * scale; "
    f"level = {[list(levels) for levels in LEVELS.values()]} at 1 and 2 bits",
    (NUMBERS, Parameter("bits", int, 1, 2, 2, "bits of a number"), SEED),
    decoded="x @ projection.hadamard(width, k, seed), quantised: it cannot be undone", matrix=hadamard)
