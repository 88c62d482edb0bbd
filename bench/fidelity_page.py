"""The tables of docs/evidence/fidelity.md, from reports of both pilots: ``python -m bench.fidelity_page FOLDER``.

What they are made of is written to fidelity.json beside that page, and the tables are made of it alone, so that a test
can make them again. The reports themselves, with every prompt's numbers, stay in FOLDER.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_tap.fidelity.reports.page import ATTENTION, DRAFTER, Columns
from vllm_tap.fidelity.reports.parts import attention_lines, drafter_lines
from vllm_tap.fidelity.reports.recommend import USES, recommend
from vllm_tap.fidelity.reports.report import Report, lines_of, load_report, plain

PAGE = Path(__file__).parents[1] / "docs" / "evidence" / "fidelity.md"
PILOTS = ("plain", "planted")
RECOMMENDED = ("lens", "probe", "neurons", "geometry")
Table = list[dict[str, Any]]


def summary(reports: dict[str, Report]) -> dict[str, Any]:
    """Of each pilot the worst layer of each codec and site, what was seen of rows, the controls; and what to take."""
    found: dict[str, Any] = {"pilots": {name: _pilot(report) for name, report in reports.items()}, "take": []}
    for use in RECOMMENDED:
        for names in (PILOTS[:1], PILOTS):
            advice = recommend([reports[name] for name in names], use, sites=("mlp_post",))
            found["take"].append({"use": use, "criterion": USES[use][0], "pilots": list(names),
                                  "codec": advice.chosen and advice.chosen.codec, "judged": advice.judged})
    return json.loads(json.dumps(plain(found)))  # type: ignore[no-any-return]


def _pilot(report: Report) -> dict[str, Any]:
    lines: dict[tuple[str, str, str], Any] = {}
    for one in lines_of(report):
        key = (one.site, one.kind, one.name)
        if key not in lines or one.kl.value > lines[key].kl.value:
            lines[key] = one
    structure = {(one.site, one.name): one.structure for one in lines_of(report) if one.structure is not None}
    widths = {place.site: place.width for place in report.places}
    return {"model": report.model, "settings": report.settings, "text": report.text, "bar": report.bar,
            "free": report.free,
            "lines": [{**asdict(one), "width": widths[one.site], "structure": structure.get((one.site, one.name))}
                      for one in lines.values() if one.kind != "noise"],
            "rows": [{"site": place.site, "layer": place.layer, "codec": name, **one} for place in report.places
                     for name, one in place.rows.items() if "probe" in one],
            "middle": {one.name: one.kl.value for one in lines_of(report) if one.kind == "codec"
                       and one.site == "mlp_post" and one.structure is not None},
            **{name: {**part, "lines": [asdict(one) for one in lines_(part)]} if part and "why" not in part else part
               for name, part, lines_ in (("attention", report.attention, attention_lines),
                                          ("drafter", report.drafter, drafter_lines))},
            "told": [{"place": place.name, **place.told} for place in report.places
                     if "shuffled" in place.told]}


def tables(found: dict[str, Any]) -> dict[str, str]:
    """The tables by name."""
    return {"run": _run(found), "changed": _changed(found), "patched": _patched(found), "rows": _rows(found),
            "attention": parts_of(found["pilots"], "attention", ATTENTION),
            "drafter": parts_of(found["pilots"], "drafter", DRAFTER), "controls": _controls(found),
            "take": _take(found)}


def _run(found: dict[str, Any]) -> str:
    one = found["pilots"]["plain"]
    return (f"{one['settings']['prompts']} prompts of {one['settings']['tokens']} tokens, {one['model']['dtype']} on "
            f"the {one['model']['device'].upper()}, vLLM {one['model']['vllm']}. The bar is what bfloat16 "
            f"costs: {one['bar']:.2g} nats. The engine's own floor: {one['free']:.2g} nats.")


def _patched(found: dict[str, Any]) -> str:
    lines = ["| pilot, site | codec | bytes a number | KL, nats | × bar | p99 | top-1 kept | Δ perplexity | "
             "× noise of its power | verdict |", "|---|---|---|---|---|---|---|---|---|---|"]
    for name, pilot in found["pilots"].items():
        for one in pilot["lines"]:
            control = one["kind"] == "control"
            size = "" if control else f"{one['row_bytes'] / one['width']:.2f}"
            word = "*control*" if control else one["verdict"]["word"]
            if one["verdict"]["more"] and not control:
                word += f" ({one['verdict']['more']} prompts more)"
            lines.append(
                f"| {name}, `{one['site']}.{one['layer']}` | {one['name'] if control else _code(one['name'])} "
                f"| {size} "
                f"| {nats(one['kl'])} | {number(one['kl']['value'], pilot['bar'])} | {number(one['tail']['p99'])} "
                f"| {percent(one['top1'])} | {percent(one['perplexity'], sign=True)} "
                f"| {'' if one['structure'] is None or control else format(one['structure'], '.2g')} | {word} |")
    return "\n".join(lines)


def _changed(found: dict[str, Any]) -> str:
    plain_, planted = (found["pilots"][name]["middle"] for name in PILOTS)
    lines = ["| codec | KL, plain | KL, planted | times |", "|---|---|---|---|"]
    lines += [f"| `{name}` | {number(cost)} | {number(planted.get(name))} | {number(planted.get(name), cost)} |"
              for name, cost in sorted(plain_.items(), key=lambda one: float("inf") if one[1] is None else one[1])]
    return "\n".join(lines)


def _rows(found: dict[str, Any]) -> str:
    lines = ["| pilot, site | codec | SQNR, dB: all | massive columns | the rest | nearest ten kept | "
             "concept's Spearman | probe's AUROC lost, frozen | refitted |", "|---|---|---|---|---|---|---|---|---|"]
    for name, pilot in found["pilots"].items():
        for one in pilot["rows"]:
            noise = [("–" if one["noise"][part] is None else f"{one['noise'][part]:.1f}")
                     for part in ("all", "massive", "rest")]
            concept = (one.get("neurons") or {}).get("concept")
            lines.append(
                f"| {name}, `{one['site']}.{one['layer']}` | `{one['codec']}` | {' | '.join(noise)} "
                f"| {100 * one['geometry']['nearest']:.1f} % | {_bounds(concept, 3) if concept else ''} "
                f"| {_bounds(one['probe']['lost'], 4)} | {_bounds(one['probe']['lost_refitted'], 4)} |")
    return "\n".join(lines).replace("`shuffled`", "*shuffled*")


def _controls(found: dict[str, Any]) -> str:
    names = ("identity", "one wrong row", "engine's codes", "shuffled", "one late")
    lines = [f"| pilot, place | {' | '.join(names)} |", "|---|" + "---|" * len(names)]
    lines += [f"| {name}, `{one['place']}` | {' | '.join(one[each] for each in names)} |"
              for name, pilot in found["pilots"].items() for one in pilot["told"]]
    return "\n".join(lines)


def _take(found: dict[str, Any]) -> str:
    lines = ["| use | what must hold | judged at | by the plain pilot alone | by both |", "|---|---|---|---|---|"]
    for use in RECOMMENDED:
        alone, both = (one for one in found["take"] if one["use"] == use)
        judged = ", ".join(f"`{place}`" for place in both["judged"])
        lines.append(f"| {use} | {alone['criterion']} | {judged} | {_code(alone['codec'])} | {_code(both['codec'])} |")
    return "\n".join(lines)


def parts_of(pilots: dict[str, Any], name: str, columns: Columns) -> str:
    """Of each pilot the lines of what a report has of the whole model, or why it has none."""
    heads = " | ".join(head for _, head, _ in columns)
    lines = [f"| pilot, place | codec | bytes | {heads} |", "|---|---|---|" + "---|" * len(columns)]
    told = []
    for pilot, report in pilots.items():
        part = report.get(name)
        if part is None or "why" in part:
            told.append(f"Of the {pilot} pilot not shown: {'not in this run' if part is None else part['why']}.")
            continue
        lines += [f"| {', '.join(filter(None, (pilot, one['place'])))} | {_code(one['name'])} "
                  f"| {one['row_bytes'] or ''} | " + " | ".join(
                      _formed(one["values"][key], form) for key, _, form in columns) + " |" for one in part["lines"]]
        told += [f"The {pilot} pilot, {what}: {said}." for what, said in part["told"].items()]
    table = "\n".join(lines).replace("`shuffled`", "*shuffled*").replace("`exact`", "exact rows")
    return "\n\n".join([*([table] if len(lines) > 2 else []), *told])


def _formed(one: dict[str, float], form: str) -> str:
    return f"{form % one['value']} [{form % one['low']}, {form % one['high']}]"


def _code(name: str | None) -> str:
    return "none of these" if name is None else f"`{name}`"


def number(value: float | None, of: float | None = 1.0) -> str:
    """A cost over another; null is what a report has for a codec that broke the model."""
    return "broken" if value is None or of is None else f"{value / of:.2g}" if of else ""


def nats(one: dict[str, float | None]) -> str:
    return number(one["value"]) + ("" if one["value"] is None else f" [{one['low']:.2g}, {one['high']:.2g}]")


def percent(one: dict[str, float], sign: bool = False) -> str:
    if one["value"] is None:
        return "broken"
    value, low, high = (100 * one[part] for part in ("value", "low", "high"))
    return f"{value:{'+' if sign else ''}.2f} % [{low:.2f}, {high:.2f}]"


def _bounds(one: dict[str, float], digits: int) -> str:
    if one["value"] is None:
        return "broken"
    return f"{one['value']:.{digits}f} [{one['low']:.{digits}f}, {one['high']:.{digits}f}]"


def written(page: str, parts: dict[str, str], command: str = "make fidelity") -> str:
    """The page with these tables between its marks, which name the ``command``; ValueError where one has no place."""
    for name, text in parts.items():
        begin, end = (f"<!-- {edge} {name} ({command}) -->" for edge in ("begin", "end"))
        if page.count(begin) != 1 or page.count(end) != 1:
            raise ValueError(f"no place for the table {name!r}: {begin} … {end}")
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}"
    return page


def write_page(page: Path, what: str | None, command: str, summarise: Callable[[dict[str, Report]], dict[str, Any]],
               tabulate: Callable[[dict[str, Any]], dict[str, str]]) -> None:
    """Write a page's tables, and what they are made of, from the reports of both pilots in the folder that is named on
    the command line; ``command`` wrote them, ``what`` is said of this one.
    """
    parser = argparse.ArgumentParser(prog=f"python -m bench.{page.stem}_page", description=what)
    parser.add_argument("folder", type=Path, help=f"where {command} wrote its reports")
    folder = parser.parse_args().folder
    found = summarise({name: load_report(folder / name / "report.json") for name in PILOTS})
    page.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    page.write_text(written(page.read_text(), tabulate(found)))


if __name__ == "__main__":
    write_page(PAGE, __doc__, "vllm-tap fidelity --pilot", summary, tables)
