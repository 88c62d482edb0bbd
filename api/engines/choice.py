"""Order in which a request tries engines: first the one that has the prompt's beginning cached, unless others are
idler.

The first bytes of a prompt name its *home* engine, by rendezvous hashing. Equal beginnings have one home, and each
engine is home to an equal share. An engine that goes or comes changes the homes of its own share alone. A request goes
home while home has at most ``max(SLACK, least // 4)`` more requests in flight than the idlest engine, which has
``least``. Otherwise it goes to the idlest. Of equally busy engines the hash decides.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from api.engines.upstreams import Upstream
from api.protocols import Protocol

__all__ = ["SLACK", "in_turn", "prefix_of"]

SLACK: Final = 4  # requests in flight by which home may always exceed the idlest engine
_BYTES: Final = 1024  # of a prompt's text that name its home
_TOKENS: Final = 256  # … of one given as token ids


def in_turn(engines: Sequence[Upstream], prefix: bytes) -> list[Upstream]:
    """The engines, the best first. Without a prefix the idlest first, equally busy ones in the order given."""
    if not prefix:
        return sorted(engines, key=lambda each: each.in_flight)
    hashed = sorted(engines, key=lambda each: _weight(prefix, each.name))
    idlest = sorted(hashed, key=lambda each: each.in_flight)
    home, least = hashed[0], idlest[0].in_flight
    if home.in_flight > least + max(SLACK, least // 4):
        return idlest
    return [home, *(each for each in idlest if each is not home)]


def _weight(prefix: bytes, name: str) -> bytes:
    return hashlib.blake2b(prefix, key=name.encode(), digest_size=8).digest()


def prefix_of(body: Mapping[str, Any], protocol: Protocol, owner: str) -> bytes:
    """The beginning of a prompt, or of the first of several. The model, the owner and the salt go before it, because
    they divide an engine's cache too.
    """
    prompt = body.get("prompt") if protocol.lists else None
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], list):
        prompt = prompt[0]
    if isinstance(prompt, list) and not any(isinstance(each, str) for each in prompt[:1]):
        begins = json.dumps(prompt[:_TOKENS]).encode()
    else:
        first = protocol.texts(body)[0]
        begins = first[:_BYTES] if isinstance(first, bytes) else b""
    return json.dumps([str(body.get("model")), owner, str(body.get("cache_salt"))]).encode() + begins if begins else b""
