"""``python -m api``, which tells its memory."""

from __future__ import annotations

import sys

from api.__main__ import main
from tests.support.footprint import answer

if __name__ == "__main__":
    answer()
    sys.exit(main())
