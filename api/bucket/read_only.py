"""Requests that a bucket cannot serve: whatever changes a store, needs an engine, or follows rows as they come."""

from __future__ import annotations

import re
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from api.auth.guard import GENERATIONS
from api.errors import error_response

__all__ = ["ReadOnly"]

_READS: Final = frozenset(("GET", "HEAD", "OPTIONS"))
_MAP: Final = re.compile(r"/v1/captures/[^/]+/map")  # the one POST that reads
_CAPTURE: Final = re.compile(r"/v1/captures/[^/]+")
_ENGINE: Final = re.compile(r"/v1/models(/.*)?|/version|/tokenize|/detokenize|/v1/messages/count_tokens")
_LIVE: Final = re.compile(r"/v1/captures/[^/]+/(events|live)")
_VECTORS: Final = re.compile(r"/v1/vectors(/.*)?")


class ReadOnly:
    """ASGI middleware: answers 403 ``read_only`` to what the bucket at ``url`` cannot serve, and says why. With
    ``deletes`` captures may be deleted.
    """

    def __init__(self, app: ASGIApp, url: str, deletes: bool) -> None:
        self.app, self.url, self.deletes = app, url, deletes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        why = _refusal(scope["method"], scope["path"], self.deletes) if scope["type"] == "http" else ""
        if not why:
            await self.app(scope, receive, send)
            return
        await error_response(403, "read_only", f"this API reads a bucket, {self.url}: {why}")(scope, receive, send)


def _refusal(method: str, path: str, deletes: bool) -> str:
    """Why a request is refused; "" where it is not."""
    if path in GENERATIONS or _ENGINE.fullmatch(path):
        return "there is no engine behind it; ask the API in front of one"
    if _VECTORS.fullmatch(path):
        return "stored vectors are for edits, and lie in the store's folder; ask the API beside its writer"
    if _LIVE.fullmatch(path):
        return ("what is in a bucket is final, and rows that still come are not there; follow them at the API beside "
                "the writer")
    if method in _READS or (method == "POST" and _MAP.fullmatch(path)):
        return ""
    if method == "DELETE" and _CAPTURE.fullmatch(path):
        return "" if deletes else ("it was started without --deletes; vllm-tap rm CAPTURE --store URL deletes captures "
                                   "here")
    return ("captures are held and released where they were made, by the API beside the writer or vllm-tap, and the "
            "next push brings that")
