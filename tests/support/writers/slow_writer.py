"""The writer on a slow disk: every sync of a segment takes SLOW_S seconds.

PROBE_S: and so does each of the syncs by which it measures the disk at its start. COMMIT_BYTES: after which it syncs.
LINE_BYTES: that a lane may have to write, before nothing more is received.
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from typing import Any

import writer_service.__main__ as program
from tests.support.writers.faulty_writer import path_of
from writer_service import fs
from writer_service.receive import receiver

if __name__ == "__main__":
    real, write_synced = fs.datasync, fs.write_synced

    def slow(fd: int) -> None:
        if path_of(fd).endswith(".open"):
            time.sleep(float(os.environ.get("SLOW_S", "0")))
        real(fd)

    def measured(*args: Any) -> int:
        time.sleep(float(os.environ.get("PROBE_S", "0")))
        return write_synced(*args)

    fs.datasync, fs.write_synced = slow, measured
    if "COMMIT_BYTES" in os.environ:
        program.Config = partial(program.Config, commit_bytes=int(os.environ["COMMIT_BYTES"]))  # type: ignore[misc, assignment]
    if "LINE_BYTES" in os.environ:
        receiver.in_line_max = int(os.environ["LINE_BYTES"])  # type: ignore[misc]
    sys.exit(program.main())
