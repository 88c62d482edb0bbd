"""Conditional requests: whether the caller has what it asks for already."""

from __future__ import annotations

from starlette.requests import Request

from api.errors import ApiError

__all__ = ["check_match", "same_entity"]


def same_entity(request: Request, tag: str) -> bool:
    """Whether If-None-Match names ``tag``: compared weakly, since who compresses on the way weakens it (RFC 9110)."""
    known = [each.strip().removeprefix("W/") for each in request.headers.get("if-none-match", "").split(",")]
    return tag in known or known == ["*"]


def check_match(request: Request, tag: str) -> None:
    """ApiError 412 where If-Match names other entities than ``tag``."""
    asked = request.headers.get("if-match", "*")
    if asked.strip() != "*" and tag not in [each.strip() for each in asked.split(",")]:
        raise ApiError(412, "changed", f"If-Match = {asked[:100]!r}: what is there now has the tag {tag}", "If-Match")
