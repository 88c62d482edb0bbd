"""Settings: what a page says of each, and checks of their values, in the same words by every process.

Each check raises StartError with the setting's name, its value and what would be valid.
"""

from __future__ import annotations

import re
import socket
from enum import StrEnum
from typing import Final, NamedTuple

from schemas import limits
from schemas.errors import SpecError, StartError
from schemas.sites import is_probe, parse_site

__all__ = ["NAME", "Durability", "LogFormat", "OnFull", "Setting", "Writers", "check_can_listen", "check_name",
           "check_one_of", "check_port", "check_positive", "check_seconds", "is_name", "parse_arm"]

NAME: Final = rf"[A-Za-z0-9][A-Za-z0-9_\-]{{0,{limits.probe_name_chars_max - 1}}}"  # of a probe, a vector, an engine
_NAME: Final = re.compile(NAME, re.ASCII)


class Setting(NamedTuple):
    """A variable: its default as a reader would write it, "" where there is none, its unit or form, and its meaning."""

    default: str
    unit: str
    meaning: str
    flag: str = ""  # of ``vllm-tap serve``, where one means the same


def is_name(text: str) -> bool:
    """Whether a probe or a vector may have this name: it is safe in a path, and as the name of a file."""
    return _NAME.fullmatch(text) is not None


class Durability(StrEnum):
    """When a row counts as safe."""

    fsync = "fsync"
    os = "os"


class LogFormat(StrEnum):
    """Formats of the writer's lines."""

    text = "text"
    json = "json"


class OnFull(StrEnum):
    """Policies for when activations come faster than the disk takes them."""

    drop = "drop"
    wait = "wait"


class Writers(StrEnum):
    """The writers that the ranks of one engine send to."""

    one = "one"
    several = "several"


def check_one_of(name: str, value: str, words: type[StrEnum]) -> None:
    """One of a few words."""
    if value not in (valid := list(words)):
        raise StartError(f"{name} = {value!r}: valid: {', '.join(valid)}")


def check_name(setting: str, name: str) -> None:
    """A name that is safe in a header, a path and a metric's label."""
    if not is_name(name):
        raise StartError(f"{setting} = {name[:100]!r}: a name is 1 to {limits.probe_name_chars_max} of A-Z a-z "
                         "0-9 _ -, and does not begin with _ or -")


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


def check_can_listen(host: str, port: int, flag: str) -> None:
    """StartError where the port cannot be listened on. It is taken for a moment and never listened on: who comes is
    refused, as before.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        raise StartError(f"{flag} {port} on {host}: {error.strerror or error}; "
                         f"stop what uses it or choose another with {flag}") from None


def parse_arm(name: str, text: str) -> tuple[str, ...]:
    """Parse a comma-separated list of places to tap, in canonical names: sites (``resid_post``), or single layers of
    one (``resid_post.12``). A site that is named alone is tapped in every layer.
    """
    places: list[str] = []
    for part in filter(None, map(str.strip, text.split(","))):
        try:
            site, layer = parse_site(part)
        except SpecError as error:
            raise StartError(f"{name} = {text!r}: {part!r}: {error.reason}") from None
        if is_probe(site):
            raise StartError(f"{name} = {text!r}: {part!r}: a probe is registered by --probe NAME=FILE "
                             "(VLLM_TAP_PROBES), not armed")
        places.append(site if layer is None else f"{site}.{layer}")
    if not places:
        raise StartError(f"{name} = {text!r}: names no site")
    return tuple(place for place in dict.fromkeys(places) if "." not in place or place.partition(".")[0] not in places)
