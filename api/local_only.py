"""Without keys, the browser of this machine's user must not be talked into reading captures for a stranger's page.

A page may point a name of its own at 127.0.0.1 and then read what "its" server answers; the Host header gives it away.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from api.config import is_loopback
from api.errors import error_response

__all__ = ["LocalOnly"]


class LocalOnly:
    """ASGI middleware: 403 where the Host header names anything but this machine."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _local(Headers(scope=scope).get("host", "localhost")):
            host = Headers(scope=scope)["host"][:100]
            answer = error_response(403, "foreign_host", f"Host = {host!r}: without keys the service answers to "
                                    "127.0.0.1, ::1 and localhost only", "Host")
            await answer(scope, receive, send)
            return
        await self.app(scope, receive, send)


def _local(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    return is_loopback(name) or name.endswith(".localhost")
