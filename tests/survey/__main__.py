"""``python -m tests.survey [ARCHITECTURE …]``: a small random model of every architecture, each in a child process.

What came of each is printed as it comes, and written to docs/evidence/models.json, where other architectures keep
theirs, and to docs/evidence/models.md.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from tests.survey.configs import WRAPPERS
from tests.survey.page import JSON, write

os.environ.update({
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_CI_ENV": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1", "VLLM_PLUGINS": "", "TOKENIZERS_PARALLELISM": "false", "VLLM_NO_USAGE_STATS": "1",
})  # before vLLM is imported

SECONDS_MAX: Final = 120


def architectures() -> list[str]:
    """Those that vLLM has code for, those that it runs by Transformers' classes, and some that take images."""
    from vllm.model_executor.models import registry

    return [*registry._TEXT_GENERATION_MODELS, *(
        name for name, (_, runs) in registry._TRANSFORMERS_SUPPORTED_MODELS.items() if "MultiModal" not in runs),
            *WRAPPERS]


def in_a_child(architecture: str) -> dict[str, Any]:
    """The row of an architecture, from a fork of this process, which may die or hang."""
    from tests.survey.start import survey

    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "row.json", Path(folder) / "log"
        pid = os.fork()
        if pid == 0:
            os.setsid()
            descriptor = os.open(log, os.O_CREAT | os.O_WRONLY)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            (Path(folder) / "model").mkdir()
            out.write_text(json.dumps(survey(architecture, Path(folder) / "model"), default=str))
            os._exit(0)
        began = time.monotonic()
        while os.waitpid(pid, os.WNOHANG)[0] == 0:
            if time.monotonic() - began > SECONDS_MAX:
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return {"result": "not started", "why": f"it did not end in {SECONDS_MAX} s"}
            time.sleep(0.05)
        if out.is_file():
            row: dict[str, Any] = json.loads(out.read_text())
            return row
        return {"result": "not started", "why": f"its process died: {log.read_text(errors='replace')[-300:]}"}


def main() -> None:
    import torch
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm.model_executor.models import registry

    import engine_side.seams.recorded_step  # noqa: F401

    torch.set_num_threads(1)
    registry._run_in_subprocess = lambda look: look()  # children are processes of their own already
    rows = json.loads(JSON.read_text()) if JSON.is_file() else {}
    for name in architectures():
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        began = time.monotonic()
        row = in_a_child(name)
        row.pop("trace", None)
        rows[name] = row
        worst = max((held["error"] for held in row.get("held", {}).values()), default=None)
        print(f"{name:34} {time.monotonic() - began:5.1f} s  {row['result']:11} "
              f"{' '.join(row.get('sites', ())) or row.get('why')}"
              f"{'' if worst is None else f'  worst {worst:.1e}'}", flush=True)
        JSON.write_text(json.dumps(rows, indent=1) + "\n")
    write()


if __name__ == "__main__":
    main()
