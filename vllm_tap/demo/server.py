"""``vllm-tap serve --tiny`` as the demo runs it: a process of its own, its lines in a file."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from schemas.errors import TapError
from vllm_tap.serve.guard import RUN
from vllm_tap.serve.services import port_is_free

__all__ = ["DemoServer"]

_READY_S: Final = 900.0  # a first start reads 4 GB and compiles: minutes, where disk or cores are slow
_STOP_S: Final = 20.0


class DemoServer:
    """A running ``vllm-tap serve``; with ``keep`` it lives on when this process ends."""

    def __init__(self, folder: Path, arm: str, keep: bool) -> None:
        self.store, self.log = folder / "store", folder / "serve.log"
        port = _free_port(8100)
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-P", "-m", "vllm_tap", "serve", "--tiny", "--arm", arm, "--store", str(self.store),
                   "--port", str(port), "--engine-port", str(_free_port(port + 1)), "--seal-idle-s", "1"]
        with self.log.open("wb") as log:
            # A death signal ties it to this process, unless it is to be kept.
            start = [] if keep else [*RUN, "start", "-1", str(os.getpid())]
            self.process = subprocess.Popen([*start, *command], stdin=subprocess.DEVNULL, stdout=log,
                                            stderr=subprocess.STDOUT, start_new_session=keep)

    def wait_ready(self, tell: Callable[[str], None]) -> None:
        """Wait until all services are ready; TapError with the last lines where the server ends instead."""
        began = time.monotonic()
        told = 0
        while "vllm-tap is ready" not in (said := self.log.read_text(errors="replace")):
            lines = said.splitlines()
            if self.process.poll() is not None:
                raise TapError("the server ended before it was ready:\n" + "\n".join(lines[-20:]))
            if time.monotonic() - began > _READY_S:
                raise TapError(f"the server was not ready in {_READY_S:.0f} s; its lines are in {self.log}")
            for line in lines[told:]:
                if line.lstrip().startswith("serve |"):
                    tell(line.partition("|")[2].strip())
            told = len(lines)
            time.sleep(0.3)

    def stop(self) -> int:
        """SIGTERM, and the exit status."""
        self.process.terminate()
        return self.process.wait(_STOP_S)


def _free_port(wanted: int) -> int:
    """The first from ``wanted`` on that is free."""
    return next(port for port in range(wanted, 1 << 16) if port_is_free("127.0.0.1", port))
