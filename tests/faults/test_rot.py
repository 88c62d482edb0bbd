"""Row 33: one flipped bit, in every kind of file that a store is made of. It is found, or it changes no answer."""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec

from schemas.errors import TapError
from schemas.ids import new_ulid
from schemas.reader import StoreReader
from tests.faults.conftest import times
from tests.store_helpers import SITE, Sender, WriterProcess, assert_rows, until
from writer_service import fs, recovery

LAYERS, COUNT, FRAME = [0, 1, 2, 3], 6, 8  # captures; rows of each, in two frames


def made(store: Path) -> list[str]:
    """A store with a block and an open segment, each with half of the captures."""
    captures = [new_ulid() for _ in range(COUNT)]
    for half in (captures[: COUNT // 2], captures[COUNT // 2 :]):
        with WriterProcess(store, "--seal-idle-s", "60") as writer, Sender(writer.endpoint) as engine:
            for number, capture in enumerate(half, captures.index(half[0])):
                engine.open(capture, prompt_len=2 * FRAME, codec="int8b64")
                for start in (0, FRAME):
                    engine.frame([(capture, number, range(start, start + FRAME))])
                engine.finish(capture, end=2 * FRAME)
            engine.wait()
            with StoreReader(store) as reader:
                for capture in half:
                    assert until(lambda name=capture: reader.capture(name).status == "complete")  # type: ignore[misc]
            writer.stop() if half[0] == captures[0] else writer.kill()
    return captures


def kind_of(path: Path, store: Path) -> str:
    parts = path.relative_to(store).parts
    if parts[0] == "blocks":
        return "block: " + "/".join(part for part in parts[2:] if not part.isdigit())
    return "open segment" if path.suffix == ".open" else "control log" if path.suffix == ".log" else path.name


def answers(store: Path, captures: list[str]) -> list[str]:
    """What a reader gets of each capture: "right", or the error; a wrong answer fails."""
    found = []
    for number, capture in enumerate(captures):
        try:
            with StoreReader(store) as reader:
                got = reader.slice(capture, SITE, LAYERS, 0, 2 * FRAME)
                status = reader.capture(capture).status
                manifest = reader.manifest(capture)
        except (TapError, sqlite3.DatabaseError, OSError, msgspec.MsgspecError) as error:
            found.append(type(error).__name__)
            continue
        assert_rows(got, number, got.positions.tolist())
        whole = got.positions.tolist() == list(range(2 * FRAME))
        assert whole or status != "complete" or sum(m.rows for m in manifest.rows[0].missing), "silently short"
        found.append("right" if whole else "short, and says so")
    return found


def test_row_33_a_flipped_bit_in_every_kind_of_file(
    tmp_path: Path, rng: random.Random, record_property: Callable[[str, object], None]
) -> None:
    """Read as it is, and again after a start of the writer: wrong rows never; captures in other files always right."""
    store = tmp_path / "store"
    captures = made(store)
    files = sorted(path for path in store.rglob("*") if path.is_file() and path.stat().st_size)
    by_kind: dict[str, list[Path]] = {}
    for path in files:
        by_kind.setdefault(kind_of(path, store), []).append(path)
    flips = times(1, max(1, 1000 // len(by_kind) + 1)) * len(by_kind)
    seen: Counter[str] = Counter()
    for flip in range(flips):
        kind = list(by_kind)[flip % len(by_kind)]
        path = rng.choice(by_kind[kind])
        copy = tmp_path / "copy"
        shutil.copytree(store, copy)
        target = copy / path.relative_to(store)
        data = bytearray(target.read_bytes())
        bit = rng.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        target.write_bytes(data)
        where = f"{kind} byte {bit // 8}"
        for moment in ("at rest", "after a start"):
            if moment == "after a start":
                try:
                    fs.close(recovery.recover(copy).lock)
                except (TapError, sqlite3.DatabaseError) as error:
                    seen[f"the start is refused ({type(error).__name__})"] += 1
                    break
            found = answers(copy, captures)
            bad = [number for number, answer in enumerate(found) if answer != "right"]
            if kind == "open segment":
                assert all(number >= COUNT // 2 for number in bad), (where, moment, found)
            if kind.startswith("block"):
                assert all(number < COUNT // 2 for number in bad), (where, moment, found)
            seen["no answer changes" if not bad else "named"] += 1
        shutil.rmtree(copy)
    record_property("times", f"{flips} flips in {len(by_kind)} kinds of file: "
                    + ", ".join(f"{what} {count}" for what, count in seen.most_common()))
    print(seen)
