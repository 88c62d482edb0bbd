"""What a list of captures is narrowed by, as SQL with placeholders: no text of a caller becomes a part of it."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Sieve"]


@dataclass(frozen=True, slots=True)
class Sieve:
    """All that is given must hold.

    ``tags`` as (key, value), value None for any; ``site`` in its canonical name; ``since_ms`` included, ``until_ms``
    not; ``text`` is looked for in tags and names, whatever the case of its ASCII letters.
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
            need("stream IN (SELECT stream FROM engines WHERE json_extract(info, '$.model') = ?)", self.model)
        if self.site is not None:
            need("EXISTS (SELECT 1 FROM json_each(resolved, '$.layers') WHERE key = ?)", self.site)
        if self.since_ms is not None:
            need("created_ms >= ?", self.since_ms)
        if self.until_ms is not None:
            need("created_ms < ?", self.until_ms)
        if self.text is not None:
            text = self.text.lower()
            need("(instr(lower(id), ?) OR EXISTS (SELECT 1 FROM json_each(tags) WHERE instr(lower(value), ?) "
                 "OR instr(lower(key), ?)) OR EXISTS (SELECT 1 FROM aliases WHERE aliases.ulid = listed.ulid "
                 "AND instr(lower(alias), ?)))", text, text, text, text)
        return ("WHERE " + " AND ".join(parts) if parts else ""), args
