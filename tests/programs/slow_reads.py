"""The service on a slow disk: every look for a probe's rows takes a second."""

from __future__ import annotations

import sys
import time

from api.__main__ import main
from schemas.read.journal_tail import FrameAt
from schemas.read.reader import StoreReader
from schemas.sites import is_probe

if __name__ == "__main__":
    real = StoreReader.frames

    def slow(self: StoreReader, capture: str, site: str, after: int) -> list[FrameAt]:
        if is_probe(site):
            time.sleep(1)
        return real(self, capture, site, after)

    StoreReader.frames = slow  # type: ignore[method-assign]
    sys.exit(main())
