"""CRC-32C (Castagnoli, reflected 0x82f63b78), for shard indexes: in machine code, or, where there is none, in NumPy.

There the bytes are cut into equal lanes that run through a table of byte pairs side by side; lanes are then joined
pairwise: the CRC of A|B is that of A carried over len(B) zero bytes (a linear map of 32 bits) xor that of B.
"""

from __future__ import annotations

from functools import lru_cache, reduce
from typing import Final

import numpy as np
import numpy.typing as npt

from schemas.native.native_loops import loops_for

U32 = npt.NDArray[np.uint32]


def _byte_table() -> U32:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(0x82F63B78), table >> 1).astype(np.uint32)
    return table


short: Final = 2048  # bytes of which one after the other is faster
_TABLE = _byte_table()
_LIST: list[int] = _TABLE.tolist()
_PAIRS = np.arange(1 << 16, dtype=np.uint32)
_PAIR_TABLE = _TABLE[(_PAIRS >> 8) ^ (_TABLE[_PAIRS & 0xFF] & 0xFF)] ^ (_TABLE[_PAIRS & 0xFF] >> 8)  # of two bytes
_TABLES = np.empty((8, 256), np.uint32)  # of a byte that so many others follow
_TABLES[0] = _TABLE
for _row in range(1, 8):
    _TABLES[_row] = _TABLES[_row - 1] >> 8 ^ _TABLE[_TABLES[_row - 1] & 0xFF]
_BYTES = np.arange(256, dtype=np.uint32)
_BITS = np.uint32(1) << np.arange(32, dtype=np.uint32)


def _apply(columns: U32, values: U32) -> U32:
    """The linear map whose image of bit i is ``columns[i]``, of each value."""
    bits = (values[:, None] >> np.arange(32, dtype=np.uint32)) & np.uint32(1)
    out: U32 = np.bitwise_xor.reduce(bits * columns, axis=1)
    return out


@lru_cache(64)
def _zeros(nbytes: int) -> U32:
    """The map that carries a CRC over ``nbytes`` zero bytes: what to xor for each value of each of its bytes."""
    result = _BITS.copy()
    power = ((_BITS >> np.uint32(8)) ^ _TABLE[_BITS & 0xFF]).astype(np.uint32)
    while nbytes:
        if nbytes & 1:
            result = _apply(power, result)
        power = _apply(power, power)
        nbytes >>= 1
    return np.stack([_apply(result, _BYTES << np.uint32(8 * byte)) for byte in range(4)])


def _bytewise(source: npt.NDArray[np.uint8], crc: int) -> int:
    for byte in source.tolist():
        crc = crc >> 8 ^ _LIST[(crc ^ byte) & 0xFF]
    return crc


def crc32c(data: bytes | bytearray | memoryview) -> int:
    """The checksum, as crc32c libraries give it.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    source = np.frombuffer(data, np.uint8)
    size = len(source)
    if (loops := loops_for(0)) is not None:
        words = size // 8 * 8
        return _bytewise(source[words:], loops.crc(source[:words], _TABLES, 0xFFFFFFFF)) ^ 0xFFFFFFFF
    if size < short:
        return _bytewise(source, 0xFFFFFFFF) ^ 0xFFFFFFFF
    lanes = 1 << max(0, min(13, (size // 64).bit_length() - 1))  # each step of all of them stays in the caches
    length = -(-size // (2 * lanes)) * 2
    # Leading zeros do not change a CRC that starts at 0; the customary start value is xored into the first 4 bytes.
    padded = np.zeros(lanes * length, np.uint8)
    padded[-size:] = source
    padded[len(padded) - size : len(padded) - size + 4] ^= 0xFF
    pairs = padded.view("<u2").reshape(lanes, length // 2)
    crcs, index, found = np.zeros(lanes, "<u4"), np.empty(lanes, np.intp), np.empty(lanes, np.uint32)
    for column in range(length // 2):
        np.bitwise_xor(crcs.view("<u2")[::2], pairs[:, column], out=index)
        _PAIR_TABLE.take(index, out=found, mode="clip")  # the mode that writes to ``out`` at once
        crcs >>= np.uint32(16)
        crcs ^= found
    while len(crcs) > 1:
        parts = crcs[::2].copy().view(np.uint8).reshape(-1, 4).T
        carried = (table.take(values) for table, values in zip(_zeros(length), parts, strict=True))
        crcs, length = reduce(np.bitwise_xor, carried, crcs[1::2]), 2 * length
    return int(crcs[0]) ^ 0xFFFFFFFF
