"""Both clients before services that are busy, break off, or want a key: what is asked again, and when."""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from vllm_tap import AsyncClient, Client, NotComplete, ServiceError, Unavailable


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


class Silent(threading.Thread):
    """A server that takes a request and does not answer; ``then`` is called once it has it."""

    def __init__(self, then: Callable[[], None] = lambda: None) -> None:
        super().__init__(daemon=True)
        self.then, self.socket = then, socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.start()

    def run(self) -> None:
        with self.socket:
            connection, _ = self.socket.accept()
        with connection:
            connection.recv(65536)
            self.then()
            while connection.recv(65536):  # until the client hangs up
                pass


def test_a_client_that_blocks_inside_a_running_event_loop() -> None:
    """As in a cell of Jupyter."""
    server = Moody(reply(503, BUSY, "Retry-After: 0"), reply(200, b'{"data": [], "next": null}'),
                   reply(200, b'{"data": [{"id": "m"}]}'))

    async def cell() -> str:
        with Client(server.url) as client:
            assert list(client.captures()) == []
            return client.model()

    assert asyncio.run(cell()) == "m" and len(server.asked) == 3


def test_ctrl_c_ends_what_is_waited_for() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a test that runs in the background ignores it
    try:
        server = Silent(lambda: os.kill(os.getpid(), signal.SIGINT))
        with Client(server.url) as client, pytest.raises(KeyboardInterrupt):
            client.capabilities()
    finally:
        signal.signal(signal.SIGINT, before)
    with Client(Moody(reply(200, b'{"data": [{"id": "m"}]}')).url) as client:
        assert client.model() == "m"


@pytest.mark.parametrize("way", ["client", "async"])
def test_no_answer_in_time(way: str) -> None:
    with pytest.raises(NotComplete, match=r"GET .*/v1/captures: no answer in time \(ReadTimeout\)"):
        listed(Silent().url, way, timeout_s=0.2)


def test_an_error_is_raised_where_it_was_asked_for() -> None:
    """The user's line, the client's method and the reason, without a chain of what httpx raised inside."""
    with pytest.raises(Unavailable) as refused, Client("http://127.0.0.1:9", retries=0) as nobody:
        nobody.capabilities()
    assert [entry.name for entry in refused.traceback][:2] == [
        "test_an_error_is_raised_where_it_was_asked_for", "capabilities"]
    assert refused.value.__suppress_context__
