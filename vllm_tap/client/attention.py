"""Attention of a capture, computed where its rows are."""

from __future__ import annotations

from schemas.attended import Attention, AttentionAsked, lack_of
from vllm_tap.errors import MissingRows

__all__ = ["whole_attention"]


def whole_attention(found: Attention, asked: AttentionAsked) -> Attention:
    """The attention; MissingRows where queries were left out that must not be."""
    if found.unattended and not asked.allow_missing:
        what, missing = lack_of(found.layer, found.unattended)
        raise MissingRows(found.capture, what, missing)
    return found
