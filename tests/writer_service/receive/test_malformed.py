"""Whatever comes over the socket, the writer lives, stores nothing wrong, and goes on with the next good frame."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schemas import limits
from schemas.ids import new_ulid
from schemas.read.reader import StoreReader
from schemas.spec import Resolved
from schemas.wire.messages import Hello, Refuse, encode
from schemas.wire.records import Dropped, Finish, Open, Own
from tests.support.store_helpers import SITE, Sender, WriterProcess, assert_adds_up, assert_rows, until


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WriterProcess]:
    with WriterProcess(tmp_path_factory.mktemp("malformed") / "store") as process:
        yield process


@pytest.fixture
def engine(writer: WriterProcess) -> Iterator[Sender]:
    with Sender(writer.endpoint) as sender:
        yield sender


def still_works(writer: WriterProcess, sender: Sender) -> None:
    """A whole capture goes through on the same connection."""
    sender.sync()
    while sender.receive(0.1) is not None:  # Acks of commits come on their own; the last one counts
        pass
    sender.seq = sender.visible
    sender.kept.clear()
    capture = new_ulid()
    sender.open(capture)
    sender.frame([(capture, 1, range(8))])
    sender.finish(capture, end=8)
    sender.wait()
    assert not {sender.seq, sender.seq - 1, sender.seq - 2} & set(sender.refused)
    with StoreReader(writer.store) as reader:
        assert until(lambda: [row for row in reader.captures(status="complete") if row.id == capture])
        assert_rows(reader.slice(capture, SITE, [0, 1, 2, 3], 0, 8), 1, range(8))


LIES = {
    "seq_zero": {"seq": 0},
    "unknown_site": {"site": "nowhere"},
    "path_as_capture": {"captures": ["../../../etc/passwd"]},
    "no_captures": {"captures": []},
    "capture_twice": {"captures": ["01ARZ3NDEKTSV4RRFFQ69G5FAV"] * 2},
    "huge_fingerprint": {"fingerprint": "f" * 2**20},
    "unknown_codec": {"codec": "pickle"},
    "huge_codec": {"codec": "rp8:k=16384,seed=1"},
    "unsettled_codec": {"codec": "kv8"},
    "other_spelling": {"codec": "int8b64:"},
    "other_codec": {"codec": "raw"},
    "other_width": {"width": 65},
    "huge_width": {"width": 2**31},
    "layers_descending": {"layers": [3, 2, 1, 0]},
    "layer_too_many": {"layers": [0, 1, 2, 3, 4]},
    "layers_huge": {"layers": list(range(5000))},
    "runs_too_many_rows": {"runs": [9]},
    "runs_too_few_rows": {"runs": [7]},
    "runs_huge": {"runs": [2**40]},
    "runs_negative": {"runs": [-8]},
    "run_zero": {"runs": [8, 0]},
    "table_checksum": {"table_xxh3": 1},
    "dtype": {"dtype": "complex64"},
    "no_streams": {"streams": []},
}


@pytest.mark.parametrize("name", LIES)
def test_frames_that_lie_are_refused_by_number(writer: WriterProcess, engine: Sender, name: str) -> None:
    capture = new_ulid()
    engine.open(capture)
    frame, parts = engine.frame([(capture, 1, range(8))], send=False)
    lie = msgspec.structs.replace(frame, **LIES[name])
    engine.socket.send_multipart([encode(lie), *parts])
    if lie.seq:
        engine.seq = lie.seq
        engine.wait()
        code, reason = engine.refused[lie.seq]
        assert code == "malformed" and reason
    still_works(writer, engine)


def test_parts_that_do_not_fit(writer: WriterProcess, engine: Sender) -> None:
    capture = new_ulid()
    engine.open(capture)
    frame, (table, *payload) = engine.frame([(capture, 1, range(8))], send=False)
    wrong_rows = table[:-4] + b"\xff\xff\xff\xff"
    far = bytearray(table)
    far[32:36] = b"\xff\xff\xff\xff"  # position 2^32-1
    variants = [
        (frame, [table[:-1], *payload]),
        (frame, [table, *payload, b"extra"]),
        (frame, [table, *payload[:-1]]),
        (frame, [table, payload[0][:-1], *payload[1:]]),
        (frame, [table, bytes(len(payload[0])), *payload[1:]]),
        (frame, [table]),
        (frame, []),
        (frame, [wrong_rows, *payload]),
        (msgspec.structs.replace(frame, table_xxh3=xxhash.xxh3_64_intdigest(bytes(far))), [bytes(far), *payload]),
    ]
    for message, parts in variants:
        engine.send(msgspec.structs.replace(message, seq=engine.next()), *parts)
    engine.wait()
    assert len(engine.refused) == len(variants)
    still_works(writer, engine)


def test_a_payload_in_several_parts(writer: WriterProcess, engine: Sender) -> None:
    capture = new_ulid()
    engine.open(capture)
    frame, (table, first, *rest) = engine.frame([(capture, 1, range(8))], send=False)
    engine.send(frame, table, first[:100], first[100:101], b"", first[101:], *rest)
    engine.finish(capture, end=8)
    engine.wait()
    assert not engine.refused
    with StoreReader(writer.store) as reader:
        assert until(lambda: [row for row in reader.captures(status="complete") if row.id == capture])
        assert_rows(reader.slice(capture, SITE, [0], 0, 8), 1, range(8))


def test_records_that_lie_are_refused(writer: WriterProcess, engine: Sender) -> None:
    good = Open(0, new_ulid(), "r", "{}", Resolved({SITE: [0]}, {SITE: "raw"}, "all", "allow"), 1, b"\0" * 4, 0, 1)
    resolved = good.resolved
    lies = [
        msgspec.structs.replace(good, capture="../x"),
        msgspec.structs.replace(good, capture=new_ulid() + ".00"),
        msgspec.structs.replace(good, asked="[1]"),
        msgspec.structs.replace(good, asked="[" * 50_000),
        msgspec.structs.replace(good, prompt_len=-1),
        msgspec.structs.replace(good, prompt_token_ids=b"abc"),
        msgspec.structs.replace(good, cached=2),
        msgspec.structs.replace(good, resolved=msgspec.structs.replace(resolved, layers={"nowhere": [0]})),
        msgspec.structs.replace(good, resolved=msgspec.structs.replace(resolved, layers={SITE: [3, 1]})),
        msgspec.structs.replace(good, resolved=msgspec.structs.replace(resolved, codec={})),
        msgspec.structs.replace(good, resolved=msgspec.structs.replace(resolved, codec={SITE: "rp8"})),
        msgspec.structs.replace(good, resolved=msgspec.structs.replace(resolved, positions=[(5, 1)])),
        msgspec.structs.replace(good, resolved=msgspec.structs.replace(resolved, positions="some")),
        msgspec.structs.replace(good, resolved=msgspec.structs.replace(resolved, images=[(3, 5), (4, 6)])),
        msgspec.structs.replace(good, resolved=msgspec.structs.replace(resolved, images=[(-1, 5)])),
        msgspec.structs.replace(good, resolved=msgspec.structs.replace(resolved, elsewhere={SITE: [0, 9]})),
        msgspec.structs.replace(good, resolved=msgspec.structs.replace(resolved, elsewhere={SITE: [1, 0]})),
        msgspec.structs.replace(good, resolved=msgspec.structs.replace(resolved, elsewhere={"../x": [0]})),
        msgspec.structs.replace(good, resolved=msgspec.structs.replace(resolved, writer=-1)),
        msgspec.structs.replace(good, resolved=msgspec.structs.replace(resolved, writer=2**40)),
        Own(0, "short", 1, "", [], {}, 1),
        Own(0, new_ulid(), 0, "", [], {}, 1),
        Own(0, new_ulid(), 10**9, "", [], {}, 1),
        Own(0, new_ulid(), 1, "x" * 1000, [], {}, 1),
        Own(0, new_ulid(), 1, "", [new_ulid()], {}, 1),
        Own(0, new_ulid(), 1, "", ["a"] * 1000, {}, 1),
        Own(0, new_ulid(), 1, "", [], {"k": "v" * 10_000}, 1),
        Own(0, new_ulid(), 1, "", [], {}, 2**63),
        msgspec.structs.replace(good, created_ms=2**64 - 1),
    ]
    for lie in lies:
        engine.send(msgspec.structs.replace(lie, seq=engine.next()))
    capture = new_ulid()
    engine.open(capture)
    more = [
        Dropped(0, capture, "nowhere", [0], 0, 1),
        Dropped(0, capture, SITE, [], 0, 1),
        Dropped(0, capture, SITE, [0], 3, 3),
        Dropped(0, capture, SITE, [0], 0, 1, "because"),
        Finish(0, capture, "stop", None, b"123", 1),
        Finish(0, capture, "stop", None, b"", -1),
        Finish(0, capture, "stop", None, b"", 1, 2**63),
    ]
    for lie in more:
        engine.send(msgspec.structs.replace(lie, seq=engine.next()))
    engine.wait()
    assert {code for code, _ in engine.refused.values()} == {"malformed"}
    assert len(engine.refused) == len(lies) + len(more)
    still_works(writer, engine)


def test_billions_of_positions_cost_no_memory(writer: WriterProcess, engine: Sender) -> None:
    capture, last = new_ulid(), limits.position_max
    resolved = Resolved({SITE: [0, 1, 2, 3]}, {SITE: "int8b64"}, "all", "recompute")
    engine.send(Open(engine.next(), capture, "r", "{}", resolved, last, b"", 7, 1))
    engine.frame([(capture, 1, [3, last - 2])])
    engine.dropped(capture, 100, 200, layers=[0, 1])
    engine.finish(capture, end=last)
    engine.wait()
    assert not engine.refused
    with StoreReader(writer.store) as reader:
        assert until(lambda: reader.capture(capture).status == "incomplete")
        manifest = reader.manifest(capture)
        assert_adds_up(manifest)
        found = [(m.start, m.stop, m.reason) for m in manifest.rows[2].missing]
        assert found == [(0, 3, "prefix_cached"), (4, 7, "prefix_cached"), (7, last - 2, "dropped"),
                         (last - 1, last, "dropped")]
        assert reader.slice(capture, SITE, [0, 2]).missing == manifest.rows[2].missing
        assert_rows(reader.slice(capture, SITE, [0, 2]), 1, [3, last - 2])
    status = Path(f"/proc/{writer.process.pid}/status").read_text()
    assert int(status.split("VmHWM:")[1].split()[0]) < 1_000_000  # KiB
    still_works(writer, engine)


def test_text_that_is_no_text(writer: WriterProcess, engine: Sender) -> None:
    frame, parts = engine.frame([(new_ulid(), 1, range(3))], send=False)
    broken = encode(frame).replace(b"int8b64", b"int8b\xff\xa5")
    engine.socket.send_multipart([broken, *parts])
    engine.sync()
    stranger = Sender(writer.endpoint)
    stranger.socket.send(encode(Hello("x" * 26, "engine", 1)).replace(b"engine", b"eng\xff\xa5e"))
    assert isinstance(stranger.receive(10), Refuse)
    stranger.close()
    still_works(writer, engine)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(max_size=300), min_size=1, max_size=4))
def test_arbitrary_bytes(writer: WriterProcess, engine: Sender, parts: list[bytes]) -> None:
    engine.socket.send_multipart(parts)
    engine.sync()


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_flipped_bits_and_cut_parts(writer: WriterProcess, engine: Sender, data: st.DataObject) -> None:
    engine.seq = engine.sync().visible
    frame, parts = engine.frame([(new_ulid(), 1, range(3))], send=False)
    message = [bytearray(part) for part in (encode(frame), *parts)]
    for _ in range(data.draw(st.integers(1, 3))):
        part = data.draw(st.sampled_from([p for p in message if p]))
        at = data.draw(st.integers(0, len(part) - 1))
        if data.draw(st.booleans()):
            part[at] ^= 1 << data.draw(st.integers(0, 7))
        else:
            del part[at:]
            part += b"\0"
    engine.socket.send_multipart([bytes(part) for part in message])
    engine.sync()


def test_after_all_of_this_it_still_works(writer: WriterProcess, engine: Sender) -> None:
    still_works(writer, engine)
    huge = Sender(writer.endpoint)
    huge.hello()
    huge.socket.send_multipart([b"x" * (limits.message_header_bytes_max + 1)])  # cuts its own connection, no other
    still_works(writer, engine)
    huge.close()
    assert "malformed=" in writer.stop()
