"""``vllm-tap capture`` with a ring that a single step's rows do not fit into: it says what generation waited for."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from schemas.read.reader import StoreReader

PROMPTS, TOKENS = 2, 1600


@pytest.mark.soak
@pytest.mark.parametrize("codec", ["raw", "int8b64"])
def test_the_command_tells_what_held_it_up(tmp_path: Path, codec: str) -> None:
    """A prompt is a step, whose rows raw take three rings; coded all rows of the run have room in another at once.

    Raw the engine has processes of its own, as it comes: what is waited for there is told here. Coded it has none.
    """
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt_token_ids": list(range(10 + n, 10 + n + TOKENS))}) + "\n"
                               for n in range(PROMPTS)))
    ring = 4 << 20 if codec == "raw" else 64 << 20
    done = subprocess.run(
        [sys.executable, "-m", "vllm_tap", "capture", str(prompts), "--tiny", "--store", str(tmp_path / "store"),
         "--sites", "resid_post,attn_out", "--max-tokens", "2", "--codec", codec, "--", "--max-model-len", "2048",
         "--max-num-batched-tokens", "2048"], capture_output=True, text=True, timeout=500,
        env={**os.environ, "VLLM_CPU_CI_ENV": "1",
             "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_TAP_RING_BYTES": str(ring),
             "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if codec == "raw" else "0"})
    assert done.returncode == 0, done.stderr
    with StoreReader(tmp_path / "store") as reader:
        assert [row.status for row in reader.captures(limit=PROMPTS)] == ["complete"] * PROMPTS
    told = re.search(r"generation waited (\d+\.\d\d) s of (\d+\.\d\d) s \(\d+%\) for room for its rows \(26\.\d MB\); "
                     r"the limit: .+\nwhat would lift it: .+--codec int8b64, or fewer --layers or --sites", done.stderr)
    if codec == "raw":
        assert told and float(told[1]) <= float(told[2]), done.stderr
    else:
        assert "waited" not in done.stderr and "lift" not in done.stderr, done.stderr
