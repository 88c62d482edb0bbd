"""The files of a block, wherever they lie: in a folder, which is mapped, or as objects of a bucket (schemas.bucket)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from schemas.store.map_file import map_file

__all__ = ["STUB", "Batch", "BlockFiles", "MappedFolder", "is_stub"]

I64 = npt.NDArray[np.int64]
Batch = tuple[slice | I64, memoryview, I64]  # which of the pieces, memory that has them, and where in it each begins


# In the place of rows that lie in a bucket alone: readers of Zarr take an empty file, as none, for fill values.
STUB: Final = b"evicted: vllm-tap recall brings these rows back to the disk\n"


def is_stub(path: Path) -> bool:
    """Whether a file of rows is none: they were evicted. FileNotFoundError where there is nothing."""
    size = path.stat().st_size
    return size == 0 or (size == len(STUB) and path.read_bytes() == STUB)


class BlockFiles(Protocol):
    """The files of one block by their paths below it, such as ``checksum/c/0/0``; FileNotFoundError of one not there.
    """

    def where(self, name: str = "") -> Path | str:
        """The path of a file, or of the block itself, as errors name it."""

    def has(self, name: str) -> bool:
        """Whether there is such a file."""

    def weight(self, mapped: int) -> int:
        """The weight of the block among those that a reader keeps, where it maps so many files of a folder."""

    def there(self) -> bool:
        """Whether the block is still there: another may have taken its place."""

    def array(self, name: str, dtype: np.dtype[Any] | str, count: int = -1) -> npt.NDArray[Any]:
        """A small file whole, or its first ``count`` elements: a copy."""

    def view(self, name: str) -> memoryview:
        """A file as it is at any time."""

    def end(self, name: str, nbytes: int) -> memoryview:
        """The last bytes of a file; fewer where it has fewer."""

    def batches(self, name: str, starts: I64, nbytes: I64 | int) -> Iterator[Batch]:
        """Pieces of ``nbytes`` that begin at ``starts`` of a file, as many at a time as memory is meant for.

        A start in the memory may lie outside of it, where the file is too short: who copies looks.
        """


class MappedFolder:
    """A block in a folder; each file is mapped once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._maps: dict[str, memoryview] = {}

    def where(self, name: str = "") -> Path:
        """The path."""
        return self.folder / name

    def has(self, name: str) -> bool:
        """Whether there is such a file."""
        return (self.folder / name).exists()

    def weight(self, mapped: int) -> int:
        """Each is a descriptor."""
        return mapped

    def there(self) -> bool:
        """Whether the folder is still there."""
        return self.folder.exists()

    def array(self, name: str, dtype: np.dtype[Any] | str, count: int = -1) -> npt.NDArray[Any]:
        """A copy of a small file."""
        return np.fromfile(self.folder / name, dtype, count)

    def view(self, name: str) -> memoryview:
        """The file, mapped."""
        known = self._maps.get(name)
        return self._maps.setdefault(name, map_file(self.folder / name)) if known is None else known

    def end(self, name: str, nbytes: int) -> memoryview:
        """Read and not mapped: pages that were erased need no room then."""
        with (self.folder / name).open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - nbytes))
            return memoryview(file.read(nbytes))

    def batches(self, name: str, starts: I64, nbytes: I64 | int) -> Iterator[Batch]:
        """All at once, in the map: nothing is copied."""
        yield slice(None), self.view(name), starts
