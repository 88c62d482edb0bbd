"""Recovery of sealed blocks: seals that were cut short are ended, and blocks that the catalog lacks are indexed."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

from schemas import codecs
from schemas.errors import CorruptError, StoreError
from schemas.store.cold_block import cold_attributes, open_cold
from schemas.store.map_file import map_file
from schemas.store.paths import WRITER, block_name, main_chunk
from schemas.store.segment import FrameView, verify_payload, walk
from writer_service import fs, log
from writer_service.catalog import catalog
from writer_service.catalog.changes import SegmentGone, SegmentSealed
from writer_service.recover.sequences import Recovered, index_frames
from writer_service.seal import sealing
from writer_service.upkeep import block_removal, cold_blocks, evicted_blocks


def finish_seals(store: Path) -> None:
    """Go on with seals that had passed the point of no return, throw the others away."""
    blocks = store / "blocks"
    for building in blocks.glob(f".building-{WRITER}-*"):
        if not sealing.finish_cut(store, int(building.name.rsplit("-", 1)[1])):
            fs.remove_tree(building)
    fs.sync_dir(blocks)


def index_blocks(db: sqlite3.Connection, store: Path, state: Recovered) -> set[str]:
    """Blocks that the catalog does not know as sealed."""
    touched: set[str] = set()
    known = {row["number"] for row in db.execute("SELECT number FROM segments WHERE sealed = 1")}
    for block in sorted((store / "blocks").glob(f"{WRITER}-*.zarr")):
        number = int(block.name.removesuffix(".zarr").rsplit("-", 1)[1])
        state.next_segment = max(state.next_segment, number + 1)
        if number in known:
            continue
        try:
            with evicted_blocks.at_hand(store, number):  # one after the other: all together may not fit on the disk
                if _is_cold(block):
                    change = cold_blocks.compacted(open_cold(block), number)
                    with catalog.transaction(db):
                        touched |= catalog.apply(db, [change])
                    continue
                views = block_frames(block, number, state.uuid)
        except (StoreError, OSError) as error:  # it costs its own rows; the next start tries again
            log.warn("block_skipped", f"a block cannot be read and is left out: {error}", segment=number,
                      error=str(error))
            state.skipped.append(block.name)
            continue
        touched |= index_frames(db, state, number, views)
        with catalog.transaction(db):
            catalog.apply(db, [SegmentSealed(number)])
    for number in known:  # taken away, and the catalog did not hear of it any more
        if not (store / block_name(number)).exists() and block_removal.removable(db, number):
            with catalog.transaction(db):
                catalog.apply(db, [SegmentGone(number)])
    return touched


def _is_cold(block: Path) -> bool:
    """StoreError where the block does not say what it holds."""
    try:
        return cold_attributes(block) is not None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError("read block", block, repr(error), "put a good copy of it in its place") from None


def block_frames(block: Path, number: int, uuid: bytes) -> list[FrameView]:
    """The whole frames of a block: its list of offsets leads past a damaged one, and is not needed where none is.

    StoreError or OSError where the block does not say what it holds, or has no rows.
    """
    try:
        attributes = json.loads((block / "zarr.json").read_text())["attributes"]
        main = codecs.streams(attributes["codec"]["name"], attributes["width"], attributes["model_dtype"])[0].name
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError("read block", block, repr(error), "put a good copy of it in its place") from None
    try:
        listed = memoryview((block / "frame" / "c" / "0").read_bytes()).cast("Q").tolist()
    except (OSError, TypeError):
        listed = []
    path = block / main_chunk(main)
    data = map_file(path)
    views: dict[int, FrameView] = {}
    for start in sorted({0, *listed}):
        if start not in views:
            views.update((view.offset, view) for view in walk(data, uuid, number, path, verify=None, start=start))
    if listed and listed == sorted(set(listed)) and views.keys() >= set(listed):
        # A whole frame that such a list leaves out was given up before the block was sealed: its sender sends it again,
        # and the next erasure clears it.
        return [views[offset] for offset in listed]
    return [view for view in views.values() if view.offset in listed or _is_whole(view, path)]


def _is_whole(view: FrameView, path: Path) -> bool:
    """Whether a frame that a damaged list does not name is one nevertheless."""
    try:
        verify_payload(view, path)
    except CorruptError:
        return False
    return True
