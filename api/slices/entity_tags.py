"""Conditional requests: whether the caller has what it asks for already."""

from __future__ import annotations

from starlette.requests import Request

__all__ = ["same_entity"]


def same_entity(request: Request, tag: str) -> bool:
    """Whether If-None-Match names ``tag``: compared weakly, since who compresses on the way weakens it (RFC 9110)."""
    known = [each.strip().removeprefix("W/") for each in request.headers.get("if-none-match", "").split(",")]
    return tag in known or known == ["*"]
