"""The demo: start everything, ask three things at once, read back, compare with Hugging Face, look at the files."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import openai
from rich.console import Console
from rich.table import Table

from schemas.errors import TapError
from schemas.manifest import Manifest
from vllm_tap.client.client import Client
from vllm_tap.demo.picture import heat_map
from vllm_tap.demo.reference import F32, Reference
from vllm_tap.demo.server import DemoServer
from vllm_tap.demo.stranger import read_rows, sealed_blocks
from vllm_tap.tiny_model import tiny_model

FOLDER: Final = Path("build/demo")
ARM: Final = "resid_post,attn_out,mlp_out"
SEAL_WAIT_S: Final = 20.0
# What each codec must keep on this float32 model: largest absolute error, and signal over noise in dB.
BARS: Final = {"raw": (1e-4, 80.0), "raw16": (None, 45.0), "int8b64": (None, 35.0)}

console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table: a site and layer of a capture against the reference."""

    capture: str
    site: str
    layer: int
    codec: str
    rows: int
    error: float
    sqnr_db: float
    ms: float

    @property
    def good(self) -> bool:
        error_max, sqnr_min = BARS[self.codec]
        return self.sqnr_db >= sqnr_min and (error_max is None or self.error <= error_max)


def _command() -> str:
    """The command line as this terminal calls it: beside Python where nothing has put that on its path."""
    return "vllm-tap" if shutil.which("vllm-tap") else os.path.relpath(Path(sys.executable).with_name("vllm-tap"))


def main() -> int:
    """0 where everything agrees."""
    parser = argparse.ArgumentParser("vllm_tap.demo", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="leave the server running")
    keep = parser.parse_args().keep
    began = time.monotonic()
    folder = FOLDER / time.strftime("%Y%m%d-%H%M%S")
    folder.mkdir(parents=True)
    say(f"the model: {tiny_model()}")
    server = DemoServer(folder, ARM, keep)
    try:
        say(f"starting vLLM with taps on {ARM}, the writer and the API (its lines: {server.log})")
        server.wait_ready(lambda line: console.print(f"    {line}", style="dim", markup=False))
        good = show(server, folder)
    except BaseException:
        server.stop()
        raise
    if keep:
        say(f"left running: {server.url}   stop it with: kill {server.process.pid}")
        console.print(f"    {_command()} ls --store {server.store}", soft_wrap=True)
    else:
        status = server.stop()
        say(f"stopped (exit code {status}); look at it again: {_command()} ls --store {server.store}")
        good = good and status == 0
    say(f"{'everything agrees' if good else 'SOMETHING DOES NOT AGREE'} ({time.monotonic() - began:.0f} s)")
    return 0 if good else 1


def say(text: str) -> None:
    console.print(f"[bold cyan]▶[/] {text}", soft_wrap=True)


def show(server: DemoServer, folder: Path) -> bool:
    """Everything between the server's start and its stop; whether all of it agrees."""
    say("a chat and two more requests at the same time, through the openai package, each with its own capture")
    chat, *others = ask(server.url)
    say("the same tokens through Hugging Face transformers, and every slice against them")
    reference = Reference(tiny_model())
    with Client(server.url) as client:
        lines, manifests = [], []
        for ref in (chat, *others):
            manifest = client.capture(ref).manifest()
            manifests.append(manifest)
            lines += compare(client, ref, manifest, reference)
        print_table(lines)
        whole = all(manifest.expected == manifest.captured + sum(gap.rows for row in manifest.rows
                                                                 for gap in row.missing) for manifest in manifests)
        complete = all(manifest.status == "complete" for manifest in manifests)
        say(f"{sum(m.captured for m in manifests)} rows captured of "
            f"{sum(m.expected for m in manifests)} expected; status: {', '.join(m.status for m in manifests)}")
        agrees = stranger(server.store, manifests[0], client)
        picture = folder / "resid_post.png"
        heat_map(client, manifests[0], picture)
        say(f"picture of the residual stream, token × layer: {picture}")
    return all(line.good for line in lines) and whole and complete and agrees


def ask(url: str) -> list[str]:
    """One chat and two concurrent requests with different specs; the response ids, which name the captures."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")

    def chat() -> str:
        answer = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Why is the sky blue?"}], max_tokens=24,
            temperature=0, extra_body={"capture": {"codec": "raw"}})
        console.print(f"    chat: {answer.choices[0].message.content!r}", style="dim", markup=False)
        extra = answer.model_extra or {}
        console.print(f"    capture: {extra['capture']}", style="dim", markup=False, soft_wrap=True)
        return answer.id

    def completion() -> str:
        answer = client.completions.create(
            model="tiny", prompt="The tower stands where the river meets the sea, and", max_tokens=40, temperature=0,
            extra_body={"capture": {"sites": ["blocks.2.hook_resid_post"], "positions": "generated"}})
        return answer.id

    def stream() -> str:
        name = ""
        for chunk in client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "Tell me a story."}], max_tokens=32, temperature=0,
                stream=True, extra_body={"capture": {"sites": ["resid_post", "mlp_out"], "layers": "::2",
                                                     "codec": {"resid_post": "raw16"}}}):
            name = chunk.id or name
        return name

    with ThreadPoolExecutor(3) as pool:
        return [future.result() for future in [pool.submit(do) for do in (chat, completion, stream)]]


def compare(client: Client, ref: str, manifest: Manifest, reference: Reference) -> list[Line]:
    """Every site and layer of a capture, read over HTTP, against the reference."""
    truth = reference.rows([*manifest.prompt_token_ids, *manifest.output_token_ids])
    lines = []
    for entry in manifest.rows:
        began = time.perf_counter()
        rows = client.capture(ref).slice(entry.site, entry.layer)
        ms = (time.perf_counter() - began) * 1000
        error, sqnr = distance(rows.values[0], truth[entry.site, entry.layer][rows.positions])
        lines.append(Line(manifest.id, entry.site, entry.layer, entry.codec, len(rows.positions), error, sqnr, ms))
    return lines


def distance(values: F32, truth: F32) -> tuple[float, float]:
    """Largest absolute error, and signal over noise in dB."""
    noise = (values - truth).astype(np.float64)
    power = float((truth.astype(np.float64) ** 2).sum())
    return float(np.abs(noise).max()), 10 * float(np.log10(power / max(float((noise**2).sum()), 1e-300)))


def print_table(lines: list[Line]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold",
                  title="slices over HTTP against a Hugging Face forward")
    for name in ("capture", "site", "layer", "codec", "rows", "max error", "SQNR dB", "ms", ""):
        table.add_column(name, justify="left" if name in ("capture", "site", "codec", "") else "right")
    last = ""
    for line in lines:
        table.add_row("" if line.capture == last else f"…{line.capture[-6:]}", line.site, str(line.layer), line.codec,
                      str(line.rows), f"{line.error:.1e}", f"{line.sqnr_db:.1f}", f"{line.ms:.1f}",
                      "[green]ok[/]" if line.good else "[red]no[/]")
        last = line.capture
    console.print(table)


def stranger(store: Path, manifest: Manifest, client: Client) -> bool:
    """The sealed block through zarr-python alone: the same numbers as over HTTP, bit for bit."""
    site, layer = manifest.rows[0].site, manifest.rows[-1].layer
    blocks = until(lambda: sealed_blocks(store, manifest.id, site))
    if not blocks:
        say(f"no block was sealed within {SEAL_WAIT_S:.0f} s")
        return False
    positions, values = read_rows(blocks[0], manifest.id, layer)
    rows = client.capture(manifest.id).slice(site, layer)
    same = np.array_equal(positions, rows.positions) and np.array_equal(values, rows.values[0])
    say(f"{blocks[0]} through zarr-python alone: {len(positions)} rows of {site}, layer {layer}, "
        f"{'bit for bit the same' if same else 'DIFFERENT'}")
    return same


def until(found: Callable[[], list[Any]]) -> list[Any]:
    deadline = time.monotonic() + SEAL_WAIT_S
    while not (result := found()) and time.monotonic() < deadline:
        time.sleep(0.25)
    return result


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except TapError as error:
        console.print(f"demo: {error}", markup=False, soft_wrap=True)
        raise SystemExit(1) from None
