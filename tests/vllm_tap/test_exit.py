"""How signals end a command, in processes of their own."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import PATIENCE_S, minds_signals

SCRIPT = """
import os, signal, sys, time
from vllm_tap.exit import Ending
def kill(number):
    os.kill(os.getpid(), number)
failed = []
with Ending(1, lambda: bool(failed)) as ending:
    {body}
    print("went on", ending.number, ending.at_once, flush=True)
    time.sleep(5)
"""


def run(body: str, *before: str) -> tuple[int, str, str]:
    command = [*before, sys.executable, "-c", SCRIPT.format(body=body.replace("\n", "\n    "))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, cwd=Path(__file__).parents[2],
                          preexec_fn=minds_signals)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_at_once_unless_it_is_patient(number: int) -> None:
    assert run(f"kill({number})") == (128 + number, "", "")


def test_the_first_asks_and_time_ends_it() -> None:
    status, said, told = run("ending.patient = True; kill(2)")
    assert (status, said) == (130, "went on 2 False\n") and "once more ends at once" in told


def test_the_second_ends_it() -> None:
    status, said, _ = run("ending.patient = True\nkill(15)\nprint('one', flush=True)\nkill(2)")
    assert (status, said) == (143, "one\n"), "it ends as the first wanted it"


def test_a_failure_ends_it_at_once() -> None:
    assert run("ending.patient = True; failed.append(1); kill(15)")[:2] == (143, "")


def test_what_was_asked_for_in_time_is_over() -> None:
    status, said, _ = run("ending.patient = True; kill(2); ending.patient = False; time.sleep(1.5); sys.exit(7)")
    assert (status, said) == (7, "")


def test_what_is_ignored_stays_so() -> None:
    assert run("kill(1)\nprint('here', flush=True)\nsys.exit(7)", "nohup")[:2] == (7, "here\n")
