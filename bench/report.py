"""Figures of a measurement: ratios with their spread, as a Markdown table and as a chart.

``python -m bench.report`` puts the tables of bench/results into docs/evidence/performance.md, between their marks.
"""

from __future__ import annotations

import random
import re
import statistics
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from bench.engine_cost import Result, Series

RESAMPLES = 2000


def interval(rounds: list[list[float]]) -> tuple[float, float, float]:
    """Median and the 95 % interval of it: bootstrap over rounds, then over iterations within each."""
    rounds = [values for values in rounds if values]
    draw = random.Random(0)
    medians = sorted(
        statistics.median([value for values in draw.choices(rounds, k=len(rounds))
                           for value in draw.choices(values, k=len(values))])
        for _ in range(RESAMPLES)
    )
    middle = statistics.median([value for values in rounds for value in values])
    return middle, medians[RESAMPLES // 40], medians[-RESAMPLES // 40]


def drift(series: Series) -> float | None:
    """The second half of the iterations over the first, medians, over rounds; None where there are fewer than four."""
    found = [statistics.median(values[-(len(values) // 2):]) / statistics.median(values[:len(values) // 2])
             for values in series.ratio if len(values) >= 4]
    return statistics.median(found) if found else None


def markdown(result: Result) -> str:
    """One table a load."""
    text: list[str] = []
    for load, scenarios in result.series.items():
        base = scenarios["base"]
        base_s = statistics.median([s for values in base.seconds for s in values])
        same = set(base.tokens)
        text += [f"**{load}** (base {base_s:.4f} s)", "",
                 "| | over base | 95 % | until durable | second half over first | answers |",
                 "|---|---|---|---|---|---|"]
        for name, series in scenarios.items():
            if name == "base" or not any(series.ratio):
                continue
            middle, low, high = interval(series.ratio)
            durable = [s for values in series.durable for s in values]
            shown = f"{statistics.median(durable) / base_s:.3f}" if durable else ""
            moved = drift(series)
            answers = "as base" if set(series.tokens) <= same else "differ"
            text.append(f"| {name} | {middle:.4f} | {low:.4f} – {high:.4f} | {shown} | "
                        f"{'' if moved is None else f'{moved:.3f}'} | {answers} |")
        text.append(f"| base, against itself | {statistics.median(_against_itself(base)):.4f} | | | | "
                    f"{'equal in every process' if len(same) == 1 else 'differ between processes'} |")
        text.append("")
    for name, memory in result.memory.items():
        text.append(f"- {name}: host {memory[0]['host'] / 2**30:.2f} → {memory[-1]['host'] / 2**30:.2f} GiB over "
                    f"{len(memory)} iterations")
    if (base := result.memory.get("base")) and "device" in base[0]:
        text.append(f"- the device, all engines that stand on it: {base[0]['device'] / 2**30:.2f} → "
                    f"{base[-1]['device'] / 2**30:.2f} GiB")
    by_reason = "".join(f"; {where}: {rows:,}" for where, rows in result.dropped.items())
    text += [f"- rows missing in all captures: {sum(result.dropped.values()):,}{by_reason}",
             f"- captures that do not add up, or rows of other tokens: {len(result.bad)} {result.bad[:3] or ''}"]
    text += [f"- {name}: log-probability of the first sampled token moves by at most {shift:.2g}"
             for name, shift in result.logprobs.items()]
    text += [f"- {name} could not run: {why}" for name, why in result.failed.items()]
    return "\n".join(text) + "\n"


def _against_itself(base: Series) -> list[float]:
    return [b / a for values in base.seconds for a, b in pairwise(values)] or [1.0]


def chart(result: Result, path: Path, say: Callable[[str], None]) -> None:
    """A bar for every scenario of the first load, on a logarithmic axis, with its interval."""
    try:
        import matplotlib
    except ImportError:
        say("no chart: matplotlib is not installed (the extra `demo` has it)")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    load, scenarios = next(iter(result.series.items()))
    bars = [(name, *interval(series.ratio)) for name, series in scenarios.items() if any(series.ratio)]
    if not bars:
        say("no chart: nothing was measured but the base")
        return
    figure, axes = plt.subplots(figsize=(8, 0.36 * len(bars) + 1.2), layout="constrained")
    ours = [not name.startswith(("base", "eager", "vLLM")) for name, *_ in bars]
    middles = [middle for _, middle, *_ in bars]
    axes.barh(range(len(bars)), middles, color=["#2f6f9f" if own else "#b9b3a8" for own in ours],
              xerr=[[middle - low for _, middle, low, _ in bars], [high - middle for _, middle, _, high in bars]])
    for at, (_, middle, _, high) in enumerate(bars):
        axes.text(high * 1.02, at, f"{middle:.3f}", va="center", fontsize=8)
    axes.set_yticks(range(len(bars)), [name for name, *_ in bars], fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(0.9, max(middles) * 1.3)
    ticks = [tick for tick in (1, 1.5, 2, 3, 4, 6, 8, 12, 16) if tick < max(middles) * 1.3]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel(f"generate() over base with CUDA graphs, {load}")
    figure.savefig(path, dpi=120)
    say(f"written: {path}")


PAGE = Path(__file__).parents[1] / "docs" / "evidence" / "performance.md"
_MARKED = re.compile(r"(<!-- bench/results/([a-z0-9-]+)\.md -->\n).*?(<!-- end -->)", re.DOTALL)


def page(text: str) -> str:
    """The page with every marked table as its result has it now."""
    results = Path(__file__).parent / "results"
    return _MARKED.sub(lambda mark: f"{mark[1]}\n{(results / f'{mark[2]}.md').read_text()}\n{mark[3]}", text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
