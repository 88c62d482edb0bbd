"""The input of ``vllm-tap capture``: a JSON line a prompt, and edits; all is checked before anything is started."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from schemas import limits
from schemas.edits.spec import parse_edits
from schemas.errors import ArgumentError, EditError, LimitError, SpecError, TapError, json_fault
from schemas.spec import parse_spec

__all__ = ["Prompt", "prompt_of", "read_edits", "read_prompts"]

LINE_BYTES_MAX: Final = 16 << 20
TAGS_MAX: Final = limits.spec_tags_max - 2  # beside the number of the line and what it was made by
_KINDS: Final = ("prompt", "messages", "prompt_token_ids")
_ROLES: Final = ("system", "user", "assistant", "tool", "developer")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line: exactly one of a text, a conversation and token ids; ``tags`` and ``id`` go to its capture.

    ``edit`` is what is changed in the model for it, None: what is for all.
    """

    line: int  # from 1
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    token_ids: list[int] | None = None
    tags: dict[str, str] = field(default_factory=dict)
    id: str | None = None
    edit: list[dict[str, Any]] | None = None


def read_prompts(path: Path) -> Iterator[Prompt]:
    """The prompts of a file, empty lines left out; TapError naming file and line where one is malformed."""
    if not path.is_file():
        raise TapError(f"PROMPTS = {str(path)!r}: " + ("is read more than once, so it must be a file" if path.exists()
                                                       else "no such file"))
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
                raise TapError(f"{path}, line {number}: {json_fault(error)}") from None


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
    if unknown := sorted(set(row) - {kinds[0], "tags", "id", "edit"}):
        raise ValueError(f"unknown field {unknown[0]!r}; valid beside {kinds[0]}: tags, id, edit")
    _check(kinds[0], row[kinds[0]])
    try:
        spec = parse_spec({key: row[key] for key in ("tags", "id") if key in row})
    except SpecError as error:
        raise ArgumentError(error.field, error.value, error.reason) from None
    if len(spec.tags) > TAGS_MAX:
        raise ArgumentError("tags", f"{len(spec.tags)} of them", f"at most {TAGS_MAX}: two more are added")
    edit = None if row.get("edit") is None else _checked_edits(row["edit"])
    return Prompt(line, row.get("prompt"), row.get("messages"), row.get("prompt_token_ids"), spec.tags, spec.id, edit)


def read_edits(path: Path | None) -> list[dict[str, Any]]:
    """The edits of a file, for every prompt; TapError naming the file where they are malformed."""
    if path is None:
        return []
    try:
        with path.open("rb") as file:
            data = file.read(limits.edit_json_bytes_max + 1)
        if len(data) > limits.edit_json_bytes_max:
            raise ValueError(f"longer than {limits.edit_json_bytes_max} bytes")
        return _checked_edits(json.loads(data))
    except OSError as error:
        raise TapError(f"--edits = {str(path)!r}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise TapError(f"--edits = {str(path)!r}: {json_fault(error)}") from None


def _checked_edits(value: Any) -> list[dict[str, Any]]:
    """A list of edits as it is; ValueError where it is none."""
    if not isinstance(value, list):
        raise EditError("", value, 'must be a list such as [{"site": "resid_post.12", "op": "scale", "by": 0}]')
    try:
        specs = parse_edits(value)
    except LimitError as error:
        raise ValueError(str(error)) from None
    for number, spec in enumerate(specs):
        if spec.from_ is not None:
            raise EditError(f"[{number}].from", spec.from_.capture, "offline no service looks it up; read the rows "
                            "from the store (vllm_tap.open_store), and give them as rows")
    return value


def _check(kind: str, value: Any) -> None:
    if kind == "prompt_token_ids":
        if not isinstance(value, list) or not value:
            raise ArgumentError(kind, value, "must be a list of at least one token id")
        for number, token in enumerate(value):
            if not _is_token(token):
                raise ArgumentError(f"{kind}[{number}]", token, "must be a token id, a whole number from 0 on")
        return
    if kind == "messages":
        if not isinstance(value, list) or not value:
            raise ArgumentError(kind, value, 'must be a list such as [{"role": "user", "content": "…"}]')
        for number, message in enumerate(value):
            _check_message(f"messages[{number}]", message)
    elif not isinstance(value, str) or not value:
        raise ArgumentError(kind, value, "must be a text of at least one character")
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ArgumentError(kind, value, "holds a lone surrogate, which is half a character and no text") from None


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31


def _check_message(name: str, message: Any) -> None:
    if not isinstance(message, dict) or message.get("role") not in _ROLES or "content" not in message:
        raise ArgumentError(name, message, f"needs a content and a role out of {', '.join(_ROLES)}")
    content = message["content"]
    if not isinstance(content, str | list | None):
        raise ArgumentError(f"{name}.content", content, "must be a text, a list of parts or null")
    for number, part in enumerate(content if isinstance(content, list) else ()):
        # A chat template would leave another part out, or write its name into the prompt, without a word.
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ArgumentError(f"{name}.content[{number}]", part, 'only text can be captured offline, as in '
                                                                   '{"type": "text", "text": "…"}')
