"""Both clients before services that are busy, break off, or want a key: what is asked again, and when."""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import re
import socket
import threading
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from vllm_tap import AsyncClient, Client, ServiceError, Unavailable


class Moody(threading.Thread):
    """A server over plain sockets that answers each connection as it was told, then as a service without captures."""

    def __init__(self, *answers: bytes) -> None:
        super().__init__(daemon=True)
        self.answers, self.asked, self.at = list(answers), list[bytes](), list[float]()
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.start()

    def run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.socket.accept()
                with connection:
                    request = b""
                    while b"\r\n\r\n" not in request:
                        request += connection.recv(65536)
                    head, _, body = request.partition(b"\r\n\r\n")
                    length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
                    while length and len(body) < int(length[1]):
                        body += connection.recv(65536)
                    self.asked.append(request)
                    self.at.append(time.monotonic())
                    connection.sendall(self.answers.pop(0) if self.answers else reply(200, b'{"data": []}'))


def reply(status: int, body: bytes, *headers: str) -> bytes:
    """An HTTP answer."""
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


BUSY = b'{"error": {"message": "busy", "code": "too_many_slices"}}'


def listed(url: str, way: str, **options: Any) -> list[Any]:
    """The list of captures, by one of the two clients."""
    if way == "client":
        with Client(url, **options) as client:
            return list(client.captures())

    async def run() -> list[Any]:
        async with AsyncClient(url, **options) as client:
            return [row async for row in client.captures()]

    return asyncio.run(run())


@pytest.mark.parametrize("way", ["client", "async"])
def test_a_busy_service_is_asked_again_when_it_says_so(way: str) -> None:
    soon = email.utils.format_datetime(datetime.now(UTC) + timedelta(seconds=1), usegmt=True)
    server = Moody(reply(429, BUSY, "Retry-After: 0.6"), reply(503, BUSY), reply(503, BUSY, f"Retry-After: {soon}"),
                   b"")
    assert listed(server.url, way) == []
    assert len(server.asked) == 5
    assert server.at[1] - server.at[0] >= 0.6 and server.at[2] - server.at[1] >= 0.5


@pytest.mark.parametrize("way", ["client", "async"])
def test_what_does_not_help_is_not_tried_again(way: str) -> None:
    server = Moody(reply(503, BUSY, "Retry-After: 3600"))
    with pytest.raises(Unavailable, match="busy"):
        listed(server.url, way)
    server = Moody(*[reply(503, BUSY, "Retry-After: 0")] * 9)
    with pytest.raises(Unavailable, match="busy"):
        listed(server.url, way, retries=2)
    assert len(server.asked) == 3
    server = Moody(reply(400, BUSY))
    with pytest.raises(ServiceError, match="busy"):
        listed(server.url, way)
    assert len(server.asked) == 1


def test_a_generation_that_may_have_begun_is_not_sent_twice() -> None:
    server = Moody(b"")
    with pytest.raises(Unavailable), Client(server.url) as client:
        client.generate("x", model="m")
    assert len(server.asked) == 1
    server = Moody(reply(503, BUSY, "Retry-After: 0"), reply(200, b'{"id": "cmpl-1", "choices": [{"text": "y"}]}'))
    with Client(server.url) as client:
        assert client.generate("x", model="m").text == "y"
    assert len(server.asked) == 2


@pytest.mark.parametrize("way", ["client", "async"])
def test_the_key_goes_along(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Moody()
    listed(server.url, way, api_key="secret-1")
    monkeypatch.setenv("VLLM_TAP_API_KEY", "secret-2")
    listed(server.url, way)
    listed(server.url, way, api_key="")
    keys = [re.findall(rb"authorization: (.*)\r", asked, re.IGNORECASE) for asked in server.asked]
    assert keys == [[b"Bearer secret-1"], [b"Bearer secret-2"], []]
    with pytest.raises(ValueError, match="api_key"):
        listed(server.url, way, api_key="a\nb")
