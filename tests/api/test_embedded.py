"""The service inside the model server's process: its routes are there, everything else is as without it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from api.auth.guard import by_address
from api.config import Config
from api.embedded import Embedded, embeddable
from api.errors import ApiError
from api.page_files import FILES
from schemas.errors import StartError
from schemas.ids import new_ulid
from schemas.native import loops as native_loops
from schemas.read.reader import StoreReader
from schemas.store.paths import endpoint_name
from tests.support.api_stack import ROOT, Stack, stack_in
from tests.support.processes import runs
from tests.support.store_helpers import until
from vllm_tap.serve.endpoint_plugin import CaptureRoutes, config_of, writer_of
from vllm_tap.serve.services import make_socket_dir
from writer_service import fs
from writer_service.recover import store_lock

SPEC = {"sites": ["resid_post"], "layers": [0, 2]}


@pytest.fixture(autouse=True)
def heard(caplog: pytest.LogCaptureFixture) -> None:
    """Some of vLLM's imports set the root logger's level."""
    caplog.set_level(logging.INFO)


@contextmanager
def server(folder: Path, *more: str, key: str = "") -> Iterator[Stack]:
    """The model server with the service in it, the writer beside it; ``key`` is sent with what is asked."""
    with stack_in(folder) as stack:
        stack.start_writer()
        stack.processes["writer"].wait_ready()
        stack.start_upstream("bfloat16", "--store", str(stack.store), *more)
        stack.url = stack.upstream_url
        stack.http = httpx.Client(base_url=stack.url)
        if key:
            stack.http.headers["authorization"] = f"Bearer {key}"
        assert until(lambda: stack.http.get("/v1/capabilities").json().get("engine"))
        yield stack


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with server(tmp_path_factory.mktemp("embedded")) as stack:
        yield stack


# ── with and without a capture ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("chat", [False, True])
def test_a_captured_request_is_owned_sent_and_answered(stack: Stack, chat: bool) -> None:
    asked = {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": "hi"}
    answer = stack.http.post("/v1/chat/completions" if chat else "/v1/completions", json={
        "model": "played", **asked, "seed": 7, "n": 2, "capture": SPEC}, headers={"X-Request-Id": f"mine-{chat}"})
    body, seen = answer.json(), stack.seen()[-1]
    ulid = body["capture"]["id"]
    assert body["capture"]["status"] == "complete" and body["capture"]["ids"] == [f"{ulid}.0", f"{ulid}.1"]
    assert seen["headers"]["x-request-id"] == ulid and "capture" not in seen["body"]  # type: ignore[index]
    manifest = stack.http.get(f"/v1/captures/mine-{chat}.1").json()
    assert manifest["expected"] == manifest["captured"] > 0
    rows = stack.http.get(f"/v1/captures/{ulid}.0/activations?site=resid_post&format=json").json()
    assert list(rows["arrays"]) == ["resid_post.0", "resid_post.2"]


def test_a_stream_comes_as_it_is_made_and_ends_with_the_capture(stack: Stack) -> None:
    arrived: list[float] = []
    with stack.http.stream("POST", "/v1/completions", json={
            "model": "played", "prompt": "x", "stream": True, "play": {"delay_s": 0.2}, "capture": SPEC}) as answer:
        lines = []
        for line in answer.iter_lines():
            if line:
                lines.append(line)
                arrived.append(time.monotonic())
    assert lines[-1] == "data: [DONE]" and json.loads(lines[-2][6:])["capture"]["status"] == "complete"
    assert arrived[-1] - arrived[0] > 0.4, "the stream was held back until it was whole"


def test_scores_come_with_the_tokens(stack: Stack) -> None:
    text = stack.http.post("/v1/completions", json={
        "model": "played", "prompt": "hello", "max_tokens": 8, "stream": True, "capture": {"probe": ["tone"]},
        "play": {"delay_s": 0.08, "live": True}}).text
    events = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line and "[DONE]" not in line]
    scored = [number for number, event in enumerate(events) if "scores" in event]
    assert {at for number in scored for at in events[number]["scores"]["positions"]} == set(range(12))
    assert any(event["choices"] for event in events[scored[0]:]) and events[-1]["capture"]["status"] == "complete"


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_agents_routes_are_captured(stack: Stack, path: str) -> None:
    """More of them: tests/api/generate/test_protocols.py."""
    asked = {"model": "played", "input": "hi", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    asked.pop("messages" if path == "/v1/responses" else "input")
    body = stack.http.post(path, json={**asked, "capture": SPEC}).json()
    assert body["capture"]["status"] == "complete"
    assert stack.http.get(f"/v1/captures/{body['id']}").json()["id"] == body["capture"]["id"]
    last = stack.http.post(path, json={**asked, "stream": True, "capture": SPEC}).text.rstrip().rpartition("data: ")[2]
    field = json.loads(last).get("response", json.loads(last))["capture"]
    assert stack.http.get(f"/v1/captures/{field['id']}").json()["status"] == "complete"
    assert "capture" not in stack.http.post(path, json=asked).json()


@pytest.mark.parametrize(("fields", "param"), [
    ({"captures": SPEC}, "captures"), ({"extra_body": {"capture": SPEC}}, "extra_body.capture"),
    ({"vllm_xargs": {"capture": "{}"}}, "vllm_xargs.capture"), ({"vllm_xargs": {"capture": 7}}, "vllm_xargs.capture"),
    ({"vllm_xargs": {"captures": "{}"}}, "vllm_xargs.captures"),
])
def test_what_only_reads_like_a_capture_is_refused(stack: Stack, fields: dict[str, Any], param: str) -> None:
    """On other routes: tests/engine/serving/test_routes.py."""
    before = len(stack.seen())
    answer = stack.complete("x", **fields)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
    assert len(stack.seen()) == before


def test_what_a_gateway_sends_goes_by(stack: Stack) -> None:
    ulid = new_ulid()
    answer = stack.complete("x", vllm_xargs={"capture": json.dumps({**SPEC, "id": ulid}), "capture_count": 1})
    assert answer.status_code == 200 and "capture" not in answer.json()
    assert until(lambda: stack.http.get(f"/v1/captures/{ulid}").status_code == 200)


@pytest.mark.parametrize("stream", [False, True])
def test_a_caller_who_leaves_takes_the_request_along(stack: Stack, stream: bool) -> None:
    ulid = new_ulid()
    with contextlib.suppress(httpx.ReadTimeout):
        stack.http.post("/v1/completions", timeout=0.5, json={
            "model": "played", "prompt": "x", "max_tokens": 50, "stream": stream,
            "play": {"delay_s": 10}, "capture": {**SPEC, "id": ulid}})
    assert until(lambda: stack.seen()[-1]["ended"] == "abort")
    assert until(lambda: stack.http.get(f"/v1/captures/{ulid}").json()["finish_reason"] == "abort")


def test_without_a_capture_it_is_the_servers_own(stack: Stack) -> None:
    """Whatever it is: no JSON, no object, the word in a prompt, no value."""
    for content in (b"{capture", b'["capture"]', b'{"model": "played", "prompt": "a \\u0063apture"}',
                    b'{"model": "played", "prompt": "capture", "capture": null}',
                    json.dumps({"model": "played", "prompt": "x", "stream": True}).encode()):
        before = len(stack.seen())
        answer = stack.http.post("/v1/completions", content=content)
        assert "x-tap-capture" not in answer.headers and b'"capture":' not in answer.content
        assert len(stack.seen()) - before == (content != b"{capture")
    assert stack.http.get("/v1/models").json()["data"][0]["id"] == "played"
    assert stack.http.get("/healthz").json() == {"detail": "Not Found"}
    for path in ("/", "/page/app.js", "/readyz", "/captures/v1/captures", "/captures/metrics", "/captures/healthz"):
        assert stack.http.get(path).json() == {"detail": "Not Found"}


# ── the page and the metrics ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", sorted(FILES))
def test_the_page_is_below_captures_and_is_the_gateways(stack: Stack, path: str) -> None:
    answer = stack.http.get(f"/captures{path}")
    assert answer.status_code == 200 and answer.content == FILES[path].data
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    assert stack.http.get(f"/captures{path}", headers={"if-none-match": answer.headers["etag"]}).status_code == 304


def test_captures_leads_to_the_page(stack: Stack) -> None:
    answer = stack.http.get("/captures", follow_redirects=True)
    assert str(answer.url) == f"{stack.url}/captures/" and answer.content == FILES["/"].data
    for method, path, status in (("POST", "/captures/", 405), ("GET", "/captures/page/", 404),
                                 ("GET", "/capturespage/app.js", 404)):
        answer = stack.http.request(method, path)
        assert answer.status_code == status, (path, answer.text)


def metrics_of(stack: Stack) -> dict[str, float]:
    return {f"{sample.name} {' '.join(sorted(sample.labels.values()))}".strip(): sample.value
            for family in text_string_to_metric_families(stack.http.get("/metrics").text) for sample in family.samples}


def test_with_a_key_the_pages_files_alone_come_without(tmp_path: Path) -> None:
    with server(tmp_path, "--key", "k", key="k") as stack:
        assert all(httpx.get(f"{stack.url}/captures{path}").status_code == 200 for path in FILES)
        for path, status in (("/v1/captures", 401), ("/v1/capabilities", 401), ("/captures/v1/captures", 404),
                             ("/captures//v1/captures", 404), ("/captures/%2fv1/captures", 404),
                             ("/captures/page/%2e%2e/v1/captures", 404)):
            assert httpx.get(f"{stack.url}{path}").status_code == status, path
        assert stack.http.get("/v1/captures").status_code == 200


@pytest.mark.parametrize("processes", ["one", "several"])
def test_metrics_are_among_the_servers_own(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: str) -> None:
    if processes == "several":  # as vLLM has it with more than one front end
        monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    with server(tmp_path) as stack:
        assert stack.complete("x", capture=SPEC).status_code == 200
        found = metrics_of(stack)
        assert found["vllm_tap_api_requests_total /v1/completions 200 POST"] == 1
        assert found["vllm_tap_api_writer_alive"] == 1 and found["vllm_tap_api_control_pending"] == 0
        assert ("python_info" in stack.http.get("/metrics").text) == (processes == "one")  # the server's are there too
        stack.processes["writer"].kill()
        assert until(lambda: metrics_of(stack)["vllm_tap_api_writer_alive"] == 0)


ESCAPED = '{"model": "played", "prompt": "x", "\\u0063apture": {"sites": ["resid_post"]}}'


@pytest.mark.parametrize("content", [
    ESCAPED.encode(), *(json.dumps(json.loads(ESCAPED)).encode(name) for name in ("utf-16", "utf-16-be", "utf-32-le"))])
def test_a_name_is_a_name_however_it_is_written(stack: Stack, content: bytes) -> None:
    answer = stack.http.post("/v1/completions", headers={"content-type": "application/json"}, content=content)
    assert answer.json()["capture"]["status"] == "complete"


# ── refusals and failures ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("fields", "status", "code"), [
    ({"capture": {"sites": ["nope"]}}, 400, "invalid_capture"),
    ({"capture": {"layers": [99]}}, 400, "invalid_capture"),
    ({"capture": SPEC, "play": {"status": 418}}, 418, 418),
    ({"capture": SPEC, "play": {"fail": True}}, 502, "upstream_broken"),
    ({"capture": SPEC, "vllm_xargs": {"capture": "{}"}}, 400, "invalid_parameter"),
])
def test_errors(stack: Stack, fields: dict[str, Any], status: int, code: object) -> None:
    ulid = new_ulid()
    if fields["capture"] == SPEC:
        fields = {**fields, "capture": {**SPEC, "id": ulid}}
    answer = stack.complete("x", **fields)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text
    if status > 400:  # what was begun is closed
        assert until(lambda: stack.http.get(f"/v1/captures/{ulid}").json()["status"] == "failed")


def test_a_stream_that_breaks_off_says_so(stack: Stack) -> None:
    answer = stack.complete("x", stream=True, max_tokens=5, play={"break_after": 2}, capture=SPEC)
    last = [line for line in answer.text.splitlines() if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "upstream_broken"


@pytest.mark.parametrize("headers", [{"host": "evil.invalid"}, {"origin": "null"},
                                     {"origin": "https:" "//evil.invalid"}])
def test_without_a_key_only_this_machine_is_answered(stack: Stack, headers: dict[str, str]) -> None:
    """The server around it may let any page of the web ask, and read what is answered."""
    for answer in (stack.http.get("/v1/captures", headers=headers),
                   stack.http.post("/v1/completions", headers=headers,
                                   json={"model": "played", "prompt": "x", "capture": SPEC})):
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "foreign_host")
    plain = stack.http.post("/v1/completions", headers=headers, json={"model": "played", "prompt": "x"})
    assert plain.status_code == 200
    for origin in ("http://localhost:3000", "http://127.0.0.1"):
        assert stack.http.get("/v1/captures", headers={"origin": origin}).status_code == 200


def test_an_address_of_another_machine_needs_a_key() -> None:
    scope: dict[str, Any] = {"client": ("192.0.2.7", 5000), "headers": [(b"host", b"localhost")]}
    with pytest.raises(ApiError, match=r"192\.0\.2\.7"):
        by_address(lambda: False)(scope)
    assert by_address(lambda: True)(scope) == by_address(lambda: False)({**scope, "client": None}) == ""


def test_where_the_server_asked_for_a_key_all_its_callers_are_one(tmp_path: Path) -> None:
    """And without a writer captures alone are refused, to who asked for them."""
    with server(tmp_path, "--keyed", "--capture-all", json.dumps(SPEC)) as stack:
        far = {"host": "models.invalid", "origin": "null"}
        # One that asked for nothing waits for the writer a moment only, which a busy machine may not keep.
        found = until(lambda: stack.complete("x").json().get("capture"))["id"]
        assert stack.http.get(f"/v1/captures/{found}", headers=far).status_code == 200
        stack.processes["writer"].kill()
        answer = stack.complete("x", capture=SPEC)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unavailable")
        began = time.monotonic()
        plain = stack.complete("x")
        assert plain.status_code == stack.http.get("/v1/captures").status_code == 200 and "capture" not in plain.json()
        assert time.monotonic() - began < 3, "a request that asked for nothing waited for the writer"


@contextmanager
def capturing_all(folder: Path, **settings: Any) -> Iterator[tuple[Stack, Embedded, list[bytes]]]:
    """The service before an application that notes its bodies, a writer that no engine talks to, not yet started."""
    bodies: list[bytes] = []

    async def application(request: Request) -> Response:
        bodies.append(await request.body())
        return Response("the server's")

    app = Starlette(routes=[Route("/v1/completions", application, methods=["POST"])])
    with tempfile.TemporaryDirectory(prefix="tap-") as sockets:
        stack = Stack(folder / "store", f"ipc://{sockets}/writer.sock")
        config = Config(stack.store, stack.endpoint, ("http://vllm",), capture_all=json.dumps(SPEC), **settings)
        try:
            yield stack, Embedded(app, **embeddable(config, lambda: False)), bodies
        finally:
            for process in stack.processes.values():
                process.stop()


def test_what_asked_for_nothing_is_refused_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever the service has against it: it is the server's, byte by byte, and counted."""
    with capturing_all(tmp_path, body_bytes_max=1000, generations_in_flight_max=1) as (stack, embedded, bodies):
        service = embedded.service
        assert service is not None

        async def post(body: bytes, host: str = "localhost", client: str = "127.0.0.1") -> httpx.Response:
            transport = httpx.ASGITransport(embedded, client=(client, 5000))
            async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}") as http:
                return await http.post("/v1/completions", content=body, headers={"content-type": "application/json"})

        async def refused(code: str, *requests: Coroutine[Any, Any, httpx.Response], times: int = 1) -> None:
            caplog.clear()
            assert {answer.text for answer in await asyncio.gather(*requests)} == {"the server's"}
            assert caplog.text.count(code) == times and caplog.text.count("not captured") == len(requests)

        async def all_of_it() -> None:
            plain, large = b'{"prompt": "x", "capture": null}', b'{"prompt": "' + bytes([120]) * 1000 + b'"}'
            async with service.router.lifespan_context(service):
                await refused("the writer does not answer", post(plain))
                stack.start_writer()
                stack.processes["writer"].wait_ready()
                while not service.state.service.channel.alive:
                    await asyncio.sleep(0.01)
                await refused("no_engine", post(plain))
                await refused("too_large", post(large))
                await refused("malformed_json", post(b"{"))
                await refused("foreign_host", post(plain, host="models.invalid"), post(plain, client="192.0.2.7"),
                              times=2)
                await refused("too_many_generations", post(plain), post(plain), post(plain), times=2)
                assert bodies == [plain, plain, large, b"{", *[plain] * 5]
                found = service.state.service.metrics.captures.labels("impossible")._value.get()
                assert found == len(bodies)
                for request, status in ((post(b'{"capture": {}}'), 503), (post(b'{"edit": [{"op": "turn"}]}'), 400),
                                        (post(b'{"capture": {}}', host="models.invalid"), 403),
                                        (post(large.replace(b"}", b', "capture": {}}')), 413)):
                    assert (await request).status_code == status
                assert len(bodies) == found

        asyncio.run(all_of_it())


# ── the plugin ──────────────────────────────────────────────────────────────────────────────────────────────────────


def attached(monkeypatch: pytest.MonkeyPatch, **environment: str) -> FastAPI:
    for name in [name for name in os.environ if name.startswith(("VLLM_TAP_", "VLLM_ACT_"))]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    app = FastAPI()

    @app.post("/v1/completions")
    async def completions() -> str:
        return "vLLM's"

    CaptureRoutes().attach_router(app)
    return app


async def asked(app: FastAPI, method: str, path: str, **arguments: Any) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        return await client.request(method, path, **arguments)


def test_it_is_inert_where_nothing_is_armed(monkeypatch: pytest.MonkeyPatch) -> None:
    app = attached(monkeypatch, VLLM_TAP_STORE="captures")
    assert app.user_middleware == [] and not Path("captures").exists()


@pytest.mark.parametrize(("environment", "says"), [
    ({"VLLM_TAP_ENDPOINT": "ipc:///nowhere"}, "VLLM_TAP_STORE is not set"),
    ({"VLLM_TAP_ENDPOINT": "tcp://far:1", "VLLM_TAP_STORE": "x"}, "on another host"),
    ({"VLLM_TAP_ENDPOINT": "udp://x", "VLLM_TAP_STORE": "x"}, "udp://x"),
    ({"VLLM_TAP_ENDPOINT": "ipc:///proc/none/x.sock", "VLLM_TAP_STORE": "/proc/none"}, "/proc/none"),
    ({"VLLM_TAP_ENDPOINT": "ipc:///x", "VLLM_TAP_STORE": "x", "VLLM_ACT_CAPTURE": "7"}, "VLLM_ACT_CAPTURE"),
])
def test_a_failure_leaves_the_servers_own_routes_alone(
        monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, environment: dict[str, str], says: str
) -> None:
    app = attached(monkeypatch, **environment)
    assert len([record for record in caplog.records if record.exc_info]) == 1 and says in caplog.text
    assert asyncio.run(asked(app, "POST", "/v1/completions", json={"prompt": "capture"})).json() == "vLLM's"
    for method, path, body in (("GET", "/v1/captures", None), ("GET", "/v1/capabilities", None),
                               ("GET", "/captures/", None),
                               ("POST", "/v1/completions", {"capture": {}})):
        answer = asyncio.run(asked(app, method, path, json=body))
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "captures_unavailable"
        assert says in answer.json()["error"]["message"]


PROGRAM = """
import sys
from pathlib import Path
from vllm_tap.serve.endpoint_plugin import config_of, writer_of
writer = writer_of(config_of({"VLLM_TAP_STORE": sys.argv[1], "VLLM_TAP_ENDPOINT": sys.argv[2]}))
print(writer and writer.pid, flush=True)
sys.stdin.read()
"""


def test_one_writer_for_all_front_ends_which_goes_with_the_first(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="tap-") as sockets:
        store, endpoint = tmp_path / "store", f"ipc://{sockets}/writer.sock"

        def front_end(endpoint: str) -> subprocess.Popen[str]:
            return subprocess.Popen([sys.executable, "-c", PROGRAM, str(store), endpoint], cwd=ROOT, text=True,
                                    stdin=subprocess.PIPE, stdout=subprocess.PIPE)

        first = front_end(endpoint)
        assert first.stdout is not None
        pid = int(first.stdout.readline())
        second = front_end(endpoint)
        assert second.stdout is not None and second.stdout.readline() == "None\n"
        with pytest.raises(StartError, match="listens at"):
            writer_of(config_of({"VLLM_TAP_STORE": str(store), "VLLM_TAP_ENDPOINT": f"{endpoint}2"}))
        second.communicate("")
        assert runs(pid)
        first.kill()
        first.communicate()
        assert until(lambda: not runs(pid))
        StoreReader(store).close()


def test_a_writer_that_is_not_ready_yet_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It has the store, and the word of where one before it listened; it may take long, or end without being ready."""
    store = tmp_path / "store"
    config = config_of({"VLLM_TAP_STORE": str(store), "VLLM_TAP_ENDPOINT": f"ipc://{tmp_path}/writer.sock"})
    said = store / endpoint_name()
    said.parent.mkdir(parents=True)
    said.write_text("ipc:///where/one/before/was")
    lock, _ = store_lock.take_lock(store)
    assert writer_of(config, 0.1) is None and "did not listen within 0.1 s" in caplog.text
    threading.Timer(0.2, fs.close, [lock]).start()
    writer = writer_of(config)
    assert writer is not None and writer.pid is not None and runs(writer.pid)
    writer.__exit__(None, None, None)


def test_its_lines_go_where_vllms_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever level the root logger has: a library that vLLM imports may set it."""
    ours, root = logging.getLogger("vllm_tap"), logging.getLogger()
    monkeypatch.setattr(ours, "parent", root)
    monkeypatch.setattr(logging.getLogger("vllm"), "level", logging.INFO)
    monkeypatch.setattr(root, "level", logging.ERROR)
    attached(monkeypatch, VLLM_TAP_ENDPOINT="ipc:///nowhere")
    for name in ("vllm.tap", "vllm_tap.api"):
        assert logging.getLogger(name).getEffectiveLevel() == logging.INFO, name


def test_the_loops_over_rows_are_compiled_before_there_is_traffic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                                  ) -> None:
    for name in ("_loops", "_maker"):
        monkeypatch.setattr(native_loops, name, None)
    monkeypatch.setenv("VLLM_TAP_STORE", str(tmp_path / "store"))
    sockets = make_socket_dir()
    monkeypatch.setenv("VLLM_TAP_ENDPOINT", f"ipc://{sockets}/w")
    plugin = CaptureRoutes()
    try:
        plugin.attach_router(FastAPI())
        assert plugin._writer is not None and until(lambda: native_loops.loops_for(0)) is not None
    finally:
        if plugin._writer is not None:
            plugin._writer.__exit__(None, None, None)
        shutil.rmtree(sockets)


def test_the_key_that_vllm_was_given_is_the_one_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    for environment, given, keyed in (("", None, False), ("", ["k"], True), ("k", None, True)):
        monkeypatch.setenv("VLLM_API_KEY", environment)
        plugin = CaptureRoutes()
        asyncio.run(plugin.init_state(None, None, Namespace(api_key=given)))
        assert plugin._keyed is keyed
