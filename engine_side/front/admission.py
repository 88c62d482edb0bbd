"""Admission of captures at the front end: check and resolve a spec, give it an id, report the capture's end."""

from __future__ import annotations

import json
import logging
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any, Final, NamedTuple

import msgspec

from engine_side.front.json_key import KEY_BYTES_MAX, json_key
from engine_side.front.ticket import EDIT_KEY, KEY, Ticket, decode, encode
from schemas.bodies import is_meant, is_meant_as_edits
from schemas.errors import EditError, LimitError, ProtocolError, SpecError, TapError
from schemas.ids import check_ulid, new_ulid
from schemas.limits import capture_samples_max
from schemas.lru import Lru
from schemas.spec import Armed, CaptureSpec, Resolved, parse_spec, resolve
from schemas.wire.control_channel import ControlChannel
from schemas.wire.layout import Part, check_codecs
from schemas.wire.records import ClientFinish

logger = logging.getLogger("vllm.tap")

_SEEN_MAX: Final = 100_000
_RETIRE_S: Final = 10.0
_KNOWN_MAX: Final = 64
_ANY: Final = "0" * 26  # stands for an id
_seen = Lru[tuple[str, int], bool](_SEEN_MAX)
_lock = threading.Lock()
_endpoint = ""
_curve: Path | None = None
_channel: ControlChannel | None = None
_retired: set[str] = set()
_uncaptured: set[str] = set()  # reasons that were logged
_untold = 0  # ends that the writer was not told of, since the last one that it was


def retire(endpoint: str) -> None:
    """The writer at ``endpoint`` is about to end for good: engines that send to it capture nothing more.

    What clients saw of their captures' ends is in the store afterwards, unless the writer takes nothing any more.
    """
    global _endpoint, _channel
    with _lock:
        _retired.add(endpoint)
        if endpoint != _endpoint:
            return
        _endpoint, old, _channel = "", _channel, None
    if old is not None:
        old.close(_RETIRE_S)


def check_in_use(endpoint: str) -> None:
    """SpecError where the writer at ``endpoint`` is no more."""
    if endpoint in _retired:
        raise SpecError("", "…", "the recording of this engine has ended; generate inside `with vllm_tap.recording(…)`")


def use(endpoint: str, curve: Path | None) -> None:
    """The writer to report ends to from now on: that of the newest engine of this process."""
    global _endpoint, _curve, _channel
    with _lock:
        if endpoint == _endpoint:
            return
        _endpoint, _curve, old, _channel = endpoint, curve, _channel, None
    if old is not None:
        old.close()


class Wanted(NamedTuple):
    """A caller's spec, held against the model; ``asked`` is its canonical JSON."""

    id: str | None
    asked: str
    resolved: Resolved


class _Known(NamedTuple):
    """Resolution shared by specs that differ by their id alone; ``around_id``: their JSON before and behind it."""

    without_id: str
    around_id: tuple[str, str]
    resolved: Resolved


@dataclass(frozen=True, slots=True)
class Shape:
    """Armed sites of a front end's model; ``widths``: numbers in a row, of the sites where that is sure; ``layout``: of
    an engine on several ranks.
    """

    armed: Armed
    widths: dict[str, int]
    layout: list[Part] = field(default_factory=list)
    known: Lru[bytes, _Known] = field(init=False, default_factory=lambda: Lru(_KNOWN_MAX))


def resolve_spec(value: object, shape: Shape) -> Wanted:
    """Resolve a caller's spec; SpecError (a ValueError) where it cannot be had.

    Most requests ask for what others did: the resolutions of the last few specs are cached without their ids. The time
    that this takes is between a batch's requests, and decides how many of them the engine's first step takes up.
    """
    key, ulid = _split_id(value)
    if key and (found := shape.known.get(key)) is not None:
        if ulid is None:
            return Wanted(None, found.without_id, found.resolved)
        before, after = found.around_id
        return Wanted(ulid, before + check_ulid(ulid) + after, found.resolved)
    if key:  # as it was then: its owner may change it meanwhile
        value = {**msgspec.json.decode(key), "id": ulid}
    try:
        spec = parse_spec(value)
    except LimitError as error:  # vLLM answers a ValueError with 400, anything else with 500
        raise SpecError("", "…", str(error)) from None
    layers = resolve(spec, shape.armed, shape.widths)
    try:
        check_codecs(shape.layout, layers)
    except ProtocolError as error:
        raise SpecError("codec", spec.codec, str(error)) from None
    if key:
        _keep(key, spec, layers, shape)
    return Wanted(spec.id, spec.to_json(), layers)


def _keep(key: bytes, spec: CaptureSpec, layers: Resolved, shape: Shape) -> None:
    around = spec.model_copy(update={"id": _ANY}).to_json().split(_ANY)
    if len(around) != 2:  # a tag reads like it
        return
    shape.known.put(key, _Known(spec.model_copy(update={"id": None}).to_json(), (around[0], around[1]), layers))


def _split_id(value: object) -> tuple[bytes, str | None]:
    """Split a spec into (its JSON without the id, the id); (b"", id) where that is not possible."""
    try:
        if type(value) is str and len(value) <= KEY_BYTES_MAX:  # as servers get it
            value = json.loads(value)
        if type(value) is not dict or type(ulid := value.get("id")) not in (str, NoneType):
            return b"", None
        rest = value.copy()
    except (ValueError, RecursionError, RuntimeError):  # the last: changed meanwhile
        return b"", None
    rest.pop("id", None)
    return (key, ulid) if (key := json_key(rest)) else (b"", None)


def check_names(extra: Mapping[str, Any]) -> None:
    """SpecError where extra arguments without a spec have one, or edits, under a name that only reads like its own."""
    for name, value in extra.items():
        if isinstance(name, str) and is_meant(name, value):
            raise SpecError("", "…", f"nothing would be captured, because the spec is in extra_args[{name!r}]; put it "
                            f"into extra_args[{KEY!r}]")
    check_edit_names(extra)


def check_edit_names(extra: Mapping[str, Any]) -> None:
    """EditError where extra arguments have edits under a name that only reads like their own."""
    for name, value in extra.items():
        if isinstance(name, str) and name != EDIT_KEY and is_meant_as_edits(name, value):
            raise EditError("", value, f"nothing would be edited, because the edits are in extra_args[{name!r}]; put "
                            f"them into extra_args[{EDIT_KEY!r}]")


def admit(value: object, count: object, *, n: int, prompt_number: int, shape: Shape) -> str:
    """The ticket's JSON of a caller's spec; SpecError (a ValueError) where it cannot be had.

    ``count`` is the number of captures that the whole HTTP request makes, where a gateway knows it: a list of prompts
    makes more than its n samples. ``prompt_number`` is this prompt's place in such a list.
    """
    wanted = resolve_spec(value, shape)
    if count is None:
        count = n if prompt_number == 0 else (prompt_number + 1) * n
    if not isinstance(count, int) or not 0 < count <= capture_samples_max:
        raise SpecError("count", count, f"must be 1 to {capture_samples_max}: the captures of the whole request")
    ulid = wanted.id or new_ulid()
    base = prompt_number * n
    if base + n > count:
        raise SpecError("count", count, f"must be at least {base + n}, because prompt {prompt_number} has n={n} "
                                        "samples")
    with _lock:
        if (ulid, base) in _seen:
            raise SpecError("id", ulid, "already in use; give each request its own id, or none")
        _seen.put((ulid, base), True)
    return encode(Ticket(id=ulid, asked=wanted.asked, resolved=wanted.resolved, base=base, n=n, count=count))


def with_told(text: str, **told: str | int) -> str:
    """Add to a ticket's JSON what the request runs with: its LoRA ``adapter``, or its ``edits`` and their ``rows``."""
    return encode(msgspec.structs.replace(decode(text), **told))


def with_images(text: str, images: list[tuple[int, int]]) -> str:
    """Add to a ticket's JSON the positions of its prompt that images fill."""
    ticket = decode(text)
    return encode(msgspec.structs.replace(ticket, resolved=msgspec.structs.replace(ticket.resolved, images=images)))


def forget(text: str) -> None:
    """Free the id of a request that was refused after ``admit``."""
    ticket = decode(text)
    with _lock:
        _seen.pop((ticket.id, ticket.base))


def count_uncaptured(reason: str) -> None:
    """Count a request that is to be captured by the engine's spec for every request, and cannot be. Each ``reason`` is
    logged once.
    """
    with _lock:
        if (channel := _open_channel()) is not None:
            channel.uncaptured += 1
        if reason in _uncaptured or len(_uncaptured) >= _KNOWN_MAX:
            return
        _uncaptured.add(reason)
    logger.warning("vllm-tap: a request is not captured, though all are to be: %s (further ones are counted alone: "
                   "vllm_tap_writer_requests_uncaptured_total)", reason)


def _open_channel() -> ControlChannel | None:
    """The channel to the writer, made when it is first needed; None where there is no writer. Behind ``_lock``."""
    global _channel
    if _channel is None and _endpoint:
        _channel = ControlChannel(_endpoint, "front_end", _curve)
    return _channel


def report_finish(capture: str, reason: str, stop_reason: str | int | None, output_token_ids: list[int]) -> None:
    """Tell the writer how the client saw the end; never waits.

    Where the writer is away for so long that no more may wait, the end is not told: logged once, and counted.
    """
    global _untold
    with _lock:
        if (channel := _open_channel()) is None:
            return
    tokens = struct.pack(f"<{len(output_token_ids)}I", *output_token_ids)
    try:
        channel.post(lambda seq: ClientFinish(seq=seq, capture=capture, reason=reason, stop_reason=stop_reason,
                                               output_token_ids=tokens))
    except TapError as error:
        if not _untold:
            logger.warning("vllm-tap: the client's view of how captures end is not stored, from %s on: %s", capture,
                           error)
        _untold += 1
        return
    if _untold:
        logger.warning("vllm-tap: the client's view of how %d captures ended was not stored; it is stored again from "
                       "%s on", _untold, capture)
        _untold = 0
