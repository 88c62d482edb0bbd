"""The ticket: what the front end hands to the engine with a request, in ``SamplingParams.extra_args["capture"]``.

The caller's spec (a JSON string or a mapping) is checked and resolved in the front end; what travels on is one JSON
string. The capture id of a sample follows from the ticket and from vLLM's name of the child request.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, Final

import msgspec

from schemas.edits import resolved
from schemas.edits.resolved import Edits
from schemas.ids import sample_id
from schemas.spec import Resolved

KEY: Final = "capture"
EDIT_KEY: Final = "edit"
COUNT_KEY: Final = "capture_count"
LISTED_KEY: Final = "capture_listed"  # by our own front end, on requests that vLLM's server numbers by their prompt

_CHILD: Final = re.compile(r"([0-9]+)_", re.ASCII)


class Ticket(msgspec.Struct, frozen=True, tag="vllm-tap", tag_field="ticket"):
    """A resolved spec with its id; the request makes samples ``base`` … ``base + n - 1`` of ``count``."""

    id: str
    asked: str
    resolved: Resolved
    base: int
    n: int
    count: int
    adapter: str = ""  # the LoRA adapter that the request runs with
    edits: str = ""  # what is told of its edits (Edits.told)
    rows: int = 0  # that they hold in the engine (Edits.rows_kept)

    def capture(self, sample: int) -> str:
        """The capture id of this request's sample 0 … n-1."""
        return sample_id(self.id, self.base + sample, self.count)

    def capture_of(self, request_id: str) -> str:
        """The capture id of an engine request: vLLM names the children of n > 1 ``k_<parent>``."""
        match = _CHILD.match(request_id) if self.n > 1 else None
        return self.capture(int(match[1]) if match else 0)


_decoder = msgspec.json.Decoder(Ticket)
_KEPT_MAX: Final = 1024  # tickets; longer ones than the next are not kept
_KEPT_LENGTH_MAX: Final = 2048


def encode(ticket: Ticket) -> str:
    """The JSON string of a ticket."""
    return msgspec.json.encode(ticket).decode()


def decode(text: str) -> Ticket:
    """The ticket of its JSON string; msgspec.DecodeError on anything else."""
    return _decoder.decode(text)


_kept = lru_cache(_KEPT_MAX)(decode)


def find(sampling_params: Any) -> Ticket | None:
    """The ticket of a request, None where it asks for no capture. Never raises: the engine must live.

    Asked several times for each request, by the thread that runs the steps.
    """
    extra = getattr(sampling_params, "extra_args", None)
    text = extra.get(KEY) if isinstance(extra, dict) else None
    if not isinstance(text, str):
        return None
    try:
        return _kept(text) if len(text) <= _KEPT_LENGTH_MAX else decode(text)
    except (msgspec.DecodeError, TypeError, UnicodeError, RecursionError):
        return None


def find_edits(sampling_params: Any) -> Edits | None:
    """The edits of a request, None where it has none. Never raises: the engine must live."""
    extra = getattr(sampling_params, "extra_args", None)
    text = extra.get(EDIT_KEY) if isinstance(extra, dict) else None
    if not isinstance(text, str):
        return None
    try:
        return resolved.decode(text)
    except (msgspec.DecodeError, TypeError, UnicodeError, RecursionError):
        return None


def unread(sampling_params: Any) -> bool:
    """Whether a request without a ticket asks for a capture or edits: it came through a front end without taps."""
    extra = getattr(sampling_params, "extra_args", None)
    return isinstance(extra, dict) and not extra.keys().isdisjoint((KEY, EDIT_KEY))
