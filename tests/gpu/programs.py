"""Programs beside these tests, each in a process of its own: an engine starts there, and its settings stay there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def printed(program: str, *words: str, **settings: str) -> tuple[list[Any], str]:
    """What ``python -m tests.gpu.PROGRAM`` printed behind "SEEN ", a line each, and all that it printed.

    ``settings`` are of its environment, which lacks this process's settings of the tap.
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith("VLLM_TAP_")}
    run = subprocess.run([sys.executable, "-m", f"tests.gpu.{program}", *words], env=environment | settings,
                         cwd=Path(__file__).parents[2], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                         timeout=300, check=False)
    seen = [json.loads(line.removeprefix("SEEN ")) for line in run.stdout.splitlines() if line.startswith("SEEN ")]
    assert seen, run.stdout[-4000:]
    return seen, run.stdout
