"""A block's own arrays, read as the plain files that they are; docs/reference/store.md names them."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from google_crc32c import value as crc32c

from schemas import codecs
from schemas.codecs import Stream
from schemas.errors import StoreError
from schemas.store.map_file import map_file
from schemas.store.paths import main_chunk

__all__ = ["MISSING", "ROW_COLUMNS", "Block", "open_block"]

MISSING: Final = np.uint64(2**64 - 1)  # in a shard index: no chunk
ROW_COLUMNS: Final = ("capture", "position", "token_id", "flags")
Array = npt.NDArray[Any]


class Block:
    """R rows × L layers of one site in F frames: sealed, or (schemas.store.cold_block) cold.

    An array is read when it is first asked for. OSError, ValueError, KeyError or TypeError where a file is not whole.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.attributes: dict[str, Any] = json.loads((folder / "zarr.json").read_text())["attributes"]
        self.layers: list[int] = list(self.attributes["layers"])
        self.captures: list[str] = list(self.attributes["captures"])
        self.declared = codecs.streams(self.attributes["codec"]["name"], self.attributes["width"],
                                       self.attributes["model_dtype"])

    @property
    def site(self) -> str:
        """The site that all rows are of."""
        return str(self.attributes["site"])

    @property
    def main(self) -> Path:
        """The file of the main stream; of a sealed block, the file that was the journal."""
        return self.folder / main_chunk(self.declared[0].name)

    @cached_property
    def row(self) -> dict[str, npt.NDArray[np.uint32]]:
        """ROW_COLUMNS, each ``[R]``."""
        return {name: self.column(name, "<u4") for name in ROW_COLUMNS}

    @cached_property
    def step(self) -> npt.NDArray[np.uint64] | None:
        """The step that computed each row, NO_STEP where its sender told none, ``[R]``; None where none did."""
        return self.column("step", "<u8") if (self.folder / "step").exists() else None

    @cached_property
    def present(self) -> npt.NDArray[np.bool_]:
        """Whether there is such a row, ``[R, L]``."""
        return np.fromfile(self._matrix("present"), bool).reshape(len(self.row["position"]), len(self.layers))

    @cached_property
    def checksum(self) -> npt.NDArray[np.uint64]:
        """The xxh3 of each row, ``[R, L]``."""
        return np.fromfile(self._matrix("checksum"), "<u8").reshape(self.present.shape)

    def mapped_checksum(self) -> npt.NDArray[np.uint64]:
        """``checksum`` as it is in the file at any time: rows are erased while a block is open."""
        return np.frombuffer(map_file(self._matrix("checksum")), "<u8").reshape(-1, len(self.layers))

    @cached_property
    def frames(self) -> npt.NDArray[np.uint64]:
        """The byte offset of each frame in the main file of a sealed block, ``[F]``."""
        return self.column("frame", "<u8")

    def column(self, name: str, dtype: str) -> Array:
        """An array by row or by frame; FileNotFoundError where the block has none of the name."""
        return np.fromfile(self.folder / name / "c" / "0", dtype)

    def _matrix(self, name: str) -> Path:
        return self.folder / name / "c" / "0" / "0"

    def side_file(self, stream: Stream) -> Path:
        """The one file of a side array."""
        return self.folder.joinpath(stream.name, "c", *["0"] * (2 + len(stream.shape)))

    def side(self, stream: Stream) -> Array:
        """A side array ``[R, L, *shape]`` of a sealed block."""
        shape = (len(self.layers), len(self.present), *stream.shape)
        return np.fromfile(self.side_file(stream), np.dtype(stream.dtype).newbyteorder("<"), int(np.prod(shape))
                           ).reshape(shape).swapaxes(0, 1)

    def index(self) -> npt.NDArray[np.uint64]:
        """The shard index ``[R, L, 2]`` at a sealed block's end; StoreError where it does not match its checksum."""
        nbytes = self.present.size * 16
        with self.main.open("rb") as file:
            file.seek(-(nbytes + 4), 2)
            footer = file.read(nbytes + 4)
        if crc32c(footer[:-4]) != int.from_bytes(footer[-4:], "little"):
            raise StoreError("read shard index", self.main, "the index does not match its checksum")
        return np.frombuffer(footer[:-4], "<u8").reshape(*self.present.shape, 2)

    def rows_between(self, offset: int, end: int, index: npt.NDArray[np.uint64] | None = None) -> npt.NDArray[np.int64]:
        """The rows whose main bytes lie in ``[offset, end)`` of the main file: those of a frame whose head is lost."""
        first = (self.index() if index is None else index)[:, :, 0].min(axis=1, initial=MISSING)
        return np.flatnonzero((first >= offset) & (first < end))


def open_block(folder: Path) -> Block:
    """A sealed block with its small arrays read; OSError, ValueError, KeyError or TypeError where one is not whole."""
    block = Block(folder)
    _ = block.checksum, block.frames
    return block
