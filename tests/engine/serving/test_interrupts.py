"""``vllm-tap capture`` and Ctrl-C, which a terminal sends to every process of the command."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from schemas.errors import TapError
from schemas.read.reader import StoreReader
from tests.support.processes import minds_signals

PROMPTS = 24
pytestmark = pytest.mark.timeout(300)


@contextmanager
def capturing(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The command in a group of its own, as a shell starts it; what it says goes to ``folder/said``."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"story {n}"}) + "\n" for n in range(PROMPTS)))
    with open(folder / "said", "wb") as said:
        command = subprocess.Popen(
            [sys.executable, "-m", "vllm_tap", "capture", str(prompts), "--tiny", "--store", str(folder / "store"),
             "--max-tokens", "200", "--codec", "raw", "--", "--max-model-len", "512", "--max-num-seqs", "8"],
            stdout=said, stderr=said, start_new_session=True, preexec_fn=minds_signals,
            env={**os.environ, "VLLM_CPU_CI_ENV": "1", "VLLM_LOGGING_LEVEL": "ERROR"})
    try:
        yield command
    finally:
        left = [process for process in psutil.process_iter(["cmdline"])
                if str(folder) in " ".join(process.info["cmdline"] or ()) or _session(process) == command.pid]
        _, left = psutil.wait_procs(left, 10)
        for process in left:
            process.kill()
        command.wait(30)
    assert not left


def _session(process: psutil.Process) -> int:
    try:
        return os.getsid(process.pid)
    except ProcessLookupError:
        return 0


def ended(folder: Path) -> int:
    """How many captures have come to their end."""
    try:
        with StoreReader(folder / "store") as reader:
            return sum(row.status == "complete" for row in reader.captures(limit=PROMPTS))
    except TapError:
        return 0


def test_an_interrupt_ends_what_is_in_flight_and_leaves_nothing_open(tmp_path: Path) -> None:
    with capturing(tmp_path) as command:
        while not ended(tmp_path):
            assert command.poll() is None, (tmp_path / "said").read_text()
            time.sleep(0.05)
        os.killpg(command.pid, signal.SIGINT)
        assert command.wait(60) == 128 + signal.SIGINT
    said = (tmp_path / "said").read_text()
    assert "Traceback" not in said and "ERROR" not in said, said
    told = re.search(r"interrupted: (\d+) of (\d+) prompts are captured; the same command goes on from there", said)
    assert told and int(told[2]) == PROMPTS
    with StoreReader(tmp_path / "store") as reader:
        rows = reader.captures(limit=PROMPTS)
    reasons = Counter(row.finish_reason for row in rows)
    assert len(rows) == PROMPTS and not {row.status for row in rows} & {"pending", "running"}
    assert 0 < reasons["length"] == int(told[1]) < PROMPTS
    assert reasons["abort"] == PROMPTS - reasons["length"]


def test_a_start_can_be_interrupted(tmp_path: Path) -> None:
    """vLLM passes over a KeyboardInterrupt while it waits for its engine, and waits on."""
    with capturing(tmp_path) as command:
        while b"starting vLLM" not in (tmp_path / "said").read_bytes():
            assert command.poll() is None, (tmp_path / "said").read_text()
            time.sleep(0.05)
        until = time.monotonic() + 60
        while not any("spawn_main" in " ".join(child.cmdline()) for child in
                      psutil.Process(command.pid).children(recursive=True)):  # the engine's process
            assert time.monotonic() < until
            time.sleep(0.05)
        time.sleep(1)
        os.killpg(command.pid, signal.SIGINT)
        assert command.wait(30) == 128 + signal.SIGINT
    assert "interrupted" in (tmp_path / "said").read_text()
