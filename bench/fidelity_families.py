"""The tables of docs/evidence/fidelity-families.md: ``python -m bench.fidelity_families FOLDER``.

Pilots of other architectures are trained here and measured by the commands, and Qwen3's is measured with so many
prompts that the tail of the cost can be told. What the tables are made of is written to fidelity-families.json beside
the page. The reports, with every prompt's numbers, stay in FOLDER; a run that was ended goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from bench.fidelity_page import nats, number, percent, written
from vllm_tap.fidelity.pilot import pilot_model
from vllm_tap.fidelity.reports.report import Line, Report, lines_of, load_report, plain

PAGE = Path(__file__).parents[1] / "docs" / "evidence" / "fidelity-families.md"
COMMAND: Final = "make fidelity-families"
_FAMILIES: Final = {"gemma2": "Gemma 2", "mixtral": "Mixtral"}
_TAIL: Final = ("--prompts", "160", "--layers", "2", "--codecs", "raw16,int8b64,fp8row,full8,nf4b64")


def measured(folder: Path) -> dict[str, Report]:
    """The reports: of each family's rows and keys and values, and of many prompts."""
    for family in _FAMILIES:
        model = pilot_model(family=family, progress=sys.stderr.isatty())
        running = [_started(words, folder / name) for name, words in (
            (family, (str(model),)), (f"{family}-kv", ("kv", str(model))))]
        if failed := [one.args for one in running if one.wait()]:
            raise SystemExit(f"failed: {failed[0]}")
    model = pilot_model(progress=sys.stderr.isatty())
    if (last := _started((str(model), *_TAIL), folder / "tail")).wait():
        raise SystemExit(f"failed: {last.args!r}")
    return {name: load_report(folder / name / "report.json")
            for name in (*_FAMILIES, *(f"{family}-kv" for family in _FAMILIES), "tail")}


def _started(words: tuple[str, ...], out: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "vllm_tap", "fidelity", *words, "--out", str(out), "--", "--dtype",
                             "float32"], env={"OMP_NUM_THREADS": "1", **os.environ}, stdout=subprocess.DEVNULL)


def summary(reports: dict[str, Report]) -> dict[str, Any]:
    """Of each report its settings, and the lines and controls that are shown."""
    return json.loads(json.dumps(plain({name: _shown(name, report) for name, report in reports.items()})))  # type: ignore[no-any-return]


def _shown(name: str, report: Report) -> dict[str, Any]:
    lines = [one for one in lines_of(report) if one.kind != "noise"]
    if name.endswith("-kv"):
        lines = [one for one in lines if one.site == "in-forward/kv"]
    elif name != "tail":
        lines = _worst(lines)
    return {"settings": report.settings, "model": report.model, "bar": report.bar, "free": report.free,
            "lines": [asdict(one) for one in lines], "retrieval": report.retrieval,
            "told": [{"place": place.name, "harness": max(place.harness, default=0.0), **place.told}
                     for place in report.places]}


def _worst(lines: list[Line]) -> list[Line]:
    """The layer of each site where a codec or a control costs most."""
    found: dict[tuple[str, str], Line] = {}
    for one in lines:
        key = (one.site, one.name)
        if key not in found or one.kl.value > found[key].kl.value:
            found[key] = one
    return list(found.values())


def tables(found: dict[str, Any]) -> dict[str, str]:
    """The tables by name."""
    return {"rows": _rows(found), "cache": _cache(found), "tail": _tail(found)}


def _rows(found: dict[str, Any]) -> str:
    lines = ["| family, place | codec | KL, nats | × bar | p99 | top-1 kept | verdict |", "|" + "---|" * 7]
    for family, name in _FAMILIES.items():
        lines += [f"| {name}, `{one['site']}.{one['layer']}` | {_name(one)} | {nats(one['kl'])} "
                  f"| {number(one['kl']['value'], found[family]['bar'])} | {number(one['tail']['p99'])} "
                  f"| {percent(one['top1'])} | {_word(one)} |" for one in found[family]["lines"]]
    return "\n".join(lines)


def _cache(found: dict[str, Any]) -> str:
    lines = ["| family | codec | KL, in-forward | p99 | top-1 kept | copied rightly | verdict |", "|" + "---|" * 7]
    for family, name in _FAMILIES.items():
        report = found[f"{family}-kv"]
        copied = (report["retrieval"].get("copied") or {}).get("in-forward/kv", {})
        lines += [f"| {name} | {_name(one)} | {nats(one['kl'])} | {number(one['tail']['p99'])} "
                  f"| {percent(one['top1'])} | {_mean(copied.get(one['name']))} | {_word(one)} |"
                  for one in report["lines"]]
    return "\n".join(lines)


def _tail(found: dict[str, Any]) -> str:
    lines = ["| place | codec | KL, nats | median | p99 | p99.9 | largest |", "|" + "---|" * 7]
    lines += [f"| `{one['site']}.{one['layer']}` | {_name(one)} | {nats(one['kl'])} | "
              + " | ".join(number(one["tail"][each]) for each in ("median", "p99", "p99.9", "max")) + " |"
              for one in found["tail"]["lines"]]
    return "\n".join(lines)


def _name(one: dict[str, Any]) -> str:
    return str(one["name"]) if one["kind"] == "control" else f"`{one['name']}`"


def _word(one: dict[str, Any]) -> str:
    return "*control*" if one["kind"] == "control" else str(one["verdict"]["word"])


def _mean(shares: list[float] | None) -> str:
    return "" if not shares else f"{100 * sum(shares) / len(shares):.3g} %"


def main() -> None:
    """Measure, and write the page's tables and what they are made of."""
    parser = argparse.ArgumentParser(prog="python -m bench.fidelity_families", description=__doc__)
    parser.add_argument("folder", type=Path, help="where the commands write their reports")
    found = summary(measured(parser.parse_args().folder))
    PAGE.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    PAGE.write_text(written(PAGE.read_text(), tables(found), COMMAND))


if __name__ == "__main__":
    main()
