"""Rows 11 and 38: the power goes. What was synced is certain; of the rest, bytes and names, any part may be there."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from schemas.ids import new_ulid
from schemas.read.reader import StoreReader
from tests.faults.conftest import times
from tests.faults.nursery import Forked, Nursery
from tests.faults.traffic import Traffic
from tests.support.store_helpers import SITE, Sender, assert_adds_up, until
from tests.support.writers.power import Certain
from writer_service.tools.fsck import fsck


def test_row_11_power_loss(
    nursery: Nursery, store: Path, rng: random.Random, record_property: Callable[[str, object], None]
) -> None:
    """Killed at random; then what was not synced is what it was before, cut off, zeros or noise, and names too."""
    writer, losses, rows, spoiled = Forked(nursery, store), times(3, 100), 0, 0
    synced = store.with_name("synced")
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
        spoiled += Certain(store, synced).lose(rng)
        writer.begin(FAULT_SYNCED=str(synced))
        assert writer.ready(), writer.log.read_text()
        rows += traffic.check(store, some=4)
        traffic.connect()
    traffic.settle(store)
    rows += traffic.check(store)
    writer.end(signal.SIGTERM)
    traffic.close()
    record_property("times", f"{losses} losses, {spoiled} unsynced bytes spoiled, {rows} rows compared")


@pytest.mark.parametrize("catalog", ["kept", "lost"])
def test_row_38_a_device_that_lies_about_a_sync(nursery: Nursery, store: Path, catalog: str,
                                                record_property: Callable[[str, object], None]) -> None:
    """Nothing can be promised on one: what was acknowledged is lost. That is said, and no row is made up."""
    writer, capture, synced = Forked(nursery, store), new_ulid(), store.with_name("synced")
    flags = ("--seal-idle-s", "60")
    writer.begin(flags, FAULT_SYNCED=str(synced), FAULT_LIES=".open")
    assert writer.ready()
    with Sender(writer.endpoint) as engine:
        engine.open(capture, prompt_len=9)
        for start in (0, 3, 6):
            engine.frame([(capture, 1, range(start, start + 3))])
        engine.finish(capture, end=9)
        engine.wait()
        with StoreReader(store) as reader:
            assert until(lambda: reader.capture(capture).status == "complete")
        writer.end(signal.SIGKILL)
        Certain(store, synced).lose()
        if catalog == "lost":
            for path in store.glob("catalog.sqlite*"):
                path.unlink()
        writer.begin(flags)
        assert writer.ready(), writer.log.read_text()
        engine.close()
        engine.connect()
        acknowledged = engine.durable
        covered = engine.hello().durable
        with StoreReader(store) as reader:
            manifest = reader.manifest(capture)
            assert_adds_up(manifest)
            assert reader.slice(capture, SITE, [0, 1, 2, 3]).positions.tolist() == []
        assert manifest.status == "incomplete" and {entry.captured for entry in manifest.rows} == {0}
        # The engine is asked again only where the catalog, whose own syncs were true, is gone as well.
        assert covered == (acknowledged if catalog == "kept" else 1)
    writer.end(signal.SIGTERM)
    assert fsck(store).bad == []
    record_property("times", f"catalog {catalog}: 9 acknowledged rows lost, 9 said to be missing")
