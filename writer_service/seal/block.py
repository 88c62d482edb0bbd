"""A sealed block's own arrays, read as the plain files that they are."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from google_crc32c import value as crc32c

from schemas import codecs
from schemas.codecs import Stream
from schemas.errors import StoreError
from schemas.store.paths import main_chunk
from writer_service.seal.sealing import MISSING, ROW_COLUMNS

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Block:
    """R rows × L layers of one site; arrays as docs/store.md names them."""

    folder: Path
    attributes: dict[str, Any]
    declared: tuple[Stream, ...]
    layers: list[int]
    captures: list[str]
    row: dict[str, npt.NDArray[np.uint32]]
    present: npt.NDArray[np.bool_]
    checksum: npt.NDArray[np.uint64]
    frames: npt.NDArray[np.uint64]

    @property
    def site(self) -> str:
        """The site that all rows are of."""
        return str(self.attributes["site"])

    @property
    def main(self) -> Path:
        """The file that was the journal."""
        return self.folder / main_chunk(self.declared[0].name)

    def side(self, stream: Stream) -> Array:
        """A side array ``[R, L, *shape]``."""
        file = side_chunk(self.folder, stream)
        shape = (len(self.layers), len(self.present), *stream.shape)
        return np.fromfile(file, np.dtype(stream.dtype).newbyteorder("<"), int(np.prod(shape))).reshape(
            shape).swapaxes(0, 1)

    def index(self) -> npt.NDArray[np.uint64]:
        """The shard index ``[R, L, 2]`` at the end of the main file; StoreError where it does not match its checksum.
        """
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


def side_chunk(folder: Path, stream: Stream) -> Path:
    """The one file of a side array."""
    return folder.joinpath(stream.name, "c", *["0"] * (2 + len(stream.shape)))


def open_block(folder: Path) -> Block:
    """The block; OSError, ValueError, KeyError or TypeError where its files are not whole."""
    attributes = json.loads((folder / "zarr.json").read_text())["attributes"]
    declared = codecs.streams(attributes["codec"]["name"], attributes["width"], attributes["model_dtype"])
    layers, captures = list(attributes["layers"]), list(attributes["captures"])
    row = {name: np.fromfile(folder / name / "c" / "0", "<u4") for name in ROW_COLUMNS}
    rows = len(row["position"])
    present = np.fromfile(folder / "present" / "c" / "0" / "0", bool).reshape(rows, len(layers))
    checksum = np.fromfile(folder / "checksum" / "c" / "0" / "0", "<u8").reshape(rows, len(layers))
    frames = np.fromfile(folder / "frame" / "c" / "0", "<u8")
    return Block(folder, attributes, declared, layers, captures, row, present, checksum, frames)

