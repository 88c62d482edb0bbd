"""Scripts of the documentation: bash reads each, and the one for Slurm does what it says; Slurm and vLLM are played."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from engine_side.config import from_environment
from tests.support.pages.readme import ROOT, blocks
from tests.support.processes import PATIENCE_S, free_port
from tests.support.store_helpers import until

PAGES = sorted(str(path.relative_to(ROOT)) for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
               if "\n```bash\n" in path.read_text())
SEVERAL_HOSTS = "docs/howto/several-hosts.md"


@pytest.mark.parametrize("page", PAGES)
def test_bash_reads_every_script(page: str) -> None:
    """Those too that it hands to another bash in quotes."""
    for script in blocks("bash", page):
        for text in (script, *re.findall(r"bash -c '([^']*)'", script)):
            for program in (["bash", "-n"], ["shellcheck", "--shell=bash", "--severity=error", "-"]):
                if shutil.which(program[0]):
                    done = subprocess.run(program, input=text, capture_output=True, text=True, timeout=PATIENCE_S)
                    assert done.returncode == 0, done.stdout + done.stderr


PROGRAMS = {
    "scontrol": 'echo "localhost\nelsewhere"',
    "srun": 'for SLURM_NODEID in 0 1; do SLURM_NODEID=$SLURM_NODEID "$@" & done; wait',
    "vllm": '"$PYTHON" "$SEEN" "$@"',
    "vllm-tap": '"$PYTHON" -m vllm_tap "$@"',
    "python": '"$PYTHON" "$@"',
}
SEEN = """
import json, os, sys
from pathlib import Path
names = [name for name in os.environ if name.startswith(("VLLM_", "SLURM_"))]
seen = [sys.argv[1:], {name: os.environ[name] for name in names}]
Path(f"seen-{os.environ['SLURM_NODEID']}.json").write_text(json.dumps(seen))
"""


def test_the_script_for_slurm_starts_every_rank_with_the_settings_of_the_page(tmp_path: Path) -> None:
    """On each node vLLM is called as its flags want; there the settings are those of an engine that reaches the writer.
    """
    script = next(text for text in blocks("bash", SEVERAL_HOSTS) if "#SBATCH" in text)
    job, port = f"test-{os.getpid()}", free_port()
    assert script.count("5570") == 2
    (tmp_path / "job.sh").write_text(script.replace("5570", str(port)).replace(":8000", f":{free_port()}"))
    (tmp_path / "seen.py").write_text(SEEN)
    (tmp_path / "bin").mkdir()
    for name, text in PROGRAMS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "SLURM_"))}
    started = subprocess.Popen(
        ["bash", "job.sh"], cwd=tmp_path, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env=plain | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "SLURM_JOB_ID": job, "PYTHON": sys.executable,
                     "SLURM_JOB_NODELIST": "two", "SEEN": str(tmp_path / "seen.py")})
    try:
        assert until(lambda: (tmp_path / "seen-1.json").exists() and (tmp_path / "seen-0.json").exists())
        assert started.wait(PATIENCE_S) == 0
        for node, last in ((0, ["--port", "8000"]), (1, ["--headless"])):
            said, settings = json.loads((tmp_path / f"seen-{node}.json").read_text())
            assert said == ["serve", "MODEL", "--tensor-parallel-size", "2", "--nnodes", "2", "--node-rank", str(node),
                            "--master-addr", "localhost", *last]
            assert (settings["VLLM_TAP_GROUP"], settings["VLLM_PLUGINS"]) == (job, "vllm_tap")
            config = from_environment(settings)  # the writer still listens
            assert config is not None and config.endpoint == f"ipc:///tmp/tap-{job}/writer.sock"
            there = settings["VLLM_TAP_ENDPOINT"].replace(f"/tmp/tap-{job}/", f"{tmp_path}/nobody-")
            config = from_environment(settings | {"VLLM_TAP_ENDPOINT": there})  # as on another node
            assert config is not None and config.endpoint == f"tcp://localhost:{port}"
    finally:
        os.killpg(started.pid, signal.SIGTERM)
        shutil.rmtree(f"/tmp/tap-{job}", ignore_errors=True)
