"""A writer or a ``vllm-tap`` whose disk and clock may be wrong.

``python -m tests.support.writers.broken PROGRAM ARGUMENTS``

FAULT breaks the disk as tests/support/writers/faulty_writer.py says. FAULT_SYNCED notes what is certain, FAULT_LIES
what a device only says that it synced (tests/support/writers/power.py). CLOCK_S shifts the wall clock.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from pathlib import Path

import obstore.store  # noqa: F401  # once, before there is any fork; a client of buckets stands none

import vllm_tap.bucket.push  # noqa: F401
from tests.support.writers.faulty_writer import break_as_asked
from tests.support.writers.power import Certain
from vllm_tap.cli.main import main as command
from writer_service.__main__ import main as writer


def break_all(argv: list[str]) -> None:
    """As the environment asks."""
    if faults := os.environ.get("FAULT"):
        break_as_asked(faults)
    if synced := os.environ.get("FAULT_SYNCED"):
        Certain(Path(argv[argv.index("--store") + 1]), Path(synced), os.environ.get("FAULT_LIES", "")).watch()
    if "CLOCK_S" in os.environ:  # of this process alone: the wall clock has no namespace
        now, now_ns, shift = time.time, time.time_ns, int(os.environ["CLOCK_S"])
        time.time, time.time_ns = lambda: now() + shift, lambda: now_ns() + shift * 10**9


if __name__ == "__main__":
    faulthandler.enable()  # what kills it stands in its log
    program, *words = sys.argv[1:]
    break_all(words)
    sys.argv[:] = [program, *words]
    sys.exit(writer(words) if program == "writer" else command())
