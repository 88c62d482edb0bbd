"""The writer where numcodecs is not installed."""

from __future__ import annotations

import sys

from writer_service.__main__ import main

if __name__ == "__main__":
    sys.modules["numcodecs"] = None  # type: ignore[assignment]  # so importing it fails
    sys.exit(main())
