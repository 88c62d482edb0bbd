"""Heads of stores in buckets, as they are fetched."""

from __future__ import annotations

from schemas import limits
from schemas.objects.layout import HEAD, Head, read_head
from schemas.objects.objects import Objects, Version

__all__ = ["fetch_head"]


def fetch_head(objects: Objects, key: str = HEAD) -> tuple[Head, Version]:
    """A head, and what a write in its place names it by. FileNotFoundError where there is none; BucketError."""
    data, version = objects.get(key, limits.bucket_head_bytes_max)
    return read_head(data, objects.url), version
