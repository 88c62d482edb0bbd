"""A report as one file for a browser, with its pictures in it: nothing is fetched from anywhere."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from vllm_tap.fidelity.kv.anchors import ANCHORS
from vllm_tap.fidelity.kv.terms import terms_of
from vllm_tap.fidelity.reports.parts import PartLine, attention_lines, drafter_lines, retrieval_lines
from vllm_tap.fidelity.reports.report import Line, Report, lines_of

__all__ = ["ATTENTION", "DRAFTER", "RETRIEVAL", "page_of", "ratios_of"]

Columns = tuple[tuple[str, str, str], ...]  # a value's name, its heading, and how it is written
ATTENTION: Final[Columns] = (("overlap", "of the eight are the same", "%.4f"), ("all", "all eight are", "%.3f"),
                             ("mass", "mass regained", "%.5f"), ("entropy", "entropy off by, nats", "%.2g"))
DRAFTER: Final[Columns] = (("tokens", "tokens a step", "%.3f"), ("share", "of those with exact rows", "%.3f"))
RETRIEVAL: Final[Columns] = (("copied", "copied rightly", "%.3f"), ("lost", "less than without", "%+.3f"))


def page_of(report: Report) -> str:
    """The page, HTML. Needs jinja2 and matplotlib."""
    from jinja2 import Environment

    lines = list(lines_of(report))
    codecs = [one for one in lines if one.kind == "codec"]
    plots = [("What a byte buys", _bytes_and_cost(report, codecs))]
    plots += [(f"{site}: KL by layer and codec", _by_layer([one for one in codecs if one.site == site]))
              for site in dict.fromkeys(one.site for one in codecs if one.layer >= 0)]
    template = Environment(autoescape=True).from_string(Path(__file__).with_name("page.html").read_text("utf-8"))
    text: str = template.render(report=report, lines=lines, plots=plots, number=_number, mean=_mean,
                                ratios=ratios_of(report), terms=list(terms_of(report)), parts=_parts(report),
                                anchors=ANCHORS)
    return text


def _parts(report: Report) -> list[tuple[str, str, dict[str, Any], list[PartLine], Columns]]:
    """The parts of the whole model: a title, what it is, what stands in the report, its lines, and their columns."""
    sizes = {(place.name, one.name): one.row_bytes for place in report.places for one in place.patched
             if one.kind == "codec"}
    known: list[tuple[str, str, dict[str, Any] | None, Callable[[dict[str, Any]], Iterator[PartLine]], Columns]] = [
        ("Attention", "Eight keys of each query and head, chosen by coded queries and keys.", report.attention,
         attention_lines, ATTENTION),
        ("A drafter trained on stored rows", "Five linear heads, fitted on coded rows of the last norm and read on "
         "exact ones; one token of a step is the model's own.", report.drafter, drafter_lines, DRAFTER),
        ("Retrieval", "A run of tokens comes again: how many of them the model still tells.", report.retrieval,
         lambda found: retrieval_lines(found, lambda place, name: sizes.get((place, name), 0)), RETRIEVAL)]
    return [(title, what, part, [] if "why" in part else list(lines(part)), columns)
            for title, what, part, lines, columns in known if part is not None]


def ratios_of(report: Report) -> dict[str, float]:
    """Ratios of a report of keys and values, by place and codec: how many times a cache of 16 bits a number is larger.
    """
    widths = {place.name: place.width for place in report.places}
    return {f"{one.place} {one.name}": 2 * widths[one.place] / one.row_bytes for one in lines_of(report)
            if one.kind == "codec" and report.settings.get("lab") == "kv"}


def _number(form: str, value: float | None, times: float = 1) -> str:
    """A number as text; what is none, or is infinite, is of a codec that broke what is measured."""
    return form % (times * value) if value is not None and np.isfinite(value) else "broken"


def _mean(values: list[float]) -> float:
    return float(np.mean(np.array(values, np.float64)))


def _bytes_and_cost(report: Report, lines: list[Line]) -> str:
    """Bytes a number against KL, the worst layer of each site, with the floors."""
    figure, axes = _figure(8, 4.5)
    for site in dict.fromkeys(one.site for one in lines):
        width = next(place.width for place in report.places if place.site == site)
        of_site = sorted((one for one in lines if one.site == site), key=lambda one: one.kl.value)
        worst = {one.name: one for one in of_site}  # the last of a name counts
        shown = [one for one in worst.values() if 0 < one.kl.value < np.inf]
        axes.scatter([one.row_bytes / width for one in shown], [one.kl.value for one in shown], label=site)
        for one in shown:
            axes.annotate(one.name.partition(":")[0], (one.row_bytes / width, one.kl.value), fontsize=8,
                          xytext=(4, 3), textcoords="offset points")
    if report.bar:
        axes.axhline(report.bar, color="grey", linestyle="--", label="the bar")
    if broken := list(dict.fromkeys(one.name.partition(":")[0] for one in lines if one.kl.value == np.inf)):
        axes.set_title(f"broken somewhere, and not drawn there: {', '.join(broken)}", fontsize=9)
    axes.set(xscale="log", yscale="log", xlabel="bytes a number, as stored", ylabel="KL in nats, the worst layer")
    axes.legend()
    return _svg(figure)


def _by_layer(lines: list[Line]) -> str:
    """log10 of KL, codec × layer; white where it is 0, or where the codec is broken, which stands there."""
    layers, names = list(dict.fromkeys(one.layer for one in lines)), list(dict.fromkeys(one.name for one in lines))
    grid = np.full((len(names), len(layers)), np.nan)
    for one in lines:
        if 0 < one.kl.value < np.inf:
            grid[names.index(one.name), layers.index(one.layer)] = np.log10(one.kl.value)
    figure, axes = _figure(min(2.5 + 0.6 * len(layers), 14), 1 + 0.4 * len(names))
    figure.colorbar(axes.imshow(grid, aspect="auto", cmap="viridis"), ax=axes, label="log10 KL")
    for one in lines:
        if one.kl.value == np.inf:
            axes.text(layers.index(one.layer), names.index(one.name), "broken", ha="center", va="center", fontsize=7)
    axes.set(xticks=range(len(layers)), xticklabels=layers, yticks=range(len(names)), yticklabels=names, xlabel="layer")
    return _svg(figure)


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _svg(figure: Any) -> str:
    """The picture as an element; text of a model's name is escaped by matplotlib."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg"):]
