"""The tables of docs/evidence/kv.md, from reports of both pilots: ``python -m bench.kv_page FOLDER``.

What they are made of is written to kv.json beside that page, and the tables are made of it alone, so that a test can
make them again. The reports themselves, with every prompt's numbers, stay in FOLDER.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.fidelity_page import nats, number, percent, write_page
from vllm_tap.fidelity.kv.anchors import ANCHORS
from vllm_tap.fidelity.kv.terms import terms_of
from vllm_tap.fidelity.reports.page import ratios_of
from vllm_tap.fidelity.reports.parts import retrieval_lines
from vllm_tap.fidelity.reports.report import Report, lines_of, numbers_of, plain
from vllm_tap.fidelity.statistics import interval

PAGE = Path(__file__).parents[1] / "docs" / "evidence" / "kv.md"


def summary(reports: dict[str, Report]) -> dict[str, Any]:
    """Of each pilot every line, what the costs are made of, and the controls."""
    return json.loads(json.dumps(plain({name: _pilot(report) for name, report in reports.items()})))  # type: ignore[no-any-return]


def _pilot(report: Report) -> dict[str, Any]:
    ratios = ratios_of(report)
    return {"model": report.model, "settings": report.settings, "text": report.text, "bar": report.bar,
            "free": report.free,
            "lines": [{**asdict(one), "ratio": ratios.get(f"{one.place} {one.name}")} for one in lines_of(report)
                      if one.kind != "noise"], "retrieval": _retrieval(report),
            "terms": [asdict(one) for one in terms_of(report)], "pooled": _pooled(report),
            "told": [{"place": place.name, "harness": max(place.harness), **place.told} for place in report.places]}


def _retrieval(report: Report) -> dict[str, Any] | None:
    part, ratios = report.retrieval, ratios_of(report)
    return part if part is None or "why" in part else {
        **part, "lines": [{**asdict(one), "ratio": ratios.get(f"{one.place} {one.name}")}
                          for one in retrieval_lines(part)]}


def _pooled(report: Report) -> dict[str, Any]:
    """By codec what its pooled form costs more in-forward, KL in nats, prompt by prompt."""
    place = next(one for one in report.places if one.site == "in-forward/kv")
    costs = {one.name: numbers_of(one, "kl") for one in place.patched if one.kind == "codec"}
    return {name: asdict(interval(costs[f"{name}-pooled"] - cost)) for name, cost in costs.items()
            if f"{name}-pooled" in costs}


def tables(found: dict[str, Any]) -> dict[str, str]:
    """The tables by name."""
    return {"run": _run(found), "modes": _modes(found), "terms": _terms(found), "pooled": _of_pools(found),
            "retrieval": _copied(found), "anchors": _anchors(), "controls": _controls(found)}


def _run(found: dict[str, Any]) -> str:
    one = found["plain"]
    asked = one["settings"]
    return (f"{asked['prompts']} prompts of {asked['tokens']} tokens, positions from {asked['context']} on are "
            f"scored; {one['model']['dtype']} on the {one['model']['device'].upper()}, vLLM {one['model']['vllm']}. "
            f"The bar is what bfloat16 costs: {one['bar']:.2g} nats. The engine's own floor: {one['free']:.2g} nats.")


def _modes(found: dict[str, Any]) -> str:
    lines = ["| pilot | codec | × smaller | KL, snapshot | KL, direct | KL, in-forward | p99 | top-1 kept "
             "| where clear | Δ perplexity | × noise of its power | verdict |", "|" + "---|" * 12]
    for name, pilot in found.items():
        by_site = {(one["site"], one["name"]): one for one in pilot["lines"]}
        for one in pilot["lines"]:
            if one["site"] != "in-forward/kv":
                continue
            control = one["kind"] == "control"
            others = [number(by_site[f"{mode}/kv", one["name"]]["kl"]["value"]) for mode in ("snapshot", "direct")]
            clear = "" if one["clear"] is None else f"{100 * one['clear']:.2f} %"
            lines.append(
                f"| {name} | {one['name'] if control else '`' + one['name'] + '`'} "
                f"| {'' if control else format(one['ratio'], '.2f')} | {' | '.join(others)} | {nats(one['kl'])} "
                f"| {number(one['tail']['p99'])} | {percent(one['top1'])} | {clear} "
                f"| {percent(one['perplexity'], sign=True)} "
                f"| {'' if one['structure'] is None or control else format(one['structure'], '.2g')} "
                f"| {'*control*' if control else one['verdict']['word']} |")
    return "\n".join(lines)


def _copied(found: dict[str, Any]) -> str:
    """By codec the share of tokens that are copied rightly, in each pilot and mode."""
    shown = {name: part for name, pilot in found.items() if (part := pilot["retrieval"]) and "why" not in part}
    told = [f"Of the {name} pilot not shown: {(pilot['retrieval'] or {'why': 'not in this run'})['why']}."
            for name, pilot in found.items() if name not in shown]
    told += [f"The {name} pilot, {what}: {said}." for name, part in shown.items() for what, said in part["told"].items()
             if "broken" in said]
    by_codec: dict[str, dict[tuple[str, str], dict[str, Any]]] = {}
    for name, part in shown.items():
        for one in part["lines"]:
            by_codec.setdefault(one["name"], {})[name, one["place"].removesuffix("/kv")] = one
    heads = list(dict.fromkeys(where for each in by_codec.values() for where in each))
    lines = [f"| codec | × smaller | {' | '.join(map(', '.join, heads))} |", "|---|---|" + "---|" * len(heads)]
    for codec, each in by_codec.items():
        ratio = next(iter(each.values()))["ratio"]
        lines.append(f"| {'*shuffled*' if ratio is None else f'`{codec}`'} "
                     f"| {'' if ratio is None else format(ratio, '.2f')} | " + " | ".join(
                         _share(each[where]["values"]["copied"]) if where in each else "" for where in heads) + " |")
    return "\n\n".join([*(["\n".join(lines)] if by_codec else []), *told])


def _share(one: dict[str, float]) -> str:
    value, low, high = (f"{100 * one[part]:.3g}" for part in ("value", "low", "high"))
    return f"{value} %" + ("" if low == value == high else f" [{low}, {high}]")


def _terms(found: dict[str, Any]) -> str:
    names = list(dict.fromkeys(one["name"] for pilot in found.values() for one in pilot["terms"]))
    lines = [f"| pilot | codec | {' | '.join(names)} |", "|---|---|" + "---|" * len(names)]
    for name, pilot in found.items():
        by_codec: dict[str, dict[str, Any]] = {}
        for one in pilot["terms"]:
            by_codec.setdefault(one["codec"], {})[one["name"]] = one["kl"]
        lines += [f"| {name} | `{codec}` | " + " | ".join(nats(terms[each]) if each in terms else "" for each in names)
                  + " |" for codec, terms in by_codec.items()]
    return "\n".join(lines)


def _anchors() -> str:
    lines = ["| *codec* | *bits a number* | *KL, nats* | *of* | *source* |", "|---|---|---|---|---|"]
    grey = "<span style=\"color: grey\">{}</span>".format
    lines += ["| " + " | ".join(map(grey, (one.codec, f"{one.bits:g}", f"{one.kl:.2g}", one.of,
                                           f"[its source]({one.source}), {one.date}"))) + " |"
              for one in ANCHORS]
    return "\n".join(lines)


def _of_pools(found: dict[str, Any]) -> str:
    lines = ["| pilot | codec | one scale for all heads costs more by, KL in nats |", "|---|---|---|"]
    lines += [f"| {name} | `{codec}` | {nats(one)} |" for name, pilot in found.items()
              for codec, one in pilot["pooled"].items()]
    return "\n".join(lines)


def _controls(found: dict[str, Any]) -> str:
    lines = ["| pilot, place | the identity's KL to a run without any change | one wrong row | shuffled |",
             "|---|---|---|---|"]
    lines += [f"| {name}, `{one['place']}` | {one['harness']:g} | {one['one wrong row']} | {one['shuffled']} |"
              for name, pilot in found.items() for one in pilot["told"]]
    return "\n".join(lines)


if __name__ == "__main__":
    write_page(PAGE, __doc__, "vllm-tap fidelity kv --pilot", summary, tables)
