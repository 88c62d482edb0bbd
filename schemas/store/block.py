"""A block's own arrays, read as the plain files that they are; docs/reference/store.md names them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from google_crc32c import value as crc32c

from schemas import codecs
from schemas.codecs import Stream
from schemas.errors import CorruptError, StoreError
from schemas.store.block_files import BlockFiles, MappedFolder
from schemas.store.paths import main_chunk

__all__ = ["MISSING", "ROW_COLUMNS", "Block", "open_block"]

MISSING: Final = np.uint64(2**64 - 1)  # in a shard index: no chunk
ROW_COLUMNS: Final = ("capture", "position", "token_id", "flags")
Array = npt.NDArray[Any]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]


class Block:
    """R rows × L layers of one site in F frames: sealed, or (schemas.store.cold_block) cold.

    An array is read when it is first asked for. OSError, ValueError, KeyError or TypeError where a file is not whole.
    """

    def __init__(self, files: BlockFiles) -> None:
        self.files = files
        self.attributes: dict[str, Any] = json.loads(bytes(files.array("zarr.json", "u1")))["attributes"]
        self.layers: list[int] = list(self.attributes["layers"])
        self._numbered = np.asarray(self.layers, np.int64)
        self.captures: list[str] = list(self.attributes["captures"])
        self.declared = codecs.streams(self.attributes["codec"]["name"], self.attributes["width"],
                                       self.attributes["model_dtype"])

    @property
    def site(self) -> str:
        """The site that all rows are of."""
        return str(self.attributes["site"])

    @property
    def weight(self) -> int:
        """The weight of the block among those that a reader keeps; it maps the checksums alone."""
        return self.files.weight(1)

    @property
    def folder(self) -> Path:
        """The folder of a block that lies in one."""
        return Path(self.files.where())

    @property
    def main(self) -> Path:
        """The file of the main stream; of a sealed block, the file that was the journal."""
        return Path(self.files.where(self.main_name))

    @property
    def main_name(self) -> str:
        """Its path below the block."""
        return main_chunk(self.declared[0].name)

    @cached_property
    def row(self) -> dict[str, npt.NDArray[np.uint32]]:
        """ROW_COLUMNS, each ``[R]``."""
        return {name: self.column(name, "<u4") for name in ROW_COLUMNS}

    @cached_property
    def step(self) -> U64 | None:
        """The step that computed each row, NO_STEP where its sender told none, ``[R]``; None where none did."""
        return self.column("step", "<u8") if self.files.has(_column("step")) else None

    @cached_property
    def present(self) -> npt.NDArray[np.bool_]:
        """Whether there is such a row, ``[R, L]``."""
        return self.files.array(_matrix("present"), "?").reshape(len(self.row["position"]), len(self.layers))

    @cached_property
    def checksum(self) -> U64:
        """The xxh3 of each row, ``[R, L]``."""
        return self.files.array(_matrix("checksum"), "<u8").reshape(self.present.shape)

    @cached_property
    def checksum_now(self) -> U64:
        """``checksum`` as it is in the file at any time: rows are erased while a block is open."""
        return np.frombuffer(self.files.view(_matrix("checksum")), "<u8").reshape(-1, len(self.layers))

    @cached_property
    def frames(self) -> U64:
        """The numbers by which readers call frames, ascending, ``[F]``: its byte offset in the main file of a sealed
        block.
        """
        return self.column("frame", "<u8")

    @cached_property
    def first(self) -> U64 | None:
        """The first row of each frame, ``[F]``; None in a block that was made before these were stored."""
        return self.column("frame_row", "<u8") if self.files.has(_column("frame_row")) else None

    def column(self, name: str, dtype: str) -> Array:
        """An array by row or by frame; FileNotFoundError where the block has none of the name."""
        return self.files.array(_column(name), dtype)

    def side_file(self, stream: Stream) -> Path:
        """The one file of a side array."""
        return Path(self.files.where(_chunk(stream)))

    def side(self, stream: Stream) -> Array:
        """A side array ``[R, L, *shape]`` of a sealed block."""
        shape = (len(self.layers), len(self.present), *stream.shape)
        return self.files.array(_chunk(stream), np.dtype(stream.dtype).newbyteorder("<"), int(np.prod(shape))
                                ).reshape(shape).swapaxes(0, 1)

    @property
    def index_bytes(self) -> int:
        """Bytes of the shard index at the main file's end, its checksum included."""
        return self.present.size * 16 + 4

    def index(self) -> U64:
        """The shard index ``[R, L, 2]`` at a sealed block's end; StoreError where it does not match its checksum."""
        footer = self.files.end(self.main_name, self.index_bytes)
        if crc32c(bytes(footer[:-4])) != int.from_bytes(footer[-4:], "little"):
            raise StoreError("read shard index", self.files.where(self.main_name),
                             "the index does not match its checksum")
        return np.frombuffer(footer[:-4], "<u8").reshape(*self.present.shape, 2)

    def rows_between(self, offset: int, end: int, index: U64 | None = None) -> I64:
        """The rows whose main bytes lie in ``[offset, end)`` of the main file: those of a frame whose head is lost."""
        first = (self.index() if index is None else index)[:, :, 0].min(axis=1, initial=MISSING)
        return np.flatnonzero((first >= offset) & (first < end))

    # ── rows by their numbers in the block ──────────────────────────────────────────────────────────────────────

    def start(self, offset: int) -> int:
        """The first row of the frame at ``offset``; CorruptError where the block left the frame out."""
        at = int(np.searchsorted(self.frames, offset))
        if at == len(self.frames) or self.frames[at] != offset or self.first is None:
            raise CorruptError("read rows", f"{self.files.where()}, frame at {offset}",
                               "it was damaged when its segment was sealed")
        return min(int(self.first[at]), len(self.checksum_now))  # beyond them where it was damaged

    def columns(self, layers: Sequence[int]) -> I64:
        """The indexes of layers among the block's."""
        return np.searchsorted(self._numbered, layers)

    def checksums_of(self, rows: I64, layers: Sequence[int]) -> U64:
        """Checksums ``[layers, rows]`` of rows of the block; CorruptError where it has no such rows."""
        try:
            found: U64 = self.checksum_now[rows, self.columns(layers)[:, None]]
        except IndexError:
            raise CorruptError("read rows", f"{self.files.where()}, row {int(rows.max())}",
                               "the block says less of its rows") from None
        return found

    @property
    def alike(self) -> bool:
        """Whether pieces of all streams lie in the same order."""
        return False

    def places(self, rows: I64, columns: I64) -> list[tuple[str, I64]]:
        """The file of each stream, and the byte of it at which each (layer, row)'s piece begins, ``[layers, rows]``.

        Of a sealed block: main bytes by the shard index, others in the arrays beside it; -1 of what is not there.
        """
        number = columns[:, None] * len(self._main_starts) + rows
        return [(self.main_name, self._main_starts[rows, columns[:, None]]),
                *((_chunk(side), number * side.nbytes) for side in self.declared[1:])]

    @cached_property
    def _main_starts(self) -> I64:
        index = self.index()
        return np.where(index[:, :, 1] == self.declared[0].nbytes, index[:, :, 0].astype(np.int64), -1)


def _column(name: str) -> str:
    return f"{name}/c/0"


def _matrix(name: str) -> str:
    return f"{name}/c/0/0"


def _chunk(stream: Stream) -> str:
    return "/".join([stream.name, "c", *["0"] * (2 + len(stream.shape))])


def open_block(folder: Path) -> Block:
    """A sealed block with its small arrays read; OSError, ValueError, KeyError or TypeError where one is not whole."""
    block = Block(MappedFolder(folder))
    _ = block.checksum, block.frames
    return block
