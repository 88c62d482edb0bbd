"""Connections to Postgres with the face of a catalog's database: ``?`` as parameter, rows by name and by number."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Final
from urllib.parse import urlsplit

from schemas.errors import ArgumentError, CatalogError, StartError, TapError

if TYPE_CHECKING:
    import psycopg

__all__ = ["PUSH_IT", "CatalogUrl", "PostgresDatabase", "check_catalog", "escaped", "installed", "told"]

PUSH_IT: Final = "vllm-tap push STORE URL --catalog brings it"
SCHEMES: Final = ("postgresql", "postgres")
_CONNECT: Final = {  # where the URL says nothing else: seconds, and a server that is gone is noticed
    "connect_timeout": "10", "keepalives_idle": "15", "keepalives_interval": "5", "keepalives_count": "3",
    "tcp_user_timeout": "30000", "application_name": "vllm-tap", "client_encoding": "UTF8"}
_OPTION: Final = re.compile('invalid URI query parameter: "[a-z_]+"')
_ESCAPE: Final = "\U0010ffff"  # Postgres takes no NUL in text: it is stored as two of these
_ESCAPED: Final = {0: _ESCAPE * 2, ord(_ESCAPE): _ESCAPE + "\U0010fffe"}
_SCANNED_ROWS: Final = 200  # that are fetched at a time where most may never be taken


class CatalogUrl:
    """A database as a URL names it; its text, in messages and logs, is without user, password and options."""

    def __init__(self, url: str) -> None:
        """ArgumentError where the URL is none; it may hold a password, so nothing of it is shown."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port
        except ValueError:
            parts, host, port = urlsplit(""), "", None
        whole = parts.scheme in SCHEMES and parts.netloc.count("@") <= 1 and parts.path.count("/") <= 1
        if not whole or "@" in parts.path or "\0" in url:
            raise ArgumentError("catalog", "a URL (not shown: it may hold a password)", "valid: postgresql://USER@HOST/"
                                "DATABASE; in user and password write '/', '@', '?' and '#' as %2F, %40, %3F and %23")
        self.url, self._text = url, f"postgresql://{host}{f':{port}' if port else ''}{parts.path}"

    def __str__(self) -> str:
        return self._text

    __repr__ = __str__

    def connect(self, *, reads: bool) -> psycopg.Connection[Any]:
        """A connection; of one that ``reads`` every transaction is of one moment. CatalogError where there is none."""
        driver = installed()
        try:
            given = driver.conninfo.conninfo_to_dict(self.url)
        except driver.ProgrammingError as error:
            # It shows a part of the URL, which may be of the password; the name of an option is none.
            why = _first_line(error) if _OPTION.match(str(error)) else "its URL cannot be read"
            raise CatalogError("connect to", str(self), why, "valid: postgresql://USER@HOST/DATABASE?sslmode=…; in "
                               "user and password write '%' as %25") from None
        with told("connect to", str(self), "is the server up, and the URL right? PGPASSWORD or ~/.pgpass may hold "
                  "the password"):
            made: psycopg.Connection[Any] = driver.connect(**{**_CONNECT, **given}, prepare_threshold=None)
        if reads:
            made.isolation_level, made.read_only = driver.IsolationLevel.REPEATABLE_READ, True
        encoding = made.info.parameter_status("server_encoding")
        if encoding != "UTF8":
            made.close()
            raise CatalogError("connect to", str(self), f"the database's encoding is {encoding}",
                               "make one with ENCODING 'UTF8' TEMPLATE template0")
        return made


def check_catalog(url: str) -> None:
    """StartError where a URL names no database, or there is no client of Postgres; nothing is asked."""
    try:
        CatalogUrl(url)
        installed()
    except TapError as error:
        raise StartError(str(error)) from None


def installed() -> Any:
    """The psycopg module; TapError without it."""
    try:
        import psycopg
        import psycopg.conninfo
    except ImportError:
        raise TapError("a catalog in Postgres needs psycopg: pip install 'vllm-tap[postgres]'") from None
    return psycopg


@contextmanager
def told(op: str, where: str, hint: str = "") -> Iterator[None]:
    """CatalogError of what Postgres says, in its first line."""
    driver = installed()
    try:
        yield
    except driver.errors.InsufficientPrivilege as error:
        raise CatalogError(op, where, _first_line(error), "the role needs USAGE on the store's schema and SELECT on "
                           "its tables, and to push also CREATE on the database") from None
    except (driver.errors.UndefinedTable, driver.errors.InvalidSchemaName):
        raise CatalogError(op, where, "it has no catalog of this store", PUSH_IT) from None
    except driver.errors.QueryCanceled as error:
        raise CatalogError(op, where, _first_line(error), "it took too long: ask for less, or again") from None
    except driver.Error as error:
        raise CatalogError(op, where, _first_line(error), hint) from None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class PostgresDatabase:
    """A connection as ``schemas.catalog.database.Database``, in the transaction that is open."""

    def __init__(self, connection: psycopg.Connection[Any], where: str) -> None:
        self.connection, self._where = connection, where

    def execute(self, sql: str, parameters: Sequence[Any] = (), /) -> psycopg.Cursor[Any]:
        """The answer, all of it; CatalogError."""
        with told("read", self._where):
            cursor = self.connection.cursor(row_factory=_named)
            return cursor.execute(_translated(sql), [escaped(one) for one in parameters], binary=True)

    def scan(self, sql: str, parameters: Sequence[Any]) -> _Scan:
        """The answer, some rows at a time."""
        return _Scan(self, sql, parameters)


class _Scan:
    """Rows of a cursor on the server; it ends with its transaction at the latest."""

    def __init__(self, database: PostgresDatabase, sql: str, parameters: Sequence[Any]) -> None:
        self._database = database
        database.execute(f"DECLARE scanned NO SCROLL CURSOR FOR {sql}", parameters)

    def __iter__(self) -> Iterator[Any]:
        count = _SCANNED_ROWS
        while count == _SCANNED_ROWS:
            found = self._database.execute(f"FETCH {_SCANNED_ROWS} FROM scanned").fetchall()
            yield from found
            count = len(found)

    def close(self) -> None:
        """Take no more."""
        self._database.execute("CLOSE scanned")


def escaped(value: Any) -> Any:
    """A parameter or a value of a column, in text without NUL; others as they are."""
    if not isinstance(value, str):
        return value
    text = str(value)  # of an enumeration its value, as SQLite takes it
    return text.translate(_ESCAPED) if "\0" in text or _ESCAPE in text else text


def _plain(value: Any) -> Any:
    """The inverse of ``escaped``."""
    if type(value) is str and _ESCAPE in value:
        return "".join("\0" if part == _ESCAPE * 2 else _ESCAPE if part[0] == _ESCAPE else part
                       for part in _pieces(value))
    return value


def _pieces(text: str) -> Iterator[str]:
    at = 0
    while at < len(text):
        size = 2 if text[at] == _ESCAPE else 1
        yield text[at:at + size]
        at += size


@lru_cache(maxsize=256)
def _translated(sql: str) -> str:
    return sql.replace("%", "%%").replace("?", "%s")


class _Row(tuple[Any, ...]):
    """A row by the names of its columns, and by their numbers."""

    __slots__ = ()
    at: ClassVar[dict[str, int]] = {}

    def __getitem__(self, key: Any) -> Any:
        return tuple.__getitem__(self, self.at[key] if isinstance(key, str) else key)


@lru_cache(maxsize=256)
def _kind(names: tuple[str, ...]) -> type[_Row]:
    return type("Row", (_Row,), {"__slots__": (), "at": {name: number for number, name in enumerate(names)}})


def _named(cursor: psycopg.Cursor[Any]) -> Any:
    kind = _kind(tuple(column.name for column in cursor.description or ()))
    return lambda values: kind(map(_plain, values))
