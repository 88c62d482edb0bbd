"""Prompts of a run that are captured already, and the ids that the others go under.

An id follows from the work: the source, the number and text of the prompt, the model and how it is captured. So a run
that was cut off in any way is the same run when it is started again. Captures that came to their end stay. Those that
were left half done are deleted, and done again under the next id of that prompt. An id of the caller's has no next one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from schemas.errors import NotFoundError, TapError
from schemas.ids import ulid_of_bits
from schemas.read.reader import CaptureRow, StoreReader
from vllm_tap.client.listing import Filters
from vllm_tap.offline.prompt_file import Prompt

__all__ = ["WORK", "Resume", "is_whole", "read_resume"]

WORK: Final = "tap.work"  # the tag that says what a capture was made by
_WORK_CHARS: Final = 16
_WHOLE: Final = ("complete", "empty")  # nothing is missing
_CUT_OFF: Final = ("abort", "error")  # how an engine ends what is in flight when it is shut down, or fails


def is_whole(row: CaptureRow) -> bool:
    """Whether every row is there of a generation that came to its own end; one that was aborted may be complete as
    well.
    """
    return row.status in _WHOLE and row.finish_reason not in _CUT_OFF


@dataclass(slots=True)
class Resume:
    """The state before a run.

    ``done``: whole captures by line. ``attempts``: the attempt that the id of a line is for. ``stale``: captures that
    are to be deleted. ``refused``: by line, why a prompt cannot be captured under its own id.
    """

    settings: dict[str, Any]
    done: dict[int, str] = field(default_factory=dict)
    attempts: dict[int, int] = field(default_factory=dict)  # where it is not the first
    stale: list[str] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)

    def is_left(self, prompt: Prompt) -> bool:
        """Whether a prompt is to be captured now."""
        return prompt.line not in self.done and prompt.line not in self.refused

    def capture_of(self, prompt: Prompt) -> str:
        """The id that a prompt's capture goes under."""
        return prompt.id or self._id(prompt, self.attempts.get(prompt.line, 0))

    def work_of(self, prompt: Prompt) -> str:
        """A digest of prompt and settings, in 16 characters."""
        return self._digest(prompt).hex()[:_WORK_CHARS]

    def _id(self, prompt: Prompt, attempt: int) -> str:
        digest = hashlib.blake2b(self._digest(prompt) + attempt.to_bytes(4, "little"), digest_size=10).digest()
        return ulid_of_bits(int.from_bytes(digest, "big"))  # its time is 0: made of what is done, not of when

    def _digest(self, prompt: Prompt) -> bytes:
        what = [self.settings, prompt.line, prompt.text, prompt.messages, prompt.token_ids,
                *([] if prompt.edit is None else [prompt.edit])]
        return hashlib.blake2b(json.dumps(what, sort_keys=True).encode(), digest_size=20).digest()

    def place(self, prompt: Prompt, reader: StoreReader, deleted: set[str]) -> None:
        """Find out what became of a prompt in earlier runs; TapError where its own id is another's."""
        if prompt.id is not None:
            self._place_named(prompt.id, prompt, reader, deleted)
            return
        attempt = 0
        while True:
            capture = self._id(prompt, attempt)
            row = _row(reader, capture)
            if row is None and capture not in deleted:
                break
            if row is not None and is_whole(row):
                self.done[prompt.line] = capture
                return
            if row is not None:
                self.stale.append(capture)
            attempt += 1
        if attempt:
            self.attempts[prompt.line] = attempt

    def _place_named(self, capture: str, prompt: Prompt, reader: StoreReader, deleted: set[str]) -> None:
        row = _row(reader, capture)
        if row is not None and row.tags.get(WORK) != self.work_of(prompt):
            raise TapError(f"line {prompt.line}: id = {capture!r}: taken in {reader.path}; give another")
        if row is not None and is_whole(row):
            self.done[prompt.line] = capture
        elif row is not None or capture in deleted:
            how = "deleted" if row is None else row.finish_reason if row.status in _WHOLE else row.status
            self.refused[prompt.line] = (f"id = {capture!r}: its capture in {reader.path} is not whole ({how}), and an "
                                         "id is never used twice; give another, or none")


def read_resume(prompts: Iterator[Prompt], settings: dict[str, Any], reader: StoreReader) -> Resume:
    """Compare the prompts of a run with the captures in a store."""
    found = Resume(settings)
    deleted = {row.id for row in Filters("deleted").of(reader)}
    if not deleted and not reader.captures(limit=1):
        return found
    for prompt in prompts:
        found.place(prompt, reader, deleted)
    return found


def _row(reader: StoreReader, capture: str) -> CaptureRow | None:
    with suppress(NotFoundError):
        return reader.capture(capture)
    return None
