"""``make faults``: every case at full length, and docs/evidence/faults.md rewritten with what came of them.

    python -m tests.faults [ROW …] [-- PYTEST ARGUMENTS]
"""

from __future__ import annotations

import os
import platform
import re
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.faults.rows import NOT_APPLICABLE, NOT_SURVIVED, ROWS
from tests.mutants.page import PAGE, kept
from tests.support.store_helpers import ROOT

HEAD = """# Faults: what the writer and its store survive

`make faults` writes this page ({when}, {machine}, {minutes:.0f} minutes, seed {seed}). `make faults ROWS="1 11"
SEED=7` runs some rows with another seed and does not change the page. `make test` runs a small part of every case.

Every case ends with the same checks:

- acknowledged rows are readable and bit-equal;
- no incomplete capture is called complete;
- no row is made up: missing rows are missing, never zeros;
- every status is a known one, and expected = captured + missing.

Power losses are simulated. Bytes that were not synced return to their old content, or become zeros or noise, or are
cut off, in blocks too. Names that were not synced return, or are gone. Row 1 includes a state machine that does all
of this in any order and compares the store with a model in memory. `pytest tests/faults/test_state_machine.py
--hypothesis-seed=7` repeats a run of it, `make soak` runs it longer.

| row | fault | cases | what was done | result |
|---|---|---|---|---|
"""


@dataclass
class Found:
    """What came of a row."""

    passed: int = 0
    failed: int = 0
    skipped: list[str] = field(default_factory=list)
    done: list[str] = field(default_factory=list)

    def result(self) -> str:
        if self.failed:
            return f"**{self.failed} failed**"
        return "passed" if self.passed else "not run"


class Report:
    """Collects outcomes by row."""

    def __init__(self) -> None:
        self.rows = {number: Found() for number in ROWS}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        for number in rows_of(report.nodeid):
            found = self.rows[number]
            if report.outcome == "failed":
                found.failed += 1
            elif report.outcome == "skipped":
                why = report.longrepr
                found.skipped.append(str(why[2] if isinstance(why, tuple | list) else why))
            else:
                found.passed += 1
                found.done += [str(value) for key, value in report.user_properties if key == "times"]


def rows_of(nodeid: str) -> list[int]:
    """The rows that a test stands for, by its name or by ROWS."""
    match = re.search(r"::test_row_((?:\d\d_)+)", nodeid)
    named = [int(part) for part in match[1].split("_") if part] if match else []
    bare = nodeid.partition("[")[0]
    listed = [row for row, (_, tests) in ROWS.items() if any(f"{bare}::".startswith(f"{test}::") for test in tests)]
    return [number for number in (*named, *listed) if number in ROWS]


def page(report: Report, minutes: float, seed: str) -> str:
    """The page in Markdown."""
    machine = f"{os.cpu_count()} cores, {platform.system()}"
    head = HEAD.format(when=time.strftime("%Y-%m-%d"), machine=machine, minutes=minutes, seed=seed)
    return head + "".join(line(number, report.rows[number]) for number in ROWS) + kept()


def line(number: int, found: Found) -> str:
    """The table's line of a row."""
    done = "; ".join([*sorted(found.done), *sorted(set(found.skipped))]) or "–"
    result = NOT_APPLICABLE.get(number, found.result())
    if result == "passed":  # the case shows what is lost
        result = NOT_SURVIVED.get(number, result)
    return f"| {number} | {ROWS[number][0]} | {found.passed + found.failed} | {done} | {result} |\n"


def main(argv: list[str]) -> int:
    """0 where every case passed."""
    rows, _, extra = " ".join(argv).partition("--")
    chosen = [int(row) for row in rows.split()] or list(ROWS)
    own = "|".join(f"row_(?:\\d\\d_)*{number:02d}(?!\\d)" for number in chosen)
    tests = [test for number in chosen for test in ROWS[number][1]]
    os.environ["TAP_FAULTS"] = "1"
    report, started = Report(), time.monotonic()
    collected = [path.as_posix() for path in sorted(Path("tests/faults").glob("test_*.py"))]
    names = sorted({f"{path}::{name}" for path in collected for name in re.findall(
        r"^def (test_row_\w+)", (ROOT / path).read_text(), re.M) if re.search(own, name)})
    # Cases wait for disks and for each other's processes most of the time: several go side by side. They take from a
    # second to minutes, so whoever has no more of his own takes another's.
    side_by_side = ["-n", os.environ.get("WORKERS", "4"), "--dist", "worksteal"]
    code = int(pytest.main(["-m", "not soak", "-q", "--timeout", "1200", *side_by_side, *extra.split(), *names,
                            *dict.fromkeys(tests)], plugins=[report]))
    if not rows.split() and not extra.strip():
        PAGE.write_text(page(report, (time.monotonic() - started) / 60, os.environ.get("TAP_FAULTS_SEED", "1")))
        print(f"written: {PAGE.relative_to(ROOT)}")
    else:
        print("".join(line(number, report.rows[number]) for number in chosen), end="")
    return code


if __name__ == "__main__":
    os.chdir(ROOT)
    raise SystemExit(main(sys.argv[1:]))
