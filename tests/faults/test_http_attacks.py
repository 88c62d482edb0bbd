"""Attacks on the HTTP service, by their rows in the fault matrix.

25 ids that are paths, 28 slices that are silly, 29 callers that are slow. The others have files of their own: 26 and
27, keys and other people's captures, tests/api/auth/test_keys.py; 30, fuzzing by the schema, tests/api/test_schema.py.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.api_stack import ROOT, Stack, running
from tests.support.processes import PATIENCE_S

HEAD_S, BODY_S, STALL_S = 3.0, 20.0, 1.0
NAMES = [
    "../x", "../../../../etc/passwd", "/etc/passwd", "//etc/passwd", "%2e%2e%2f%2e%2e%2fetc%2fpasswd",
    "%252e%252e%252f", "..%5c..%5cetc", "a%00b", ".", "..", "...", "%2e", "x" * 300, "%F0%9F%92%A9",
    "%EF%BC%8E%EF%BC%8E%EF%BC%8Fx", "\u2025", "01kbj8z6x4r2t0n5qw3e7m9yhc", "01KBJ8Z6X4R2T0N5QW3E7M9YHC.00",
    "01KBJ8Z6X4R2T0N5QW3E7M9YHC.1000000", "cmpl-", "con", "*", "w0-00000001.zarr", "catalog.sqlite", "keys.json", "-rf",
    "$(id)", "`id`", "%0a", "%0d%0aX-Evil:1", "a%2fb", "~root",
]
ASKED = [("GET", ""), ("GET", "/activations"), ("GET", "/events"), ("GET", "/live"), ("GET", "/map"),
         ("GET", "/tokens"), ("DELETE", ""), ("PUT", "/hold")]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("opened") / "files"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, opened: Path) -> Iterator[Stack]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENED", str(opened))
        with running(tmp_path_factory.mktemp("attacks"), "bfloat16", "--head-s", str(HEAD_S), "--body-s", str(BODY_S),
                     "--slice-stall-s", str(STALL_S), program="tests.programs.audited_api") as stack:
            yield stack


@pytest.fixture(scope="module")
def capture(stack: Stack) -> str:
    return str(stack.complete("hello", capture={}).json()["capture"]["id"])


def connect(stack: Stack) -> socket.socket:
    host, port = stack.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), PATIENCE_S)


def ask(stack: Stack, request: bytes) -> bytes:
    """Over a bare socket: clients tidy up what they send."""
    with connect(stack) as connection:
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.mark.faults
def test_row_25_no_name_leads_out_of_the_store(stack: Stack, capture: str, opened: Path) -> None:
    assert stack.http.get(f"/v1/captures/{capture}/activations").status_code == 200  # everything is loaded by now
    before = opened.stat().st_size
    for name in NAMES:
        for method, suffix in ASKED:
            answer = ask(stack, f"{method} /v1/captures/{name}{suffix} HTTP/1.1\r\nHost: localhost\r\n"
                                "Connection: close\r\n\r\n".encode())
            assert answer.split()[1] in (b"400", b"404", b"405"), (method, name, answer[:200])
        for body in ({"id": name}, {"tags": {"../x": name}}, {"sites": [name]}, {"codec": name}):
            assert stack.complete("x", capture=body).status_code in (400, 413)
        short = name[:99]
        stack.http.get("/v1/captures", params={"text": short, "model": short, "tag": f"{short}={short}"})
    files = {line.partition(" ")[2].strip("'\"b") for line in opened.read_text()[before:].splitlines()}
    strange = {file for file in files if not file.startswith(str(stack.store)) and not file.isdecimal()
               and not file.startswith(("/proc/", "/sys/"))}
    own = (str(ROOT), "/usr", sys.prefix, sys.base_prefix)
    assert not {file for file in strange if not file.startswith(own)}, strange
    assert not any(part in file for file in strange for part in ("passwd", "/x", "evil"))
    assert {path.name for path in stack.store.iterdir()} <= {
        "store.json", "catalog.sqlite", "catalog.sqlite-wal", "catalog.sqlite-shm", "writers", "blocks", "keys.json"}


@pytest.mark.parametrize(("query", "status"), [
    ("start=0&stop=1000000000000", 400), ("start=-1", 400), ("stop=-1", 400), ("layer=0:4:0", 400),
    ("layer=0:4:-1", 400),
    ("start=1000000000&stop=1000000001", 416), ("positions=" + ",".join(f"{i}:{i + 1}" for i in range(1000)), 400),
    ("&".join(["site=k"] * 4097), 400), ("layer=" + ",".join(["1"] * 5000), 400), ("layer=99999", 400),
    ("timeout=1e308&wait=complete", 400), ("timeout=nan&wait=complete", 400), ("format=pickle", 400),
])
def test_row_28_silly_slices_are_refused(stack: Stack, capture: str, query: str, status: int) -> None:
    answer = stack.http.get(f"/v1/captures/{capture}/activations?{query}")
    assert answer.status_code == status and answer.json()["error"]["message"]


def test_row_28_what_is_sent_is_bounded(stack: Stack) -> None:
    large = ask(stack, b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                       b"Content-Length: 999999999999\r\nConnection: close\r\n\r\n")
    assert large.split()[1] == b"413" and b"limit" in large
    with contextlib.suppress(ConnectionError):  # refused before it was read to its end
        head = ask(stack, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"x" * 200_000 + b"\r\n\r\n")
        assert head.split()[1] in (b"400", b"431")
    deep = stack.http.post("/v1/completions", content=b'{"capture": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
                           headers={"content-type": "application/json"})
    assert deep.status_code == 400 and deep.json()["error"]["code"] == "malformed_json"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize("value", [b"1,", b"[],", b'{"":0},'])
def test_row_28_a_body_of_small_values_is_not_parsed(stack: Stack, path: str, value: bytes) -> None:
    """Ten million empty lists are 30 MiB, and seconds in which the service would answer nobody else."""
    body = b'{"prompt": [' + value * (30_000_000 // len(value)) + b"0]}"
    answer = stack.http.post(path, content=body, headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (413, "too_large")
    assert "values in the body" in error["message"] and "limit 4194304" in error["message"]


def test_row_29_a_head_that_never_ends(stack: Stack) -> None:
    """Slowloris: a byte now and then keeps nothing open, and others are served meanwhile."""
    slow = [connect(stack) for _ in range(200)]
    began_s = time.monotonic()
    while time.monotonic() - began_s < HEAD_S + 1.5:
        for connection in slow:
            with contextlib.suppress(OSError):
                connection.sendall(b"G" if time.monotonic() - began_s < 0.1 else b"X: y\r\n")
        assert stack.http.get("/healthz").status_code == 200
        time.sleep(0.2)
    for connection in slow:
        connection.settimeout(5)
        with pytest.raises(OSError):  # reset: what was not read went with it
            while connection.recv(4096):
                pass
            raise ConnectionResetError
        connection.close()


def test_row_29_a_body_that_never_ends(stack: Stack) -> None:
    with connect(stack) as connection:
        began_s = time.monotonic()
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                           b"Content-Length: 1000\r\n\r\n{")
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
        assert answer.split()[1] == b"408" and b"too_slow" in answer
        assert BODY_S * 0.9 < time.monotonic() - began_s < BODY_S + 10


def test_row_29_a_connection_is_kept_between_requests(stack: Stack) -> None:
    """The bound is on a head, not on the pause before it."""
    with httpx.Client(base_url=stack.url) as client:
        for _ in range(2):
            assert client.get("/healthz").status_code == 200
            time.sleep(HEAD_S + 0.5)
        assert len(client._transport._pool.connections) == 1  # type: ignore[attr-defined]


def test_row_29_readers_who_take_nothing(stack: Stack) -> None:
    """Many who ask for slices and do not read them: cut off, their memory free again, others served."""
    ulid = stack.complete("x" * 3000, max_tokens=1, capture={"codec": "raw"}).json()["capture"]["id"]
    asleep = []
    for _ in range(100):
        connection = connect(stack)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(f"GET /v1/captures/{ulid}/activations HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        asleep.append(connection)
    end_s = time.monotonic() + PATIENCE_S
    freed = False
    while not freed and time.monotonic() < end_s:
        small = stack.http.get(f"/v1/captures/{ulid}/activations?layer=0&site=resid_post&stop=4")
        assert small.status_code in (200, 429), small.text
        freed = "vllm_tap_api_slices_in_flight_bytes 0.0" in stack.http.get("/metrics").text
        time.sleep(0.1)
    assert freed
    for connection in asleep:
        connection.close()
    assert stack.http.get("/readyz").json()["status"] == "ready"
    assert "Traceback" not in (stack.store.parent / "api.log").read_text()
