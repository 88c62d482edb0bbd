"""``python -m writer_service``, which tells its memory."""

from __future__ import annotations

import sys

from tests.support.footprint import answer
from writer_service.__main__ import main

if __name__ == "__main__":
    answer()
    sys.exit(main())
