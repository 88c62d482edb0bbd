"""Stored rows of an index, copied out of the files in which they lie, or the bucket that they were evicted to."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from io import FileIO
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from schemas.catalog.records import Segment
from schemas.errors import CorruptError, NotFoundError, StoreError
from schemas.lru import Lru
from schemas.objects.evicted import Evicted, EvictedWatch, evicted_numbers, read_away
from schemas.read.reader import StoreReader
from schemas.read.segment_maps import SegmentMaps, View, opened
from schemas.store.row_checksums import piece_digests
from schemas.store.segment import FrameView, head_digest, read_frame, verify_payload
from schemas.wire.row_table import FLAG_ERASED
from vllm_tap.loader.block_rows import Stored, copy_by_block
from vllm_tap.loader.row_index import RowIndex, relocated

__all__ = ["RowFiles"]

_HEADS_MAX: Final = 4096
_SCRATCH_BYTES: Final = 1 << 18
_GAP_BYTES: Final = 1 << 14  # copying so much that is not wanted takes no longer than asking once more
Bytes = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]


class RowFiles:
    """Rows by their numbers in the index, from this process.

    Blocks are read and not mapped. Erasing may free a page, and a full file system in memory then has none to fault in:
    the process would end. Cold blocks are mapped, because nothing in them is ever erased: others take their place.
    """

    def __init__(self, index: RowIndex, verify: bool, sweepers: int = 1) -> None:
        """``sweepers`` is the number of processes that read the index, each rows of its own."""
        self.index, self._verify, self._sweepers = index, verify, sweepers
        self._maps = SegmentMaps(index.store, index.uuid)  # of cold blocks and of checksums
        self._watch, self._away = EvictedWatch(index.store), dict[int, Evicted]()
        self._reader: StoreReader | None = None  # of evicted rows
        self._heads = Lru[tuple[int, int], FrameView](_HEADS_MAX)
        self._scratch = np.empty(_SCRATCH_BYTES, np.uint8)
        # The segment that was read last, where it lies, and it itself: a file closes itself, also when the interpreter
        # ends and nothing is left of what this module has imported.
        self._file: tuple[int, Path, FileIO] | None = None

    def fill(self, chosen: I64, slots: I64, stored: Sequence[Stored], token_id: I64) -> None:
        """Copy rows ``chosen`` of the index to ``slots`` of every key's arrays, and their token ids to those of
        ``token_id``. A key whose entry of ``stored`` has no arrays is left out.

        Rows that were moved since (by compaction) are looked up anew: ``index`` then is another, of the same rows. What
        ``copy`` raises.
        """
        while True:
            away = self._look()
            try:
                self._fill(chosen, slots, stored, token_id, away)
                return
            except CorruptError:
                raise
            except StoreError:
                moved = relocated(self.index)
                if np.array_equal(moved.frames, self.index.frames) and self._look() == away:
                    raise
                self.index = moved

    def _look(self) -> Mapping[int, Evicted]:
        """The records of blocks whose rows lie in a bucket by now."""
        if self._watch.has_moved():
            before, self._away = self._away, {
                number: record for number in evicted_numbers(self.index.store)
                if (record := read_away(self.index.store, number)) is not None}
            for number in before.keys() | self._away.keys():
                if before.get(number) != self._away.get(number):
                    self._forget(number)
        return self._away

    def _fill(self, chosen: I64, slots: I64, stored: Sequence[Stored], token_id: I64, away: Mapping[int, Evicted]
              ) -> None:
        evicted = np.isin(self.index.frames[:, 0], list(away))
        for keys in self._alike(stored):
            frame, row = self.index.frame[keys[0]][chosen], self.index.row[keys[0]][chosen]
            if len(there := np.flatnonzero(evicted[frame])):
                found = copy_by_block(self._beyond(), self.index, keys, chosen[there], stored, slots[there])
                if keys[0] == 0:
                    token_id[slots[there]] = found
            here = np.flatnonzero(~evicted[frame])
            order = here[np.lexsort((row[here], frame[here]))]
            numbers, places = chosen[order], slots[order]
            bounds = np.flatnonzero(np.diff(frame[order], prepend=-1, append=-1))
            for begin, end in pairwise(bounds.tolist()):
                where = places[begin:end]
                found = self.copy(keys, numbers[begin:end], stored, where)
                if keys[0] == 0:
                    token_id[where] = found

    def _beyond(self) -> StoreReader:
        """The reader of evicted rows, which knows of all that moved since."""
        if self._reader is None:
            self._reader = StoreReader(self.index.store, self.index.cache, self.index.cache_bytes,
                                       sweepers=self._sweepers)
        self._reader.tidy()
        return self._reader

    def _alike(self, stored: Sequence[Stored]) -> list[list[int]]:
        """Keys in groups whose rows lie in the same rows of the same frames, so that these are looked up once a group.
        Keys that are not wanted are left out, but for the first: its frames tell the tokens.
        """
        groups: list[list[int]] = []
        for key in range(len(self.index.keys)):
            if key and not stored[key]:
                continue
            for group in groups:
                if self.index.frame[group[0]] is self.index.frame[key]:
                    group.append(key)
                    break
            else:
                groups.append([key])
        return groups

    def copy(self, keys: Sequence[int], numbers: I64, stored: Sequence[Stored], slots: I64) -> npt.NDArray[np.uint32]:
        """Copy rows ``numbers``, all of one frame and ascending, to ``slots`` of the keys' arrays, and give their token
        ids [n]. ``stored`` has an entry for every key of the index; ``keys`` lie in the same rows of that frame.

        NotFoundError where one was erased, CorruptError where bytes do not match their checksums.
        """
        index = self.index
        number, offset = index.frames[index.frame[keys[0]][numbers[0]]].tolist()
        segment, rows = index.segments[number], index.row[keys[0]][numbers].astype(np.int64)
        layers = [index.keys[key][1] for key in keys]
        while True:
            view = self._view(segment, offset)
            erased = view.table.flags[rows] & FLAG_ERASED != 0
            if erased.any():
                gone = index.captures[index.capture[numbers[erased][0]]]
                raise NotFoundError(f"capture {gone} was deleted after the dataset was made; make the dataset again: "
                                    "it is left out then")
            wanted = view.pieces([view.frame.layers.index(layer) for layer in layers], rows)
            for key, pieces in zip(keys, wanted, strict=True):
                for stream, out in enumerate(stored[key].values()):
                    if isinstance(view, FrameView) and not view.whole:
                        self._read(segment, offset + view.layout.parts[stream], pieces, out, slots)
                    else:
                        out[slots] = view.section(stream)[pieces]
            bad = self._verify and not self._match(segment, offset, layers, rows, [stored[key] for key in keys], slots)
            # A head is rewritten before rows are erased, so one that is still the same now vouches for the copy.
            if self._stale(segment, offset, view):
                self._forget(segment.number)
            elif bad:
                raise CorruptError("read rows", f"block {number}, frame at byte {offset}",
                                   "a row does not match its checksum", "vllm-tap fsck names all that do not")
            else:
                return view.table.token_id[rows]

    def close(self) -> None:
        """Close what is open; what was copied stays."""
        self._maps.close()
        self._heads.clear()
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        if self._file is not None:
            self._file[2].close()
            self._file = None

    def _view(self, segment: Segment, offset: int) -> View:
        if segment.cold:
            return self._maps.frame(segment, offset)
        try:
            return self._frame(segment, offset)
        except CorruptError:  # of a file that another took the place of, or damaged
            self._forget(segment.number)
            return self._frame(segment, offset)

    def _frame(self, segment: Segment, offset: int) -> FrameView:
        """A frame of a file that rows may be erased from: its head, unless only the frame as a whole has checksums."""
        key, whole = (segment.number, offset), self._verify and self._maps.block(segment) is None
        view = None if whole else self._heads.get(key)
        if view is None:
            path, fd = self._open(segment)
            view = read_frame(fd, offset, self.index.uuid, segment.number, path, payload=whole)
            if whole:
                verify_payload(view, path)
                return view
            self._heads.put(key, view)
        return view

    def _read(self, segment: Segment, begin: int, pieces: I64, out: Bytes, slots: I64) -> None:
        """Ascending pieces of the stream that begins at byte ``begin``, by way of memory that stays in the cache."""
        path, fd = self._open(segment)
        nbytes = out.shape[1]
        if len(self._scratch) < nbytes:
            self._scratch = np.empty(nbytes, np.uint8)
        for a, b in _stretches(pieces, nbytes, len(self._scratch) // nbytes):
            first, last = int(pieces[a]), int(pieces[b - 1])
            part = self._scratch[:(last - first + 1) * nbytes]
            if os.preadv(fd, [part.data], begin + first * nbytes) < len(part):
                raise CorruptError("read rows", f"{path} from byte {begin} on", "the file was cut")
            near = part.reshape(-1, nbytes)
            out[slots[a:b]] = near if len(near) == b - a else near[pieces[a:b] - first]

    def _match(self, segment: Segment, offset: int, layers: list[int], rows: I64, copied: Sequence[Stored], slots: I64
               ) -> bool:
        """Whether every row that was copied has its checksum; True where frames are compared with theirs as a whole."""
        block = self._maps.block(segment)
        return block is None or all(
            bool((piece_digests(next(iter(arrays.values())), list(arrays.values())[1:], slots) == expected).all())
            for expected, arrays in zip(block.checksums_of(block.start(offset) + rows, layers), copied, strict=True)
            if arrays)

    def _stale(self, segment: Segment, offset: int, view: View) -> bool:
        if isinstance(view, FrameView):
            return head_digest(self._open(segment)[1], offset) != view.digest
        return view.stale

    def _open(self, segment: Segment) -> tuple[Path, int]:
        if self._file is None or self._file[0] != segment.number:
            path, file = opened(self.index.store, segment, FileIO)
            if self._file is not None:
                self._file[2].close()
            self._file = segment.number, path, file
        _, path, file = self._file
        return path, file.fileno()

    def _forget(self, segment: int) -> None:
        """Look at a segment anew: it was erased from, moved, evicted, or brought back."""
        self._maps.forget(segment)
        for key, _ in self._heads.items():
            if key[0] == segment:
                self._heads.pop(key)
        if self._file is not None and self._file[0] == segment:
            self._file[2].close()
            self._file = None


def _stretches(pieces: I64, nbytes: int, most: int) -> Iterable[tuple[int, int]]:
    """Runs ``[begin, end)`` of ascending pieces that are read at once, ``most`` at a time with what lies between."""
    span = pieces - pieces[0]
    if span[-1] < most and span[-1] + 1 == len(pieces):
        return [(0, len(pieces))]
    cuts = np.flatnonzero((np.diff(pieces) * nbytes > _GAP_BYTES) | np.diff(span // most).astype(bool)) + 1
    return pairwise([0, *cuts.tolist(), len(pieces)])
