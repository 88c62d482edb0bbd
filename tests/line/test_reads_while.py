"""Readers beside a writer that appends, seals, erases and takes blocks away: the old answer, the new one, or none."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from schemas.catalog.filters import read_filter
from schemas.errors import NotFoundError, StoreError
from schemas.ids import new_ulid
from schemas.read.reader import StoreReader
from tests.support.api_stack import running
from tests.support.store_helpers import SITE, Sender, WriterProcess, assert_rows, engine_info, is_erased, until
from writer_service.tools.fsck import fsck

READERS = 4


@contextmanager
def readers(read: Callable[[random.Random], str]) -> Iterator[Counter[str]]:
    """``read`` in a loop in several threads; what it answered, counted. Its errors are the test's."""
    done, seen, failures = threading.Event(), Counter[str](), []

    def loop(seed: int) -> None:
        rng = random.Random(seed)
        try:
            while not done.is_set():
                seen[read(rng)] += 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=loop, args=(seed,)) for seed in range(READERS)]
    for thread in threads:
        thread.start()
    try:
        yield seen
    finally:
        done.set()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]


@pytest.mark.parametrize("cold", [False, True], ids=["one_reader_each", "a_new_reader_each_time"])
def test_rows_are_whole_or_gone(tmp_path: Path, cold: bool) -> None:
    """Every frame has rows of three captures, so that erasing one goes on beside reads of the others."""
    store, captures, width = tmp_path / "store", [new_ulid() for _ in range(30)], 1024
    flags = ("--segment-bytes", "400000", "--seal-idle-s", "0.2", "--keep-s", "0.05")
    with WriterProcess(store, *flags) as writer, Sender(writer.endpoint, engine=engine_info(width)) as engine:
        for at in range(0, len(captures), 3):
            three = captures[at : at + 3]
            for capture in three:
                engine.open(capture, prompt_len=24)
            for start in range(0, 24, 8):
                engine.frame([(capture, captures.index(capture), range(start, start + 8)) for capture in three],
                             width=width)
            for capture in three:
                engine.finish(capture, end=24)
        engine.wait()
        own = threading.local()

        def read(rng: random.Random) -> str:
            number = rng.randrange(len(captures))
            if cold or not hasattr(own, "reader"):
                own.reader = StoreReader(store)
            try:
                got = own.reader.slice(captures[number], SITE, rng.sample(range(4), 2))
            except NotFoundError:
                return "gone"
            else:
                assert_rows(got, number, range(24))
                return "there"
            finally:
                if cold:
                    own.reader.close()

        with StoreReader(store) as reader:
            assert until(lambda: len(reader.captures(status="complete")) == len(captures))
        order = list(range(len(captures)))
        random.Random(0).shuffle(order)
        with readers(read) as seen, StoreReader(store) as reader:
            for number in order[:25]:
                engine.delete(captures[number])
                engine.wait()
            assert until(lambda: is_erased(reader, *(captures[number] for number in order[:25])))
        assert seen["gone"] > 10 and seen["there"] > 10
        writer.stop()
    assert fsck(store).bad == []
    with StoreReader(store) as reader:
        assert {row.id for row in reader.captures()} == {captures[number] for number in order[25:]}


@pytest.mark.soak
def test_never_a_500(tmp_path: Path) -> None:
    with running(tmp_path) as stack:
        spec = {"sites": ["resid_post"], "codec": "raw16"}
        captures = [stack.complete(f"while {i}", capture=spec).json()["capture"]["id"] for i in range(12)]
        before = {capture: stack.http.get(f"/v1/captures/{capture}/activations?wait=complete").content
                  for capture in captures}

        def read(rng: random.Random) -> str:
            capture = rng.choice(captures)
            answer = stack.http.get(f"/v1/captures/{capture}/activations")
            assert answer.status_code in (200, 404), answer.text
            assert answer.status_code == 404 or answer.content == before[capture]
            return str(answer.status_code)

        with readers(read) as seen:
            for capture in captures[:10]:
                assert stack.http.delete(f"/v1/captures/{capture}").status_code == 204
            with StoreReader(stack.store) as reader:
                assert until(lambda: is_erased(reader, *captures[:10]))
        assert seen["200"] and seen["404"]


def test_who_follows_outlives_that_a_neighbour_is_erased(tmp_path: Path) -> None:
    """A frame holds rows of several captures: its checksums are others once those of one are gone."""
    store, (one, other) = tmp_path / "store", [new_ulid() for _ in range(2)]
    with WriterProcess(store, "--keep-s", "0.05") as writer, Sender(writer.endpoint, engine=engine_info()) as engine:
        engine.open(one)
        engine.open(other)
        engine.frame([(one, 0, range(8)), (other, 1, range(8))])
        engine.wait()
        with StoreReader(store) as reader:
            frame, = until(lambda: reader.frames(one, SITE, 0))
            before = reader.live_rows(frame, one, [0, 1, 2, 3])
            engine.delete(other)
            engine.wait()

            def erased() -> bool:
                with StoreReader(store) as fresh:
                    return fresh.live_rows(frame, other, [0]) is None

            assert until(erased)
            after = reader.live_rows(frame, one, [0, 1, 2, 3])
            assert before is not None and after is not None and after.values.tobytes() == before.values.tobytes()
            assert reader.live_rows(frame, other, [0, 1, 2, 3]) is None


FOLLOW = """
import sys, time
from pathlib import Path
from schemas.errors import CorruptError
from schemas.read.reader import StoreReader, read_store_uuid
from schemas.read.journal_tail import JournalTail

store, capture, end = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
reader, tail = StoreReader(store), JournalTail(store, read_store_uuid(store), lambda _: end)
seen, until = 0, time.monotonic() + 1.5
while time.monotonic() < until:
    tail.look()
    for frame in tail.frames(capture, "resid_post"):
        try:
            seen += reader.live_rows(frame, capture, [0, 1, 2, 3]) is not None
        except CorruptError:
            pass
print("seen", seen > 0)
"""


def test_who_follows_outlives_that_a_file_is_cut(tmp_path: Path) -> None:
    """The writer takes back what it could not make durable: a map of it would end the follower with SIGBUS."""
    store, capture = tmp_path / "store", new_ulid()
    with WriterProcess(store) as writer, Sender(writer.endpoint, engine=engine_info(4096)) as engine:
        engine.open(capture, prompt_len=64)
        engine.frame([(capture, 0, range(64))], width=4096)
        engine.wait()
        with StoreReader(store) as reader:
            until(lambda: reader.progress(capture).captured)
        writer.kill()
    journal, = store.glob("writers/*/journal/*.open")
    durable = journal.read_bytes()
    follower = subprocess.Popen([sys.executable, "-c", FOLLOW, str(store), capture, str(len(durable))],
                                stdout=subprocess.PIPE, text=True)
    with journal.open("r+b", buffering=0) as file:
        while follower.poll() is None:
            file.seek(len(durable))
            file.write(durable)  # the same frame once more, of which the catalog does not know
            time.sleep(0.004)
            file.truncate(len(durable))
    assert follower.communicate()[0] == "seen True\n" and follower.returncode == 0


def test_a_segment_that_grows_is_mapped_once(tmp_path: Path) -> None:
    """Each read maps it as it is by then: what was parsed before must not hold the maps, and descriptors, of before."""
    store, capture = tmp_path / "store", new_ulid()
    with WriterProcess(store) as writer, Sender(writer.endpoint, engine=engine_info()) as engine, \
            StoreReader(store) as reader:
        engine.open(capture, prompt_len=40)
        for position in range(40):
            engine.frame([(capture, 0, [position])])
            engine.wait()
            until(lambda last=position: reader.progress(capture).captured == 4 * (last + 1))  # type: ignore[misc]
            assert_rows(reader.slice(capture, SITE, [0, 3]), 0, range(position + 1))
        lives = reader.frames(capture, SITE, 0)
        values = [reader.live_rows(frame, capture, [0]) for frame in lives]
        assert [rows.positions.tolist() for rows in values if rows is not None] == [[at] for at in range(40)]
        mapped = [link for link in map(_target, Path("/proc/self/fd").iterdir()) if link.startswith(str(store))
                  and "journal" in link]
    assert len(mapped) <= 2, mapped


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except FileNotFoundError:  # that of the listing itself
        return ""


def test_a_list_that_takes_its_time_holds_nobody_up(tmp_path: Path) -> None:
    store, capture = tmp_path / "store", new_ulid()
    chosen = read_filter(text=capture[-8:])
    with WriterProcess(store) as writer, Sender(writer.endpoint) as engine:
        engine.open(capture)
        engine.wait()
        reader = StoreReader(store)
        assert until(lambda: reader.page(wanted=chosen)[0])
        found: list[str] = []
        other = threading.Thread(target=lambda: found.append(reader.capture(capture).id), daemon=True)
        with reader._apart().moment():  # as while thousands of captures are looked at
            other.start()
            other.join(10.0)
            assert found == [capture]
        reader.close()
        with pytest.raises(StoreError, match="closed"):
            reader.page(wanted=chosen)
        writer.stop()
