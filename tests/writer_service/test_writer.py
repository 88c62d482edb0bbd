"""The writer as a process: what goes in over the socket comes out of the reader, bit for bit."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from schemas import limits
from schemas.catalog.records import connect_write, find_capture
from schemas.errors import LimitError, NotFoundError, SpecError
from schemas.ids import new_ulid
from schemas.read.reader import StoreReader
from schemas.spec import Resolved
from schemas.wire.messages import (
    Ack,
    Frame,
    Hello,
    Ping,
    Refuse,
    StreamPart,
    TapCounters,
    TapState,
    decode_from_writer,
    encode,
)
from schemas.wire.records import Open
from schemas.wire.row_table import RowTable
from tests.support.consistency import assert_consistent
from tests.support.processes import PATIENCE_S
from tests.support.store_helpers import (
    PROGRAMS,
    ROOT,
    SITE,
    Sender,
    WriterProcess,
    assert_adds_up,
    assert_rows,
    engine_info,
    until,
)
from writer_service.catalog import catalog
from writer_service.catalog.changes import Indexed
from writer_service.control_log import LogEntry


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def writer(store: Path) -> Iterator[WriterProcess]:
    with WriterProcess(store) as process:
        yield process


@pytest.fixture
def engine(writer: WriterProcess) -> Iterator[Sender]:
    with Sender(writer.endpoint) as sender:
        yield sender


@pytest.fixture
def api(writer: WriterProcess) -> Iterator[Sender]:
    with Sender(writer.endpoint, role="api") as sender:
        yield sender


def final(reader: StoreReader, capture: str, owner: str | None = None) -> str:
    """The status, once it is no longer running; the catalog follows an engine's Ack a moment later."""

    until(lambda: reader.capture(capture, owner).status not in ("running", "pending"))
    return reader.capture(capture, owner).status


def test_a_capture_from_open_to_slice(store: Path, writer: WriterProcess, engine: Sender) -> None:
    capture = new_ulid()
    engine.open(capture)
    engine.frame([(capture, 1, range(8))])
    engine.frame([(capture, 1, [8])])
    engine.frame([(capture, 1, [9, 10])], runs=[1, 1])
    engine.finish(capture, end=11, output=4)
    engine.wait()
    with StoreReader(store) as reader:
        assert final(reader, capture) == "complete"
        manifest = reader.manifest(capture)
        assert_adds_up(manifest)
        assert (manifest.expected, manifest.captured, manifest.total_len) == (44, 44, 12)
        assert manifest.output_token_ids == [1000, 1001, 1002, 1003]
        assert_rows(reader.slice(capture, SITE, [0, 1, 2, 3], 0, 11), 1, range(11))
        part = reader.slice(capture, "blocks.2.hook_resid_post", [2], 7, 100)
        assert part.clipped and part.stop == 11
        assert_rows(part, 1, [7, 8, 9, 10])
        assert_rows(reader.slice(capture, SITE, [3, 1], 2, 9), 1, range(2, 9))
        assert part.values().shape == (1, 4, 64)
        engine_seen = reader.engine()
        assert engine_seen is not None and engine_seen.model == "tiny"
        writer.stop()
        assert (store / "blocks" / "w0-00000001.zarr" / "zarr.json").exists()
        # The reader still holds the file under its old name; a new one finds it under the new name.
        assert_rows(reader.slice(capture, SITE, [0, 3], 0, 11), 1, range(11))
    with StoreReader(store) as reader:
        assert_rows(reader.slice(capture, SITE, [0, 3], 0, 11), 1, range(11))
        assert reader.manifest(capture).sites[0].extents[0].block == "blocks/w0-00000001.zarr"


def test_slices_that_cannot_be(store: Path, engine: Sender) -> None:
    capture = new_ulid()
    engine.open(capture)
    engine.frame([(capture, 1, range(8))])
    engine.finish(capture, end=8)
    engine.wait()
    with StoreReader(store) as reader:
        final(reader, capture)
        with pytest.raises(NotFoundError, match=r"no layer \[9\].*\[0, 1, 2, 3\]"):
            reader.slice(capture, SITE, [9], 0, 1)
        with pytest.raises(NotFoundError, match="no site attn_out; it has: resid_post"):
            reader.slice(capture, "attn_out", [0], 0, 1)
        with pytest.raises(SpecError, match="unknown site"):
            reader.slice(capture, "nonsense", [0], 0, 1)
        with pytest.raises(NotFoundError, match="at least one layer"):
            reader.slice(capture, SITE, [], 0, 1)
        for ref in ("../../etc/passwd", "", "x" * 10_000, "'; DROP TABLE captures; --", new_ulid()):
            with pytest.raises(NotFoundError):
                reader.slice(ref, SITE, [0], 0, 1)
        assert reader.slice(capture, SITE, [0], 5, 2).positions.tolist() == []
        with pytest.raises(LimitError):
            reader.captures(limit=10**6)


def test_payload_in_a_ring_is_read_in_place(store: Path, writer: WriterProcess, tmp_path: Path) -> None:
    ring = tmp_path / "ring"
    ring.write_bytes(bytes(1 << 20))
    sender = Sender(writer.endpoint, ring=ring, ring_bytes=1 << 20)
    assert sender.hello().ring
    capture = new_ulid()
    sender.open(capture, prompt_len=40)
    sender.frame([(capture, 1, range(30))], runs=[10, 15, 5], ring_at=4096)
    sender.frame([(capture, 1, range(30, 40))], ring_at=200_000)
    sender.finish(capture, end=40)
    sender.wait()
    with StoreReader(store) as reader:
        assert final(reader, capture) == "complete"
        assert_rows(reader.slice(capture, SITE, [0, 1, 2, 3], 0, 40), 1, range(40))
    sender.close()


def test_a_ring_that_lies(store: Path, writer: WriterProcess, tmp_path: Path) -> None:
    """Extents outside the ring, a ring that was cut, and rings that are no files: refused, and the writer lives."""
    ring = tmp_path / "ring"
    ring.write_bytes(bytes(1 << 16))
    link = tmp_path / "link"
    link.symlink_to("/etc/passwd")
    for path, size in ((link, 100), (tmp_path, 100), (Path("/dev/zero"), 4096), (ring, 1 << 40), (tmp_path / "no", 1)):
        with Sender(writer.endpoint, ring=path, ring_bytes=size) as bad:
            assert bad.hello().ring is False, path
    sender = Sender(writer.endpoint, ring=ring, ring_bytes=1 << 16)
    assert sender.hello().ring
    capture = new_ulid()
    sender.open(capture)
    good, parts = sender.frame([(capture, 1, range(8))], ring_at=0, send=False)

    def with_extents(extents: list[tuple[int, int]]) -> Frame:
        q = good.streams[0]
        changed = [StreamPart(q.name, q.nbytes, q.xxh3, extents), *good.streams[1:]]
        return Frame(
            **{**{f: getattr(good, f) for f in good.__struct_fields__}, "seq": sender.next(), "streams": changed}
        )

    size = good.streams[0].nbytes
    for extents in (
        [(1 << 16, size)],
        [(-1, size)],
        [(2**62, size)],
        [(0, size - 1)],
        [(0, size), (0, 0)],
        [(64, size)],
    ):
        sender.send(with_extents(extents), *parts)
    sender.wait()
    assert {code for code, _ in sender.refused.values()} == {"malformed"} and len(sender.refused) == 6
    with open(ring, "r+b") as file:
        file.truncate(10)
    sender.send(with_extents(good.streams[0].extents), *parts)
    sender.wait()
    assert "cut" in sender.refused[sender.seq][1]
    sender.close()


def test_duplicates_and_gaps(store: Path, engine: Sender) -> None:
    capture = new_ulid()
    engine.open(capture)
    for position in range(8):
        engine.frame([(capture, 1, [position])])
    for seq in sorted(engine.kept):
        engine.socket.send_multipart(engine.kept[seq])
    engine.wait()
    before = engine.seq
    ahead, parts = engine.frame([(capture, 1, [9])], send=False)
    engine.seq = before + 5
    late, late_parts = engine.frame([(capture, 1, [10])], send=False)
    assert late.seq == before + 6
    from schemas.wire.messages import encode

    engine.socket.send_multipart([encode(late), *late_parts])  # a gap: not taken
    ack = engine.sync()
    assert (ack.durable, ack.visible) == (before, before)
    engine.seq = before
    engine.send(ahead, *parts)
    engine.finish(capture, end=10, output=2)
    engine.wait()
    with StoreReader(store) as reader:
        final(reader, capture)
        manifest = reader.manifest(capture)
        assert_adds_up(manifest)
        assert [m.start for m in manifest.rows[0].missing] == [8]
        assert_rows(reader.slice(capture, SITE, [0, 1], 0, 11), 1, [0, 1, 2, 3, 4, 5, 6, 7, 9])
        assert len(manifest.sites[0].extents) == 9


def test_a_heartbeat_of_a_newer_engine_is_one(engine: Sender) -> None:
    engine.hello()
    ping = msgspec.to_builtins(Ping(TapState(TapCounters(), 1 << 20, 0, 0)))
    ping["tap"]["counters"]["new"] = ping["tap"]["new"] = ping["new"] = 1
    engine.socket.send(msgspec.msgpack.encode({"type": "ping", **ping}))
    assert until(lambda: isinstance(engine.receive(1), Ack))


def test_unknown_identities_are_told_to_greet(writer: WriterProcess) -> None:
    sender = Sender(writer.endpoint)
    sender.open(new_ulid())
    answer = sender.receive()
    assert isinstance(answer, Refuse) and answer.code == "hello"
    sender.wait()  # greets, sends again
    assert sender.durable == 1
    sender.close()


def test_versions_epochs_and_names_of_streams(writer: WriterProcess, engine: Sender) -> None:
    for change in ({"epoch": 5, "stream": engine.stream}, {"stream": "../../x"}):
        other = Sender(writer.endpoint, **change)  # type: ignore[arg-type]
        with pytest.raises(AssertionError, match=r"stale|malformed"):
            other.hello()
        other.close()


def test_recomputed_rows_the_latest_wins(store: Path, engine: Sender) -> None:
    capture = new_ulid()
    engine.open(capture)
    engine.frame([(capture, 1, range(8))], version=0)
    engine.frame([(capture, 1, range(2, 6))], version=1)
    engine.frame([(capture, 1, [3])], version=2, layers=[0, 1])
    engine.finish(capture, end=8)
    engine.wait()
    with StoreReader(store) as reader:
        assert final(reader, capture) == "complete"
        assert_rows(reader.slice(capture, SITE, [2, 3], 2, 6), 1, range(2, 6), version=1)
        assert_rows(reader.slice(capture, SITE, [0, 1], 3, 4), 1, [3], version=2)
        assert_rows(reader.slice(capture, SITE, [0, 1, 2, 3], 6, 8), 1, [6, 7])
        mixed = reader.slice(capture, SITE, [1, 2], 3, 4)
        assert mixed.positions.tolist() == [3]
        assert not np.array_equal(mixed.pieces["q"][0], mixed.pieces["q"][1])


def test_a_drop_supersedes_what_was_there_and_later_rows_supersede_it(store: Path, engine: Sender) -> None:
    capture = new_ulid()
    engine.open(capture)
    engine.frame([(capture, 1, range(8))])
    engine.dropped(capture, 2, 6)
    engine.frame([(capture, 1, [4])], version=3)
    engine.dropped(capture, 7, 8, layers=[3])
    engine.finish(capture, end=8)
    engine.wait()
    with StoreReader(store) as reader:
        assert final(reader, capture) == "incomplete"
        manifest = reader.manifest(capture)
        assert_adds_up(manifest)
        by_layer = {row.layer: [(m.start, m.stop, m.reason) for m in row.missing] for row in manifest.rows}
        assert by_layer[0] == [(2, 4, "dropped"), (5, 6, "dropped")]
        assert by_layer[3] == [(2, 4, "dropped"), (5, 6, "dropped"), (7, 8, "dropped")]
        assert_rows(reader.slice(capture, SITE, [0], 4, 5), 1, [4], version=3)
        both = reader.slice(capture, SITE, [0, 3], 0, 8)
        assert both.positions.tolist() == [0, 1, 4, 6]
        assert [(m.start, m.stop) for m in both.missing] == [(2, 4), (5, 6), (7, 8)]
        assert [(m.start, m.stop) for m in reader.slice(capture, SITE, [0], 3, 7).missing] == [(3, 4), (5, 6)]


def test_rows_past_the_end_are_stale(store: Path, engine: Sender) -> None:
    capture = new_ulid()
    engine.open(capture, prompt_len=4)
    engine.frame([(capture, 1, range(10))])
    engine.finish(capture, end=6, output=3)
    engine.wait()
    with StoreReader(store) as reader:
        assert final(reader, capture) == "complete"
        assert_rows(reader.slice(capture, SITE, [0], 0, 99), 1, range(6))


@pytest.mark.parametrize(
    ("prefix_cache", "cached", "reason", "end", "output", "rows", "status", "missing"),
    [
        ("allow", 4, "stop", 9, 2, range(4, 9), "complete", [(0, 4, "prefix_cached")]),
        ("recompute", 4, "stop", 9, 2, range(4, 9), "incomplete", [(0, 4, "prefix_cached")]),
        ("allow", 4, "stop", 9, 2, range(9), "complete", []),
        ("recompute", 0, "abort", 5, 0, range(5), "incomplete", [(5, 7, "aborted")]),
        ("recompute", 0, "stop", 9, 2, range(8), "incomplete", [(8, 9, "dropped")]),
        ("recompute", 0, "abort", 10, 2, range(10), "complete", []),
    ],
)
def test_reasons_and_statuses(
    store: Path,
    engine: Sender,
    prefix_cache: str,
    cached: int,
    reason: str,
    end: int,
    output: int,
    rows: range,
    status: str,
    missing: list[tuple[int, int, str]],
) -> None:
    capture = new_ulid()
    engine.open(capture, prefix_cache=prefix_cache, cached=cached)
    engine.frame([(capture, 1, rows)])
    engine.finish(capture, end=end, output=output, reason=reason)
    engine.wait()
    with StoreReader(store) as reader:
        assert final(reader, capture) == status
        manifest = reader.manifest(capture)
        assert_adds_up(manifest)
        assert [(m.start, m.stop, m.reason) for m in manifest.rows[0].missing] == missing


@pytest.mark.parametrize(
    ("positions", "expected"),
    [("prompt", 8), ("generated", 3), ("last_prompt", 1), ([(1, 3), (9, 50)], 4), ([], 0), ([(11, 50)], 0)],
)
def test_expected_rows_follow_the_positions_asked(
    store: Path, engine: Sender, positions: object, expected: int
) -> None:
    capture = new_ulid()
    engine.open(capture, positions=positions)
    engine.frame([(capture, 1, range(11))])
    engine.finish(capture, end=11, output=4)
    engine.wait()
    with StoreReader(store) as reader:
        assert final(reader, capture) == ("complete" if expected else "empty")
        assert [row.captured for row in reader.manifest(capture).rows] == [expected] * 4


def test_a_running_capture_can_be_read(store: Path, engine: Sender) -> None:
    capture = new_ulid()
    engine.open(capture)
    engine.frame([(capture, 1, range(6))])
    engine.wait()
    with StoreReader(store) as reader:
        until(lambda: reader.captures())
        assert until(lambda: reader.manifest(capture).captured == 24)
        manifest = reader.manifest(capture)
        assert manifest.status == "running"
        assert_adds_up(manifest)
        assert [(m.start, m.stop, m.reason) for m in manifest.rows[0].missing] == [(6, 8, "pending")]


def test_ids_owners_samples_and_aliases(store: Path, writer: WriterProcess, engine: Sender, api: Sender) -> None:
    one, many = new_ulid(), new_ulid()
    api.own(one, owner="alice", aliases=["chatcmpl-1", "req-7"], tags={"k": "v"})
    api.own(many, count=3, owner="alice", aliases=["cmpl-2"])
    api.wait()
    with StoreReader(store) as reader:  # an Ack to an API means that readers see it
        assert reader.capture(one).status == "pending"
        assert reader.capture("chatcmpl-1", "alice").id == one
        assert reader.capture(f"{one}.0", "alice").id == one
        for ref, owner in ((one, "bob"), ("chatcmpl-1", "bob"), ("req-7", ""), (many, "alice")):
            with pytest.raises(NotFoundError):
                reader.capture(ref, owner)
        assert reader.samples("cmpl-2", "alice") == [f"{many}.{i}" for i in range(3)]
        assert reader.capture("cmpl-2.1").id == f"{many}.1"
        with Sender(writer.endpoint, role="api") as rival:
            rival.own(one, owner="bob")
            rival.own(many, owner="bob", aliases=["chatcmpl-1"])
            rival.own(new_ulid(), owner="bob", aliases=["chatcmpl-1"])
            rival.wait()
            assert [rival.refused[n][0] for n in (1, 2)] == ["conflict", "conflict"]
            assert 3 not in rival.refused
        assert reader.capture("chatcmpl-1", "alice").id == one
        assert reader.capture("chatcmpl-1", "bob").owner == "bob"
        engine.open(one)
        engine.open(f"{many}.5")
        engine.wait()
        until(lambda: reader.captures(status="running") and reader.capture(f"{many}.5").status == "running")
        assert reader.capture(one).owner == "alice" and reader.capture(one).tags == {"k": "v"}
        assert reader.capture(f"{many}.5").owner == "alice"  # never everybody's
        assert {row.id for row in reader.captures(owner="bob")} == {reader.capture("chatcmpl-1", "bob").id}
        pages = [reader.captures(limit=2)]
        while pages[-1]:
            pages.append(reader.captures(limit=2, before=pages[-1][-1].id))
        listed = [row.id for page in pages for row in page]
        assert len(listed) == len(set(listed)) == 6


def test_a_capture_belongs_to_the_engine_that_opened_it(store: Path, writer: WriterProcess, engine: Sender) -> None:
    capture = new_ulid()
    engine.open(capture)
    engine.wait()
    with Sender(writer.endpoint) as rival:
        rival.open(capture, request="other")
        rival.frame([(capture, 9, range(8))])
        rival.finish(capture, end=8)
        rival.wait()
        assert [rival.refused[n][0] for n in (1, 3)] == ["conflict", "conflict"] and 2 not in rival.refused
    engine.frame([(capture, 1, range(8))])
    engine.finish(capture, end=8)
    engine.frame([(capture, 9, range(8))])
    engine.dropped(capture, 0, 8)
    engine.finish(capture, end=2)
    engine.open(capture)
    engine.wait()
    assert [engine.refused[n][0] for n in (5, 6, 7)] == ["stale", "stale", "conflict"]
    with StoreReader(store) as reader:
        assert final(reader, capture) == "complete"
        assert_rows(reader.slice(capture, SITE, [0, 1, 2, 3], 0, 8), 1, range(8))
    assert "rows_not_indexed=16" in writer.stop()


def test_abandoned_and_client_finished(store: Path, engine: Sender, api: Sender) -> None:
    from schemas.wire.records import Abandon

    never, stopped = new_ulid(), new_ulid()
    api.own(never)
    api.own(stopped)
    api.send(Abandon(api.next(), never, "the engine answered 503"))
    api.wait()
    engine.open(stopped)
    engine.open(never)
    engine.frame([(stopped, 1, range(10))])
    engine.finish(stopped, end=10, output=2, reason="abort")
    engine.wait()
    api.client_finish(stopped, "stop")
    api.send(Abandon(api.next(), stopped, "too late"))
    api.client_finish("../../etc", "stop")
    api.wait()
    assert engine.refused[2][0] == "conflict"
    assert api.refused[5][0] == "conflict" and api.refused[6][0] == "malformed"
    with StoreReader(store) as reader:
        assert reader.capture(never).status == "failed"
        with pytest.raises(NotFoundError, match="503"):
            reader.slice(never, SITE, [0], 0, 1)
        manifest = reader.manifest(stopped)
        assert (manifest.finish_reason, manifest.engine_finish_reason, manifest.stop_reason) == ("stop", "abort", "END")
        assert manifest.status == "complete"


def test_the_front_end_may_be_faster_than_the_engine(store: Path, engine: Sender, api: Sender) -> None:
    capture = new_ulid()
    api.client_finish(capture, "stop")
    api.wait()
    engine.open(capture)
    engine.frame([(capture, 1, range(10))])
    engine.finish(capture, end=10, output=2, reason="abort")
    engine.wait()
    with StoreReader(store) as reader:
        assert final(reader, capture) == "complete"
        manifest = reader.manifest(capture)
        assert (manifest.finish_reason, manifest.engine_finish_reason, manifest.stop_reason) == ("stop", "abort", "END")


@pytest.mark.parametrize("client_first", [True, False])
@pytest.mark.parametrize(("reason", "end"), [("abort", 12), ("length", 11), ("stop", 11)])
def test_a_stop_string_ends_the_sequence_where_the_client_saw_it(
    store: Path, engine: Sender, api: Sender, client_first: bool, reason: str, end: int
) -> None:
    capture = new_ulid()
    engine.open(capture)
    engine.frame([(capture, 1, range(12))])
    engine.wait()
    if not client_first:
        engine.finish(capture, end=end, output=4, reason=reason)
        engine.wait()
    api.client_finish(capture, "stop", output=2)
    api.wait()
    if client_first:
        engine.finish(capture, end=end, output=4, reason=reason)
        engine.wait()
    with StoreReader(store) as reader:
        assert final(reader, capture) == "complete"
        until(lambda: reader.manifest(capture).client_finish_reason)
        manifest = reader.manifest(capture)
        assert (manifest.finish_reason, manifest.engine_finish_reason, manifest.stop_reason) == ("stop", reason, "END")
        assert manifest.output_token_ids == [1000, 1001]
        assert manifest.end == manifest.total_len == manifest.prompt_len + 2
        assert len(reader.slice(capture, SITE, [0], 0, 100).positions) == manifest.prompt_len + 2


def test_delete_hides_at_once_and_holds_win(store: Path, writer: WriterProcess, engine: Sender, api: Sender) -> None:
    from schemas.wire.records import Hold

    ulid = new_ulid()
    api.own(ulid, count=2, aliases=["x-1"])
    api.wait()
    for sample in range(2):
        engine.open(f"{ulid}.{sample}")
        engine.frame([(f"{ulid}.{sample}", sample, range(8))])
    engine.finish(f"{ulid}.0", end=8)
    engine.wait()
    api.send(Hold(api.next(), ulid, True))
    api.delete(ulid)
    api.wait()
    assert api.refused[3][0] == "held"
    with StoreReader(store) as reader:
        assert final(reader, f"{ulid}.0") == "complete"
        api.send(Hold(api.next(), ulid, False))
        api.delete(f"{ulid}.0")
        api.wait()
        for ref in (f"{ulid}.0",):
            for call in (reader.capture, reader.manifest, lambda ref: reader.slice(ref, SITE, [0], 0, 1)):
                with pytest.raises(NotFoundError):
                    call(ref)
        assert reader.samples("x-1") == [f"{ulid}.1"]
        api.delete("x")
        api.delete(ulid)
        api.delete(ulid)
        api.wait()
        assert api.refused[6][0] == "not_found" and api.refused[8][0] == "not_found"
        with pytest.raises(NotFoundError):
            reader.samples("x-1")
        assert [row.id for row in reader.captures()] == []
        assert len(reader.captures(status="deleted")) == 2
        engine.frame([(f"{ulid}.1", 1, [8])])  # still generating: its rows are no longer kept for anybody
        engine.wait()
        api.own(ulid)
        api.wait()
        assert api.refused[api.seq][0] == "conflict"  # a tombstone keeps the id taken
    assert "rows_not_indexed=1" in writer.stop()


def test_engine_lost_by_silence_by_bye_and_come_back(store: Path, tmp_path: Path) -> None:
    with WriterProcess(store, "--engine-lost-s", "0.6") as writer, StoreReader(store) as reader:
        silent, leaving = Sender(writer.endpoint), Sender(writer.endpoint)
        first, second = new_ulid(), new_ulid()
        for sender, capture in ((silent, first), (leaving, second)):
            sender.hello()
            sender.open(capture)
            sender.frame([(capture, 1, range(5))])
            sender.wait()
        leaving.bye()
        assert final(reader, second) == "incomplete"
        assert reader.capture(first).status == "running"
        assert final(reader, first) == "incomplete"
        for capture in (first, second):
            manifest = reader.manifest(capture)
            assert_adds_up(manifest)
            assert [(m.start, m.stop, m.reason) for m in manifest.rows[0].missing] == [(5, 8, "engine_lost")]
        # It was only paused: the rest comes, and the finish says what is true.
        silent.frame([(first, 1, range(5, 8))])
        silent.finish(first, end=8)
        silent.wait()
        assert until(lambda: reader.capture(first).status == "complete")
        silent.close()
        leaving.close()


def test_second_writer_is_refused(store: Path, writer: WriterProcess, tmp_path: Path) -> None:
    other = subprocess.run(
        [sys.executable, "-m", "writer_service", "--store", str(store), "--endpoint", writer.endpoint + "2"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert other.returncode == 2 and other.stdout == ""
    assert "another writer has it" in other.stderr and other.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--endpoint", "tcp://0.0.0.0:5555"], "must be ipc"),
        (["--endpoint", "ipc:///tmp/" + "x" * 200], "105"),
        (["--endpoint", "ipc:///usr/w"], "mode 0700"),
        (["--listen", "tcp://127.0.0.1:0", "--curve", "/none"], "/none"),
        (["--durability", "hope"], "fsync, os"),
        (["--seal-idle-s", "0"], "positive"),
    ],
)
def test_bad_settings_end_the_start(store: Path, flags: list[str], says: str) -> None:
    argv = [
        sys.executable,
        "-m",
        "writer_service",
        "--store",
        str(store),
        "--endpoint",
        "ipc:///tmp/tap-none/w",
        *flags,
    ]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1
    assert not store.exists()  # nor is one that is there mended, which a look at a copy must not do


def test_a_folder_of_somebody_else_is_not_made_a_store(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    argv = [sys.executable, "-m", "writer_service", "--store", str(tmp_path), "--endpoint", "ipc:///tmp/tap-none/w"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 2 and "not empty" in done.stderr
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.txt"]


def test_os_durability_acks_after_the_write(store: Path) -> None:
    with WriterProcess(store, "--durability", "os") as writer, Sender(writer.endpoint) as engine:
        capture = new_ulid()
        engine.open(capture)
        engine.frame([(capture, 1, range(8))])
        engine.finish(capture, end=8)
        engine.wait()
        writer.kill()
        writer.start()
        assert engine.hello().durable == 3  # a crash of the process loses nothing that was acknowledged
        with StoreReader(store) as reader:
            assert final(reader, capture) == "complete"


def test_many_sites_codecs_and_captures_in_one_frame(store: Path, writer: WriterProcess) -> None:
    sites = ("resid_post", "attn_out")
    captures = [new_ulid() for _ in range(5)]
    with Sender(writer.endpoint, engine=engine_info(width=96, dtype="bfloat16", sites=sites)) as engine:
        for capture in captures:
            engine.open(capture, prompt_len=3, layers={site: [0, 2] for site in sites}, codec="raw")
        for site in sites:
            engine.frame(
                [(capture, i, range(3)) for i, capture in enumerate(captures)],
                runs=[6, 9],
                layers=[0, 2],
                codec="raw",
                width=96,
                dtype="bfloat16",
                site=site,
            )
        for capture in captures:
            engine.finish(capture, end=3)
        engine.wait()
        with StoreReader(store) as reader:
            for i, capture in enumerate(captures):
                assert final(reader, capture) == "complete"
                for site in sites:
                    got = reader.slice(capture, site, [2, 0], 0, 3)
                    assert (got.dtype, got.width, got.pieces["x"].dtype) == ("bfloat16", 96, np.uint16)
                    assert_rows(got, i, range(3))


def test_the_memory_of_an_engine_that_ended_is_let_go(store: Path, tmp_path: Path) -> None:
    ring = tmp_path / "ring"
    ring.write_bytes(bytes(1 << 20))
    capture = new_ulid()
    with WriterProcess(store, "--engine-lost-s", "0.5") as writer:

        def mapped() -> int:
            return Path(f"/proc/{writer.process.pid}/maps").read_text().count(str(ring))

        with Sender(writer.endpoint, ring=ring, ring_bytes=1 << 20) as engine:
            engine.bye()
            assert until(lambda: mapped() == 0)
        with Sender(writer.endpoint, ring=ring, ring_bytes=1 << 20) as engine:
            engine.open(capture, prompt_len=3)
            engine.frame([(capture, 1, range(3))], ring_at=0)
            engine.wait()
            assert mapped() == 1
            assert until(lambda: mapped() == 0)
            engine.frame([(capture, 1, range(3, 6))], ring_at=1 << 16)  # it had only been silent
            engine.finish(capture, end=6)
            engine.wait()
            assert not engine.refused and mapped() == 1
            with StoreReader(store) as reader:
                assert until(lambda: reader.capture(capture).status == "complete")
                assert_rows(reader.slice(capture, SITE, [0, 1, 2, 3], 0, 6), 1, range(6))


def test_every_refusal_is_told(api: Sender) -> None:
    for _ in range(3000):
        api.delete(new_ulid())
    api.wait()
    assert len(api.refused) == 3000


def test_a_greeting_of_another_version_is_refused_for_good(writer: WriterProcess) -> None:
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(writer.endpoint)
    for version, code in ((1, "version"), (limits.PROTOCOL_VERSION, "malformed")):
        words = msgspec.msgpack.decode(encode(Hello(new_ulid(), "api", 5)))
        socket.send(msgspec.msgpack.encode({**words, "version": version, "new": 1}))
        assert socket.poll(5000)
        answer = decode_from_writer(socket.recv())
        assert isinstance(answer, Refuse) and answer.code == code, answer
    socket.close()


def test_many_streams_of_the_past_leave_room_for_new_ones(store: Path) -> None:
    with WriterProcess(store) as writer:
        old = Sender(writer.endpoint, epoch=5)
        old.hello()
        old.open(new_ulid())
        old.wait()
        old.bye()
        old.sync()
        writer.stop()
        db = sqlite3.connect(store / "catalog.sqlite")
        db.executemany("INSERT INTO streams VALUES (?, 5, 'api', 1, 0)", [(new_ulid(),) for _ in range(5000)])
        db.commit()
        db.close()
        writer.start()
        with Sender(writer.endpoint) as engine:
            engine.open(new_ulid())
            engine.wait()
        assert old.hello().durable == 1
        old.epoch = 4
        with pytest.raises(AssertionError, match="stale"):
            old.hello()
        old.close()


def test_a_stream_that_began_again_within_a_commit_stays_at_its_new_epoch(store: Path) -> None:
    """The commit has rows of the stream as it was, and the greeting of the one that it is."""
    with WriterProcess(store) as writer:
        streams = []
        for _ in range(5):
            with Sender(writer.endpoint, epoch=5) as before:
                capture = new_ulid()
                before.open(capture)
                before.wait()
                before.frame([(capture, 1, range(4))])
                before.sync()  # the frame was taken; its commit waits for others
                with Sender(writer.endpoint, stream=before.stream, epoch=6):
                    streams.append(before.stream)
        writer.stop()
        db = sqlite3.connect(store / "catalog.sqlite")
        assert db.execute("SELECT DISTINCT epoch, covered FROM streams").fetchall() == [(6, 0)]
        db.close()
        assert_consistent(store)
        writer.start()
        for stream in streams:
            late = Sender(writer.endpoint, stream=stream, epoch=5)
            with pytest.raises(AssertionError, match="stale"):
                late.hello()
            late.close()


def test_a_running_capture_costs_the_same_with_every_commit(tmp_path: Path) -> None:
    """Reading all its rows again with each commit would make a long generation ever slower."""
    db = connect_write(tmp_path / "catalog.sqlite")
    catalog.create(db, "00" * 16)
    capture, stream = new_ulid(), new_ulid()
    resolved = Resolved({SITE: [0]}, {SITE: "raw"}, "all", "allow")
    opened = LogEntry(stream, 1, 0, 0, Open(1, capture, "r", "{}", resolved, 2, b"", 0, 1))
    said: list[str] = []
    with catalog.transaction(db):
        catalog.refresh(db, catalog.apply(db, [opened]))
        db.set_trace_callback(said.append)
        for seq in range(2, 9):
            one = np.ones(1, np.uint32)
            frame = Frame(seq, SITE, "raw", "float32", 1, [0], [capture], [1], 0, [], "f")
            indexed = Indexed(stream, 1, 0, 1, 4096 * seq, 4096, frame, RowTable(one * 0, one * seq, one, one))
            catalog.refresh(db, catalog.apply(db, [indexed]))
        db.set_trace_callback(None)
    assert not [statement for statement in said if "FROM extents" in statement]
    found = find_capture(db, capture)
    assert found is not None and (found.status, found.total_len) == ("running", 9)
    db.close()


def test_what_is_stored_belongs_to_one_user(store: Path, writer: WriterProcess, engine: Sender) -> None:
    capture = new_ulid()
    engine.open(capture, prompt_len=1)
    engine.frame([(capture, 1, [0])])
    engine.finish(capture, end=1)
    engine.wait()
    assert until(lambda: (store / "catalog.sqlite-wal").exists())
    open_to_others = [path for path in [store, *store.rglob("*")] if path.stat().st_mode & 0o077]
    writer.stop()
    open_to_others += [path for path in [store, *store.rglob("*")] if path.stat().st_mode & 0o077]
    assert not open_to_others


def test_a_catalog_that_cannot_be_written_does_not_hold_up_the_end(
    store: Path, writer: WriterProcess, engine: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full disk: what is acknowledged lies in the journal, and the next start reads it from there."""
    capture = new_ulid()
    engine.open(capture, prompt_len=1)
    engine.wait()
    with StoreReader(store) as reader:
        assert until(lambda: reader.captures() != [])
    writer.kill()
    writer.script = PROGRAMS / "faulty_catalog.py"
    monkeypatch.setenv("CATALOG", "closed")
    writer.start()
    engine.hello()
    engine.frame([(capture, 1, [0])])
    engine.finish(capture, end=1)
    engine.wait()
    writer.process.send_signal(signal.SIGTERM)
    writer.process.communicate(timeout=PATIENCE_S)
    writer.script = None
    writer.start()
    with StoreReader(store) as reader:
        assert reader.capture(capture).status == "complete"
        assert_rows(reader.slice(capture, SITE, [0, 1, 2, 3], 0, 1), 1, [0])


def test_an_endpoint_that_is_a_file_of_somebody_is_left_alone(store: Path, tmp_path: Path) -> None:
    folder = tmp_path / "private"
    folder.mkdir(mode=0o700)
    (folder / "thesis").write_text("mine")
    done = subprocess.run(
        [sys.executable, "-m", "writer_service", "--store", str(store), "--endpoint", f"ipc://{folder}/thesis"],
        cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 2 and "not a socket" in done.stderr and (folder / "thesis").read_text() == "mine"


def test_a_page_goes_on_after_a_capture_that_was_deleted_meanwhile(store: Path, engine: Sender, api: Sender) -> None:
    captures = [new_ulid() for _ in range(3)]
    for capture in captures:
        api.own(capture, owner="a")
    api.wait()
    with StoreReader(store) as reader:
        first, *rest = [row.id for row in reader.captures(owner="a")]
        api.delete(first)
        api.wait()
        assert [row.id for row in reader.captures(owner="a", before=first)] == rest


@pytest.mark.parametrize("asked", [{}, {"owner": "a"}, {"status": "running"}, {"owner": "a", "status": "running"}])
def test_a_page_of_captures_is_read_off_an_index(store: Path, writer: WriterProcess, asked: dict[str, str]) -> None:
    with StoreReader(store) as reader:
        ran: list[str] = []
        reader._catalog.db.set_trace_callback(ran.append)
        reader.captures(**asked)
        query = next(text for text in ran if "FROM captures" in text)
        steps = [row["detail"] for row in reader._catalog.db.execute(f"EXPLAIN QUERY PLAN {query}")]
        (step,) = [step for step in steps if "captures" in step]
    assert "USING INDEX captures_" in step and not any("TEMP B-TREE" in step for step in steps)  # found in order
    assert all(f"{name}=?" in step for name in asked), step
