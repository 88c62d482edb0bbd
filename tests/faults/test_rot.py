"""Row 33: one flipped bit, in every kind of file that a store is made of. It is found, or it changes no answer."""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from schemas.errors import TapError
from schemas.ids import new_ulid
from schemas.read.reader import StoreReader
from schemas.store.paths import journal_folder
from tests.faults.conftest import times
from tests.support.store_helpers import SITE, Sender, WriterProcess, assert_rows, until
from writer_service import fs
from writer_service.control_log import log_numbers, log_path
from writer_service.recover import recovery
from writer_service.tools.compaction import compact
from writer_service.tools.fsck import fsck
from writer_service.tools.rebuild import rebuild

LAYERS, EACH, FRAME = [0, 1, 2, 3], 3, 8  # captures in each kind of place; rows of each, in two frames
PLACES = ("cold block", "block", "open segment")


def made(store: Path) -> list[str]:
    """A store with a cold block, a sealed one and an open segment, each with some of the captures, in this order."""
    captures = [new_ulid() for _ in range(EACH * len(PLACES))]
    for place, first in zip(PLACES, range(0, len(captures), EACH), strict=True):
        with WriterProcess(store, "--seal-idle-s", "60") as writer, Sender(writer.endpoint) as engine:
            own = captures[first : first + EACH]
            for number, capture in enumerate(own, first):
                engine.open(capture, prompt_len=2 * FRAME, codec="int8b64")
                for start in (0, FRAME):
                    engine.frame([(capture, number, range(start, start + FRAME))])
                engine.finish(capture, end=2 * FRAME)
            engine.wait()
            with StoreReader(store) as reader:
                for capture in own:
                    assert until(lambda name=capture: reader.capture(name).status == "complete")  # type: ignore[misc]
            writer.kill() if place == "open segment" else writer.stop()
        if place == "cold block":
            assert compact(store).cold == 1
    return captures


def kind_of(path: Path, store: Path) -> str:
    parts = path.relative_to(store).parts
    if parts[0] == "blocks":
        what = "block" if (path.parents[len(parts) - 3] / "frame").exists() else "cold block"
        return f"{what}: " + "/".join(part for part in parts[2:] if not part.isdigit())
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
    kinds = rng.sample(list(by_kind), len(by_kind))
    flips = times(16, -(-1000 // len(kinds)) * len(kinds))
    drawn = [(flip, kind := kinds[flip % len(kinds)], path := rng.choice(by_kind[kind]),
              rng.randrange(8 * path.stat().st_size)) for flip in range(flips)]
    seen: Counter[str] = Counter()
    with ThreadPoolExecutor(times(1, 4)) as pool:
        for found in pool.map(lambda each: flipped(store, tmp_path / f"copy{each[0]}", captures, *each[1:]), drawn):
            seen.update(found)
    record_property("times", f"{flips} flips in {min(flips, len(kinds))} kinds of file, each read twice: "
                    + ", ".join(f"{what} {count}" for what, count in seen.most_common()))
    print(seen)


def flipped(store: Path, copy: Path, captures: list[str], kind: str, path: Path, bit: int) -> list[str]:
    """What comes of one flipped bit: as the store lies there, and after a start of the writer."""
    shutil.copytree(store, copy)
    target, outcomes = copy / path.relative_to(store), []
    data = bytearray(target.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    target.write_bytes(data)
    where = f"{kind} byte {bit // 8}"
    for moment in ("at rest", "after a start"):
        if moment == "after a start":
            try:
                fs.close(recovery.recover(copy).lock)
            except (TapError, sqlite3.DatabaseError) as error:
                outcomes.append(f"the start is refused ({type(error).__name__})")
                break
        found = answers(copy, captures)
        bad = [number for number, answer in enumerate(found) if answer != "right"]
        if (place := kind.partition(":")[0]) in PLACES:
            assert all(number // EACH == PLACES.index(place) for number in bad), (where, moment, found)
        outcomes.append("no answer changes" if not bad else "named")
    shutil.rmtree(copy)
    return outcomes


def test_row_33_a_flipped_bit_in_the_head_of_a_control_log(tmp_path: Path) -> None:
    """No hash covers the head, whose upper bits say which logs it stands for: none goes for what it says alone."""
    store, captures = tmp_path / "store", [new_ulid() for _ in range(3)]
    for number, capture in enumerate(captures):
        with WriterProcess(store, "--keep-s", "600") as writer:
            with Sender(writer.endpoint, role="api") as api:
                api.hello()
                api.own(capture, owner=f"owner {number}")
                api.wait()
            writer.stop()
    logs = log_numbers(store / journal_folder())
    assert logs == [1, 2, 3]
    for bit in range(13 * 8, 16 * 8):
        copy = tmp_path / f"bit{bit}"
        shutil.copytree(store, copy)
        head = log_path(copy / journal_folder(), 3)
        data = bytearray(head.read_bytes())
        data[bit // 8] ^= 1 << bit % 8
        head.write_bytes(data)
        found = [bad.file for bad in fsck(copy).bad if "head is damaged" in bad.what]
        assert found == [f"{journal_folder()}/{head.name}"]
        fs.close(recovery.recover(copy).lock)
        assert log_numbers(copy / journal_folder()) == logs
        fs.close(rebuild(copy).state.lock)
        with StoreReader(copy) as reader:
            assert [reader.capture(capture).owner for capture in captures] == [f"owner {n}" for n in range(3)]
        shutil.rmtree(copy)
