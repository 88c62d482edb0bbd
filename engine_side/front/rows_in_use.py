"""Rows that edits of requests hold in the engine: the front end lets in no more than it keeps."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

from schemas.errors import EditError


@dataclass(slots=True)
class RowsInUse:
    """Rows of all requests that have not ended; an engine keeps ``limit``."""

    limit: int = 0
    count: int = 0

    def check(self, each: int, samples: int = 1) -> None:
        """EditError where there is no room for so many more for each of a prompt's ``samples``."""
        more = each * samples
        asked = f"{more} rows" + (f", {each} for each of n = {samples}" if samples > 1 else "")
        if more > self.limit:
            raise EditError("", asked, f"the engine has room for {self.limit}, and each sample (n) of each prompt "
                            "takes its own; ask for fewer samples or rows, or raise VLLM_TAP_EDIT_ROWS (--edit-rows)")
        if more and self.count + more > self.limit:
            raise EditError("", asked, f"the engine has room for {self.limit}, and running requests use {self.count}; "
                            "each sample of each prompt takes its own; ask again when they have ended, or raise "
                            "VLLM_TAP_EDIT_ROWS (--edit-rows)")

    def hold(self, owner: object, rows: int) -> None:
        """Count rows until their owner is gone, whichever way it goes."""
        self.count += rows
        weakref.finalize(owner, self._let_go, rows).atexit = False

    def _let_go(self, rows: int) -> None:
        self.count -= rows


OF_ENGINE = RowsInUse()  # one front end of a process serves one engine
