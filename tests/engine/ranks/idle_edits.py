"""A worker whose edits of one place are not filled in while its start looks whether they act."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from engine_side.edits.editor import Editor

IDLE = ("resid_post", 3)
_right = Editor.setting


def _setting(self: Editor, place: tuple[str, int], rows: int) -> AbstractContextManager[Any]:
    return nullcontext() if place == IDLE else _right(self, place, rows)


class Registers:
    """What a worker is extended by: importing this module there does it."""

    Editor.setting = _setting  # type: ignore[method-assign,assignment]
