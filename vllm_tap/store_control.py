"""Records to a store's writer from the command line: to the one that runs, or to one started for it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from schemas.errors import StoreError
from schemas.read.reader import StoreReader
from schemas.wire.control_channel import ControlChannel
from schemas.wire.records import Delete, Hold
from vllm_tap.serve.services import make_socket_dir
from vllm_tap.serve.writer_process import WriterProcess
from writer_service.recover.store_lock import is_free, listens

__all__ = ["delete", "hold"]

_SUBMIT_S: Final = 10.0
_ERASE_S: Final = 60.0
listens_s: Final = 30.0  # how long a writer that starts is waited for


def delete(store: Path, refs: list[str]) -> list[str]:
    """Delete captures; their ids. Without a running writer their bytes are erased when this returns."""
    with _channel(store) as (channel, ours), StoreReader(store) as reader:
        targets = [reader.target(ref)[0] for ref in refs]  # all of them, before the first goes
        for target in targets:
            channel.submit(lambda seq, target=target: Delete(seq=seq, capture=target), _SUBMIT_S)  # type: ignore[misc]
        deadline = time.monotonic() + _ERASE_S
        while ours and reader.erasing() and time.monotonic() < deadline:
            time.sleep(0.1)
    return targets


def hold(store: Path, ref: str, on: bool) -> str:
    """Put a capture on hold or release it; its id."""
    with _channel(store) as (channel, _), StoreReader(store) as reader:
        target = reader.target(ref)[0]
        channel.submit(lambda seq: Hold(seq=seq, capture=target, on=on), _SUBMIT_S)
    return target


@contextmanager
def _channel(store: Path) -> Iterator[tuple[ControlChannel, bool]]:
    """A channel to the store's writer, and whether that was started for it."""
    StoreReader(store).close()  # no store, no writer
    if (endpoint := _endpoint(store)) is not None:
        channel = ControlChannel(endpoint, "cli")
        try:
            yield channel, False
        finally:
            channel.close()
        return
    folder = make_socket_dir()
    try:
        endpoint = f"ipc://{folder / 'writer.sock'}"
        with WriterProcess(store, endpoint):
            channel = ControlChannel(endpoint, "cli")
            try:
                yield channel, True
            finally:
                channel.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _endpoint(store: Path) -> str | None:
    """The endpoint of the store's writer, None where it has none. StoreError where one does not listen in time."""
    deadline = time.monotonic() + listens_s
    while not is_free(store):
        if (found := listens(store)) is not None:
            return found
        if time.monotonic() > deadline:
            raise StoreError("reach the writer of", store, f"it does not listen yet, after {listens_s:g} s",
                             "it is starting, or another command has the store: try again when it is done")
        time.sleep(0.05)
    return None
