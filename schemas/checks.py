"""Settings held against what they may be, in the same words by every process.

Each raises StartError with the setting's name, its value and what would be valid.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from schemas.errors import StartError

__all__ = ["DURABILITY", "LOG_FORMATS", "ON_FULL", "check_one_of", "check_port", "check_positive", "check_seconds"]

DURABILITY: Final = ("fsync", "os")
LOG_FORMATS: Final = ("text", "json")
ON_FULL: Final = ("drop", "wait")


def check_one_of(name: str, value: str, valid: Sequence[str]) -> None:
    """One of a few words."""
    if value not in valid:
        raise StartError(f"{name} = {value!r}: valid: {', '.join(valid)}")


def check_positive(name: str, value: float | None) -> None:
    """More than 0, or not given."""
    if value is not None and not value > 0:
        raise StartError(f"{name} = {value}: must be positive")


def check_seconds(name: str, seconds: float) -> None:
    """More than 0 and less than a day."""
    if not 0 < seconds < 86400:
        raise StartError(f"{name} = {seconds}: more than 0 and less than a day")


def check_port(name: str, port: int, zero: str = "") -> None:
    """A port; 0 only where ``zero`` says what it stands for."""
    if not (0 if zero else 1) <= port <= 65535:
        raise StartError(f"{name} = {port}: a port is 1 to 65535" + (f", 0 for {zero}" if zero else ""))
