"""A key for what callers ask for: its JSON, which no other value has."""

from __future__ import annotations

from math import isfinite
from types import NoneType
from typing import Any, Final

import msgspec

__all__ = ["KEY_BYTES_MAX", "json_key"]

KEY_BYTES_MAX: Final = 2048
_LEAVES: Final = (str, int, bool, NoneType)


def json_key(value: object) -> bytes:
    """The JSON of a value; b"" where it is long, or another value has the same."""
    try:
        key = msgspec.json.encode(value) if _is_plain(value) else b""
    except (TypeError, ValueError, OverflowError, RecursionError, RuntimeError):  # the last: changed meanwhile
        return b""
    return key if len(key) <= KEY_BYTES_MAX else b""


def _is_plain(value: Any) -> bool:
    """Whether no other value has the same JSON. Bytes, dates and keys that are numbers would have the same JSON as a
    text, and infinity has that of None.
    """
    kind = type(value)
    if kind is dict:
        return all(type(name) is str for name in value) and all(map(_is_plain, value.values()))
    if kind in (list, tuple):
        return all(map(_is_plain, value))
    return isfinite(value) if kind is float else kind in _LEAVES
