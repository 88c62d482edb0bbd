"""``make bench``: what capturing costs generation, bytes a token by codec, and the writer against the plain disk."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench import engine_cost, writer_throughput
from bench.codec_tables import shown
from bench.shapes import LOADS, SHAPES
from schemas import codecs

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Measure, print tables, write bench/results/SHAPE.json."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="small", help="model shape (default: small, for CPUs)")
    parser.add_argument("--pairs", type=int, default=2, help="rounds of one process a configuration (default: 2)")
    parser.add_argument("--iterations", type=int, default=5, help="measured iterations a process (default: 5)")
    parser.add_argument("--only", default=",".join(engine_cost.CONFIGURATIONS),
                        help="configurations, base first (default: %(default)s)")
    parser.add_argument("--skip-writer", action="store_true", help="leave out the writer's throughput")
    args = parser.parse_args()
    console = Console()
    load = LOADS[args.shape]
    console.print(f"shape {args.shape}, batch {load.batch}, prompt {load.prompt}, generated {load.generated}, greedy")
    result = engine_cost.measure(args.shape, args.only.split(","), args.pairs, args.iterations, console.print)
    console.print(_engine_table(result))
    for configuration, reason in result.failed.items():
        console.print(f"{configuration}: could not run here: {reason}")
    console.print(f"rows dropped in all captures: {result.dropped}")
    console.print(_codec_table(args.shape))
    report = {"shape": args.shape, **asdict(result)}
    if not args.skip_writer:
        with tempfile.TemporaryDirectory(prefix="vllm-tap-bench-", dir=".") as folder:
            report["writer"] = writer_throughput.measure(0.5, 3, Path(folder))
        console.print("writer: " + ", ".join(f"{key} {value:.3g}" for key, value in report["writer"].items()))
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{args.shape}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    console.print(f"written: {path}")


def _engine_table(result: engine_cost.Result) -> Table:
    table = Table(title="generate(), over base with its graphs, in the same run")
    for column in ("", "ratio", "by round", "until durable", "tokens as idle"):
        table.add_column(column, justify="left" if not column else "right")
    for name, ratios in result.ratio.items():
        durable = statistics.median(result.durable[name]) / statistics.median(result.seconds["base"])
        same = "same" if result.same_tokens[name] else "differ"
        ours = [f"{durable:.3f}", same] if name.startswith("ours") else ["", ""]
        table.add_row(name, f"{statistics.median(ratios):.3f}", " ".join(f"{r:.3f}" for r in ratios), *ours)
    return table


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
