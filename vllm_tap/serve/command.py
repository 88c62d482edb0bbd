"""``vllm-tap serve``: the supervisor with a terminal in front of it."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Final

from api.config import keys_file
from schemas.codecs import parse_codec
from schemas.legacy import SITE, error_text
from schemas.read.reader import StoreReader
from schemas.wire.ask_store import ask_store
from vllm_tap.serve.services import ServeConfig, make_socket_dir, services
from vllm_tap.serve.supervisor import Supervisor
from vllm_tap.sizes import size_text

__all__ = ["serve"]

_ASK_S: Final = 1.0  # that a writer may take to say what its store takes
_COLOURS: Final = {"serve": "1;36", "writer": "35", "engine": "2", "api": "32", "push": "33"}


def serve(config: ServeConfig) -> int:
    """Runs writer, engine and API until a signal; the exit status. StartError before anything is started."""
    socket_dir = make_socket_dir()
    began = time.monotonic()
    output = _Output()
    try:
        chosen = services(config, socket_dir)
        output("serve", f"starting {config.model}: {', '.join(one.name for one in chosen)} (an engine takes a minute)")
        supervisor = Supervisor(
            chosen, socket_dir, output,
            running=lambda: open_captures(config.store),
            ready=lambda: output.block(_ready_text(
                config, time.monotonic() - began,
                ask_store(f"ipc://{socket_dir / 'writer.sock'}", None, _ASK_S).bytes_s)),
        )
        return asyncio.run(supervisor.run())
    finally:
        shutil.rmtree(socket_dir, ignore_errors=True)


def open_captures(store: Path) -> int:
    """The number of captures of a store that an engine still works on (at most 1,000 are counted)."""
    reader = StoreReader(store)
    try:
        return len(reader.captures(status="running", limit=1000))
    finally:
        reader.close()


class _Output:
    """Lines with the name of who said them; goes silent where nobody listens any more."""

    def __init__(self) -> None:
        self._colour = sys.stdout.isatty()
        self._open = True

    def __call__(self, name: str, line: str) -> None:
        code = _COLOURS.get(name, "0")
        self.block(f"\x1b[{code}m{name:>6} |\x1b[0m {line}" if self._colour else f"{name:>6} | {line}")

    def block(self, text: str) -> None:
        if not self._open:
            return
        try:
            print(text, flush=True)
        except (OSError, ValueError):  # `vllm-tap serve | head`: the service matters more than its lines
            self._open = False


def _ready_text(config: ServeConfig, seconds: float, store_bytes_s: float = 0.0) -> str:
    takes = f"      (takes {size_text(round(store_bytes_s))} of rows a second)" if store_bytes_s else ""
    name = config.served_name or config.model
    keys = keys_file(config.store, config.keys)
    needed, key = (f"\n    keys     {keys}: every request needs one", " -H 'Authorization: Bearer KEY'"
                   ) if keys.exists() else ("", "")
    body = f'{{"model": "{name}", "max_tokens": 16, "messages": [{{"role": "user", "content": "Hello"}}],'
    every = ""
    if config.capture_all:
        codec = parse_codec(json.loads(config.capture_all)["codec"])
        every = f"\n    every    request is captured: {SITE}, all layers, as {codec.identity}\n" \
                f"             error: {error_text(codec)}"
    probes = "".join(f"\n    probe    {probe}" for probe in config.probes)
    edits = f"\n    edit     {config.edits.places}      (add \"edit\" to a request)" if config.edits.places else ""
    bucket = f"\n    bucket   {config.bucket}      (what is sealed goes there every {config.push_every_s:g} s)" \
        if config.bucket else ""
    vectors = "".join(f"\n    vector   {vector}" for vector in config.edits.vectors)
    return f"""
  vllm-tap is ready ({seconds:.0f} s)

    API      {config.url}/v1      (OpenAI-compatible; add "capture" to a request)
    page     {config.url}/       (captures in a browser)
    store    {config.store.absolute()}{takes}{bucket}
    armed    {config.arm}{probes}{edits}{vectors}{every}{needed}

    try      curl {config.url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d \\
               '{body} "capture": {{}}}}'
             vllm-tap ls --store {config.store}
    stop     Ctrl-C
"""
