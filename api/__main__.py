"""``python -m api``: the HTTP service as a process. Exit 2 with one line where it cannot start as configured."""

from __future__ import annotations

import argparse
import asyncio
import logging
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from api.app import create_app
from api.config import Config
from api.slow_heads import bounded_heads
from schemas import limits
from schemas.bucket.places import is_url
from schemas.codecs import check_installed
from schemas.errors import StartError
from schemas.native import loops


def flags() -> argparse.ArgumentParser:
    """The flags of the process."""
    parser = argparse.ArgumentParser("python -m api", description="The HTTP service of vllm-tap.")
    parser.add_argument("--store", required=True, action="append", metavar="DIR", help="the writer's store, read only "
                        "here; or the URL of a bucket that a writer elsewhere pushes to: s3://BUCKET/PREFIX, gs://…, "
                        "az://…, file:///PATH; repeatable with URLs, and s3://BUCKET/PREFIX/* is all one level below: "
                        "stores that are read as one")
    parser.add_argument("--endpoint", metavar="ipc://PATH", help="the writer's socket; none with a bucket")
    parser.add_argument("--upstream", action="append", metavar="URL", help="vLLM's server (default: "
                        "http://127.0.0.1:8101); of several each with its name: --upstream a=URL --upstream b=URL")
    parser.add_argument("--host", default="127.0.0.1", help="address of the service; beyond loopback only with keys")
    parser.add_argument("--port", type=int, default=8100, metavar="P", help="0 takes any free one")
    parser.add_argument("--keys", type=Path, metavar="FILE", help="the API keys (default: keys.json of the store, "
                                                                  "if it has one); needed to listen beyond loopback")
    parser.add_argument("--requests-in-flight-max", type=int, default=limits.requests_in_flight_max, metavar="N",
                        help="requests of one key at a time; more are answered 429")
    parser.add_argument("--generations-in-flight-max", type=int, default=limits.generations_in_flight_max, metavar="N",
                        help="generations of one key at a time; more are answered 429")
    parser.add_argument("--slice-bytes-max", type=int, default=limits.slice_bytes_max, metavar="N",
                        help="bytes of the largest slice that is answered")
    parser.add_argument("--slices-in-flight-bytes-max", type=int, default=limits.slices_in_flight_bytes_max,
                        metavar="N", help="bytes of memory of all slices being answered together")
    parser.add_argument("--slice-stall-s", type=float, default=Config.__dataclass_fields__["slice_stall_s"].default,
                        metavar="S", help="cut off a caller who takes nothing of a slice for S seconds: its memory "
                        "counts until the last byte is sent")
    parser.add_argument("--head-s", type=float, default=Config.__dataclass_fields__["head_s"].default, metavar="S",
                        help="cut off a connection whose request's head is not whole after S seconds")
    parser.add_argument("--body-s", type=float, default=Config.__dataclass_fields__["body_s"].default, metavar="S",
                        help="refuse a request whose body is not whole after S seconds")
    parser.add_argument("--capture-all", default="", metavar="SPEC",
                        help="capture every request that brings no spec of its own, as this one says (JSON)")
    _add_bucket_options(parser)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Serves until SIGTERM or SIGINT; prints ``api ready URL`` when it accepts connections."""
    args = flags().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        check_installed()
        config = _config(vars(args))
        loops.begin()
        app = create_app(config)
        listening = _listen(config)
    except StartError as error:
        print(f"api: {error}", file=sys.stderr)
        return 2
    asyncio.run(_serve(app, config, listening))
    return 0


def _add_bucket_options(parser: argparse.ArgumentParser) -> None:
    default = Config.__dataclass_fields__
    parser.add_argument("--also", action="append", metavar="URL", help="read other stores too, of buckets that other "
                        "nodes push to: s3://BUCKET/PREFIX, or s3://BUCKET/PREFIX/* for all one level below it; "
                        "repeatable")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="folder on a local disk for rows of a bucket, and "
                        "of those that were evicted to one (default: ~/.cache/vllm-tap)")
    parser.add_argument("--cache-bytes", type=int, metavar="N", help="bytes of that folder at most "
                        f"(default: {limits.bucket_cache_bytes})")
    parser.add_argument("--catalog", metavar="URL", help="Postgres database that has a bucket's catalog "
                        "(vllm-tap push --catalog brings it), postgresql://USER@HOST/DATABASE")
    parser.add_argument("--deletes", action="store_true", default=None, help="serve DELETE of captures in a bucket "
                        "too, with credentials that may write there; rows leave it with the store's next push")
    parser.add_argument("--bucket-look-s", type=float, metavar="S", help="look for a newer head so often (default: "
                        f"{default['bucket_look_s'].default:g})")
    parser.add_argument("--bucket-answer-s", type=float, metavar="S", help="give up a read of the bucket after so long "
                        f"(default: {default['bucket_answer_s'].default:g})")


def _config(given: dict[str, Any]) -> Config:
    """The settings that the options say; StartError where some do not belong together."""
    given = {name: value for name, value in given.items() if value is not None}
    stores = given.pop("store")
    if folders := [store for store in stores if not is_url(store)]:
        if len(stores) > 1:
            raise StartError(f"store = {folders[0]!r}: a folder is read alone, beside its writer; several stores are "
                             "read from buckets: vllm-tap push brings them there")
    else:
        return Config(Path(), given.pop("endpoint", ""), given.pop("upstream", ()), buckets=stores, **given)
    if "bucket_look_s" in given and "also" not in given:
        raise StartError(f"bucket_look_s = {given['bucket_look_s']!r}: taken with a bucket's URL as --store or "
                         "--also alone")
    if "endpoint" not in given:
        raise StartError("endpoint: missing; name the writer's socket, such as ipc:///tmp/vllm-tap/writer.sock, or "
                         "give the URL of a bucket as --store")
    return Config(store=Path(folders[0]), **given)


def _listen(config: Config) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # With the protocol named, asyncio turns Nagle's algorithm off: small answers in 2 ms instead of 45.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((config.host, config.port))
    except OSError as error:
        listening.close()
        raise StartError(f"cannot listen on {config.host}:{config.port}: {error.strerror}; "
                         "choose another --port") from None
    listening.listen(512)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # every connection takes a descriptor
    most = 2 * limits.connections_max
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    return listening


class _ApiServer(uvicorn.Server):
    """A server whose signals are handled here: being asked to stop is a clean end, with exit status 0."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(app: FastAPI, config: Config, listening: socket.socket) -> None:
    # h11 bounds the headers of a request (64 KiB); the faster httptools would take them without end.
    server = _ApiServer(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="on",
                                    http=bounded_heads(config.head_s), limit_concurrency=limits.connections_max,
                                    timeout_graceful_shutdown=round(config.stop_grace_s) + 3, timeout_keep_alive=30))
    serving = asyncio.ensure_future(server.serve([listening]))
    loop = asyncio.get_running_loop()

    def stop() -> None:
        # Callers who stay would hold the exit for ever: what is in flight gets a moment, then upstream is closed.
        server.should_exit = True
        loop.call_later(config.stop_grace_s, lambda: asyncio.ensure_future(app.state.service.stop()))

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    if server.started:
        host = f"[{config.host}]" if ":" in config.host else config.host
        print(f"api ready http://{host}:{listening.getsockname()[1]}", flush=True)
    await serving


if __name__ == "__main__":
    raise SystemExit(main())
