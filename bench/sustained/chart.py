"""The picture of the line in docs/evidence/performance.md: ``python -m bench.sustained.chart PICTURE RESULT…``.

A bar a result of ``python -m bench.sustained --profile``: processor seconds a GB by stage, of the trial that went as
fast as the ring gave room, and how often each stored byte is read, written and hashed.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Final

import msgspec

from bench.sustained.result import Result
from bench.sustained.trial import Trial

# By thread, then by stage up to its first colon; in the order of the way that bytes go.
_THREADS: Final = {"seal": "seal", "keep": "make room", "catalog": "catalog", "sync": "commit, sync"}
_NETWORK: Final = "network: join, cipher, porter"
_STAGES: Final = {
    "sender": {"put steps together": "sender: put together", "hash": "sender: hash", "join for the network": _NETWORK,
               "send": _NETWORK},
    "writer": {"check hash, hash rows": "writer: check, hash rows", "ring to file": "writer: ring to file",
               "commit": "commit, sync"},
}
COLOURS: Final = {
    "sender: put together": "#9ecae1", "sender: hash": "#4292c6", "sender: rest": "#08519c", _NETWORK: "#b9b3a8",
    "writer: check, hash rows": "#fdae6b", "writer: ring to file": "#e6550d", "commit, sync": "#a63603",
    "catalog": "#74c476", "seal": "#238b45", "make room": "#bcbddc", "writer: rest": "#756bb1",
}


def grouped(trial: Trial) -> Counter[str]:
    """Processor seconds a GB by what the picture shows."""
    found: Counter[str] = Counter()
    for process, counts in trial.stages.items():
        known = _STAGES[process]
        for name, sums in counts["stages"].items():
            thread, _, stage = name.partition("/")
            group = _THREADS.get(thread) or known.get(stage.partition(":")[0], f"{process}: rest")
            found[group] += sums[0] / counts["gb"]
        for thread, seconds in counts["threads"].items():
            if thread == "stages":  # the timers' own
                continue
            mine = sum(sums[0] for name, sums in counts["stages"].items() if name.startswith(f"{thread}/"))
            group = _NETWORK if thread == "ZMQbg" and "porter" in trial.cpu_s_per_gb and trial.cpu_s_per_gb[
                "porter"] > 0.05 else _THREADS.get(thread, f"{process}: rest")
            found[group] += max(0.0, seconds - mine) / counts["gb"]
    found[_NETWORK] += trial.cpu_s_per_gb.get("porter", 0.0)
    return found


def touched(trial: Trial) -> tuple[float, float, float]:
    """How often a stored byte is read, written and hashed."""
    sums = [0.0, 0.0, 0.0]
    for counts in trial.stages.values():
        for _, _, _, _, *nbytes in counts["stages"].values():
            sums = [a + b / 1e9 / counts["gb"] for a, b in zip(sums, nbytes, strict=True)]
    return sums[0], sums[1], sums[2]


def main() -> None:
    """Draw it."""
    parser = argparse.ArgumentParser(prog="python -m bench.sustained.chart", description=__doc__)
    parser.add_argument("picture", type=Path)
    parser.add_argument("results", type=Path, nargs="+")
    args = parser.parse_args()
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    results = [msgspec.json.decode(path.read_bytes(), type=Result) for path in args.results]
    figure, axes = plt.subplots(figsize=(11, 0.62 * len(results) + 1.9), layout="constrained")
    lefts = [0.0] * len(results)
    bars = [grouped(result.trials[0]) for result in results]
    for group, colour in COLOURS.items():
        widths = [bar[group] for bar in bars]
        axes.barh(range(len(bars)), widths, left=lefts, color=colour, label=group)
        for at, (left, width) in enumerate(zip(lefts, widths, strict=True)):
            if width > 0.028 * max(sum(bar.values()) for bar in bars):
                axes.text(left + width / 2, at, f"{width:.2f}", ha="center", va="center", fontsize=7)
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    for at, (left, result) in enumerate(zip(lefts, results, strict=True)):
        read, written, hashed = touched(result.trials[0])
        axes.text(left, at, f"  {left:.2f} s/GB; read {read:.1f}×, written {written:.1f}×, hashed {hashed:.1f}×",
                  va="center", fontsize=7)
    labels = [f"{one.setting.codec}, {one.setting.store}\n{one.cores} cores" for one in results]
    axes.set_yticks(range(len(bars)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.35 * max(lefts))
    axes.set_xlabel("processor seconds a GB of coded rows, sender and writer together")
    figure.legend(loc="outside lower center", ncols=4, fontsize=7, frameon=False)
    figure.savefig(args.picture, dpi=120)
    print(f"written: {args.picture}")


if __name__ == "__main__":
    main()
