"""The manifest: what a capture asked for, what was stored, and what is missing with its reason."""

from __future__ import annotations

from typing import Any, Final

import msgspec

ELSEWHERE: Final = "elsewhere"  # other writers' stores have it
REASONS: Final = ("prefix_cached", "dropped", "aborted", "not_armed", "engine_lost", "part_lost", "rejected_draft",
                  "quota", "fenced", "deleted", "pending", ELSEWHERE)
STATUSES: Final = ("pending", "running", "complete", "empty", "incomplete", "failed", "deleted")
FINAL: Final = frozenset(("complete", "empty", "incomplete", "failed"))  # of what is not deleted


class Missing(msgspec.Struct, frozen=True):
    """Positions ``[start, stop)`` that were expected and are not there."""

    start: int
    stop: int
    reason: str

    @property
    def rows(self) -> int:
        """Number of positions."""
        return self.stop - self.start


class Extent(msgspec.Struct, frozen=True):
    """Rows of the capture in one frame: ``block`` is the segment's path below the store."""

    block: str
    frame: int  # byte offset of the frame in the block's main file
    rows: int
    position_min: int
    position_max: int


class SiteLayer(msgspec.Struct, frozen=True):
    """One site × layer: expected = captured + missing, always; ``rejected`` drafts are stored beside them."""

    site: str
    layer: int
    codec: str
    expected: int
    captured: int
    missing: list[Missing]
    rejected: int = 0


class SiteInfo(msgspec.Struct, frozen=True):
    """Description of a site's stored numbers."""

    site: str
    width: int  # numbers in a row
    decoded_width: int  # numbers that a row decodes to
    codec: str  # its identity
    family: str  # the codec's name and its parameters apart
    parameters: dict[str, int | float]
    decoded: str  # what the decoded numbers are
    formula: str  # how a row is decoded from its streams
    dtype: str  # the model's; a codec's streams follow from codec, width and dtype
    streams: list[dict[str, Any]]  # name, dtype, shape, view, fill; empty where the codec does not fit the width
    error_bound: str
    meaning: str
    transformer_lens: str | None  # with {l} for the layer
    extents: list[Extent]
    shared_out: bool = False  # ranks share its columns out: rows are put together decoded, and streams is empty


class PartInfo(msgspec.Struct, frozen=True):
    """One rank's part of a capture. Blocks name of every stream what it sends."""

    rank: int
    state: str  # "awaited" until it joins, "running", "finished", or "lost": its sender is gone


class Manifest(msgspec.Struct, frozen=True):
    """The whole truth about one capture (design: docs/reference/store.md)."""

    id: str
    aliases: list[str]
    status: str  # one of STATUSES
    asked: dict[str, Any]
    resolved: dict[str, Any]
    tags: dict[str, str]
    created_ms: int
    engine: dict[str, Any]  # EngineInfo, without its layout
    adapter: str  # the LoRA adapter that the model ran with, "" for none
    edits: list[dict[str, Any]]  # made while it ran, in their order, vectors by their digest; rows are as they went on
    prompt_len: int
    total_len: int  # prompt + generated tokens known so far
    end: int  # positions [0, end) were computed for the final sequence
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    finish_reason: str | None  # as the client saw it; the engine's, where nobody has told that
    client_finish_reason: str | None  # as it was told
    stop_reason: str | int | None
    cached: int
    recomputed: int
    sites: list[SiteInfo]
    rows: list[SiteLayer]
    hold: bool = False  # neither deleted nor expired until it is released
    engine_finish_reason: str | None = None  # a stop string looks like an abort inside the engine
    parts: list[PartInfo] = []  # of an engine on several ranks: those that send something of what was asked for
    failed: str | None = None  # why no engine ran the request

    @property
    def expected(self) -> int:
        """Rows expected over all sites and layers."""
        return sum(entry.expected for entry in self.rows)

    @property
    def captured(self) -> int:
        """Rows stored over all sites and layers."""
        return sum(entry.captured for entry in self.rows)
