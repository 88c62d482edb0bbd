"""Rows of a site as they are asked for: by range, by place, or any rows of any captures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from schemas import codecs, limits
from schemas.catalog.parts import merged
from schemas.codecs import Stream
from schemas.errors import LimitError, NotFoundError
from schemas.manifest import Missing
from schemas.read.coverage import LayerGroup
from schemas.spec import Resolved

__all__ = ["DECODED", "Part", "Pick", "Places", "RowFormat", "RowsAt", "Slice", "Which", "check_layers", "common_rows",
           "missing_of"]

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowFormat:
    """Codec, dtype and width of a site's stored rows."""

    codec: str
    dtype: str
    width: int

    @property
    def streams(self) -> tuple[Stream, ...]:
        """The codec's streams."""
        return codecs.streams(self.codec, self.width, self.dtype)

    @property
    def decoded_width(self) -> int:
        """Numbers that a row decodes to."""
        return codecs.identified(self.codec).decoded_width(self.width)

    def of_columns(self, width: int) -> RowFormat:
        """The format in which a share of so many columns is stored."""
        return replace(self, width=width)

    def check_bytes(self, rows: int) -> None:
        """LimitError where so many stored rows are more than a slice may have."""
        nbytes = rows * sum(stream.nbytes for stream in self.streams)
        if nbytes > limits.slice_bytes_max:
            raise LimitError("bytes of a slice", nbytes, limits.slice_bytes_max, "ask for fewer layers or positions")

    def decoded(self, copied: Sequence[Bytes]) -> npt.NDArray[np.float32]:
        """Rows that were copied, by stream uint8 ``[layers, n, piece bytes]``, as float32 ``[layers, n, width]``."""
        pieces = {stream.name: each.view(stream.dtype).reshape(*each.shape[:2], *stream.shape)
                  for stream, each in zip(self.streams, copied, strict=True)}
        return codecs.decode(self.codec, pieces, self.width, self.dtype)

    def assembled(self, layers: int, rows: int, parts: Sequence[Part]) -> dict[str, Array]:
        """The stored numbers by stream, ``[layers, rows, *stream.shape]``."""
        made: dict[str, Array] = {}
        for number, stream in enumerate(self.streams):
            if len(parts) == 1 and parts[0].at is None:
                whole = parts[0].copied[number]
            else:
                whole = np.empty((layers, rows, stream.nbytes), np.uint8)
                for part in parts:
                    at = np.arange(rows) if part.at is None else part.at
                    whole[np.asarray(part.members)[:, None], at] = part.copied[number]
            made[stream.name] = whole.view(stream.dtype).reshape(layers, rows, *stream.shape)
        return made


@dataclass(frozen=True, slots=True)
class Part:
    """Rows that were copied, by stream uint8 ``[members, n, piece bytes]``: which of the layers, and which of the rows
    (None: all of them, in order).
    """

    members: list[int]
    at: I64 | None
    copied: list[Bytes]


DECODED: Final = "raw", "float32"  # codec and dtype of rows that were put together of the columns of several ranks


@dataclass(frozen=True, slots=True)
class Slice:
    """Rows ``[start, stop)`` of some layers of a site, as stored; of a site that ranks share out, decoded (DECODED).

    ``pieces[stream]`` is ``[layers, n, *stream.shape]``; ``positions``, ``token_ids`` and ``flags`` (wire.row_table:
    generated, recomputed, an accepted draft) are uint32 ``[n]``. A
    position is a row only if every asked layer has it; the others are in ``missing``. ``clipped`` says that the range
    asked for reached past the end. ``codec`` is the identity; ``codecs.identified`` tells what its numbers are.
    """

    capture: str
    site: str
    layers: list[int]
    codec: str
    dtype: str
    width: int
    start: int
    stop: int
    positions: npt.NDArray[np.uint32]
    token_ids: npt.NDArray[np.uint32]
    flags: npt.NDArray[np.uint32]
    pieces: dict[str, Array]
    missing: list[Missing]
    clipped: bool

    def values(self) -> npt.NDArray[np.float32]:
        """Decoded rows, float32 ``[layers, n, decoded width]``: k numbers a row where the codec projects."""
        return codecs.decode(self.codec, self.pieces, self.width, self.dtype)

    def kept_energy(self) -> npt.NDArray[np.float32] | None:
        """Share of each row's energy that was kept, ``[layers, n]``; None where the codec keeps every column."""
        return codecs.kept_energy(self.pieces)


@dataclass(frozen=True, slots=True)
class RowsAt:
    """Any rows of one kind, in the order asked for; ``pieces[stream]`` is ``[layers, n, *stream.shape]``.

    ``token_ids`` and ``flags`` (schemas.wire.row_table) are uint32 ``[n]``.
    """

    site: str
    layers: list[int]
    codec: str
    dtype: str
    width: int
    token_ids: npt.NDArray[np.uint32]
    flags: npt.NDArray[np.uint32]
    pieces: dict[str, Array]

    def values(self) -> npt.NDArray[np.float32]:
        """Decoded rows, float32 ``[layers, n, decoded width]``."""
        return codecs.decode(self.codec, self.pieces, self.width, self.dtype)


@dataclass(frozen=True, slots=True)
class Places:
    """Places of rows of some layers of a site, for who reads very many: no row is touched to find out. Where ranks
    share the columns out, ``width`` of them from column ``start`` on.

    ``positions`` uint32 ``[n]``, ascending: those that every asked layer has. Row i of layer l is row ``row[l, i]`` of
    the frame at byte ``offset[l, i]`` of segment ``segment[l, i]``, int64 ``[layers, n]``.
    """

    capture: str
    codec: str
    dtype: str
    width: int
    positions: npt.NDArray[np.uint32]
    segment: npt.NDArray[np.int64]
    offset: npt.NDArray[np.int64]
    row: npt.NDArray[np.int64]
    start: int = 0


def check_layers(capture: str, resolved: Resolved, site: str, layers: Sequence[int]) -> None:
    """NotFoundError where the capture has not all of the layers, or one is named twice."""
    if site not in resolved.layers:
        raise NotFoundError(f"capture {capture} has no site {site}; it has: {', '.join(resolved.layers) or 'none'}")
    if absent := sorted(set(layers) - set(resolved.layers[site])):
        raise NotFoundError(f"capture {capture} has no layer {absent} of {site}; it has: {resolved.layers[site]}")
    if not layers or len(set(layers)) != len(layers):
        raise NotFoundError(f"layers = {list(layers)}: name at least one layer, each once; "
                            f"captured: {resolved.layers[site]}")


Which = slice | I64
Pick = tuple[LayerGroup, list[int], Which]


def common_rows(groups: Sequence[LayerGroup], wanted: Sequence[int], start: int, stop: int, rejected: bool
                ) -> tuple[I64, list[Pick]]:
    """Positions in ``[start, stop)`` that every wanted layer has, and for each group of layers which of ``wanted`` it
    has and which of its rows they are.

    Of ``rejected`` drafts a position may have several: they are the same where they lie in the same row of a frame.
    """
    used = [(group, members) for group in groups
            if (members := [i for i, layer in enumerate(wanted) if layer in group.layers])]
    chosen = [group.rejected if rejected else group.rows for group, _ in used]
    if len(used) == 1:
        begin, end = chosen[0].positions.searchsorted((start, stop)).tolist()
        return chosen[0].positions[begin:end], [(*used[0], slice(begin, end))]
    keys = [rows.extent << 32 | rows.row if rejected else rows.positions for rows in chosen]
    common = keys[0]
    for more in keys[1:]:
        common = np.intersect1d(common, more, assume_unique=True)
    first = chosen[0].positions[np.isin(keys[0], common)]
    inside = (first >= start) & (first < stop)
    picks: list[Pick] = [(group, members, np.flatnonzero(np.isin(key, common))[inside])
                         for (group, members), key in zip(used, keys, strict=True)]
    return first[inside], picks


def missing_of(groups: Sequence[LayerGroup], wanted: Sequence[int], start: int, stop: int) -> list[Missing]:
    """Missing ranges of any wanted layer within ``[start, stop)``; where layers differ, the first's reason."""
    used = [group for group in groups if set(group.layers) & set(wanted)]
    clipped = [Missing(max(m.start, start), min(m.stop, stop), m.reason) for group in used for m in group.missing]
    found = [m for m in clipped if m.start < m.stop]
    if len(used) == 1:
        return found
    return merged(found)
