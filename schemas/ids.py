"""Capture ids: a ULID, or ``ULID.i`` for sample i of a request that makes several captures.

An id is validated against a closed alphabet wherever it enters, so it can never name a path.
ULID: https://github.com/ulid/spec (26 characters of Crockford base 32, 48 bits of milliseconds first).
"""

from __future__ import annotations

import os
import re
import time

from schemas.errors import SpecError

_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_ULID = re.compile(r"[0-7][0-9A-HJKMNP-TV-Z]{25}", re.ASCII)
_CAPTURE = re.compile(r"([0-7][0-9A-HJKMNP-TV-Z]{25})(?:\.(0|[1-9][0-9]{0,5}))?", re.ASCII)


def new_ulid() -> str:
    """A fresh ULID; sorts by creation time to the millisecond."""
    return ulid_of_bits((time.time_ns() // 1_000_000) << 80 | int.from_bytes(os.urandom(10), "big"))


def ulid_of_bits(number: int) -> str:
    """The ULID of 128 bits: 48 of milliseconds, then 80 of anything."""
    return "".join(_ALPHABET[(number >> shift) & 31] for shift in range(125, -1, -5))


def is_ulid(text: str) -> bool:
    """Whether ``text`` is a ULID in canonical (upper case) form."""
    return _ULID.fullmatch(text) is not None


def ulid_ms(capture: str) -> int:
    """The time in a capture id's ULID, in milliseconds since 1970."""
    number = 0
    for character in capture[:10]:
        number = number << 5 | _ALPHABET.index(character)
    return number


def check_ulid(text: str) -> str:
    """``text`` if it is a ULID, else a SpecError on the field ``id``."""
    if not is_ulid(text):
        raise SpecError("id", text, "must be a ULID: 26 characters of 0-9 and A-Z without I, L, O, U")
    return text


def split_capture_id(capture: str) -> tuple[str, int | None] | None:
    """``("ULID", i)`` of a capture id, i None where it has no sample number; None if it is not one."""
    match = _CAPTURE.fullmatch(capture)
    if match is None:
        return None
    return match[1], None if match[2] is None else int(match[2])


def sample_id(ulid: str, index: int, count: int) -> str:
    """The capture id of sample ``index`` of ``count``: the ULID itself where there is only one."""
    return ulid if count == 1 else f"{ulid}.{index}"
