"""Log of the writer on standard error: lines for people, or one JSON object a line."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from typing import Any

_as_json = False


def use_json() -> None:
    """Log JSON from now on."""
    global _as_json
    _as_json = True


def warn(event: str, text: str, **fields: Any) -> None:
    """Log that something is wrong."""
    _write("warning", event, text, fields)


def info(event: str, text: str, **fields: Any) -> None:
    """Log that something was done, for programs alone: people have numbers and files."""
    if _as_json:
        _write("info", event, text, fields)


def _write(level: str, event: str, text: str, fields: dict[str, Any]) -> None:
    line = f"writer: {text}"
    if _as_json:
        line = json.dumps({"time": round(time.time(), 3), "level": level, "event": event, "message": text, **fields},
                          default=str)
    with contextlib.suppress(OSError):  # on the disk that is full, of which it may be about to tell
        print(line, file=sys.stderr, flush=True)
