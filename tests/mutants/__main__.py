"""``make mutants``: each mutant in a copy of the tree, and its tests, which must fail there and pass without it.

    python -m tests.mutants [PART OF AN ID …] [-n PROCESSES]

Killed is a mutant of which a test fails where it asserts something. One that cannot be imported, or whose tests do not
end (unless it says so), is not; that ends the run like a mutant that survives.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import itertools
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import psutil

from tests.mutants.page import write_page
from tests.mutants.table import Mutant, mutants
from tests.support.store_helpers import ROOT

_moments = itertools.count(1_000_000_000)
TIMEOUT_S = 120  # of one test; the machine may be busy
# What a mutant that was badly made fails with, wherever that is told: in a test, or in what its processes print.
WRONG = re.compile(r"\b(?:SyntaxError|IndentationError|ImportError|ModuleNotFoundError|NameError|UnboundLocalError)\b")


@dataclass(frozen=True)
class Verdict:
    """What came of a mutant: ``killed`` by a test, or ``why`` not."""

    mutant: Mutant
    killed: str = ""
    why: str = ""


@dataclass(frozen=True)
class Outcome:
    """Of one test: passed, failed, error, skipped or timeout; and what it said."""

    node: str
    result: str
    text: str


def copy_tree(target: Path) -> None:
    """What git has and would take, as it is in the working tree."""
    names = subprocess.run(["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, check=True,
                           stdout=subprocess.PIPE).stdout.decode().split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def end_all_of(tree: Path) -> None:
    """End what the tests in a copy of the tree have started and, mutants as they are, left behind."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(tree) in process.environ().get("PYTHONPATH", "") and process.pid != os.getpid():
                process.kill()


def run(tree: Path, nodes: Sequence[str], first_failure: bool) -> list[Outcome]:
    """The tests in a copy of the tree."""
    report = tree / "report.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0",
               f"--timeout={TIMEOUT_S}", f"--junitxml={report}", "-o", "junit_family=xunit1",
               *(["-x"] if first_failure else []), *nodes]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.Popen(command, cwd=tree, env={**environment, "PYTHONPATH": str(tree)}, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True, start_new_session=True)
    try:
        said, _ = done.communicate(timeout=TIMEOUT_S * (len(nodes) + 1))
    except subprocess.TimeoutExpired:
        return [Outcome(nodes[0], "timeout", "the tests did not end")]
    finally:
        done.kill()
        done.wait()
        end_all_of(tree)
    if not report.exists():
        return [Outcome(nodes[0], "error", said[-2000:])]
    return [_outcome(case) for case in ElementTree.parse(report).iter("testcase")]


def _outcome(case: ElementTree.Element) -> Outcome:
    node = f"{case.get('file')}::{case.get('name')}"
    text = "".join(part.get("message", "") + (part.text or "") for part in case)
    tags = {part.tag for part in case}
    for tag, result in (("error", "error"), ("failure", "failed"), ("skipped", "skipped")):
        if tag in tags:
            return Outcome(node, "timeout" if re.search(r"Timeout [(>]", text) else result, text)
    return Outcome(node, "passed", text)


def judge(mutant: Mutant, outcomes: Sequence[Outcome]) -> Verdict:
    """Whether what its tests did kills a mutant."""
    wrong = [outcome for outcome in outcomes if outcome.result == "error" or WRONG.search(outcome.text)]
    if wrong:
        said = WRONG.search(wrong[0].text)
        return Verdict(mutant, why=f"{wrong[0].node} did not come to assert anything: "
                                   f"{said[0] if said else wrong[0].text[-300:]}")
    if slow := [outcome for outcome in outcomes if outcome.result == "timeout"]:
        return Verdict(mutant, slow[0].node) if mutant.hangs else Verdict(mutant, why=f"{slow[0].node} does not end")
    if failed := [outcome for outcome in outcomes if outcome.result == "failed"]:
        return Verdict(mutant, failed[0].node)
    return Verdict(mutant, why="survived " + ", ".join(outcome.node.partition("::")[2] for outcome in outcomes))


def write(path: Path, text: str) -> None:
    """A file that Python compiles anew: it goes by size and time, and here one second sees several."""
    path.write_text(text)
    moment = next(_moments)
    os.utime(path, (moment, moment))


def trial(mutant: Mutant, tree: Path) -> Verdict:
    """Make the mutant in a copy of the tree, run its tests, take it back."""
    path = tree / mutant.file
    before = path.read_text()
    try:
        write(path, mutant.mutated(tree))
        lint = subprocess.run([sys.executable, "-m", "ruff", "check", "-q", "--select", "E9,F82", str(path)],
                              cwd=tree, stdout=subprocess.PIPE, text=True)
        if lint.returncode:
            return Verdict(mutant, why=f"it is badly made: {lint.stdout}")
        return judge(mutant, run(tree, mutant.tests, True))
    finally:
        write(path, before)


def try_all(chosen: Sequence[Mutant], trees: Sequence[Path]) -> list[Verdict]:
    """All of them, as many at once as there are trees."""
    free: queue.Queue[Path] = queue.Queue()
    for tree in trees:
        free.put(tree)

    def one(mutant: Mutant) -> Verdict:
        tree = free.get()
        try:
            verdict = trial(mutant, tree)
        finally:
            free.put(tree)
        print(f"{'killed ' if verdict.killed else 'ALIVE  '} {mutant.id}: "
              f"{verdict.killed.partition('::')[2] or verdict.why}", flush=True)
        return verdict

    with ThreadPoolExecutor(len(trees)) as pool:
        return list(pool.map(one, chosen))


def main(argv: Sequence[str]) -> int:
    """0 where none survives."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("parts", nargs="*", help="parts of ids: those mutants alone, and their lines of the page")
    parser.add_argument("-n", type=int, default=2, help="how many at once")
    options = parser.parse_args(argv)
    began = time.monotonic()
    every = mutants()
    chosen = [mutant for mutant in every if not options.parts or any(part in mutant.id for part in options.parts)]
    for mutant in chosen:  # before anything runs: whatever does not apply is told at once
        ast.parse(mutant.mutated(ROOT))
    with tempfile.TemporaryDirectory(prefix="tap-mutants-") as folder:
        trees = [Path(folder) / str(number) for number in range(options.n)]
        for tree in trees:
            copy_tree(tree)
        nodes = sorted({node for mutant in chosen for node in mutant.tests})
        print(f"{len(chosen)} mutants; first their {len(nodes)} tests without them", flush=True)
        bad = [outcome for outcome in run(trees[0], nodes, False) if outcome.result != "passed"]
        for outcome in bad:
            print(f"{outcome.result} without any mutant: {outcome.node}\n{outcome.text[-3000:]}", flush=True)
        names = {outcome.node for outcome in bad}
        sound = [mutant for mutant in chosen if not names.intersection(mutant.tests)
                 and not {name.partition("[")[0] for name in names}.intersection(mutant.tests)]
        verdicts = try_all(sound, trees)
    verdicts += [Verdict(mutant, why="its tests do not pass without it") for mutant in chosen if mutant not in sound]
    alive = [verdict for verdict in verdicts if not verdict.killed]
    minutes = (time.monotonic() - began) / 60
    print(f"{len(verdicts) - len(alive)} of {len(verdicts)} mutants killed, {minutes:.0f} minutes")
    for verdict in alive:
        print(f"ALIVE   {verdict.mutant.id} ({verdict.mutant.promise}): {verdict.why}")
    write_page(every, {verdict.mutant.id: verdict.killed for verdict in verdicts})
    return 1 if alive else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
