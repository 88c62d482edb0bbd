"""The files of the page, read at the start: what a browser may ask for without a key."""

from __future__ import annotations

import mimetypes
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import xxhash

__all__ = ["FILES", "HEADERS"]

_FOLDER: Final = Path(__file__).parent / "page"
HEADERS: Final = {
    # A key may be typed in here: nothing but these files runs, and nothing but this service is asked.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
                               "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # asked for each time, sent only where it has changed
}
_TYPES: Final = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".md": "text/plain",
                 ".svg": "image/svg+xml"}


@dataclass(frozen=True, slots=True)
class _PageFile:
    data: bytes
    media_type: str
    etag: str


def _load(path: Path) -> _PageFile:
    data = path.read_bytes()
    media_type = _TYPES.get(path.suffix) or mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return _PageFile(data, media_type, f'"{xxhash.xxh3_64_hexdigest(data)}"')


FILES: Final = {  # what a browser may ask for without a key, by path
    **{f"/page/{path.relative_to(_FOLDER).as_posix()}": _load(path) for path in _FOLDER.rglob("*") if path.is_file()},
    "/": _load(_FOLDER / "index.html"),
}
