"""Objects that a bucket holds of a store; docs/reference/bucket.md draws it. No object is ever changed but the head.

    head.json                                which snapshot of the catalog holds; the one object that is written under
                                             a condition
    retired/<push>.json                      a head that another store's folder took over from, as it was
    catalog/e<epoch>-<xxh3>.sqlite.gz        a snapshot: the catalog's tables, and ``blocks``, where each block lies
    blocks/w0-<number>-e<epoch>-<identity>.zarr/
                                             a block, byte for byte as on the disk, and
        index.zip                            its small files and side arrays once more, the end of its main shard, and
                                             ``objects.json``; it is put last: a block that has one is whole

A block's identity is the hash of its small files, which include the checksums of all rows. So a block that rows were
erased from lies elsewhere. Epoch 0 is left out of the key. A push makes objects of its head's epoch alone. It names
older objects only where the head before does. So if an epoch is over and no head names an object of it, none will ever
name it again.
"""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Mapping
from typing import Final

import msgspec
import xxhash

from schemas import limits
from schemas.errors import BucketError
from schemas.store.paths import WRITER

__all__ = ["BLOCKS_DDL", "BLOCK_KEY", "CATALOGS", "CATALOG_KEY", "CONDITIONS", "END", "HEAD", "INDEX", "OBJECTS",
           "PUSH", "RETIRED", "VERSION", "VERSION_ORIGIN", "Head", "Stored", "block_key", "catalog_key", "digest",
           "epoch_of", "folder_of", "identity_of", "pack_index", "read_head", "retired_key", "unpack_index"]

HEAD: Final = "head.json"
INDEX: Final = "index.zip"
CONDITIONS: Final = ".conditions"  # an object that a push writes to see whether conditions are heeded
OBJECTS: Final = "objects.json"  # in the index: bytes and xxh3 of the block's other files by their names
END: Final = "end/"  # in the index, before a shard's name: its last bytes
CATALOGS: Final = "catalog"
RETIRED: Final = "retired"
FORMAT: Final = "vllm-tap bucket"
VERSION: Final = 2  # 1 had no epochs
VERSION_ORIGIN: Final = 3  # of a head with an origin, which readers before would not know
_EPOCH: Final = "(?:e([1-9][0-9]{0,8})-)?"
BLOCK_KEY: Final = re.compile(rf"blocks/{WRITER}-[0-9]{{8,}}-{_EPOCH}([0-9a-f]{{32}})\.zarr")
CATALOG_KEY: Final = re.compile(rf"{CATALOGS}/{_EPOCH}([0-9a-f]{{32}})\.sqlite\.gz")
PUSH: Final = re.compile("[0-9a-f]{32}")
BLOCKS_DDL: Final = """CREATE TABLE blocks (
    segment INTEGER PRIMARY KEY, key TEXT NOT NULL, index_bytes INTEGER NOT NULL, index_xxh3 TEXT NOT NULL)"""
_NO_TIME: Final = (1980, 1, 1, 0, 0, 0)  # equal blocks have equal indexes


class Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file's bytes, and its xxh3 of 128 bits in hex."""

    nbytes: int
    xxh3: str


class Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The head; ``push`` is drawn at random by who wrote it, ``parent`` that of the head before.

    ``epoch`` is one more after each take-over, and each removal of what no head names, which draws ``fence``.
    """

    format: str
    version: int
    store: str  # its uuid, in hex
    push: str
    parent: str | None
    generation: int
    pushed_ms: int
    catalog: Stored  # before it was packed
    packed_bytes: int
    epoch: int = 0
    catalog_epoch: int = 0  # in which the snapshot was put
    fence: str = ""
    erased_epoch: int = 0  # what no head names of earlier epochs may have rows of deleted captures
    origin: str = ""  # captures were deleted in the bucket since this push, whose folder still has them

    @property
    def catalog_key(self) -> str:
        """The key of the snapshot."""
        return catalog_key(self.catalog.xxh3, self.catalog_epoch)


def digest(data: bytes | bytearray) -> str:
    """The xxh3 of 128 bits in hex."""
    return xxhash.xxh3_128_hexdigest(data)


def block_key(number: int, identity: str, epoch: int) -> str:
    """The folder of a block's objects."""
    return f"blocks/{WRITER}-{number:08d}-{_epoch(epoch)}{identity}.zarr"


def identity_of(key: str) -> str:
    """The identity of the block in a folder; empty where it is no block's."""
    found = BLOCK_KEY.fullmatch(key)
    return found[2] if found else ""


def epoch_of(key: str) -> int | None:
    """The epoch of an object of a block, or of a snapshot; None of any other."""
    parts = key.split("/", 2)
    found = BLOCK_KEY.fullmatch("/".join(parts[:2])) if len(parts) == 3 else CATALOG_KEY.fullmatch(key)
    return None if found is None else int(found[1] or 0)


def folder_of(key: str) -> str:
    """The folder of the block that an object belongs to; of any other its key."""
    folder = "/".join(key.split("/", 2)[:2])
    return folder if BLOCK_KEY.fullmatch(folder) else key


def catalog_key(xxh3: str, epoch: int) -> str:
    """The key of a snapshot."""
    return f"{CATALOGS}/{_epoch(epoch)}{xxh3}.sqlite.gz"


def retired_key(push: str) -> str:
    """The key of the head of a push that was taken over from."""
    return f"{RETIRED}/{push}.json"


def _epoch(number: int) -> str:
    return f"e{number}-" if number else ""


def read_head(data: bytes, url: str) -> Head:
    """The head; BucketError where it is none, or of a later version."""
    try:
        said = msgspec.json.decode(data)
        if said["format"] != FORMAT:
            raise ValueError("it is no head of ours")
        if said["version"] not in range(1, VERSION_ORIGIN + 1):
            raise BucketError("read", f"{url}/{HEAD}", f"version {said['version']}, this program knows 1 to "
                              f"{VERSION_ORIGIN}", "update vllm-tap")
        head = msgspec.convert(said, Head)
        for text in (head.store, head.catalog.xxh3, head.push, head.origin or head.push):
            if not PUSH.fullmatch(text):  # they become paths of the cache, and keys
                raise ValueError(f"{text!r} is no hash")
        if not (0 <= head.catalog_epoch <= head.epoch < limits.bucket_epoch_max
                and 0 <= head.erased_epoch <= head.epoch):
            raise ValueError(f"epoch {head.epoch}, of its catalog {head.catalog_epoch}")
    except (msgspec.MsgspecError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise BucketError("read", f"{url}/{HEAD}", f"malformed: {error}") from None
    nbytes, packed = head.catalog.nbytes, head.packed_bytes
    if not 0 < nbytes <= limits.bucket_catalog_bytes_max or not 0 < packed <= nbytes + nbytes // 100 + 1024:
        raise BucketError("read", f"{url}/{HEAD}", f"a catalog of {nbytes:,} bytes, packed {packed:,}")
    return head


def pack_index(files: Mapping[str, bytes], objects: Mapping[str, Stored]) -> bytes:
    """``index.zip``: a block's small files and ends of shards, and what all its objects are."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as archive:
        for name, data in sorted({**files, OBJECTS: msgspec.json.encode(objects, order="sorted")}.items()):
            archive.writestr(zipfile.ZipInfo(name, _NO_TIME), data)
    return made.getvalue()


def unpack_index(data: bytes, url: str) -> tuple[dict[str, bytes], dict[str, Stored]]:
    """The inverse; BucketError where it is none. Its members are stored as they are, so they are not larger than it."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = archive.infolist()
            if any(member.compress_type != zipfile.ZIP_STORED for member in members) or (
                    sum(member.file_size for member in members) > len(data)):
                raise ValueError("its members are larger than itself")
            files = {member.filename: archive.read(member) for member in members}
        return files, msgspec.json.decode(files.pop(OBJECTS), type=dict[str, Stored])
    except (zipfile.BadZipFile, msgspec.MsgspecError, ValueError, KeyError, NotImplementedError, EOFError,
            RuntimeError) as error:
        raise BucketError("read", url, f"malformed: {error!r}") from None
