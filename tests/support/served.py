"""``vllm-tap serve`` as a process of its own, from when it is ready to when it has ended in order."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from tests.support.processes import PATIENCE_S


@contextmanager
def serving(words: Sequence[str], environment: Mapping[str, str], ready_s: float = 240
            ) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
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
        assert ready.wait(ready_s) and process.poll() is None, "\n".join(lines[-40:])
        yield process, lines
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0, "\n".join(lines[-40:])
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def until_it_was_cut_off(left: Callable[[], str], reason: Callable[[str], str]) -> str:
    """The id of a capture whose client left in time; asked again where the engine was done by then."""
    for _ in range(8):
        ulid = left()
        if (ended := reason(ulid)) == "abort":
            return ulid
        assert ended == "length", ended
    raise AssertionError("eight requests were generated whole before their clients had left")
