"""What happened since the writer's start, counted in the main loop."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """Every field is a metric: ``vllm_tap_writer_FIELD_total``."""

    frames: int = 0
    rows: int = 0
    frames_checksummed: int = 0
    records: int = 0
    payload_bytes: int = 0
    acks: int = 0
    duplicates: int = 0
    gaps: int = 0
    malformed: int = 0
    refused: int = 0
    rows_not_indexed: int = 0
    rows_over_quota: int = 0
    disk_errors: int = 0
    commits: int = 0
    sealed: int = 0
    expired: int = 0
    rows_erased: int = 0
    erasures_failed: int = 0
    blocks_removed: int = 0
    dropped: dict[str, int] = field(default_factory=dict)  # rows that engines did not keep, by reason
    connections_refused: dict[str, int] = field(default_factory=dict)  # by reason
