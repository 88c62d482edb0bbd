"""Makes cold blocks (schemas/store/cold_block.py) of the rows of other blocks, and ends what a crash left of that."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Sequence
from pathlib import Path

from schemas.catalog.records import load_segment
from schemas.errors import CorruptError, StoreError
from schemas.read.segment_maps import SegmentMaps
from schemas.store.cold_block import ColdBlock, cold_attributes, open_cold
from schemas.store.compressed import library
from schemas.store.paths import WRITER, block_name, compacting_name, journal_folder
from writer_service import fs
from writer_service.catalog import catalog
from writer_service.catalog.changes import Compacted, Indexed, SegmentGone, SegmentMade
from writer_service.seal.sealing import sync_tree
from writer_service.upkeep import block_removal
from writer_service.upkeep.cold_block_writer import ColdBlockWriter


def need_library(store: Path) -> None:
    """StoreError where the store has compressed blocks and what unpacks them is not installed.

    Without it their rows cannot be read, checked or erased: they are as whole as ever, and nobody may say otherwise.
    """
    try:
        library(store)
    except StoreError:
        for folder in sorted((store / "blocks").glob(f"{WRITER}-*.zarr")):
            try:
                attributes = cold_attributes(folder)
            except (OSError, ValueError, KeyError):
                continue  # fsck says what is lost
            if attributes is not None and attributes.get("compression"):
                library(folder)


def build(store: Path, uuid: bytes, db: sqlite3.Connection, number: int, replaces: Sequence[int],
          strict: bool = True, compress: bool = False) -> Compacted:
    """Make the cold block ``number`` of the rows that the catalog knows in the blocks ``replaces``, all of one kind.

    ``compress`` it where its codec has one stream alone; one that replaces a compressed block always is.

    StoreError where a row does not match its checksum, OSError where the disk fails: nothing has changed then. Not
    ``strict`` where damaged rows must not stop the removal of rows beside them. Damaged rows are then carried over with
    the checksum that tells, and frames of which nothing can be told any more are left out.
    """
    segment = load_segment(db, replaces[0])
    if segment is None:
        raise StoreError("compact", store / block_name(replaces[0]), "the catalog does not know it",
                         "vllm-tap rebuild makes the catalog again")
    folder = store / compacting_name(number)
    if folder.exists():
        fs.remove_tree(folder)
    maps = SegmentMaps(store, uuid)
    try:
        writer = ColdBlockWriter(store, maps, db, segment, replaces, strict, compress)
        fs.make_dirs(folder)
        writer.write(folder, uuid, number)
        block = open_cold(folder)
        for offset in block.frames.tolist():
            if strict or not writer.damaged:
                block.frame(offset).verify()
        change = compacted(block, number)
        del block
        sync_tree(folder)
        fs.rename(folder, store / block_name(number))
    except Exception:
        if folder.exists():
            fs.remove_tree(folder)
        raise
    finally:
        maps.close()
    return change


# ── what was cut short, and what is replaced ────────────────────────────────────────────────────────────────────────


def remove_replaced(store: Path, db: sqlite3.Connection, numbers: Sequence[int]) -> None:
    """Remove blocks that a cold one stands for."""
    for number in numbers:
        block_removal.remove_block(store, number)
    with catalog.transaction(db):
        catalog.apply(db, [SegmentGone(number) for number in numbers])


def finish_replacing(store: Path, db: sqlite3.Connection) -> None:
    """Take away what cold blocks stand for and a crash left; the catalog knows the cold blocks."""
    left: list[int] = []
    for row in db.execute("SELECT number FROM segments WHERE cold = 1").fetchall():
        try:
            attributes = cold_attributes(store / block_name(row["number"])) or {"replaces": []}
        except (OSError, ValueError, KeyError, TypeError):
            continue  # fsck says what is lost
        left += [old for old in attributes["replaces"] if (store / block_name(old)).exists() or load_segment(db, old)]
    if left:
        block_removal.remember_streams(store, db)
        remove_replaced(store, db, left)


def numbers_on_disk(store: Path) -> set[int]:
    """Numbers of the sealed blocks and journal files that are there."""
    names = [*(store / "blocks").glob(f"{WRITER}-*.zarr"), *(store / journal_folder()).glob("[0-9]*.open")]
    return {int(path.name.split(".")[0].rsplit("-", 1)[-1]) for path in names}


def free_number(store: Path) -> int:
    """A number that no segment has or had, where no writer gives them out."""
    return max(int(block_removal.read_covered(store)["next_segment"]) - 1, *numbers_on_disk(store), 0) + 1


def finish_cut(store: Path) -> None:
    """Remove what a crash left of cold blocks that had no name yet."""
    for folder in (store / "blocks").glob(f".compacting-{WRITER}-*"):
        fs.remove_tree(folder)


def compacted(block: ColdBlock, number: int) -> Compacted:
    """Change that tells the catalog of a cold block; frames that are not whole are left out."""
    made = block.attributes
    frames = []
    for offset in block.frames.tolist():
        with contextlib.suppress(CorruptError):
            view = block.frame(offset)
            header, frame = view.header, view.frame
            frames.append(Indexed(header.stream, header.epoch, frame.seq, number, offset, 0, frame, view.table))
    return Compacted(SegmentMade(number, made["site"], made["codec"]["name"], made["model_dtype"], made["width"],
                                 made["fingerprint"]), list(made["replaces"]), frames)
