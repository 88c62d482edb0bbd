"""The catalog of a store in Postgres: a schema of its own, with the tables of SQLite that readers ask for.

Columns, keys and indexes follow from ``schemas.catalog.tables``. Functions of the schema do there what SQLite's of the
same names do, so that one text of SQL is right in both. ``head`` is one row: which push of which bucket this is.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from schemas.catalog.tables import CATALOG_VERSION, DDL
from schemas.objects.layout import BLOCKS_DDL, PUSH

__all__ = ["VERSION", "Table", "functions", "head_table", "indexes", "schema_of", "tables"]

VERSION: Final = CATALOG_VERSION * 1000 + 1  # of the tables, and of what is here
# What the queries of readers name; the writer's own tables stay with it.
NAMES: Final = ("aliases", "blocks", "captures", "doomed", "drops", "engines", "extents", "lost_ranks", "owners",
                "parts", "scrub", "segments")
INDEXES: Final = ("captures_ulid", "captures_created", "captures_owner", "captures_status", "captures_owner_status",
                  "aliases_alias", "aliases_ulid")
_TYPES: Final = {"TEXT": 'text COLLATE "C"', "INTEGER": "bigint", "BLOB": "bytea"}
# NUL in JSON is \u0000, which Postgres refuses: SQLite ends a text there, and so does this. What schemas.postgres.
# connection escapes in parameters is escaped here too. A pair of backslashes is set aside: it begins no escape.
_JSON: Final = r"""replace(replace(replace(replace(%s, '\\', E'\x01'), '\udbff\udfff', '\udbff\udfff\udbff\udffe'),
    '\u0000', '\udbff\udfff\udbff\udfff'), E'\x01', '\\')::json"""
_CUT: Final = r"split_part({}, U&'\+10FFFF\+10FFFF', 1)"


@dataclass(frozen=True, slots=True)
class Table:
    """A table: its columns with their types of Postgres (``text``, ``int8``, ``bytea``), and its key."""

    name: str
    columns: dict[str, str]
    key: tuple[str, ...]

    def ddl(self, schema: str) -> str:
        """The statement that makes it."""
        columns = ", ".join(f'"{name}" {declared}' for name, declared in self.columns.items())
        return f'CREATE TABLE {schema}.{self.name} ({columns}, PRIMARY KEY ({quoted(self.key)}))'


def quoted(names: Iterator[str] | tuple[str, ...] | list[str], prefix: str = "") -> str:
    """Names of columns, as SQL."""
    return ", ".join(f'{prefix}"{name}"' for name in names)


@lru_cache(maxsize=1)
def tables() -> tuple[Table, ...]:
    """The tables that readers ask for."""
    found = []
    with closing(_made()) as db:
        for name in NAMES:
            columns = {row["name"]: row for row in db.execute(f"PRAGMA table_xinfo({name})")}
            keys = sorted((row["pk"], column) for column, row in columns.items() if row["pk"])
            types = {column: _TYPES[row["type"]] for column, row in columns.items()}
            if name == "engines":  # the newest is the one that came last
                types = {"rowid": "bigint", **types}
            found.append(Table(name, types, tuple(column for _, column in keys)))
    return tuple(found)


def indexes() -> list[str]:
    """The statements that make the indexes, once the search path names the schema."""
    with closing(_made()) as db:
        return [db.execute("SELECT sql FROM sqlite_master WHERE name = ?", (name,)).fetchone()["sql"]
                for name in INDEXES]


def _made() -> sqlite3.Connection:
    db = sqlite3.connect(":memory:")
    db.row_factory = sqlite3.Row
    db.executescript(f"{DDL}; {BLOCKS_DDL}")
    return db


def schema_of(store: str) -> str:
    """The schema of a store, whose uuid is 32 hex digits."""
    assert PUSH.fullmatch(store)
    return f"vllm_tap_{store}"


def head_table(schema: str) -> str:
    """The statement that makes the table of the head."""
    return (f"CREATE TABLE {schema}.head (one boolean PRIMARY KEY CHECK (one), version bigint NOT NULL, "
            "url text NOT NULL, push text NOT NULL, head text NOT NULL)")


def functions(schema: str) -> list[str]:
    """The statements that make SQLite's functions."""
    tags, nested = _JSON % "$1", f"({_JSON % '$1'} -> substr($2, 3))"
    pair = f"SELECT {_CUT.format('key')}, {_CUT.format('value')} FROM json_each_text"
    how = "LANGUAGE sql IMMUTABLE PARALLEL SAFE"
    return [f"CREATE OR REPLACE FUNCTION {schema}.{head} {how} AS $body$ {body} $body$" for head, body in (
        ("lower(text) RETURNS text", 'SELECT pg_catalog.lower($1 COLLATE "C")'),
        ("instr(text, text) RETURNS integer", 'SELECT strpos($1 COLLATE "C", $2)'),
        ("json_each(text) RETURNS TABLE (key text, value text)", f"{pair}({tags})"),
        ("json_each(text, text) RETURNS TABLE (key text, value text)", f"{pair}({nested})"),
        ("json_extract(text, text) RETURNS text", f"SELECT {_CUT.format(f'{nested} #>> $${{}}$$')}"),
    )]
