"""Vectors that callers have stored for their edits to name: each owner's own, in the store, below ``vectors/``.

Each vector is a safetensors file, in a folder of its owner. Its metadata tell the owner, the name, the digest of the
numbers (``digest_of`` of schemas.edits.vectors) and when it came. A file is there whole and durable, or not at all, and
is never changed. Other numbers under its name need the old ones deleted first.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from schemas import limits
from schemas.checks import is_name
from schemas.edits.vectors import digest_of
from schemas.errors import ConflictError, CorruptError, LimitError, NotFoundError, StoreError
from schemas.store.paths import VECTORS_FOLDER
from schemas.store.small_files import sync_folder, write_durable

__all__ = ["About", "StoredVectors"]

F32 = npt.NDArray[np.float32]

_SUFFIX: Final = ".safetensors"


class About(msgspec.Struct, frozen=True):
    """A stored vector without its numbers; ``created_ms`` since 1970."""

    name: str
    digest: str
    width: int
    created_ms: int


@dataclass(frozen=True, slots=True)
class StoredVectors:
    """The vectors in a store. Every call works on files, and may wait for another call's; StoreError where one fails.

    A name is looked up among the owner's own vectors only.
    """

    store: Path
    count_max: int = limits.vectors_max
    bytes_max: int = limits.vectors_bytes_max

    def put(self, owner: str, name: str, numbers: F32) -> tuple[About, bool]:
        """Store a vector durably, and tell whether it is new. ``name`` must pass ``is_name``.

        Nothing is done where the same numbers are stored under this name. ConflictError where the name has other
        numbers, LimitError where the owner has no room.
        """
        about = About(name, digest_of(numbers), len(numbers), time.time_ns() // 1_000_000)
        with self._changing(owner) as folder:
            path = folder / f"{name}{_SUFFIX}"
            if path.exists():
                if (found := _about(path)).digest != about.digest:
                    raise ConflictError(f"vector {name!r} is stored with other numbers, digest {found.digest}; these "
                                        f"have {about.digest}: delete it first, or take another name")
                return found, False
            data = save({"vector": numbers}, {"owner": owner, "name": name, "digest": about.digest,
                                              "created_ms": str(about.created_ms)})
            sizes = [each.stat().st_size for each in _files(folder)]
            if len(sizes) >= self.count_max:
                raise LimitError("stored vectors of one key", len(sizes) + 1, self.count_max, "delete some")
            if sum(sizes) + len(data) > self.bytes_max:
                raise LimitError("bytes of the stored vectors of one key", sum(sizes) + len(data), self.bytes_max,
                                 "delete some")
            write_durable(path, data)
        return about, True

    def numbers(self, owner: str, name: str) -> tuple[About, F32] | None:
        """A vector with its numbers, float32 [width]; None where the owner has none of that name.

        CorruptError where the file's numbers are not those that were put.
        """
        if not is_name(name):  # it never becomes a path
            return None
        path = self._folder(owner) / f"{name}{_SUFFIX}"
        with _reading(path):
            try:
                with safe_open(path, framework="np") as file:
                    about, numbers = _described(path, file), file.get_tensor("vector")
            except FileNotFoundError:
                return None
        if numbers.dtype != np.float32 or numbers.shape != (about.width,) or digest_of(numbers) != about.digest:
            raise CorruptError("read vector", path, "its numbers are not those that were stored", "delete it, and "
                               "put it again")
        return about, numbers

    def all(self, owner: str) -> list[About]:
        """The owner's vectors by name; one that is deleted meanwhile is left out."""
        found = []
        for path in _files(self._folder(owner)):
            with suppress(FileNotFoundError):
                found.append(_about(path))
        return found

    def delete(self, owner: str, name: str) -> None:
        """Deletes a vector for good; NotFoundError where the owner has none of that name."""
        absent = NotFoundError(f"no vector {name[:100]!r}; GET /v1/vectors lists those that are stored")
        if not is_name(name) or not self._folder(owner).is_dir():
            raise absent
        with self._changing(owner) as folder:
            try:
                (folder / f"{name}{_SUFFIX}").unlink()
            except FileNotFoundError:
                raise absent from None
            sync_folder(folder)

    def _folder(self, owner: str) -> Path:
        """A folder for an owner's name, which is no path."""
        return self.store / VECTORS_FOLDER / hashlib.sha256(owner.encode()).hexdigest()[:32]

    @contextmanager
    def _changing(self, owner: str) -> Iterator[Path]:
        """The owner's folder, held against other threads and processes; what a crash has left half done is removed."""
        folder = self._folder(owner)
        try:
            for missing in [each for each in (folder.parent, folder) if not each.is_dir()]:
                missing.mkdir(mode=0o700, exist_ok=True)
                sync_folder(missing.parent)
            held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(held, fcntl.LOCK_EX)
                for left in [each for each in folder.iterdir() if each.name.startswith(".")]:
                    left.unlink()
                yield folder
            finally:
                os.close(held)
        except OSError as error:
            raise StoreError("write vector", folder, error.strerror or error, "is the disk full? may this service "
                                                                              "write to the store?") from None


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(each for each in folder.iterdir() if each.suffix == _SUFFIX and is_name(each.stem))
    except FileNotFoundError:
        return []


def _about(path: Path) -> About:
    with _reading(path), safe_open(path, framework="np") as file:
        return _described(path, file)


def _described(path: Path, file: Any) -> About:
    """The facts in a file's head; CorruptError where they are not there."""
    metadata = file.metadata() or {}
    try:
        width, = file.get_slice("vector").get_shape()
        return About(path.name.removesuffix(_SUFFIX), metadata["digest"], width, int(metadata["created_ms"]))
    except (SafetensorError, KeyError, ValueError) as error:
        raise CorruptError("read vector", path, f"no stored vector: {error!r}", "delete it, and put it again") from None


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    except SafetensorError as error:
        raise CorruptError("read vector", path, error, "delete it, and put it again") from None
    except OSError as error:
        raise StoreError("read vector", path, error.strerror or error) from None
