"""Frames out of runs: rows of one entry from several steps leave in one message, once it is full or old."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import numpy as np
import xxhash

from engine_side.transport.events import Entry, Mark, Run
from engine_side.transport.shared_memory import Regions, Shared
from schemas import codecs, limits
from schemas.wire.engine_info import EngineInfo
from schemas.wire.layout import share_widths
from schemas.wire.messages import Frame, StreamPart, TapCounters
from schemas.wire.row_table import RowTable

_HASHERS: Final = 2  # threads that hash what is long, while the sender makes the next frames
_LONG_BYTES: Final = 1 << 20
_APART_BYTES: Final = 1 << 16  # pieces that are hashed where they lie: a copy side by side would cost more

Digest = Callable[[], int]  # the xxh3 of a stream: waits for it


@dataclass(slots=True)
class OpenFrame:
    """A frame that is still growing."""

    started_s: float
    runs: list[Run] = field(default_factory=list)
    captures: list[tuple[list[str], Any]] = field(default_factory=list)  # by run, names and each row's index into them
    nbytes: int = 0
    steps: int = 0
    rows: int = 0


class FrameBuilder:
    """The frames that grow, one of each entry; a closed one goes to ``send`` with its row table, the digests that its
    streams lack, and its regions.
    """

    def __init__(self, info: EngineInfo, shared: Shared, regions: Regions, counters: TapCounters, rank: int,
                 send: Callable[[Frame, bytes, Sequence[Digest], Sequence[Mark]], None]) -> None:
        self.open: dict[Entry, OpenFrame] = {}
        self._info, self._shared, self._regions, self._counters = info, shared, regions, counters
        self._rank, self._send = rank, send
        self._part = info.layout[rank] if info.layout else None
        self._widths = share_widths(self._part, info.widths)
        self._hashers = ThreadPoolExecutor(_HASHERS, thread_name_prefix="hash")
        self._copied = np.empty(0, np.uint8)  # where steps are put together; kept: new memory has to be touched

    def add(self, run: Run, slots: dict[int, str]) -> None:
        """Take rows that lie in the ring; ``slots`` has the capture of each slot."""
        self._regions.hold(run.mark)
        try:
            distinct, inverse = np.unique(run.slot, return_inverse=True)
            names = [slots[int(slot)] for slot in distinct]
        except BaseException:
            self._regions.release([run.mark])
            raise
        rows = run.steps * len(run.slot)
        if (begun := self.open.get(run.entry)) is not None and begun.rows + rows > limits.frame_rows_max:
            self.close(run.entry)
        frame = self.open.setdefault(run.entry, OpenFrame(time.monotonic()))
        frame.rows += rows
        frame.runs.append(run)
        frame.captures.append((names, inverse))
        frame.nbytes += run.steps * sum(size for _, size in run.extents.values())
        frame.steps += run.steps
        if frame.nbytes >= limits.frame_bytes_target or frame.steps >= 1024:
            self.close(run.entry)

    def close_of(self, capture: str) -> None:
        """Close the frames that have rows of a capture."""
        for entry, frame in list(self.open.items()):
            if any(capture in names for names, _ in frame.captures):
                self.close(entry)

    def close_old(self, force: bool) -> None:
        """Close the frames that have waited long enough for more rows, or all of them."""
        now_s = time.monotonic()
        for entry, frame in list(self.open.items()):
            if force or now_s - frame.started_s >= limits.frame_delay_ms / 1000:
                self.close(entry)

    def close(self, entry: Entry) -> None:
        """Send the frame of an entry, if there is one."""
        if (frame := self.open.pop(entry, None)) is None:
            return
        marks = [run.mark for run in frame.runs]
        try:
            self._send(*self._message(entry, frame), marks)
        except BaseException:
            self._regions.release(marks)
            raise

    def _message(self, entry: Entry, frame: OpenFrame) -> tuple[Frame, bytes, list[Digest]]:
        """The message of a frame, which has no number yet, its row table, and the digests of its streams."""
        captures = list(dict.fromkeys(name for names, _ in frame.captures for name in names))
        number = {name: i for i, name in enumerate(captures)}
        capture = np.concatenate([
            np.tile(np.asarray([number[name] for name in names])[inverse], run.steps)
            for run, (names, inverse) in zip(frame.runs, frame.captures, strict=True)
        ])
        table = RowTable(
            capture.astype(np.uint32),
            np.concatenate([self._positions(run) for run in frame.runs]).astype(np.uint32),
            np.concatenate([self._column(run, run.tokens, "<u4") for run in frame.runs]),
            np.concatenate([np.tile(run.flags, run.steps) for run in frame.runs]).astype(np.uint32),
        ).to_bytes()
        width, dtype = self._widths[entry.site], self._info.dtype_of(entry.site)
        streams = [self._stream(stream.name, frame.runs) for stream in codecs.streams(entry.codec, width, dtype)]
        return Frame(
            seq=0, site=entry.site, codec=entry.codec, dtype=dtype, width=width, layers=list(entry.layers),
            captures=captures, runs=[len(run.slot) for run in frame.runs for _ in range(run.steps)],
            table_xxh3=xxhash.xxh3_64_intdigest(table),
            streams=[part for part, _ in streams],
            fingerprint=self._info.fingerprint, rank=self._rank, time_ns=time.time_ns(),
            steps=msgspec.UNSET if self._part is None else [run.number + step * run.pace for run in frame.runs
                                                            for step in range(run.steps)],
        ), table, [digest for _, digest in streams]

    def _column(self, run: Run, offset: int, dtype: str) -> Any:
        """A column of all steps of a run that lies in the ring from ``offset`` on."""
        size = np.dtype(dtype).itemsize * len(run.slot)
        return self._shared.blocks_at(offset, size, run.steps, run.stride).copy().view(dtype).reshape(-1)

    def _positions(self, run: Run) -> Any:
        """The positions that the model used; they differ from the host's only where the host had to guess."""
        used = self._column(run, run.positions, "<i8")
        expected = (run.position + np.arange(run.steps)[:, None]).reshape(-1)
        if not np.array_equal(used, expected):
            self._counters.position_mismatches += 1
        return used

    def _stream(self, name: str, runs: list[Run]) -> tuple[StreamPart, Digest]:
        extents = [(run.extents[name][0] + step * run.stride, run.extents[name][1])
                   for run in runs for step in range(run.steps)]
        part = StreamPart(name, sum(size for _, size in extents), 0, extents)
        if part.nbytes >= _LONG_BYTES and part.nbytes >= _APART_BYTES * len(extents):
            return part, self._hashers.submit(_digest, [self._shared.bytes_at(*extent) for extent in extents]).result
        digest = _digest(self._contiguous(*run.extents[name], run) for run in runs)  # in turn: they share memory
        return part, lambda: digest

    def _contiguous(self, offset: int, size: int, run: Run) -> Any:
        """The bytes of a stream in all steps of a run, side by side.

        One copy and one checksum are cheaper than a checksum of many small extents.
        """
        if run.steps == 1:
            return self._shared.bytes_at(offset, size)
        if len(self._copied) < run.steps * size:
            self._copied = np.empty(run.steps * size, np.uint8)
        together = self._copied[: run.steps * size]
        np.copyto(together.reshape(run.steps, size), self._shared.blocks_at(offset, size, run.steps, run.stride))
        return together


def _digest(buffers: Iterable[Any]) -> int:
    digest = xxhash.xxh3_64()
    for buffer in buffers:
        digest.update(buffer)
    return digest.intdigest()
