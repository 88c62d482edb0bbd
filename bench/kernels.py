"""``python -m bench.kernels``: what one launch of each encoder takes on this GPU, against a plain copy of its bytes."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from engine_side import kernels
from schemas import codecs

SIZES = ((8192, 36), (32, 36))  # rows of a step × layers: a prefill and a decode
WIDTHS = (2048, 4096)
MASSIVE = (70, 71, 1415, 1900)  # columns; the first two share a group


def main() -> None:
    """Measure, print a table to stderr and JSON to stdout."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description=__doc__)
    parser.add_argument("--codecs", default="int8b64 raw16",
                        help="identities, by blanks; those that have no kernel are left out (default: %(default)s)")
    parser.add_argument("--warps", type=int, nargs="*", default=[0], help="0: as chosen by width (default)")
    parser.add_argument("--repeats", type=int, default=30)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench.kernels: no CUDA device here")
    console, results = Console(stderr=True, width=150), []
    table = Table(title=f"{torch.cuda.get_device_name()}: microseconds, median of {args.repeats}")
    for column in ("codec", "width", "rows", "warps", "gathered", "kernel", "copy", "ratio", "host"):
        table.add_column(column, justify="left" if column == "codec" else "right")
    for width in WIDTHS:
        for tokens, layers in SIZES:
            buffer = torch.randn(layers, tokens, width, device="cuda").to(torch.bfloat16)
            buffer[:, :, list(MASSIVE)] *= 300
            for codec in args.codecs.split():
                if not kernels.supported(codec, width, buffer.dtype):
                    continue
                for warps in args.warps if not kernels.rows_max(codec, width) else [0]:  # a product has its own
                    for gathered in (False, True):
                        row = measure(codec, buffer, gathered, warps, args.repeats)
                        results.append(row)
                        table.add_row(*(f"{value:.1f}" if isinstance(value, float) else str(value)
                                        for value in row.values()))
            del buffer
    console.print(table)
    print(json.dumps({"device": torch.cuda.get_device_name(), "kernels": results}, indent=1))


def measure(codec: str, buffer: torch.Tensor, gathered: bool, warps: int, repeats: int) -> dict[str, Any]:
    """One line of the table."""
    layers, tokens, width = buffer.shape
    ends = [0]
    for stream in codecs.streams(codec, width, "bfloat16"):
        ends.append(ends[-1] + -(-stream.nbytes * layers * tokens // 64) * 64)
    ends += [ends[-1] + -(-4 * tokens // 64) * 64]
    scratch = torch.empty(ends[-1] + 8 * tokens, dtype=torch.uint8, device="cuda")
    numbers = torch.arange(tokens, device="cuda")
    source = kernels.StagedRows(buffer, torch.arange(layers, dtype=torch.int32, device="cuda"),
                            numbers.flip(0).contiguous() if gathered else 0, tokens, numbers.int(), numbers)
    if warps:
        kernels._kernel.cache_clear()
        kernel = kernels._kernel(codec, kernels.Kind(width, buffer.dtype, gathered, True, buffer.device))
        kernel.warps = warps
    moved = buffer.nbytes + scratch.nbytes  # a copy of half of that reads and writes as much
    one, other = (torch.empty(moved // 2, dtype=torch.uint8, device="cuda") for _ in range(2))

    most = (kernels.rows_max(codec, width) or layers * tokens) // layers  # of a launch; each writes over the one before
    sources = [replace(source, rows=source.rows + begin if isinstance(source.rows, int) else source.rows[begin:],
                       n=min(most, tokens - begin)) for begin in range(0, tokens, most)]
    for block in sources:
        kernels.launch(codec, block, scratch, ends)(0)
    launches = [kernels.launch(codec, block, scratch, ends) for block in sources]  # compiled by now

    def encode() -> None:
        for launch in launches:
            launch(0)

    return {"codec": codec, "width": width, "rows": layers * tokens, "warps": warps, "gathered": gathered,
            "kernel": on_device(encode, repeats), "copy": (copy := on_device(lambda: other.copy_(one), repeats)),
            "ratio": on_device(encode, repeats) / copy, "host": on_host(encode, repeats)}


def on_device(work: Callable[[], object], repeats: int) -> float:
    """Microseconds by the device's clock, each time with other data in the caches."""
    for _ in range(3):
        work()
    spoil = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    taken = []
    for _ in range(repeats):
        spoil.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) * 1000)
    return statistics.median(taken)


def on_host(work: Callable[[], object], repeats: int) -> float:
    """Microseconds of Python that it takes, of 20 that follow each other and wait for nothing."""
    taken = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(20):
            work()
        taken.append((time.perf_counter() - begin) / 20 * 1e6)
    return statistics.median(taken)


if __name__ == "__main__":
    main()
