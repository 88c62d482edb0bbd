"""Arrays of any size as files: written in blocks, and under their names only when they are whole."""

from __future__ import annotations

import os
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

__all__ = ["FileArray", "plain", "replacing", "replacing_folder", "write_npy", "write_npz"]


@dataclass(frozen=True, slots=True)
class FileArray:
    """An array whose bytes come in C order from ``blocks()``."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    blocks: Callable[[], Iterator[npt.NDArray[Any]]]

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def plain(name: str, values: npt.NDArray[Any]) -> FileArray:
    """An array that is in memory already."""
    return FileArray(name, values.dtype, values.shape, lambda: iter([values]))


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file that appears under its name only when it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            yield file
            file.flush()
            Path(file.name).chmod(0o644)
            os.replace(file.name, path)  # noqa: PTH105
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


@contextmanager
def replacing_folder(target: Path) -> Iterator[Path]:
    """A folder to make, which takes the place of ``target`` when it is whole; where that fails, what was there stays.

    What else is written beside it goes.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as beside:
        made, before = Path(beside, "made"), Path(beside, "before")
        yield made
        if target.exists():
            target.rename(before)
        try:
            made.rename(target)
        except BaseException:
            if before.exists():
                before.rename(target)
            raise


def write_npy(file: IO[bytes], array: FileArray) -> None:
    """The bytes of an npy file."""
    np.lib.format.write_array_header_2_0(  # type: ignore[no-untyped-call]
        file, {"descr": array.dtype.str, "fortran_order": False, "shape": array.shape})
    for block in array.blocks():
        file.write(block.tobytes())


def write_npz(path: Path, arrays: list[FileArray]) -> None:
    """An uncompressed npz; strings are arrays of characters, so that nothing needs pickle."""
    with replacing(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for array in arrays:
            with archive.open(f"{array.name}.npy", "w", force_zip64=True) as member:
                write_npy(member, array)
