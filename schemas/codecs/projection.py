"""The matrices of ``rp8`` and ``sketch``: float32 [width, k] from (width, k, seed) alone, the same for ever.

Both are made of the raw 64-bit numbers of the counter-based generator Philox4x64-10 (Salmon et al. 2011) with the key
``seed`` and the counter 0: NumPy's own distributions may change between versions, this stream may not.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from schemas.codecs.declare import Parameter
from schemas.errors import SpecError

Matrix = npt.NDArray[np.float32]

NUMBERS_MAX: Final = 1 << 23  # of one matrix: 32 MiB, and a second to make
NUMBERS: Final = Parameter("k", int, 1, 1 << 14, 512, "numbers that a row becomes")
SEED: Final = Parameter("seed", int, 0, (1 << 32) - 1, 0, "key of the projection's generator")


def columns(width: int, k: int, codec: str) -> int:
    """The count of numbers that a row of ``width`` becomes; SpecError where the matrix would be too large."""
    if width * k > NUMBERS_MAX:
        raise SpecError("codec", f"{codec}:k={k}", f"valid at width {width}: k up to {NUMBERS_MAX // width}, because "
                                                   f"the projection has at most {NUMBERS_MAX} numbers")
    return min(k, width)


@lru_cache(maxsize=4)
def gaussian(width: int, k: int, seed: int) -> Matrix:
    """Independent normal numbers of variance 1/k, in C order, by Box and Muller from pairs of raw numbers (a, b).

    A k larger than the width is taken as the width.

    u = ((a >> 11) + 1) / 2^53 and v = (b >> 11) / 2^53. The two numbers are √(−2 ln u) · cos 2πv and √(−2 ln u) · sin
    2πv. Both are divided by √k.
    """
    k = min(k, width)
    raw = np.random.Philox(key=seed).random_raw(width * k + width * k % 2).reshape(-1, 2) >> np.uint64(11)
    radius = np.sqrt(-2 * np.log((raw[:, 0] + np.uint64(1)) * 2.0**-53))
    angle = 2 * np.pi * (raw[:, 1] * 2.0**-53)
    pairs = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=-1)
    return _frozen(pairs.reshape(-1)[: width * k].reshape(width, k) / np.sqrt(k))


@lru_cache(maxsize=4)
def hadamard(width: int, k: int, seed: int) -> Matrix:
    """The first ``width`` rows and k of the columns of D · H · E · H, divided by √(n k): two transforms with random
    signs.

    n is width rounded up to a power of two and H the n × n matrix of (−1)^popcount(i & j). D and E are diagonal, with
    signs from the first n raw numbers. The lowest bit of a number is set where the sign in D is −1, the next bit where
    the sign in E is −1. The columns are the places of the k smallest of the following n raw numbers.

    Columns of the n × n product are orthogonal. The projected numbers are close to normal even where one column of a
    row is a thousand times larger than the others. A k larger than the width is taken as the width.
    """
    k, n = min(k, width), 1 << (width - 1).bit_length()
    raw = np.random.Philox(key=seed).random_raw(2 * n)
    one, two = (1 - 2 * (raw[:n] >> np.uint64(bit) & np.uint64(1)).astype(np.int32) for bit in (0, 1))
    chosen = np.argsort(raw[n:], kind="stable")[:k]
    both = np.zeros((k, n), np.int32)
    both[np.arange(k), chosen] = 1
    both = _transformed(_transformed(both) * two)
    return _frozen((both[:, :width] * one[:width]).T / np.sqrt(n * k))


def _transformed(x: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Each row times H, in whole numbers: exact."""
    n, step = x.shape[-1], 1
    while step < n:
        pairs = x.reshape(len(x), -1, 2, step)
        x = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], axis=2).reshape(len(x), n)
        step *= 2
    return x


def _frozen(matrix: npt.NDArray[np.floating]) -> Matrix:
    """float32, and not to be written to: it is shared."""
    out = matrix.astype(np.float32)
    out.setflags(write=False)
    return out
