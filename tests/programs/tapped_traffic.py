"""Captures through a sender's process; what this process and the sender's have open and hold, before and after.

A process of its own: what earlier tests left open in theirs would be let go of meanwhile. Run as
``python -m tests.programs.tapped_traffic ENDPOINT STORE CAPTURES``, beside a writer; prints what it saw as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from schemas.read.reader import StoreReader
from tests.engine_side.transport.test_sender_process import TappedProcess
from tests.support.footprint import at_rest, footprint
from tests.support.store_helpers import until


def main(endpoint: str, store: Path, captures: int) -> None:
    tapped = TappedProcess(endpoint)
    pids, ring = {"engine": os.getpid(), "sender": tapped.process.pid}, tapped.ring.shared.path
    size = ring.stat().st_size

    def go(number: int) -> None:
        for each in range(number):
            capture = tapped.open(40)
            tapped.step(capture, 0, 30)
            if each % 5:  # the others are given up in the middle
                tapped.step(capture, 30, 10)
            tapped.finish(capture, 40)
            tapped.recorder.before_step(0)
        tapped.recorder.flush()
        with StoreReader(store) as reader:
            assert until(lambda: reader.capture(capture).status not in ("pending", "running"))

    go(captures // 2)
    before = {name: at_rest(pid, store, 1.0) for name, pid in pids.items()}
    memory: dict[str, list[int]] = {"engine": [], "sender": []}
    for _ in range(10):
        go(captures // 20)
        for name, seen in memory.items():
            seen.append(footprint(pids[name], store).anonymous)
    after = {name: at_rest(pid, store, 1.0) for name, pid in pids.items()}
    assert ring.stat().st_size == size
    tapped.close()
    assert not ring.exists()
    print(json.dumps({name: {"before": vars(before[name]), "after": vars(after[name]), "memory": memory[name]}
                      for name in pids}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
