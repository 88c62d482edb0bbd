"""Take what deleted captures said out of a control log: token ids, spec, tags, adapter. The log is replaced whole."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import msgspec

from schemas.errors import StoreError
from schemas.store.paths import journal_folder
from schemas.wire.records import ClientFinish, Finish, Open, Own, PartFinish
from writer_service import fs
from writer_service.control_log import LogEntry, content_of, log_end, log_path, read_log, scrubbed_log, span_of


def scrub_log(store: Path, uuid: bytes, number: int, captures: Collection[str]) -> None:
    """Rewrite a log that nobody appends to; ``captures`` are ids, and ULIDs of which every sample is deleted.

    StoreError where a record is damaged: what follows it cannot be read, and would be gone for good.
    """
    path = log_path(store / journal_folder(), number)
    read = list(read_log(path, uuid))
    end = read[-1][0] if read else log_end
    if end != path.stat().st_size:
        raise StoreError("scrub control log", path, f"the record at byte {end} is damaged",
                         "put a good copy of the log in its place, or cut it off there")
    entries = [_without(entry) if content_of(entry) in captures else entry for _, entry in read]
    fs.write_durable(path, scrubbed_log(uuid, entries, span_of(path)))


def _without(entry: LogEntry) -> LogEntry:
    message = entry.message
    match message:
        case Own():
            left: Own | Open | Finish | PartFinish | ClientFinish = msgspec.structs.replace(message, tags={})
        case Open():
            left = msgspec.structs.replace(message, asked="{}", prompt_token_ids=b"", adapter="", edits="")
        case Finish():
            left = msgspec.structs.replace(message, stop_reason=None, output_token_ids=b"", edits="")
        case PartFinish():
            left = msgspec.structs.replace(message, edits=msgspec.UNSET)
        case ClientFinish():
            left = msgspec.structs.replace(message, stop_reason=None, output_token_ids=b"")
        case _:
            return entry
    return msgspec.structs.replace(entry, message=left)
