"""``qk8``: as ``kv8``, for queries and keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from schemas.codecs.declare import CodecFamily
from schemas.codecs.kv8 import FAMILY as KV8

FAMILY: Final[CodecFamily] = replace(
    KV8, name="qk8", meaning="int8 with a bfloat16 scale a head, for queries and keys, to compute attention from",
    sites=("q", "k", "q_rot", "k_rot"))
