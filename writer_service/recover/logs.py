"""Recovery of the control logs: what the catalog lacks of them is applied, a torn tail is cut off."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from schemas.store.paths import journal_folder
from schemas.wire.messages import Bye, Hello
from writer_service import fs
from writer_service.catalog import catalog
from writer_service.catalog.changes import Change
from writer_service.control_log import log_end, log_numbers, log_path, read_log
from writer_service.recover.sequences import Recovered, StreamSequence


def replay_logs(db: sqlite3.Connection, store: Path, state: Recovered) -> set[str]:
    """Apply what the catalog lacks of the control logs; a torn tail is cut off the newest."""
    journal = store / journal_folder()
    log, _, offset = (catalog.get_meta(db, "log") or "0:0").partition(":")
    touched: set[str] = set()
    numbers = log_numbers(journal)
    for number in numbers:
        if number < int(log):
            continue
        path = log_path(journal, number)
        start = int(offset) if number == int(log) else 0
        end = max(start, log_end)
        entries: list[Change] = []
        for after, entry in read_log(path, state.uuid, start):
            end = after
            entries.append(entry)
            if not entry.stream:  # the writer's own decision
                continue
            known = state.streams.setdefault(entry.stream, StreamSequence(entry.epoch, "engine"))
            known.note(entry.epoch, entry.covered, entry.seq, record=True)
            if entry.epoch < known.epoch:
                continue  # a merged log is read from its beginning, also where the catalog knows more
            if isinstance(entry.message, Hello):
                known.role = entry.message.role
            elif isinstance(entry.message, Bye):
                known.bye = True
        with catalog.transaction(db):
            touched |= catalog.apply(db, entries, number)
        state.log_read = f"{number}:{end}"
        if number == numbers[-1]:
            state.cut_bytes += fs.cut(path, end)
    state.next_log = numbers[-1] + 1 if numbers else 1
    return touched
