"""Recovery before a writer receives anything: take the lock, mend the journal, make the catalog true.

Policy: of every journal file the frames that the catalog has are kept, and the longest valid prefix of what follows
them; the rest is cut. A damaged frame among those, or inside a sealed block, costs that frame alone.
"""

from __future__ import annotations

import json
import sqlite3
import time
import uuid as uuids
from pathlib import Path

from schemas import limits
from schemas.errors import StartError
from schemas.read.reader import read_store_uuid
from schemas.store.paths import KEYS_FILE
from writer_service import fs
from writer_service.catalog import catalog
from writer_service.catalog.catalog_file import (
    DAMAGED,
    REBUILDING,
    REPLACED,
    damaged,
    open_catalog,
    remove_catalog,
    set_aside,
)
from writer_service.catalog.entries import note_streams
from writer_service.recover.blocks import finish_seals, index_blocks
from writer_service.recover.logs import replay_logs
from writer_service.recover.open_segments import index_open_segments
from writer_service.recover.sequences import Recovered, load_streams, note_removed, take_again
from writer_service.recover.store_lock import take_lock
from writer_service.upkeep import block_removal, cold_blocks, erasing, log_merging

MADE_FIRST = ("writers", "blocks", ".store.json.tmp", KEYS_FILE)  # what may be there without a store.json


def check_folder(store: Path) -> None:
    """StartError where the folder is somebody else's, StoreError where the store is of another version."""
    fs.make_dirs(store)
    if (store / "store.json").exists():
        read_store_uuid(store)
    elif strange := [entry.name for entry in store.iterdir() if entry.name not in MADE_FIRST]:
        raise StartError(f"store {store}: the folder is not empty and has no store.json (it has {strange[0]!r}); "
                         "name a new or empty folder")


def make_store(store: Path) -> bytes:
    """The store's uuid. The folder becomes a store where it is none yet. A store of an older version becomes one of
    today's: programs that know only the older version do not write to it from now on.
    """
    file = store / "store.json"
    if not file.exists():
        document = {"format": "vllm-tap store", "version": limits.STORE_VERSION, "uuid": str(uuids.uuid4()),
                    "created_ms": time.time_ns() // 1_000_000}
        fs.write_durable(file, json.dumps(document, indent=1).encode())
    uuid = read_store_uuid(store)
    document = json.loads(file.read_text())
    if document["version"] < limits.STORE_VERSION:
        fs.write_durable(file, json.dumps({**document, "version": limits.STORE_VERSION}, indent=1).encode())
    return uuid


def recover(store: Path) -> Recovered:
    """Take the lock, make the store whole and its catalog true; StartError or StoreError where it cannot be used."""
    check_folder(store)
    lock, epoch = take_lock(store)
    uuid = make_store(store)  # under the lock: two writers that start at once must not both name the store
    db, rebuilt = open_catalog(store, uuid)
    try:
        state = mend(store, uuid, lock, epoch, db, rebuilt)
    except sqlite3.DatabaseError as error:
        # An index that does not match its table is not seen before something is changed that it has: looking for that
        # at every start takes 10 s of a million captures.
        if rebuilt or not damaged(error):
            raise
        set_aside(store, DAMAGED)
        state = mend(store, uuid, lock, epoch, *open_catalog(store, uuid))
    for name in (DAMAGED, REBUILDING, REPLACED):  # they tell what was deleted since
        remove_catalog(store, name)
    return state


def mend(store: Path, uuid: bytes, lock: int, epoch: int, db: sqlite3.Connection, rebuilt: bool) -> Recovered:
    """Journals and blocks made whole and the catalog true; ``db`` is closed."""
    try:
        state = Recovered(uuid, epoch, lock, 1, 1, {}, [], rebuilt=rebuilt)
        load_streams(db, state)
        finish_seals(store)
        block_removal.finish_removals(store)
        cold_blocks.finish_cut(store)
        log_merging.finish_merges(store, uuid)
        state.not_erased = erasing.redo_all(store)
        note_removed(store, state)
        touched = replay_logs(db, store, state)
        touched |= index_blocks(db, store, state)
        touched |= index_open_segments(db, store, state)
        with catalog.transaction(db):
            catalog.refresh(db, touched)
            for name, sequence in state.streams.items():
                sequence.settle()
                take_again(db, name, sequence)
            note_streams(db, [(name, s.epoch, s.role, s.covered) for name, s in state.streams.items()])
            if state.log_read:  # with the numbers that were read there: a start cut short before this reads it again
                catalog.set_meta(db, "log", state.log_read)
            # Records past a gap are not read again, and are no frames: nothing else would tell that they are there.
            catalog.set_meta(db, "ahead", json.dumps(
                {name: [s.epoch, sorted(s.records)] for name, s in sorted(state.streams.items()) if s.records}))
        cold_blocks.finish_replacing(store, db)
        return state
    finally:
        db.close()
