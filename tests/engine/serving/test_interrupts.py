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
from tests.support.processes import PATIENCE_S, minds_signals

PROMPTS = 200  # a minute of work for the fastest machine: the interrupt comes in its first seconds


@contextmanager
def capturing(folder: Path, program: str = "vllm_tap", words: int = 1, at_once: int = 2, tokens: int = 400,
              **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """The command in a group of its own, as a shell starts it; what it says goes to ``folder/said``."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": "story " * words + str(n)}) + "\n" for n in range(PROMPTS)))
    with open(folder / "said", "wb") as said:
        command = subprocess.Popen(
            [sys.executable, "-m", program, "capture", str(prompts), "--tiny", "--store", str(folder / "store"),
             "--max-tokens", str(tokens), "--codec", "raw", "--", "--max-model-len", "512",
             "--max-num-seqs", str(at_once)],
            stdout=said, stderr=said, start_new_session=True, preexec_fn=minds_signals,
            env={**os.environ, "VLLM_CPU_CI_ENV": "1", "VLLM_LOGGING_LEVEL": "ERROR", **environment})
    try:
        yield command
    finally:
        left = [process for process in psutil.process_iter(["cmdline"])
                if str(folder) in " ".join(process.info["cmdline"] or ()) or _session(process) == command.pid]
        _, left = psutil.wait_procs(left, 10)
        for process in left:
            process.kill()
        command.wait(PATIENCE_S)
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


@pytest.mark.soak
def test_an_interrupt_ends_what_is_in_flight_and_leaves_nothing_open(tmp_path: Path) -> None:
    with capturing(tmp_path) as command:
        while not ended(tmp_path):
            assert command.poll() is None, (tmp_path / "said").read_text()
            time.sleep(0.05)
        os.killpg(command.pid, signal.SIGINT)
        assert command.wait(PATIENCE_S) == 128 + signal.SIGINT
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


@pytest.mark.soak  # an engine of its own, and seconds for each sync
def test_an_interrupted_run_tells_which_stage_held_generation_up(tmp_path: Path) -> None:
    """On a disk that takes a ring of rows (4 MiB) every second; a step of 2,048 tokens of prompts makes two."""
    with capturing(tmp_path, "tests.programs.slow_disk", words=100, at_once=64, tokens=20, SLOW_S="1",
                   VLLM_TAP_RING_BYTES=str(4 << 20)) as command:
        while not ended(tmp_path):
            assert command.poll() is None, (tmp_path / "said").read_text()
            time.sleep(0.05)
        os.killpg(command.pid, signal.SIGINT)
        assert command.wait(PATIENCE_S) == 128 + signal.SIGINT
    said = (tmp_path / "said").read_text()
    assert re.search(r"generation waited [0-9.]+ s of [0-9.]+ s \([0-9]+%\) for room for its rows", said), said
    assert "what would lift it: another disk for --store" in said


@pytest.mark.soak
def test_a_start_can_be_interrupted(tmp_path: Path) -> None:
    """vLLM passes over a KeyboardInterrupt while it waits for its engine, and waits on."""
    with capturing(tmp_path) as command:
        while b"starting vLLM" not in (tmp_path / "said").read_bytes():
            assert command.poll() is None, (tmp_path / "said").read_text()
            time.sleep(0.05)
        until = time.monotonic() + PATIENCE_S
        while not any("spawn_main" in " ".join(child.cmdline()) for child in
                      psutil.Process(command.pid).children(recursive=True)):  # the engine's process
            assert time.monotonic() < until
            time.sleep(0.05)
        time.sleep(1)
        os.killpg(command.pid, signal.SIGINT)
        assert command.wait(PATIENCE_S) == 128 + signal.SIGINT
    assert "interrupted" in (tmp_path / "said").read_text()
