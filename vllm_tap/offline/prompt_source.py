"""The source of prompts of ``vllm-tap capture``: a file of JSON lines, or a Hugging Face dataset."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

from schemas.errors import TapError
from vllm_tap.client.convert import need
from vllm_tap.offline.prompt_file import Prompt, prompt_of, read_prompts

__all__ = ["PromptSource"]

HUB: Final = "hf:"
_COLUMNS: Final = ("prompt", "messages", "prompt_token_ids", "text", "input_ids")
_FILES_MAX: Final = 100_000
_KINDS: Final = {"text": "prompt", "input_ids": "prompt_token_ids"}


@dataclass(frozen=True, slots=True)
class PromptSource:
    """A source of prompts. ``given``: a file of JSON lines, a folder that holds a dataset, or ``hf:NAME`` on the
    Hugging Face hub.

    Of a dataset, ``column`` is sent: text, a list of messages, or a list of token ids. Its default is the first of
    prompt, messages, prompt_token_ids, text, input_ids that the dataset has. At most ``limit`` prompts are taken.
    """

    given: str
    split: str | None = None
    column: str | None = None
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise TapError(f"--limit = {self.limit}: at least 1")
        if self.given == HUB:
            raise TapError(f"PROMPTS = {self.given!r}: name a dataset of the hub behind it, as hf:NAME")
        if not self.is_dataset and (self.split or self.column):
            raise TapError(f"PROMPTS = {self.given!r}: --split and --column are for datasets, and this is a file")

    @property
    def is_dataset(self) -> bool:
        """Whether it is read with datasets."""
        return self.given.startswith(HUB) or Path(self.given).is_dir()

    @property
    def name(self) -> str:
        """The name that a prompt's id follows from, beside its number: the same where the file is moved."""
        if not self.is_dataset:
            return Path(self.given).name
        place = self.given if self.given.startswith(HUB) else Path(self.given).resolve().name
        return f"{place} {self.split or 'train'}"

    def __iter__(self) -> Iterator[Prompt]:
        """The prompts; TapError naming the line or row of a malformed one."""
        rows = self._dataset_prompts() if self.is_dataset else read_prompts(Path(self.given))
        return islice(rows, self.limit)

    def _dataset_prompts(self) -> Iterator[Prompt]:
        try:
            yield from self._rows_of(self._load())
        except TapError:
            raise
        except Exception as error:  # of a file in it, where that is read at last
            said = str(error).strip().partition("\n")[0]
            raise TapError(f"PROMPTS = {self.given!r}: {type(error).__name__}: {said}") from None

    def _rows_of(self, dataset: Any) -> Iterator[Prompt]:
        columns = list(dataset.column_names or next(iter(dataset), {}))
        column = self.column or next((name for name in _COLUMNS if name in columns), None)
        if column is None or column not in columns:
            raise TapError(f"--column = {self.column!r}: {self.given} has {', '.join(columns)}; name the one to send")
        for number, row in enumerate(dataset, 1):
            try:
                yield prompt_of(number, {_kind(column, row[column]): row[column]})
            except ValueError as error:
                raise TapError(f"{self.given}, row {number}, column {column}: {error}") from None

    def _load(self) -> Any:
        datasets = need("datasets", f"PROMPTS = {self.given!r}")
        folder = Path(self.given)
        try:
            if self.given.startswith(HUB):
                return datasets.load_dataset(self.given.removeprefix(HUB), split=self.split or "train", streaming=True)
            _check_size(folder)
            if not ((folder / "dataset_info.json").is_file() or (folder / "dataset_dict.json").is_file()):
                return datasets.load_dataset(str(folder.resolve()), split=self.split or "train", streaming=True)
            found = datasets.load_from_disk(self.given)
            return found[self.split or "train"] if isinstance(found, dict) else found
        except TapError:
            raise
        except Exception as error:
            raise TapError(f"PROMPTS = {self.given!r}: {type(error).__name__}: {error}") from None


def _check_size(folder: Path) -> None:
    """TapError where a folder holds so many files that it is no dataset: all of them would be looked through."""
    files = (name for _, _, names in os.walk(folder) for name in names)
    if next(islice(files, _FILES_MAX, None), None) is not None:
        raise TapError(f"PROMPTS = {str(folder)!r}: holds more than {_FILES_MAX:,} files; name the folder of the "
                       "dataset, or a file of JSON lines")


def _kind(column: str, value: object) -> str:
    """The kind of a column's value, in the words of a file of prompts."""
    if column in _KINDS:
        return _KINDS[column]
    if isinstance(value, list):
        return "messages" if value and isinstance(value[0], dict) else "prompt_token_ids"
    return "prompt"
