"""The input of ``vllm-tap capture``: a JSON line a prompt, every line checked before anything is started."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from schemas.errors import SpecError, TapError
from schemas.spec import parse_spec

__all__ = ["Prompt", "prompt_of", "read_prompts"]

LINE_BYTES_MAX: Final = 16 << 20
_KINDS: Final = ("prompt", "messages", "prompt_token_ids")
_ROLES: Final = ("system", "user", "assistant", "tool", "developer")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line: exactly one of a text, a conversation and token ids; ``tags`` and ``id`` go to its capture."""

    line: int  # from 1
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    token_ids: list[int] | None = None
    tags: dict[str, str] = field(default_factory=dict)
    id: str | None = None


def read_prompts(path: Path) -> Iterator[Prompt]:
    """The prompts of a file, empty lines left out; TapError naming file and line where one is malformed."""
    if not path.is_file():
        raise TapError(f"PROMPTS = {str(path)!r}: no such file")
    with path.open("rb") as file:
        number = 0
        while data := file.readline(LINE_BYTES_MAX + 1):
            number += 1
            try:
                if len(data) > LINE_BYTES_MAX:
                    raise ValueError(f"longer than {LINE_BYTES_MAX} bytes")
                if data.strip():
                    yield _parse(number, data)
            except (ValueError, RecursionError) as error:
                reason = error.reason if isinstance(error, SpecError) else str(error)
                raise TapError(f"{path}, line {number}: {reason}") from None


def _parse(line: int, data: bytes) -> Prompt:
    try:
        row = json.loads(data)
    except json.JSONDecodeError as error:
        raise ValueError(f"malformed JSON: {error.msg} at column {error.colno}") from None
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8") from None
    if not isinstance(row, dict):
        raise ValueError('must be an object such as {"prompt": "…"}')
    return prompt_of(line, row)


def prompt_of(line: int, row: dict[str, Any]) -> Prompt:
    """The prompt of a line's object; ValueError where it is malformed."""
    kinds = [kind for kind in _KINDS if kind in row]
    if len(kinds) != 1:
        raise ValueError(f"must have exactly one of {', '.join(_KINDS)}; it has {', '.join(kinds) or 'none'}")
    if unknown := sorted(set(row) - {kinds[0], "tags", "id"}):
        raise ValueError(f"unknown field {unknown[0]!r}; valid beside {kinds[0]}: tags, id")
    spec = parse_spec({key: row[key] for key in ("tags", "id") if key in row})
    prompt = Prompt(line, row.get("prompt"), row.get("messages"), row.get("prompt_token_ids"), spec.tags, spec.id)
    _check(prompt)
    return prompt


def _check(prompt: Prompt) -> None:
    if prompt.token_ids is not None:
        good = isinstance(prompt.token_ids, list) and prompt.token_ids and all(
            isinstance(token, int) and not isinstance(token, bool) and 0 <= token < 1 << 31
            for token in prompt.token_ids)
        if not good:
            raise ValueError("prompt_token_ids must be a list of at least one token id")
    elif prompt.messages is not None:
        if not isinstance(prompt.messages, list) or not prompt.messages:
            raise ValueError('messages must be a list such as [{"role": "user", "content": "…"}]')
        for message in prompt.messages:
            if not isinstance(message, dict) or message.get("role") not in _ROLES or "content" not in message:
                raise ValueError(f"every message needs a content and a role out of {', '.join(_ROLES)}")
    elif not isinstance(prompt.text, str) or not prompt.text:
        raise ValueError("prompt must be a text of at least one character")
