"""A block on its way to a bucket: what the bucket has of it already is not sent again, and its index goes last."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import xxhash

from schemas import limits
from schemas.bucket.snapshots import hash_file, hash_pieces, pieces
from schemas.errors import BucketError, StoreError
from schemas.objects.evicted import Evicted
from schemas.objects.layout import (
    END,
    INDEX,
    Stored,
    block_key,
    digest,
    epoch_of,
    identity_of,
    pack_index,
    unpack_index,
)
from schemas.objects.objects import Objects
from schemas.store.block import Block
from schemas.store.block_files import MappedFolder, is_stub
from schemas.store.cold_block import cold_attributes, open_cold
from vllm_tap.bucket.snapshot import BlockAt

__all__ = ["BlockSender", "LocalBlock", "files_of", "named_block", "read_block", "send_block"]

_AT_ONCE: Final = 8
_NONE: Final = np.zeros(0, np.int64)


@dataclass(slots=True)
class BlockSender:
    """The destination of blocks, with what is known to be there: ``there`` has every object's bytes, ``before`` the
    head's blocks.

    Blocks that the head before does not name go under names of ``epoch``. ``verify``: rows are read back too.
    """

    objects: Objects
    there: dict[str, int]
    before: Mapping[int, BlockAt]
    verify: bool
    epoch: int = 0
    new_blocks: int = 0
    new_bytes: int = 0


def files_of(folder: Path) -> dict[str, Path]:
    """The files of a block by their names in it; FileNotFoundError where there is no block."""
    found = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    if "zarr.json" not in found:
        raise FileNotFoundError(folder)
    return found


@dataclass(frozen=True, slots=True)
class LocalBlock:
    """A block in a folder: its files by their names, the names of those with rows, and the contents of the others."""

    block: Block
    files: dict[str, Path]
    large: set[str]
    small: dict[str, bytes]  # and the end of the main shard
    identity: str


def read_block(folder: Path) -> LocalBlock:
    """A block, but for its rows; StoreError where it cannot lie in a bucket, FileNotFoundError where there is none."""
    files = files_of(folder)
    block = Block(MappedFolder(folder)) if cold_attributes(folder) is None else open_cold(folder)
    if block.first is None:
        raise StoreError("push", folder, "it is of an early version, without the first rows of frames",
                         "vllm-tap compact makes it anew")
    large = {name for name, _ in block.places(_NONE, _NONE)}
    nbytes = sum(path.stat().st_size for name, path in files.items() if name not in large)
    if nbytes > limits.bucket_index_bytes_max // 2:
        raise StoreError("push", folder, f"its small files take {nbytes:,} bytes",
                         f"at most {limits.bucket_index_bytes_max // 2:,} are taken: rows of so few numbers go into "
                         "smaller blocks with the writer's --segment-bytes")
    small = {name: path.read_bytes() for name, path in files.items() if name not in large}
    small[END + block.main_name] = bytes(block.files.end(block.main_name, block.index_bytes))
    hashed = xxhash.xxh3_128()
    for name, data in sorted(small.items()):
        hashed.update(f"{name} {len(data)}\n".encode())
        hashed.update(data)
    return LocalBlock(block, files, large, small, hashed.hexdigest())


def send_block(sender: BlockSender, number: int, folder: Path) -> BlockAt:
    """Send one block; what the bucket has of it already is not sent again."""
    found = read_block(folder)
    block, files, large, small = found.block, found.files, found.large, found.small
    known = sender.before.get(number)
    is_named = known is not None and identity_of(known.key) == found.identity
    key = known.key if known is not None and is_named else block_key(number, found.identity, sender.epoch)
    is_new = f"{key}/{INDEX}" not in sender.there
    whole = not is_new and all(sender.there.get(f"{key}/{name}") == path.stat().st_size
                               for name, path in files.items())
    if whole and not sender.verify and known is not None and is_named and (
            sender.there[f"{key}/{INDEX}"] == known.index.nbytes):
        return known
    within = {**small, **_sides(files, large - {block.main_name})}
    if whole and not sender.verify:
        return _whole_block(sender, key, within)
    objects = {name: Stored(len(data), digest(data)) for name, data in small.items() if not name.startswith(END)}
    _send_small(sender, key, {name: small[name] for name in objects if name != "zarr.json"})
    for name in sorted(large):
        objects[name] = _send_file(sender, f"{key}/{name}", files[name])
    _send_small(sender, key, {"zarr.json": small["zarr.json"]})
    index = pack_index(within, objects)
    _check_sizes(sender, key, objects)
    sender.objects.put(f"{key}/{INDEX}", index)
    sender.new_blocks += is_new
    at = _whole_block(sender, key, within)
    if at.index != Stored(len(index), digest(index)):
        raise BucketError("write", f"{sender.objects.url}/{key}/{INDEX}", "other bytes are there than were sent", "",
                          True)
    return at


def named_block(sender: BlockSender, record: Evicted) -> BlockAt:
    """The place of a block whose rows lie in the bucket alone, evicted from this disk.

    StoreError where the rows lie in another bucket, or where this bucket has lost them. StoreError too where this
    bucket may delete them because its head does not name them. With ``verify`` they are also compared with their
    checksums.
    """
    place, at = f"segment {record.segment}", BlockAt(record.key, record.index)
    if record.url != sender.objects.url:
        raise StoreError("push", place, f"its rows were evicted from this disk to {record.url}",
                         "push there, or vllm-tap recall brings them back first")
    known = sender.before.get(record.segment)
    if (known is None or known.key != at.key) and epoch_of(f"{at.key}/") != sender.epoch:
        raise StoreError("push", place, f"its rows were evicted to {record.key}, which the head of {record.url} does "
                         "not name", "vllm-tap recall brings them back, while they are there")
    sender.there |= sender.objects.sizes(at.key)  # another push may have sent and evicted it since this one looked
    sizes = {INDEX: record.index.nbytes, **{name: stored.nbytes for name, stored in record.files}}
    for name, nbytes in sizes.items():
        if sender.there.get(f"{at.key}/{name}") != nbytes:
            raise StoreError("push", place, f"its rows were evicted from this disk, and {record.url} has lost them: "
                             f"{at.key}/{name}", "vllm-tap fsck names the captures")
    for name, stored in record.files if sender.verify else ():
        if _read_back(sender, f"{at.key}/{name}", stored) != stored:
            raise StoreError("push", place, f"its rows were evicted from this disk, and {record.url}/{at.key}/{name} "
                             "does not match its checksum", "vllm-tap fsck --bucket URL --deep names the captures")
    return at


def _sides(files: Mapping[str, Path], names: set[str]) -> dict[str, bytes]:
    """Side arrays, the smallest first, as far as an index has them whole."""
    found, left = dict[str, bytes](), limits.bucket_index_sides_bytes
    for nbytes, name in sorted((files[name].stat().st_size, name) for name in names):
        if (left := left - nbytes) >= 0:
            found[name] = files[name].read_bytes()
    return found


def _whole_block(sender: BlockSender, key: str, within: Mapping[str, bytes]) -> BlockAt:
    """A block that is up, its index read back; BucketError where that does not hold what the block does."""
    where = f"{sender.objects.url}/{key}/{INDEX}"
    data, _ = sender.objects.get(f"{key}/{INDEX}", limits.bucket_index_bytes_max)
    found, objects = unpack_index(data, where)
    if found != within:
        raise BucketError("read", where, "it does not hold what the block does",
                          f"somebody changed it: remove the objects below {key} and push again")
    sender.there[f"{key}/{INDEX}"] = len(data)
    _check_sizes(sender, key, objects)
    return BlockAt(key, Stored(len(data), digest(data)))


def _check_sizes(sender: BlockSender, key: str, objects: Mapping[str, Stored]) -> None:
    sizes = sender.objects.sizes(key)
    for name, stored in objects.items():
        if sizes.get(f"{key}/{name}") != stored.nbytes:
            raise BucketError("write", f"{sender.objects.url}/{key}/{name}",
                              f"{sizes.get(f'{key}/{name}')} bytes are there, {stored.nbytes} were sent", "push again",
                              True)


def _send_small(sender: BlockSender, key: str, files: Mapping[str, bytes]) -> None:
    new = {f"{key}/{name}": data for name, data in files.items() if sender.there.get(f"{key}/{name}") != len(data)}
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(sender.objects.put, new.keys(), new.values()))
    sender.new_bytes += sum(map(len, new.values()))


def _send_file(sender: BlockSender, key: str, path: Path) -> Stored:
    """A large file; sent once more where other bytes are read back than were sent."""
    if is_stub(path):
        raise FileNotFoundError(path)  # its rows were evicted meanwhile
    there = sender.there.get(key) == path.stat().st_size  # an object is there whole or not at all
    stored = hash_file(path) if there else _send(sender, key, path)
    if sender.verify and _read_back(sender, key, stored) != stored:
        stored = _send(sender, key, path)
        if _read_back(sender, key, stored) != stored:
            raise BucketError("write", f"{sender.objects.url}/{key}", "other bytes are there than were sent, twice")
    return stored


def _read_back(sender: BlockSender, key: str, wanted: Stored) -> Stored:
    return sender.objects.stream(key, wanted.nbytes, hash_pieces)


def _send(sender: BlockSender, key: str, path: Path) -> Stored:
    """A large file, hashed as it is sent."""
    hashed, nbytes = xxhash.xxh3_128(), 0

    def read() -> Iterator[bytes]:
        nonlocal nbytes
        hashed.reset()
        nbytes = 0
        for piece in pieces(path):
            hashed.update(piece)
            nbytes += len(piece)
            yield piece

    sender.objects.put(key, read)
    sender.new_bytes += nbytes
    return Stored(nbytes, hashed.hexdigest())
