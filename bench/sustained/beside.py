"""Who else is at work on a store while it is written: ``python -m bench.sustained.beside readers|loader STORE``.

Works until SIGTERM, then prints what was read as JSON.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from bench.sustained.line import ROOT
from bench.sustained.played import SITE
from schemas.errors import CorruptError, NotFoundError, TapError

KINDS: Final = ("readers", "loader", "retention")
_ROWS: Final = 64  # of a slice
_PAUSE_S: Final = 0.005  # between slices: who looks at captures does not read as fast as it can
_EPOCH_S: Final = 5.0  # then the loader looks anew for what has come


def readers(store: Path, until: Callable[[], bool], count: Callable[[int, int], None]) -> None:
    """Slices of captures that have ended, two layers of 64 positions each, one after the other."""
    from schemas.read.reader import StoreReader

    draw = random.Random(0)
    with StoreReader(store) as reader:
        while not until():
            for row in reader.captures(limit=20):
                if until():
                    return
                try:
                    found = reader.slice(row.id, SITE, draw.sample(range(8), 2), 0, _ROWS)
                    count(2 * len(found.positions), 0)
                except CorruptError:
                    raise
                except TapError:  # it has not begun, or was deleted
                    count(0, 1)
                time.sleep(_PAUSE_S)
            time.sleep(_PAUSE_S)


def loader(store: Path, until: Callable[[], bool], count: Callable[[int, int], None]) -> None:
    """Shuffled batches of one layer over all captures that have ended, as a training reads them."""
    import torch

    from vllm_tap.loader.dataset import rows

    torch.set_num_threads(1)
    while not until():
        began = time.monotonic()
        try:
            for batch in rows(store, SITE, 3, dtype=torch.bfloat16):
                count(len(batch["position"]), 0)
                if until() or time.monotonic() - began > _EPOCH_S:
                    break
        except CorruptError:
            raise
        except (NotFoundError, TapError):  # nothing has ended yet, or it was deleted
            count(0, 1)
            time.sleep(0.2)


class Beside:
    """Such a process."""

    def __init__(self, kind: str, store: Path) -> None:
        self.process = subprocess.Popen([sys.executable, "-m", "bench.sustained.beside", kind, str(store)], cwd=ROOT,
                                        stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.process.stdout.readline()  # it listens to SIGTERM

    def close(self) -> dict[str, Any]:
        """End it; what it read. RuntimeError where it failed."""
        self.process.send_signal(signal.SIGTERM)
        out, _ = self.process.communicate(timeout=60)
        if self.process.returncode:
            raise RuntimeError(f"what read beside ended with status {self.process.returncode}: see its standard error")
        found: dict[str, Any] = json.loads(out)
        return found


def main() -> None:
    """Work until SIGTERM."""
    kind, store = sys.argv[1], Path(sys.argv[2])
    ended, began = False, time.monotonic()
    rows_read = not_there = 0

    def stop(*_: object) -> None:
        nonlocal ended
        ended = True

    def count(rows: int, missing: int) -> None:
        nonlocal rows_read, not_there
        rows_read, not_there = rows_read + rows, not_there + missing

    signal.signal(signal.SIGTERM, stop)
    print("begins", flush=True)
    {"readers": readers, "loader": loader}[kind](store, lambda: ended, count)
    print(json.dumps({"rows_s": rows_read / (time.monotonic() - began), "rows": rows_read, "not_there": not_there}))


if __name__ == "__main__":
    main()
