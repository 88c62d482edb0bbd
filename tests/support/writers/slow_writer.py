"""The writer on a slow disk: every sync of a segment takes SLOW_S seconds."""

from __future__ import annotations

import os
import sys
import time

from tests.support.writers.faulty_writer import path_of
from writer_service import fs
from writer_service.__main__ import main

if __name__ == "__main__":
    real = fs.datasync

    def slow(fd: int) -> None:
        if path_of(fd).endswith(".open"):
            time.sleep(float(os.environ["SLOW_S"]))
        real(fd)

    fs.datasync = slow
    sys.exit(main())
