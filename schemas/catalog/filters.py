"""The filter of a list of captures, as SQL with placeholders: no text of a caller becomes a part of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final

from schemas import limits
from schemas.errors import ArgumentError
from schemas.sites import BY_MODEL, ask_site

__all__ = ["WHEN", "CaptureFilter", "milliseconds", "parse_tag", "read_filter"]

WHEN: Final = "milliseconds since 1970, or a time such as 2026-01-31T12:00:00Z"
_1970: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class CaptureFilter:
    """The conditions of wanted captures: all that is given must hold.

    ``tags`` are (key, value), value None for any. ``model`` is the model's name, or that of its LoRA adapter. ``site``
    is a canonical name. ``since_ms`` is included, ``until_ms`` is not. ``text`` is searched for in tags and names,
    whatever the case of its ASCII letters.
    """

    tags: list[tuple[str, str | None]] = field(default_factory=list)
    model: str | None = None
    site: str | None = None
    since_ms: int | None = None
    until_ms: int | None = None
    text: str | None = None

    def condition(self) -> tuple[str, list[str | int]]:
        """A WHERE clause over rows of ``captures`` under the name ``listed``, "" where all pass, and its arguments."""
        parts: list[str] = []
        args: list[str | int] = []

        def need(part: str, *values: str | int) -> None:
            parts.append(part)
            args.extend(values)

        for key, value in self.tags:
            if value is None:
                need("EXISTS (SELECT 1 FROM json_each(tags) WHERE key = ?)", key)
            else:
                need("EXISTS (SELECT 1 FROM json_each(tags) WHERE key = ? AND value = ?)", key, value)
        if self.model is not None:
            need("(adapter = ? OR stream IN (SELECT stream FROM engines WHERE json_extract(info, '$.model') = ?))",
                 self.model, self.model)
        if self.site is not None:
            # Of a name that the model decides all that it may be.
            sites = BY_MODEL[self.site].sites if self.site in BY_MODEL else (self.site,)
            need(f"EXISTS (SELECT 1 FROM json_each(resolved, '$.layers') WHERE key IN ({','.join('?' * len(sites))}))",
                 *sites)
        if self.since_ms is not None:
            need("created_ms >= ?", self.since_ms)
        if self.until_ms is not None:
            need("created_ms < ?", self.until_ms)
        if self.text is not None:
            need("(instr(lower(id), lower(?)) > 0 OR EXISTS (SELECT 1 FROM json_each(tags) WHERE instr(lower(value), "
                 "lower(?)) > 0 OR instr(lower(key), lower(?)) > 0) OR EXISTS (SELECT 1 FROM aliases WHERE "
                 "aliases.ulid = listed.ulid AND instr(lower(alias), lower(?)) > 0))", *[self.text] * 4)
        return ("WHERE " + " AND ".join(parts) if parts else ""), args


def read_filter(tags: Sequence[str] = (), model: str | None = None, site: str | None = None, since: str | None = None,
                until: str | None = None, text: str | None = None) -> CaptureFilter:
    """The filter that a query or a command says in words; ArgumentError names which of them is wrong.

    ``tags`` are key=value, or a key alone for any value; ``since`` and ``until`` as ``WHEN`` says.
    """
    if len(tags) > limits.filter_tags_max:
        raise ArgumentError("tag", f"{len(tags)} of them", f"at most {limits.filter_tags_max}")
    for name, values in (("tag", tags), ("model", [model]), ("text", [text])):
        for value in values:
            if value is not None and not 0 < len(value) <= limits.filter_chars_max:
                raise ArgumentError(name, value, f"valid: 1 to {limits.filter_chars_max} characters")
    known = None if site is None else ask_site(site, "site", ArgumentError)[0]
    return CaptureFilter([parse_tag(tag) for tag in tags], model, known, moment("since", since), moment("until", until),
                         text)


def parse_tag(text: str) -> tuple[str, str | None]:
    """Key and value; the value None of a key alone."""
    key, equals, value = text.partition("=")
    return key, value if equals else None


def milliseconds(when: datetime) -> int:
    """Since 1970, the first whole one that is not before ``when``; without a zone it is the local time."""
    return -((_1970 - when.astimezone(UTC)) // timedelta(milliseconds=1))


def moment(name: str, text: str | None) -> int | None:
    """Milliseconds since 1970 of a moment in words; ArgumentError names the argument that has none."""
    if text is None:
        return None
    if not isinstance(text, str):
        raise ArgumentError(name, text, f"valid: {WHEN}")
    if text.isdecimal() and text.isascii() and len(text) <= 15:
        return int(text)
    try:
        found = datetime.fromisoformat(text)
        return milliseconds(found if found.tzinfo else found.replace(tzinfo=UTC))
    except (ValueError, OverflowError):
        raise ArgumentError(name, text, f"valid: {WHEN} (UTC where it names no zone)") from None
