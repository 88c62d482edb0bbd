"""Access: the owner of each request, and how much each owner asks at once. Every path needs it but those in ``OPEN``.

Without keys, only this machine may ask. A stranger's page in a browser on this machine must not ask either. Such a page
can point a host name of its own at 127.0.0.1, and then read what "its" server answers. The Host header gives it away.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from api.auth.keys import KeyFile
from api.config import Config, is_loopback
from api.errors import ApiError, error_response
from api.page_files import FILES
from api.protocols import PROTOCOLS

__all__ = ["GENERATIONS", "OPEN", "AccessGuard", "Who", "by_address", "by_key"]

Who = Callable[[Scope], str]  # whose a request is, "" where there is but one; ApiError where it may not ask

# They tell only that the process lives, and show what every installation has: the page, where a user types the key.
OPEN: Final = frozenset(("/healthz", *FILES))
GENERATIONS: Final = tuple(PROTOCOLS)


class AccessGuard:
    """ASGI middleware: refuses callers that ``who`` does not know, and answers 429 over an owner's limits.

    The owner that ``who`` names becomes ``request.state.owner``. Callbacks on ``request.state.at_end`` give back what a
    request holds. They run when the request ends, answered or not.
    """

    def __init__(self, app: ASGIApp, config: Config, who: Who) -> None:
        self.app, self.config, self.who = app, config, who
        self._requests: Counter[str] = Counter()
        self._generations: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN:
            await self.app(scope, receive, send)
            return
        try:
            owner = self.who(scope)
            generation = scope["path"] in GENERATIONS
            self._check(owner, generation)
        except ApiError as error:
            await error_response(error.status, error.code, error.message, error.param, error.headers)(
                scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["owner"] = owner
        self._requests[owner] += 1
        self._generations[owner] += generation
        try:
            with ExitStack() as state["at_end"]:
                await self.app(scope, receive, send)
        finally:
            self._requests[owner] -= 1
            self._generations[owner] -= generation

    def _check(self, owner: str, generation: bool) -> None:
        whose = f"of {owner!r} " if owner else ""
        for counted, at_once, limit in (("requests", self._requests[owner], self.config.requests_in_flight_max),
                                        ("generations", self._generations[owner],
                                         self.config.generations_in_flight_max)):
            if at_once >= limit and (generation or counted == "requests"):
                raise ApiError(429, f"too_many_{counted}", f"{at_once} {counted} {whose}are in flight, limit {limit}; "
                               "ask again in a moment", headers={"Retry-After": "1"})


def by_key(keys: KeyFile) -> Who:
    """The name that a request's key stands for; 401 without a key in use. On an open service, foreign hosts get 403."""

    def who(scope: Scope) -> str:
        headers = Headers(scope=scope)
        if keys.open:
            _check_host(headers)
            return ""
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        # Either may be somebody else's: a proxy's, or what a client library always sends.
        owners = [keys.owner(text.strip()) for text in (bearer if scheme.lower() == "bearer" else "",
                                                        headers.get("x-api-key", ""))]
        owner = owners[0] if owners[1] is None else owners[1]
        if owner is None:
            # The same words for no key, a wrong one and a revoked one.
            raise ApiError(401, "invalid_key", "a key in use is needed: Authorization: Bearer KEY, or x-api-key: KEY",
                           "Authorization", {"WWW-Authenticate": 'Bearer realm="vllm-tap"'})
        return owner

    return who


def by_address(keyed: Callable[[], bool]) -> Who:
    """A rule for a service on a server's own port, which may listen anywhere and lets any web page ask: all callers are
    one owner.

    If that server asks for a key (``keyed``), it has already done so. If it does not, all but this machine get 403.
    """

    def who(scope: Scope) -> str:
        if keyed():
            return ""
        client, headers = scope.get("client"), Headers(scope=scope)
        if client is not None and not is_loopback(client[0]):  # on a Unix socket there is no address
            raise ApiError(403, "foreign_host", "without a key only this machine may ask for captures, not "
                           f"{client[0]}; start the server with --api-key")
        _check_host(headers)
        origin = headers.get("origin")
        if origin is not None and not _local(origin.partition("://")[2]):
            raise ApiError(403, "foreign_host", f"Origin = {origin[:100]!r}: without keys other web pages may not "
                           "ask for captures; use the page of this service, or a client", "Origin")
        return ""

    return who


def _check_host(headers: Headers) -> None:
    host = headers.get("host", "localhost")
    if not _local(host):
        raise ApiError(403, "foreign_host", f"Host = {host[:100]!r}: without keys the service answers to "
                       "127.0.0.1, ::1 and localhost only", "Host")


def _local(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    return is_loopback(name) or name.endswith(".localhost")
