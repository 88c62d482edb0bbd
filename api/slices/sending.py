"""Answers that are sent piece by piece, to callers who may take nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping

from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

__all__ = ["StallLimited", "tell_stalled"]

log = logging.getLogger("vllm_tap.api")


class StallLimited(StreamingResponse):
    """A streamed answer; a caller who takes nothing of it for ``stall_s`` seconds is cut off."""

    def __init__(self, content: AsyncIterator[bytes | memoryview], stall_s: float, media_type: str,
                 headers: Mapping[str, str] | None = None) -> None:
        super().__init__(content, headers=headers, media_type=media_type)
        self.stall_s = stall_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stalled = False

        async def bounded(message: Message) -> None:
            nonlocal stalled
            try:
                async with asyncio.timeout(self.stall_s):  # wait_for would make a task of every message
                    await send(message)
            except TimeoutError:
                stalled = True
                raise

        try:
            await super().__call__(scope, receive, bounded)
        except Exception:
            if not stalled:
                raise
            tell_stalled(scope, self.stall_s)


def tell_stalled(scope: Scope, stall_s: float) -> None:
    """Log that a caller was cut off: leaving an answer that has begun unfinished makes the server do that."""
    log.warning("%s: the caller took nothing for %g s and was cut off", scope["path"], stall_s)
