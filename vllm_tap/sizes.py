"""Sizes as people write them: 500, 64MiB, 1.5 GB."""

from __future__ import annotations

import re
from typing import Final

from schemas.errors import TapError

__all__ = ["parse_size", "size_text"]

_UNITS: Final[dict[str, int]] = {"": 1, **{f"{letter}B": 1000**power for power, letter in enumerate("KMGTP", 1)},
                 **{f"{letter}IB": 1024**power for power, letter in enumerate("KMGTP", 1)}, "B": 1}
_SIZE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", re.ASCII)


def parse_size(text: str, what: str) -> int:
    """Bytes, at least 1; TapError beginning with ``what``."""
    match = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or not 0 < (size := round(float(match[1]) * unit)) < 1 << 63:
        raise TapError(f"{what} = {text[:100]!r}: a number of bytes such as 50GB, 1.5TB or 64MiB")
    return size


def size_text(size: int) -> str:
    """A size with three digits and its unit."""
    for power, letter in enumerate(("", "k", "M", "G", "T", "P")):
        if size < 999.5 * 1000**power or letter == "P":
            return f"{size / 1000**power:.3g} {letter}B"
    raise AssertionError
