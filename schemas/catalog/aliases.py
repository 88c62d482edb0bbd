"""Finding captures by any of their names. NotFoundError says the same whether there is none or it is not theirs."""

from __future__ import annotations

import re
from typing import Any, Final

from schemas import limits
from schemas.catalog.database import Database
from schemas.catalog.records import Capture, capture_of, find_capture
from schemas.errors import NotFoundError
from schemas.ids import split_capture_id

__all__ = ["find", "newest", "no_capture", "of_one_owner", "samples", "under"]

_INDEXED: Final = re.compile(r"(.+)\.(0|[1-9][0-9]{0,5})", re.ASCII)


def no_capture(ref: str) -> NotFoundError:
    """The error, in the same words whether there is none, it is deleted or it is another's."""
    return NotFoundError(f"no capture {ref[:limits.alias_chars_max]!r}")


def find(db: Database, ref: str, owner: str | None) -> Capture:
    """The capture of an id or an alias."""
    capture_id = ref if split_capture_id(ref) is not None else _resolve_alias(db, ref, owner)
    capture = find_capture(db, capture_id)
    if capture is None:
        ulid, index = split_capture_id(capture_id) or ("", None)
        capture = find_capture(db, ulid) if index == 0 else None
        if index is None:
            found = under(db, ulid, owner)
            if len(found) > 1:
                raise NotFoundError(f"{ref} has {len(found)} samples; ask for {found[0].id} … {found[-1].id}")
            capture = found[0]
    if capture is None or capture.deleted or (owner is not None and capture.owner != owner):
        raise no_capture(ref)
    return capture


def newest(db: Database, alias: str, owner: str | None) -> Capture | None:
    """The first of the captures that an alias stands for, one that is not deleted where there is any; None of no such
    alias.
    """
    try:
        ulid, _ = split_capture_id(_resolve_alias(db, alias, owner)) or ("", None)
    except NotFoundError:
        return None
    theirs, args = ("", []) if owner is None else ("AND owner = ?", [owner])
    row = db.execute(f"SELECT * FROM captures WHERE ulid = ? {theirs} ORDER BY deleted, sample LIMIT 1",
                     (ulid, *args)).fetchone()
    return None if row is None else capture_of(row)


def under(db: Database, ulid: str, owner: str | None) -> list[Capture]:
    """The captures of a request, in the order of their numbers."""
    return [capture_of(row) for row in _under(db, ulid, owner, "*")]


def _under(db: Database, ulid: str, owner: str | None, columns: str) -> list[Any]:
    """Their rows, the owner's column among them."""
    rows = db.execute(f"SELECT {columns} FROM captures WHERE ulid = ? AND deleted = 0 ORDER BY sample", (ulid,))
    found = [row for row in rows if owner is None or row["owner"] == owner]
    if not found:
        raise no_capture(ulid)
    return found


def samples(db: Database, ref: str, owner: str | None) -> list[str]:
    """The ids of the captures under a ULID or an alias, in the order of their numbers."""
    if split_capture_id(ref) is None:
        ref = _resolve_alias(db, ref, owner)
    ulid, index = split_capture_id(ref) or ("", None)
    if index is not None:
        return [find(db, ref, owner).id]
    return [str(row["id"]) for row in _under(db, ulid, owner, "id, owner")]


def of_one_owner(db: Database, alias: str) -> None:
    """NotFoundError where several owners have captures of that name."""
    match = _INDEXED.fullmatch(alias)
    query = ("SELECT ulid, owner, MIN(n) AS first FROM aliases JOIN captures USING (ulid, owner) WHERE alias IN (?, ?) "
             "AND deleted = 0 GROUP BY ulid, owner ORDER BY first")
    found = db.execute(query, (alias, match[1] if match else alias)).fetchall()
    if len({row["owner"] for row in found}) > 1:
        ids = ", ".join(f"{row['ulid']} (of {row['owner'] or 'nobody'})" for row in found)
        raise NotFoundError(f"{alias} names captures of several owners; ask for one by its id: {ids}")


def _resolve_alias(db: Database, alias: str, owner: str | None) -> str:
    theirs, args = ("", []) if owner is None else ("AND owner = ?", [owner])
    query = f"SELECT ulid FROM aliases WHERE alias = ? {theirs} ORDER BY n DESC LIMIT 1"
    row = db.execute(query, (alias, *args)).fetchone()
    if row is not None:
        return str(row["ulid"])
    if match := _INDEXED.fullmatch(alias):
        row = db.execute(query, (match[1], *args)).fetchone()
        if row is not None:
            return f"{row['ulid']}.{match[2]}"
    raise no_capture(alias)
