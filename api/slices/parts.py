"""Answers of which a caller may ask for a part of the bytes (RFC 9110), sent piece by piece."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.errors import ApiError
from api.service import service_of
from api.slices.reading import SliceMemory
from api.slices.sending import tell_stalled
from api.slow_heads import ENDS_WHAT_IT_CLOSES

__all__ = ["asked_part", "head_of", "sent_part"]

_PIECE_BYTES: Final = 1 << 20  # of one write to the socket
_SHORT_BYTES: Final = 1 << 16
_BYTES: Final = re.compile(r"bytes=([0-9]{0,15})-([0-9]{0,15})", re.ASCII)


def asked_part(request: Request, size: int, tag: str) -> slice | None:
    """The bytes that a Range header asks for; None where it asks for something else than some of them, and so for all,
    or there is no entity tag. ApiError 416.
    """
    match = _BYTES.fullmatch(request.headers.get("range", ""))
    if request.method != "GET" or not tag or match is None or match[1] == match[2] == "":
        return None
    if request.headers.get("if-range", tag) != tag:
        return None
    first, last = match[1], match[2]
    start = int(first) if first else max(size - int(last), 0)
    part = slice(start, min(int(last) + 1, size) if first and last else size)
    if not part.start < part.stop:
        if first and last and int(last) < int(first):
            return None  # RFC 9110: no range at all
        raise ApiError(416, "out_of_range", f"Range = {match[0]!r}: there are {size} bytes", "Range",
                       {"Content-Range": f"bytes */{size}"})
    return part


def head_of(size: int, headers: Mapping[str, str], media_type: str) -> Response:
    """The answer to HEAD about so many bytes."""
    return Response(status_code=200, headers={**headers, "Content-Length": str(size)}, media_type=media_type)


def sent_part(request: Request, buffers: Sequence[bytes | memoryview], part: slice | None, held: SliceMemory,
              headers: Mapping[str, str], media_type: str) -> Response:
    """The answer with a part of the bytes of ``buffers``, or all; ``held`` is given back when it is sent."""
    size = sum(map(len, buffers))
    sent, more = part or slice(0, size), {}
    if part is not None:  # also where it is all of them: who asks for a range knows it by the status 206
        more["Content-Range"] = f"bytes {part.start}-{part.stop - 1}/{size}"
    more["Content-Length"] = str(sent.stop - sent.start)
    service_of(request).metrics.slice_bytes.inc(sent.stop - sent.start)
    return _Sending(_pieces(buffers, sent), held, {**headers, **more}, media_type, 200 if part is None else 206)


class _Sending(Response):
    """The answer on its way, piece by piece; its memory counts until the caller has it, has left or takes no more.

    A caller who takes nothing for ``slice_stall_s`` seconds, or up to a tenth more, is cut off.
    """

    def __init__(self, pieces: Iterator[bytes | memoryview], held: SliceMemory, headers: Mapping[str, str],
                 media_type: str, status: int) -> None:
        super().__init__(None, status, headers, media_type)
        self.held, self.pieces = held, list(pieces)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop, stall_s = asyncio.get_running_loop(), self.held.service.config.slice_stall_s
        moved_s, left = loop.time(), len(self.pieces)
        # A connection that keeps what it was given for as long as the caller likes gets pieces of its own.
        lent = scope.get("state", {}).get(ENDS_WHAT_IT_CLOSES, False)
        try:
            async with asyncio.timeout(1.1 * stall_s) as limit:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                for piece in self.pieces:
                    if loop.time() > moved_s + 0.1 * stall_s:  # seldom: moving the limit takes longer than a piece
                        moved_s = loop.time()
                        limit.reschedule(moved_s + 1.1 * stall_s)
                    left -= 1
                    await send({"type": "http.response.body", "body": piece if lent else bytes(piece),
                                "more_body": left > 0})
        except TimeoutError:
            tell_stalled(scope, stall_s)
        finally:
            self.held.release()


def _pieces(buffers: Iterable[bytes | memoryview], part: slice) -> Iterator[bytes | memoryview]:
    """The bytes of a part of an answer: long buffers cut, short ones joined, since each piece takes time to send."""
    before, short = 0, list[memoryview]()
    for buffer in buffers:
        view = memoryview(buffer)
        view = view[max(part.start - before, 0):max(part.stop - before, 0)]
        before += len(buffer)
        if len(view) < _SHORT_BYTES:
            short.append(view)
            continue
        if short:
            yield b"".join(short)
            short.clear()
        for at in range(0, len(view), _PIECE_BYTES):
            yield view[at:at + _PIECE_BYTES]
    yield b"".join(short)
