"""``vllm-tap serve`` as a process of its own, from when it is ready to when it has ended in order."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager


@contextmanager
def serving(words: Sequence[str], environment: Mapping[str, str]) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """The process of ``vllm-tap serve`` with these arguments, and the lines that it has said so far."""
    process = subprocess.Popen([sys.executable, "-m", "vllm_tap", "serve", *words], env=environment, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    lines: list[str] = []
    ready = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip())
            if "vllm-tap is ready" in line:
                ready.set()
        ready.set()

    threading.Thread(target=read, daemon=True).start()
    try:
        assert ready.wait(240) and process.poll() is None, "\n".join(lines[-40:])
        yield process, lines
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, "\n".join(lines[-40:])
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
