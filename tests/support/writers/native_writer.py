"""The writer of a process that has hashed many rows already."""

from __future__ import annotations

import sys

from schemas.native.loops import load
from writer_service.__main__ import main

if __name__ == "__main__":
    load()
    sys.exit(main())
