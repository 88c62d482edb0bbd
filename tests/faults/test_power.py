"""Row 11: the power goes. Of every file only what was synced is certain; of the rest, any part may be there."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

from tests.faults.conftest import times
from tests.faults.nursery import Forked, Nursery
from tests.faults.traffic import Traffic


def lose(store: Path, synced: Path, rng: random.Random) -> int:
    """Spoil what was not synced: cut off, zeroed or turned to noise, page by page; how many bytes that were."""
    certain: dict[int, int] = {}
    for line in synced.read_text().split("\n")[:-1]:
        inode, size = map(int, line.split())
        certain[inode] = max(certain.get(inode, 0), size)
    spoiled = 0
    for path in [*store.glob("writers/w0/journal/*"), *store.glob("catalog.sqlite-wal")]:
        size, safe = path.stat().st_size, certain.get(path.stat().st_ino, 0)
        if path.name.endswith("-wal"):
            safe = rng.randrange(size + 1)  # the catalog is a cache: its log may lose any tail
        if size <= safe:
            continue
        spoiled += size - safe
        with open(path, "r+b") as file:
            for at in range(safe, size, 4096):
                file.seek(at)
                kind, nbytes = rng.randrange(3), min(4096, size - at)
                if kind:
                    file.write(bytes(nbytes) if kind == 1 else rng.randbytes(nbytes))
            if rng.random() < 0.5 or path.name.endswith("-wal"):
                file.truncate(rng.randrange(safe, size + 1))
    for path in store.glob("catalog.sqlite-shm"):
        path.unlink()
    return spoiled


def test_row_11_power_loss(
    nursery: Nursery, store: Path, rng: random.Random, record_property: Callable[[str, object], None]
) -> None:
    """Killed at random, then every byte that was not synced cut off, zeroed or turned to noise."""
    writer, losses, rows, spoiled = Forked(nursery, store), times(3, 100), 0, 0
    synced = writer.folder / "synced"
    writer.begin(FAULT_SYNCED=str(synced))
    assert writer.ready()
    traffic = Traffic(writer.endpoint, rng)
    traffic.connect()
    for _ in range(losses):
        traffic.send(rng.randrange(5, 60))
        time.sleep(rng.random() * 0.06)
        traffic.receive()
        traffic.send(rng.randrange(1, 20))
        time.sleep(rng.random() * 0.004)
        writer.end(signal.SIGKILL)
        traffic.receive()
        spoiled += lose(store, synced, rng)
        writer.begin(FAULT_SYNCED=str(synced))
        assert writer.ready(), writer.log.read_text()
        rows += traffic.check(store, some=4)
        traffic.connect()
    traffic.settle(store)
    rows += traffic.check(store)
    writer.end(signal.SIGTERM)
    traffic.close()
    record_property("times", f"{losses} losses, {spoiled} unsynced bytes spoiled, {rows} rows compared")
