"""Sizes and ages as people write them: 500, 64MiB, 1.5 GB; 30s, 12h."""

from __future__ import annotations

import re
from typing import Final

from schemas.errors import ArgumentError, TapError

__all__ = ["parse_age", "parse_size", "size_text"]

_UNITS: Final[dict[str, int]] = {"": 1, **{f"{letter}B": 1000**power for power, letter in enumerate("KMGTP", 1)},
                 **{f"{letter}IB": 1024**power for power, letter in enumerate("KMGTP", 1)}, "B": 1}
_SIZE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", re.ASCII)
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_AGE: Final = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)([smhd])", re.ASCII)


def parse_age(text: str, what: str, least: float = 0.0) -> float:
    """Seconds, at least ``least``; ArgumentError of ``what``."""
    match = _AGE.fullmatch(text)
    if match is None or (seconds := float(match[1]) * _SECONDS[match[2]]) < least:
        raise ArgumentError(what, text, "a number and its unit: 30s, 5m, 12h, 1d"
                            + (f"; at least {least:g}s" if least else ""))
    return seconds


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
