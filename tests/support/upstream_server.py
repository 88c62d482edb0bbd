"""A model server's HTTP side, small and real: OpenAI's wire format, and an engine that sends its rows to the writer.

What a request wants of it beside text travels in the field ``play``, which a gateway must pass through untouched:

    status        answer with this error instead
    delay_s       before the first token, and between tokens of a stream
    break_after   cut the connection after so many stream chunks
    drop          [site, [layers], start, stop]: say that these rows were dropped
    cached        so many leading prompt positions are not computed
    unopened      serve the text without any capture
    unfinished    leave the capture running
    live          of a stream: send each row when its token is there, not all at the end
    guess         with live: each second and third token are guessed in one step; every other guess is wrong
    nan           positions whose scores are no numbers
    fail          raise instead of answering
    uncapturable  why a request with a capture is refused, as the engine says it
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest, multiprocess
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from api.config import Config
from api.embedded import Embedded, embeddable
from schemas.ids import sample_id
from schemas.spec import Armed, parse_spec, resolve
from schemas.wire.messages import TapCounters, TapState
from tests.support.engines.engine_player import ARMED, EnginePlayer

MODEL = "played"


class Upstream:
    """The state of the server: its engine, and what it was asked."""

    def __init__(self, endpoint: str, dtype: str, name: str = "", models: Sequence[str] = (MODEL,),
                 armed: Armed = ARMED) -> None:
        self.engine = EnginePlayer(endpoint, dtype, armed=armed, name=name, model=models[0]) if endpoint else None
        self.listed = list(models)
        self.seen: list[dict[str, Any]] = []
        self.speed: dict[str, float] = {}
        self.since_s = 0.0

    async def set_speed(self, request: Request) -> Response:
        """From now on metrics tell ``prompt`` and ``generated`` tokens a second, ``running`` requests, and Pings a ring
        of which ``used`` of ``ring`` bytes are taken.
        """
        self.speed, self.since_s = await request.json(), time.monotonic()
        if self.engine is not None and "ring" in self.speed:
            self.engine.tap = TapState(TapCounters(), int(self.speed["ring"]), int(self.speed.get("used", 0)), 0)
        return Response()

    async def metrics(self, request: Request) -> Response:
        """As vLLM does: those of the process, or of all processes that tell them together where there are several."""
        registry = REGISTRY
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            registry = CollectorRegistry()
            multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        seconds = time.monotonic() - self.since_s
        told = "".join(f'vllm:{name}{{model_name="{{played}}",engine="0"}} {value!r}\n' for name, value in (
            ("prompt_tokens_total", seconds * self.speed["prompt"]),
            ("generation_tokens_total", seconds * self.speed["generated"]),
            ("num_requests_running", self.speed["running"]))) if self.speed else ""
        return Response(generate_latest(registry) + told.encode(), media_type="text/plain")

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": each, "object": "model"} for each in self.listed]})

    async def health(self, request: Request) -> Response:
        return Response()

    async def log(self, request: Request) -> Response:
        return JSONResponse(self.seen)

    async def tokenize(self, request: Request) -> Response:
        body = await request.json()
        if not isinstance(body.get("prompt"), str):
            return bad_request("prompt must be text")
        return JSONResponse({"tokens": list(body["prompt"].encode("utf-8", "surrogatepass"))})

    async def detokenize(self, request: Request) -> Response:
        body = await request.json()
        if not isinstance(body.get("tokens"), list) or not all(
                type(token) is int and 0 <= token < 256 for token in body["tokens"]):
            return bad_request("tokens must be token ids")
        return JSONResponse({"prompt": bytes(body["tokens"]).decode(errors="replace")})

    async def generate(self, request: Request) -> Response:
        body = await request.json()
        seen: dict[str, Any] = {"path": request.url.path, "headers": dict(request.headers), "body": body,
                                "ended": None}
        self.seen.append(seen)
        play = body.get("play", {})
        if "fail" in play:
            raise RuntimeError("as asked")
        if "status" in play:
            return JSONResponse({"error": {"message": "as asked", "type": "played", "param": None,
                                           "code": play["status"]}}, play["status"])
        if "uncapturable" in play and "capture" in (body.get("vllm_xargs") or {}):
            return bad_request(play["uncapturable"])
        if why := refused(body, request.url.path):
            return bad_request(why)
        work = Work(self, body, request, seen)
        if body.get("stream"):
            return StreamingResponse(work.stream(), media_type="text/event-stream")
        return await work.plain()


def bad_request(why: str) -> JSONResponse:
    return JSONResponse({"error": {"message": why, "type": "BadRequestError", "param": None, "code": 400}}, 400)


async def as_json(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"detail": error.detail}, error.status_code, error.headers)


def refused(body: dict[str, Any], path: str) -> str | None:
    """What vLLM would say of a malformed body, None where it is well-formed."""
    def tokens(value: object) -> bool:
        return isinstance(value, list) and len(value) > 0 and all(type(token) is int and token >= 0 for token in value)

    def message(value: object) -> bool:
        return (isinstance(value, dict) and isinstance(value.get("content"), str)
                and value.get("role") in ("system", "user", "assistant"))

    prompt, messages = body.get("input" if path == "/v1/responses" else "prompt"), body.get("messages")
    chat = "chat" in path or path == "/v1/messages"
    if not isinstance(body.get("model"), str):
        return "model must be a string"
    if chat and not (isinstance(messages, list) and messages and all(map(message, messages))):
        return "messages must be a list of messages"
    if not chat and not (isinstance(prompt, str) or tokens(prompt) or (isinstance(prompt, list) and prompt and (
            all(isinstance(each, str) for each in prompt) or all(map(tokens, prompt))))):
        return "prompt must be text, token ids or a list of either"
    for name in ("n", "max_tokens", "max_output_tokens"):
        if name in body and not (type(body[name]) is int and 0 < body[name] <= 2**31):
            return f"{name} must be a number from 1 on"
    if not isinstance(body.get("stream", False), bool):
        return "stream must be true or false"
    return None


class Work:
    """One request being served."""

    def __init__(self, upstream: Upstream, body: dict[str, Any], request: Request, seen: dict[str, Any]) -> None:
        self.body, self.seen, self.engine, self.request = body, seen, upstream.engine, request
        self.model = upstream.listed[0]
        self.chat, self.path = "messages" in body, request.url.path
        self.play = body.get("play", {})
        self.name = ("chatcmpl-" if self.chat else "cmpl-") + request.headers.get("x-request-id", "none")
        if self.path == "/v1/responses":
            self.name = body.get("request_id", "resp_none")
        prompts = [body["messages"][-1]["content"]] if self.chat else body.get("prompt", body.get("input"))
        prompts = prompts if isinstance(prompts, list) and not isinstance(prompts[0], int) else [prompts]
        self.prompts = [list(p.encode("utf-8", "surrogatepass")) if isinstance(p, str) else p for p in prompts]
        self.n = body.get("n") or 1
        self.out = [ord("a") + i % 26 for i in range(body.get("max_tokens", body.get("max_output_tokens", 4)))]
        xargs = body.get("vllm_xargs") or {}
        self.spec = None
        if "capture" in xargs and self.engine is not None and not self.play.get("unopened"):
            self.spec = parse_spec(xargs["capture"])
            assert xargs.get("capture_count", 1) == len(self.prompts) * self.n

    def captures(self) -> list[tuple[str, int, list[int]]]:
        count = len(self.prompts) * self.n
        assert self.spec is not None and self.spec.id is not None
        return [(sample_id(self.spec.id, i, count), i, self.prompts[i // self.n]) for i in range(count)]

    def begin(self) -> None:
        if self.spec is None or self.engine is None:
            return
        cached = self.play.get("cached", 0)
        for capture, sample, prompt in self.captures():
            adapter = "" if self.body["model"] == self.model else self.body["model"]
            resolved = self.engine.open(capture, self.spec, prompt, cached, adapter)
            self.engine.send_rows(capture, sample, resolved, len(prompt), prompt, list(range(cached, len(prompt))),
                                  nan=self.play.get("nan", ()))
            if "drop" in self.play:
                self.engine.drop(capture, *self.play["drop"])

    def advance(self, out: list[int]) -> None:
        """The row of the newest token but one: the newest was not computed yet."""
        if self.spec is None or self.engine is None:
            return
        for capture, sample, prompt in self.captures():
            at, resolved = len(prompt) + len(out) - 2, resolve(self.spec, self.engine.armed)
            if self.play.get("guess") and at % 3 == 1:
                continue  # the step before had guessed it
            self.engine.send_rows(capture, sample, resolved, len(prompt), prompt + out, [at])
            if self.play.get("guess"):
                right = at % 3 == 0
                guessed = [*prompt, *out[:-1], out[-1] if right else 0]
                self.engine.send_rows(capture, sample if right else sample + 1000, resolved, len(prompt), guessed,
                                      [at + 1], draft=True)

    def end(self, reason: str, out: list[int]) -> None:
        self.seen["ended"] = reason
        if self.spec is None or self.engine is None or self.play.get("unfinished"):
            return
        for capture, sample, prompt in self.captures():
            end = len(prompt) + len(out) - (reason != "abort")
            if not self.play.get("guess"):
                self.engine.send_rows(capture, sample, resolve(self.spec, self.engine.armed), len(prompt), prompt + out,
                                      list(range(len(prompt), end)), nan=self.play.get("nan", ()))
            self.engine.finish(capture, reason, out, end)

    async def plain(self) -> Response:
        await asyncio.to_thread(self.begin)
        until = time.monotonic() + self.play.get("delay_s", 0)
        while time.monotonic() < until:
            await asyncio.sleep(0.02)
            if await self.request.is_disconnected():
                await asyncio.to_thread(self.end, "abort", [])
                return Response(status_code=499)
        await asyncio.to_thread(self.end, "length", self.out)
        text = bytes(self.out).decode()
        if self.path == "/v1/responses":
            return JSONResponse(self.response("completed"))
        if self.path == "/v1/messages":
            return JSONResponse({"id": self.name, "type": "message", "role": "assistant", "model": self.model,
                                 "content": [{"type": "text", "text": text}], "stop_reason": "end_turn"})
        choices = [{"index": i, "finish_reason": "stop", "logprobs": None,
                    **({"message": {"role": "assistant", "content": text}} if self.chat else {"text": text})}
                   for i in range(len(self.prompts) * self.n)]
        return JSONResponse({"id": self.name, "object": "chat.completion" if self.chat else "text_completion",
                             "created": 1, "model": self.model, "choices": choices, "usage": self.usage()})

    def response(self, status: str) -> dict[str, Any]:
        """As OpenAI's Responses have it."""
        text = {"type": "output_text", "text": bytes(self.out).decode(), "annotations": []}
        return {"id": self.name, "object": "response", "created_at": 1, "model": self.model, "status": status,
                "tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "output": [{
                    "id": "msg_1", "type": "message", "role": "assistant", "status": status, "content": [text]}]}

    def usage(self) -> dict[str, int]:
        prompt, out = sum(map(len, self.prompts)), len(self.out) * len(self.prompts) * self.n
        return {"prompt_tokens": prompt, "completion_tokens": out, "total_tokens": prompt + out}

    async def stream(self) -> AsyncIterator[bytes]:
        done: list[int] = []
        reason = "abort"
        try:
            await asyncio.to_thread(self.begin)
            for token in self.out:
                await asyncio.sleep(self.play.get("delay_s", 0))
                done.append(token)
                if self.play.get("break_after") == len(done):
                    raise ConnectionAbortedError("as asked")
                if self.play.get("live"):
                    await asyncio.to_thread(self.advance, done)
                yield self.event({"choices": [self.delta(bytes([token]).decode(), None)]})
            reason = "length"
            if self.path in _LAST:
                await asyncio.to_thread(self.end, "length", self.out)
                kind, held = _LAST[self.path]
                last = named(kind, {"response": self.response("completed")} if held else {})
                for part in (last[:9], last[9:-1], last[-1:]):  # in pieces, as a network has them
                    await asyncio.sleep(0.01)
                    yield part
                return
            yield self.event({"choices": [self.delta("", "stop")]})
            if (self.body.get("stream_options") or {}).get("include_usage"):
                yield self.event({"choices": [], "usage": self.usage()})
            await asyncio.to_thread(self.end, "length", self.out)
            yield b"data: [DONE]\n\n"
        finally:
            if reason == "abort":
                # A thread of its own: this task is being cancelled.
                threading.Thread(target=self.end, args=("abort", list(done))).start()

    def delta(self, text: str, reason: str | None) -> dict[str, Any]:
        what = {"delta": {"content": text}} if self.chat else {"text": text}
        return {"index": 0, "finish_reason": reason, "logprobs": None, **what}

    def event(self, value: dict[str, Any]) -> bytes:
        if self.path in _LAST:
            text = value["choices"][0].get("text") or value["choices"][0]["delta"]["content"]
            if self.path == "/v1/responses":
                return named("response.output_text.delta", {"delta": text, "item_id": "msg_1", "output_index": 0,
                                                            "content_index": 0, "logprobs": []})
            return named("content_block_delta", {"index": 0, "delta": {"type": "text_delta", "text": text}})
        return b"data: " + json.dumps({
            "id": self.name, "object": "chat.completion.chunk" if self.chat else "text_completion", "created": 1,
            "model": self.model, **value}).encode() + b"\n\n"


_LAST = {"/v1/responses": ("response.completed", True), "/v1/messages": ("message_stop", False)}


def named(kind: str, value: dict[str, Any]) -> bytes:
    """An event of the protocols whose events have names."""
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **value})}\n\n".encode()


class AsksForKey:
    """ASGI middleware: as vLLM with ``--api-key``, which guards what is below /v1 and nothing else."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self.app, self.key = app, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/v1") and (
                Headers(scope=scope).get("authorization") != f"Bearer {self.key}"):
            await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)
        else:
            await self.app(scope, receive, send)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--endpoint", default="")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--store", type=Path, help="the service of captures on this server's own port too")
    parser.add_argument("--keyed", action="store_true", help="… which takes this server to have asked for a key")
    parser.add_argument("--key", default="", help="… which does ask for this one")
    parser.add_argument("--capture-all", default="", help="… and captures what does not ask for it as this says")
    parser.add_argument("--engine", default="", help="the engine's name, as a gateway with several has it")
    parser.add_argument("--model", action="append", help="what it serves: the model, then adapters")
    parser.add_argument("--armed", action="append", help="sites that it has, all where none is named")
    args = parser.parse_args()
    armed = Armed({site: ARMED.sites[site] for site in args.armed}, ARMED.n_layers) if args.armed else ARMED
    upstream = Upstream(args.endpoint, args.dtype, args.engine, args.model or [MODEL], armed)
    app = Starlette(routes=[
        Route("/v1/models", upstream.models), Route("/health", upstream.health), Route("/_log", upstream.log),
        Route("/tokenize", upstream.tokenize, methods=["POST"]),
        Route("/detokenize", upstream.detokenize, methods=["POST"]),
        Route("/v1/completions", upstream.generate, methods=["POST"]),
        Route("/v1/chat/completions", upstream.generate, methods=["POST"]),
        Route("/v1/responses", upstream.generate, methods=["POST"]),
        Route("/v1/messages", upstream.generate, methods=["POST"]),
        Route("/v1/messages/count_tokens", upstream.tokenize, methods=["POST"]),
        Route("/metrics", upstream.metrics), Route("/_speed", upstream.set_speed, methods=["POST"]),
    ], exception_handlers={HTTPException: as_json})
    if args.store:
        config = Config(args.store, args.endpoint, ("http://vllm",), capture_all=args.capture_all)
        app.add_middleware(Embedded, **embeddable(config, lambda: args.keyed or bool(args.key)))
    if args.key:
        app.add_middleware(AsksForKey, key=args.key)
    listening = socket.create_server(("127.0.0.1", args.port))
    print(f"upstream ready http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run([listening])


if __name__ == "__main__":
    main()
