"""``make bench``: what capturing costs generation, and bytes a token by codec."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from bench import engine_cost, report
from bench.codec_tables import shown
from bench.configurations import CONFIGURATIONS
from bench.scenarios import ENGINES
from bench.shapes import LOADS, SHAPES
from schemas import codecs

RESULTS = Path(__file__).parent / "results"
# Those that need no numbers in the model, and no other memory.
SETTINGS = [name for name, one in CONFIGURATIONS.items() if one.model == "dense" and not {
    "max_num_batched_tokens", "max_num_seqs", "dtype", "compilation_config", "enforce_eager"} & one.options.keys()]


class Report(msgspec.Struct):
    """What bench/results holds."""

    shape: str
    machine: str
    engine: engine_cost.Result


def main() -> None:
    """Measure, print tables as they come, write bench/results/NAME.{json,md,png}."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="small", help="model shape (default: small, for CPUs)")
    parser.add_argument("--configuration", default="base", choices=SETTINGS,
                        help="how all engines run vLLM (default: as it comes)")
    parser.add_argument("--engines", default="base,tap,eager,builtin",
                        help=f"processes, base first, of {', '.join(ENGINES)} (default: %(default)s)")
    parser.add_argument("--loads", default="",
                        help=f"of {', '.join(LOADS)} (default: small, or hook where the shape is larger)")
    parser.add_argument("--scenarios", default="", help="names with + between them (default: all)")
    parser.add_argument("--rounds", type=int, default=2, help="times that all processes are made anew (default: 2)")
    parser.add_argument("--pairs", type=int, default=1, help="sets of processes that stand side by side (default: 1)")
    parser.add_argument("--iterations", type=int, default=5, help="measured iterations a round (default: 5)")
    parser.add_argument("--name", default="", help="of the result (default: the shape); what is there is added to")
    args = parser.parse_args()
    os.environ["BENCH_CONFIGURATION"] = args.configuration
    console = Console(width=140)
    loads = args.loads.split(",") if args.loads else ["small" if args.shape == "small" else "hook"]
    RESULTS.mkdir(exist_ok=True)
    named = args.shape if args.configuration == "base" else f"{args.shape}-{args.configuration.replace(' ', '-')}"
    path = RESULTS / f"{args.name or named}.json"
    found = msgspec.json.decode(path.read_bytes(), type=Report) if path.exists() else Report(
        args.shape, _machine(), engine_cost.Result())

    def save() -> None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")

    for load in loads:
        console.print(f"shape {args.shape}, {load}: batch {LOADS[load].batch}, prompt {LOADS[load].prompt}, generated "
                      f"{LOADS[load].generated}, greedy")
    engine_cost.measure(args.shape, args.engines.split(","), loads, args.rounds, args.pairs, args.iterations,
                        list(filter(None, args.scenarios.split("+"))), found.engine, console.print, save)
    save()
    text = f"Shape {found.shape}, {found.machine}\n\n{report.markdown(found.engine)}"
    path.with_suffix(".md").write_text(text)
    console.print(text, markup=False, highlight=False)
    console.print(_codec_table(args.shape))
    report.chart(found.engine, path.with_suffix(".png"), console.print)
    console.print(f"written: {path}")


def _machine() -> str:
    """What it ran on, in words."""
    import platform

    import torch
    import vllm

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return f"{device}, vLLM {vllm.__version__}, torch {torch.__version__}"


def _codec_table(shape: str) -> Table:
    table = Table(title=f"bytes a token, one site, every layer of shape {shape} in bfloat16")
    table.add_column("codec")
    table.add_column("bytes a row", justify="right")
    table.add_column("bytes a token", justify="right")
    width, layers = SHAPES[shape].hidden, SHAPES[shape].layers
    for codec in map(shown, codecs.CODECS):
        row = sum(stream.nbytes for stream in codecs.streams(codec, width, "bfloat16"))
        table.add_row(codec, f"{row:,}", f"{row * layers:,}")
    return table


if __name__ == "__main__":
    main()
