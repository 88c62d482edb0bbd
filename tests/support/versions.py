"""The tests marked ``versions`` with one vLLM after the other, and a table of them: ``make versions`` runs this.

Each version has an environment of its own, ``.versions/VERSION``, which the Makefile makes. Exit status 1 where a test
failed with any of them, or where one ran none.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / ".versions"


def run(version: str) -> dict[str, str]:
    """What came of each test: "ok", "FAILED" or "skipped", by its short name."""
    report = ENVIRONMENTS / f"{version}.xml"
    report.unlink(missing_ok=True)
    subprocess.run([ENVIRONMENTS / version / "bin" / "python", "-m", "pytest", "-m", "versions", "--quiet",
                    f"--junitxml={report}", "tests"], cwd=ROOT, check=False)
    return outcomes(report) if report.exists() else {}


def outcomes(report: Path) -> dict[str, str]:
    """The same, read from a report of pytest's."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        result = "FAILED" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "ok"
        found[f"{case.get('classname', '').rpartition('.')[2]}: {case.get('name')}"] = result
    return found


def table(results: dict[str, dict[str, str]]) -> str:
    """Markdown: a row a test, a column a version; "–" where a test did not run."""
    tests = dict.fromkeys(test for found in results.values() for test in found)
    lines = ["| test | " + " | ".join(results) + " |", "|---" * (len(results) + 1) + "|"]
    lines += [f"| {test} | " + " | ".join(found.get(test, "–") for found in results.values()) + " |" for test in tests]
    return "\n".join(lines)


def main() -> int:
    """``python -m tests.support.versions VERSION …``"""
    results = {}
    for version in sys.argv[1:]:
        print(f"── vLLM {version} ──", flush=True)
        results[version] = run(version)
    print(table(results))
    bad = [version for version, found in results.items() if not found or "FAILED" in found.values()]
    print(f"failed with vLLM {', '.join(bad)}" if bad else f"all passed with vLLM {', '.join(results)}")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
