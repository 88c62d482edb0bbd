"""Blocks whose rows lie in a bucket, opened there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from schemas.codecs import Stream
from schemas.errors import BucketError, CorruptError
from schemas.objects.block_objects import BlockObjects
from schemas.store.block import Block
from schemas.store.cold_block import ColdBlock
from schemas.wire.messages import Frame
from schemas.wire.row_table import RowTable

__all__ = ["SealedRows", "object_mismatch", "open_objects", "sealed_rows"]


@dataclass(frozen=True, slots=True)
class SealedRows:
    """Rows of a frame of a sealed block, as the block's own arrays say them."""

    offset: int
    frame: Frame
    table: RowTable
    declared: tuple[Stream, ...]


def open_objects(files: BlockObjects, cold: bool) -> Block:
    """The block in a folder of a bucket; BucketError where its small files are not whole."""
    try:
        block = ColdBlock(files) if cold else Block(files)
        _ = block.frames, block.first, block.checksum_now
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BucketError("open block", files.where(), repr(error)) from None
    return block


def sealed_rows(block: Block, offset: int) -> SealedRows:
    """The description of a frame's rows in a sealed block that is not cold, at ``offset``; CorruptError where it has
    none there.
    """
    first, stop = block.start(offset), len(block.present)
    following = block.frames.searchsorted(offset) + 1
    if block.first is not None and following < len(block.first):
        stop = min(int(block.first[following]), stop)
    if first >= stop:
        raise CorruptError("read frame", f"{block.files.where()} at byte {offset}", "none of its rows is there")
    layers = [block.layers[column] for column in np.flatnonzero(block.present[first:stop].any(0)).tolist()]
    said = block.attributes
    frame = Frame(0, block.site, said["codec"]["name"], said["model_dtype"], said["width"], layers,
                  block.captures, [stop - first], 0, [], said["fingerprint"])
    table = RowTable(*(block.row[name][first:stop] for name in ("capture", "position", "token_id", "flags")))
    return SealedRows(offset, frame, table, block.declared)


def object_mismatch(block: Block, offset: int) -> CorruptError:
    """The error where a row does not match its checksum; what the cache has of the block is forgotten."""
    assert isinstance(block.files, BlockObjects)
    block.files.forget()
    return CorruptError("read rows", f"{block.files.where()}, frame at {offset}", "a row does not match its checksum",
                        "vllm-tap fsck says whether it does in the local store")
