"""A request's body before any route has it: received, given once more, and searched for a capture or edits named in it.

Servers ignore fields that they do not know. So a route that takes captures or edits knows every place where a client
may put them by mistake. A route that takes none refuses a request that names them. The rule is the same on routes of
any kind.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import parse_qsl

from schemas import limits
from schemas.errors import ArgumentError, LimitError
from schemas.spec import CaptureSpec

__all__ = ["Message", "Named", "Receive", "again", "aside", "check_values", "has_key", "in_body", "in_fields",
           "is_meant", "is_meant_as_edits", "may_name", "named", "reads_like", "whole"]

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
_T = TypeVar("_T")

_LETTERS: Final = sorted("capture")
_HOLDER: Final = re.compile(r"extra|xargs|sampling_params", re.IGNORECASE)  # what holds arguments beside a body's own
_LETTERS_OFF: Final = 2
_DEPTH: Final = 3  # of holders in holders, as in sampling_params.extra_args
_FIELDS: Final = {field.alias or name for name, field in CaptureSpec.model_fields.items()}
_SIGNS: Final = (b"captur", b"Captur", b"CAPTUR", b"\0")  # the last is UTF-16 or UTF-32
_LIKE: Final = re.compile(rb'"[acepturACEPTUR]{7}"|\\u00[4-7]')  # the latter is an ASCII letter, and no accent
_KEY: Final = re.compile(rb'(?<!\\)"(?:[^"\\]{0,40}captur[^"\\]{0,40}|([aceptur]{7})|'
                         rb'[^"]{0,40}\\u00[4-7][^"]{0,100})"\s*:', re.IGNORECASE)
_PART: Final = re.compile(rb'[\r\n](?i:content-disposition):[^\r\n]{0,1000}?[; ]name="?([^"\r\n;]{1,200})')
_EDIT: Final = "edit"
_EDIT_LETTERS: Final = sorted(_EDIT)
# Two, neither of which may begin with just any character: one search for both takes twice the time.
_EDIT_KEYS: Final = (re.compile(rb'edit[^"\\]{0,40}"\s*:', re.IGNORECASE), re.compile(rb'"[deitDEIT]{4}"\s*:'))
_EDITS_KEY: Final = re.compile(rb'(?<!\\)"edit"\s*:\s*"?\s*[\[{]')
_LIKE_EDITS_KEYS: Final = tuple(re.compile(key.pattern + rb'\s*"?\s*[\[{]', re.IGNORECASE) for key in _EDIT_KEYS)
_OP: Final = re.compile(rb'"op\\?"')  # also in a text of JSON
_FORM_EDITS: Final = re.compile(rb'(?:^|&)(?:[^=&]{0,40}edit[^=&]{0,40}|[deit]{4})=', re.IGNORECASE)
_FORM_FIELDS: Final = 1000
_ASIDE_BYTES: Final = 1 << 20


class Named(NamedTuple):
    """A capture that is named, or edits: the path of the field, and what it holds."""

    param: str
    value: Any

    @property
    def of_edits(self) -> bool:
        """Whether the field is one of edits, or reads like one."""
        name = self.param.rpartition(".")[2]
        return name == _EDIT or (_reads_like_edit(name) and not reads_like(name))

    @property
    def is_sure(self) -> bool:
        """False of a body's own ``edit`` that does not hold edits: of a route that takes none it may be another's."""
        return not self.of_edits or _are_edits(self.value)


async def whole(receive: Receive, bytes_max: float = float("inf")) -> deque[Message]:
    """A request's body, or its beginning where it is longer; the last message is another where the client left."""
    messages: deque[Message] = deque()
    size = 0
    while not messages or (messages[-1].get("more_body", False) and size < bytes_max):
        messages.append(await receive())
        size += len(messages[-1].get("body", b""))
    return messages


def again(messages: deque[Message], receive: Receive) -> Receive:
    """A ``receive`` that gives the request once more and lets go of each message as it is taken."""

    async def once_more() -> Message:
        return messages.popleft() if messages else await receive()

    return once_more


async def aside(look: Callable[[deque[Message]], _T], messages: deque[Message]) -> _T:
    """Run ``look`` on a body: for a large one in a thread, so that nobody else waits for it."""
    if sum(len(message.get("body", b"")) for message in messages) > _ASIDE_BYTES:
        return await asyncio.to_thread(look, messages)
    return look(messages)


def reads_like(name: str) -> bool:
    """Whether a field's name is ``capture``, or nearly so."""
    like = name.lower()
    return "captur" in like or sorted(like) == _LETTERS


def _reads_like_edit(name: str) -> bool:
    like = name.lower()
    return _EDIT in like or sorted(like) == _EDIT_LETTERS


def is_meant_as_edits(name: str, value: Any) -> bool:
    """Whether a field is ``edit`` or reads like it, and holds edits: other APIs have fields of such names."""
    return _reads_like_edit(name) and _are_edits(value)


def named(body: Mapping[str, Any]) -> Iterator[Named]:
    """Places where a JSON object names a capture or edits: in a field, in what holds extra arguments, in the objects of
    a list.

    Elsewhere the word is content: of messages, of tools, of a schema. In a list only what is a spec is meant.
    Among extra arguments, which may be others', only what nearly has the name, or is a spec. Of names that read like
    ``edit`` only what holds edits.
    """
    for name, value in body.items():
        if ((reads_like(name) or name == _EDIT) and value is not None) or is_meant_as_edits(name, value):
            yield Named(name, value)
        elif isinstance(value, Mapping) and _HOLDER.search(name):
            yield from _held(name, value, _DEPTH)
        elif isinstance(value, list):
            yield from _listed(name, value, _DEPTH)


def _held(path: str, holder: Mapping[str, Any], depth: int) -> Iterator[Named]:
    for name, value in holder.items():
        if is_meant(name, value) or is_meant_as_edits(name, value):
            yield Named(f"{path}.{name}", value)
        elif isinstance(value, Mapping) and depth > 1:
            yield from _held(f"{path}.{name}", value, depth - 1)


def is_meant(name: str, value: Any) -> bool:
    """Whether an argument among those of others is a capture: misspelt by a letter or two, or a spec by what it holds.

    Theirs may be about captures as well, of a screen or of a time.
    """
    if value is None or not reads_like(name):
        return False
    if len(name) <= len(_LETTERS) + _LETTERS_OFF or name.lower() == "capture_count":
        return True
    if isinstance(value, str) and value.startswith("{") and len(value) <= limits.spec_json_bytes_max:
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    return _is_spec(value)


def _is_spec(value: Any) -> bool:
    return isinstance(value, Mapping) and _FIELDS.issuperset(value)


def _are_edits(value: Any) -> bool:
    """Whether a value is a list of objects with an ``op``, its JSON text, or one of them without its list."""
    if isinstance(value, str) and len(value) <= limits.edit_json_bytes_max:
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    return any(isinstance(each, Mapping) and "op" in each for each in (value if isinstance(value, list) else [value]))


def _listed(path: str, items: list[Any], depth: int) -> Iterator[Named]:
    if {dict, list}.isdisjoint(map(type, items)):  # millions of token ids, say
        return
    for number, item in enumerate(items):
        if isinstance(item, dict):
            for name, value in item.items():
                if (reads_like(name) and _is_spec(value)) or is_meant_as_edits(name, value):
                    yield Named(f"{path}[{number}].{name}", value)
                elif isinstance(value, Mapping) and _HOLDER.search(name):
                    yield from _held(f"{path}[{number}].{name}", value, depth)
        elif isinstance(item, list) and depth > 1:
            yield from _listed(f"{path}[{number}]", item, depth - 1)


def in_body(data: bytes, content_type: str) -> list[Named]:
    """``named`` for a body as it was sent, JSON or a form; none for what is neither. LimitError where too much would
    have to be parsed, and the text has a key that reads like it; ArgumentError for a form of too many fields.
    """
    kind = content_type.partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        parts = {part[1].decode(errors="replace"): part.end() for part in _PART.finditer(data)}
        return in_fields((name, "…" if reads_like(name) else _part(data, end)) for name, end in sorted(parts.items())
                         if reads_like(name) or _reads_like_edit(name))
    form = kind == "application/x-www-form-urlencoded"
    if not may_name(data) and not (form and _FORM_EDITS.search(data)):
        return []
    if form:
        if data.count(b"&") >= _FORM_FIELDS:
            raise ArgumentError("body", f"a form of {data.count(b'&') + 1} fields", f"at most {_FORM_FIELDS} are "
                                "looked at, and one of these may name a capture; send fewer, or JSON")
        return in_fields(parse_qsl(data.decode(errors="replace"), keep_blank_values=True))
    try:
        check_values(data)
    except LimitError:
        if has_key(data):
            raise
        return []
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return []
    return list(named(body)) if isinstance(body, dict) else []


def in_fields(pairs: Iterable[tuple[str, str]]) -> list[Named]:
    """Fields of a form or a query that name a capture, or hold edits."""
    return [Named(name, value) for name, value in pairs if reads_like(name) or is_meant_as_edits(name, value)]


def _part(data: bytes, end: int) -> str:
    """The content of a form's part whose name ends at ``end``."""
    start = data.find(b"\r\n\r\n", end)
    stop = data.find(b"\r\n--", start + 1)
    return "" if start < 0 else data[start + 4 : stop if stop > 0 else None].decode(errors="replace")


def may_name(data: bytes) -> bool:
    """False where nothing in a body reads like it: most are parsed but once, where they are served."""
    return any(sign in data for sign in _SIGNS) or any(like.search(data) for like in (_LIKE, *_EDIT_KEYS))


def has_key(data: bytes) -> bool:
    """Whether the text of a body that is not parsed has a key that reads like it: of an object anywhere in it."""
    text = data.replace(b"\0", b"")
    if _EDITS_KEY.search(text) or (_OP.search(text) and any(key.search(text) for key in _LIKE_EDITS_KEYS)):
        return True
    return any(
        not found[1] or sorted(found[1].decode().lower()) == _LETTERS for found in _KEY.finditer(text))


def check_values(data: bytes) -> None:
    """LimitError where a body has so many values that parsing it would keep everybody else waiting."""
    most = limits.request_values_max
    if len(data) > most and (values := sum(data.count(mark) for mark in b"[{,")) > most:
        raise LimitError("values in the body (its commas and opening brackets)", values, most)
