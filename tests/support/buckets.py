"""A real S3 server for tests, in an environment of its own, and a proxy before it that fails as networks do.

``make bucket-test`` installs the server; TAP_S3_SERVER names its program, moto's or ministack's. Without it such tests
are skipped, and say so. TAP_AZURITE names the program of Azure's emulator, which is asked without a proxy.
"""

from __future__ import annotations

import base64
import hmac
import http.client
import os
import shutil
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate, parsedate_to_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.support.processes import PATIENCE_S, free_port

SERVER = os.environ.get("TAP_S3_SERVER") or next(
    (str(path) for path in [Path(__file__).resolve().parents[2] / ".s3" / "bin" / "moto_server"] if path.exists()),
    shutil.which("moto_server"))
NO_SERVER = "the bucket was NOT tested over S3: `make bucket-test` installs a server and runs it"
AZURITE = os.environ.get("TAP_AZURITE", "")
# The published key of every emulator.
_AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
# "503", "cut": half of the answer's body, "lost": no answer comes, "slow": none until ``let_go`` is set, "flip": a bit
# of what is sent, "heedless": without the request's conditions.
Fault = str | None


@dataclass
class FaultProxy:
    """What a client asks of ``upstream``; ``fault`` says of each (method, path with its query) how it fails."""

    upstream: int
    fault: Callable[[str, str], Fault] = lambda method, path: None
    seen: list[tuple[str, str]] = field(default_factory=list)
    unsigned: list[str] = field(default_factory=list)  # paths of bodies that came without their SHA-256
    got: int = 0  # bytes of objects that were read
    ahead_s: int = 0  # by which the service's clock seems to have moved, where it is asked when an object was written
    port: int = 0
    let_go: threading.Event = field(default_factory=threading.Event)

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which a client of S3 finds it."""
        return {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}", "AWS_ALLOW_HTTP": "true",
                "AWS_REGION": "us-east-1", "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}

    def reads(self) -> int:
        """How many requests of objects there were."""
        return sum(method == "GET" and "list-type" not in path for method, path in self.seen)


@contextmanager
def proxy(upstream: int) -> Iterator[FaultProxy]:
    """A running proxy."""
    made = FaultProxy(upstream)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # else a body waits 40 ms for the acknowledgement of its head

        def _forward(self) -> None:
            nbytes = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(nbytes)
            if len(body) < nbytes:  # who sent it was killed
                self.close_connection = True
                return
            made.seen.append((self.command, self.path))
            if self.command == "PUT" and not self.headers.get("x-amz-checksum-sha256"):
                made.unsigned.append(self.path)
            fault = made.fault(self.command, self.path)
            if fault == "503":
                self.send_response(503)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            if fault == "slow":
                made.let_go.wait(PATIENCE_S)
            if fault == "flip":
                body = body[:-1] + bytes([body[-1] ^ 1])
            line = http.client.HTTPConnection("127.0.0.1", made.upstream, timeout=PATIENCE_S)
            line.request(self.command, self.path, body, {name: value for name, value in self.headers.items() if not (
                fault == "heedless" and name.lower().startswith("if-"))})
            answer = line.getresponse()
            data = answer.read()
            line.close()
            if self.command == "GET" and "list-type" not in self.path:
                made.got += len(data)
            if fault == "lost":
                self.close_connection = True
                return
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() == "last-modified" and self.command == "HEAD":
                    value = formatdate(parsedate_to_datetime(value).timestamp() + made.ahead_s, usegmt=True)
                if name.lower() not in ("connection", "content-length", "transfer-encoding", "server", "date"):
                    self.send_header(name, value)
            length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(data))
            self.send_header("Content-Length", length or "0")
            self.end_headers()
            self.wfile.write(data[:len(data) // 2] if fault == "cut" else data)
            self.close_connection = fault == "cut"

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _forward

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            """Who asked was killed; what else goes wrong its client tells."""

    server = Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    made.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _ask_until_it_answers(process: subprocess.Popen[bytes], request: Callable[[], urllib.request.Request]) -> None:
    """Ask a server that is starting until it does what is asked."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            urllib.request.urlopen(request(), timeout=PATIENCE_S).close()
            return
        except OSError as error:
            assert time.monotonic() < deadline and process.poll() is None, error
            time.sleep(0.1)


@contextmanager
def s3_server() -> Iterator[FaultProxy]:
    """A server with an empty bucket named ``bucket``, by way of a proxy."""
    assert SERVER is not None
    port = free_port()
    flags = [] if Path(SERVER).name == "ministack" else ["-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen([SERVER, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                               env={**os.environ, "GATEWAY_PORT": str(port)})
    try:
        _ask_until_it_answers(process, lambda: urllib.request.Request(f"http://127.0.0.1:{port}/bucket", method="PUT"))
        with proxy(port) as between:
            yield between
    finally:
        process.kill()
        process.wait()


@contextmanager
def azure_server(folder: Path) -> Iterator[dict[str, str]]:
    """Azure's emulator with an empty container named ``bucket``; the variables by which a client finds it."""
    port = free_port()
    process = subprocess.Popen([AZURITE, "--blobPort", str(port), "--location", str(folder), "--silent",
                                "--skipApiVersionCheck"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    account, version = "devstoreaccount1", "2021-08-06"

    def container() -> urllib.request.Request:
        date = formatdate(usegmt=True)
        signed = ("PUT" + 12 * "\n" + f"x-ms-date:{date}\nx-ms-version:{version}\n/{account}/{account}/bucket\n"
                  "restype:container")
        signature = base64.b64encode(hmac.digest(base64.b64decode(_AZURE_KEY), signed.encode(), "sha256")).decode()
        return urllib.request.Request(
            f"http://127.0.0.1:{port}/{account}/bucket?restype=container", method="PUT", headers={
                "x-ms-date": date, "x-ms-version": version, "Content-Length": "0",
                "Authorization": f"SharedKey {account}:{signature}"})

    try:
        _ask_until_it_answers(process, container)
        yield {"AZURE_ENDPOINT": f"http://127.0.0.1:{port}/{account}", "AZURE_ALLOW_HTTP": "true",
               "AZURE_STORAGE_ACCOUNT_NAME": account, "AZURE_STORAGE_ACCOUNT_KEY": _AZURE_KEY}
    finally:
        process.kill()
        process.wait()
