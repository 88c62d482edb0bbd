"""A small store with something of every format in it, kept for ever: what a later version must read.

    python -m tests.support.golden_store        writes the one of this version; never over one that is there

A version number that is raised (``NAME``) needs a store of its own; those of before stay.
"""

from __future__ import annotations

import tempfile
import zipfile
from pathlib import Path
from typing import Final

from schemas import limits
from schemas.read.reader import StoreReader
from schemas.store.segment import SEGMENT_VERSION
from schemas.wire.records import Hold
from tests.support.ranks import LAYERS, Rank, info_of
from tests.support.store_helpers import Sender, WriterProcess, until
from writer_service.control_log import LOG_VERSION
from writer_service.tools.compaction import compact

GOLDEN: Final = Path(__file__).parent / "golden"
NAME: Final = f"store{limits.STORE_VERSION}-segment{SEGMENT_VERSION}-log{LOG_VERSION}.zip"
COLD, SEALED, DELETED, OPEN, PARTS_COLD, PARTS_OPEN = (f"01JZZZZZZZZZZZZZZZZZZZZZ{number:02d}" for number in range(6))
ROWS: Final = 6
RANKS: Final = 2  # that send rows of the last two, since version 2
_LEFT_OUT: Final = ("catalog.sqlite", "LOCK", "endpoint")  # what follows from the rest, and what is of a process


def make(store: Path) -> None:
    """A cold block; a sealed one with an erased row's neighbours; an open segment of a writer that was killed."""
    journal, blocks = store / "writers" / "w0" / "journal", store / "blocks"
    with WriterProcess(store, "--seal-idle-s", "0.1") as writer:
        with Sender(writer.endpoint) as engine:
            engine.open(COLD, prompt_len=ROWS)
            engine.frame([(COLD, 0, range(ROWS))])
            engine.finish(COLD, end=ROWS)
            engine.wait()
            _play_ranks(writer.endpoint, PARTS_COLD, 4, end=True)
            assert until(lambda: list(blocks.glob("*.zarr")) and not list(journal.glob("[0-9]*.open")))
        writer.stop()
    assert compact(store).cold >= 1
    cold = len(list(blocks.glob("*.zarr")))
    with WriterProcess(store, "--seal-idle-s", "0.1", "--keep-s", "0.1") as writer:
        with Sender(writer.endpoint) as engine, Sender(writer.endpoint, role="api") as api:
            for capture in (SEALED, DELETED):
                engine.open(capture, prompt_len=ROWS)
            engine.frame([(SEALED, 1, range(ROWS)), (DELETED, 2, range(ROWS))])
            engine.dropped(SEALED, ROWS, ROWS + 2)
            for capture in (SEALED, DELETED):
                engine.finish(capture, end=ROWS + 2)
            engine.wait()
            assert until(lambda: len(list(blocks.glob("*.zarr"))) == cold + 1 and not list(journal.glob("[0-9]*.open")))
            api.send(Hold(api.next(), SEALED, True))
            api.delete(DELETED)
            api.wait()
            with StoreReader(store) as reader:
                db = reader._catalog.db
                assert until(lambda: not db.execute("SELECT 1 FROM doomed").fetchall())
        writer.stop()
    with WriterProcess(store, "--seal-idle-s", "600") as writer, Sender(writer.endpoint) as engine:
        engine.open(OPEN, prompt_len=ROWS, codec="raw16")
        engine.frame([(OPEN, 3, range(ROWS))], codec="raw16")
        engine.wait()
        _play_ranks(writer.endpoint, PARTS_OPEN, 5, end=False)
        writer.kill()


def _play_ranks(endpoint: str, capture: str, number: int, end: bool) -> None:
    """Rows of ranks, computed twice where position 2 is."""
    info = info_of(RANKS, group=f"group {number}")
    with Rank(endpoint, 0, info) as leader, Rank(endpoint, 1, info) as other:
        leader.open(capture, ROWS, {"resid_post": LAYERS, "q": LAYERS})
        other.join(capture)
        for rank in (leader, other):
            for site in ("resid_post", "q"):
                rank.rows(capture, number, site, range(ROWS), step=1)
                rank.rows(capture, number, site, [2], step=2, version=1, again=True)
            if end and rank is other:
                rank.part_finish(capture)
        if end:
            leader.finish(capture, end=ROWS)
        leader.wait()
        other.wait()


def main() -> None:
    """Write the store of this version."""
    GOLDEN.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(GOLDEN / NAME, "x", zipfile.ZIP_DEFLATED) as file:
        store = Path(folder) / "store"
        make(store)
        for path in sorted(store.rglob("*")):
            if path.is_file() and not path.name.startswith(_LEFT_OUT):
                file.write(path, path.relative_to(store))


if __name__ == "__main__":
    main()
