"""The segment format: what is written is read back, and nothing that was changed passes."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas import codecs
from schemas.errors import CorruptError, StoreError
from schemas.ids import new_ulid
from schemas.store.frame_hashes import prove_frame
from schemas.store.segment import PRELUDE, FrameHeader, encode_head, parse_frame, seal_head, verify_payload, walk
from schemas.wire.messages import Frame, StreamPart
from schemas.wire.row_table import RowTable
from writer_service import fs
from writer_service.catalog.changes import SegmentMade
from writer_service.journal.open_segments import OpenSegment

UUID = bytes(range(16))
STREAM = new_ulid()


def build(
    seq: int, runs: list[int], layers: list[int], codec: str = "int8b64", width: int = 80, dtype: str = "bfloat16"
) -> tuple[Frame, bytes, list[list[memoryview]], dict[str, Any]]:
    """A frame, its table, its runs by stream, and the content ``[layers, rows, piece]`` by stream."""
    rng = np.random.default_rng(seq)
    rows = sum(runs)
    column = np.arange(rows, dtype=np.uint32)
    table = RowTable(column % 2, column + 7, column * 3, column * 0).to_bytes()
    bounds = np.cumsum([0, *runs])
    parts, buffers, content = [], [], {}
    for stream in codecs.streams(codec, width, dtype):
        values = rng.integers(0, 256, (len(layers), rows, stream.nbytes), np.uint8)
        content[stream.name] = values
        pieces = [values[:, a:b].tobytes() for a, b in pairwise(bounds)]
        buffers.append([memoryview(piece) for piece in pieces])
        joined = b"".join(pieces)
        parts.append(StreamPart(stream.name, len(joined), xxhash.xxh3_64_intdigest(joined), [(5, 1)] * len(pieces)))
    frame = Frame(
        seq,
        "resid_post",
        codec,
        dtype,
        width,
        layers,
        [new_ulid(), new_ulid() + ".3"],
        runs,
        xxhash.xxh3_64_intdigest(table),
        parts,
        "f",
    )
    return frame, table, buffers, content


def segment_of(
    path: Path, frames: list[tuple[Frame, bytes, list[list[memoryview]], Any]], number: int = 3
) -> list[int]:
    """Write a segment; the end of each frame."""
    fd = fs.open_new(path)
    segment = OpenSegment(SegmentMade(number, "resid_post", "int8b64", "bfloat16", 80, "f"), path, fd)
    ends = []
    for frame, table, buffers, _ in frames:
        segment.append(UUID, FrameHeader(STREAM, 5, 0, frame), table, buffers)
        ends.append(segment.end)
    fs.close(fd)
    return ends


@pytest.mark.parametrize("codec", ["int8b64", "raw", "raw16"])
@pytest.mark.parametrize("runs", [[1], [5], [1, 4, 2], [1, 1, 1, 1]])
@pytest.mark.parametrize("layers", [[0], [3, 7, 9]])
def test_round_trip(tmp_path: Path, codec: str, runs: list[int], layers: list[int]) -> None:
    built = [build(seq, runs, layers, codec, dtype="float32" if codec == "raw" else "bfloat16") for seq in (1, 2)]
    ends = segment_of(tmp_path / "s", built)
    data = memoryview((tmp_path / "s").read_bytes())
    views = list(walk(data, UUID, 3, "s", verify=verify_payload))
    assert [view.end for view in views] == ends
    for view, (frame, _, _, content) in zip(views, built, strict=True):
        assert all(not part.extents for part in view.frame.streams)
        assert (view.frame.seq, view.frame.layers, view.header.stream) == (frame.seq, layers, STREAM)
        assert view.offset % 4096 == 0 and view.layout.parts[0] % 4096 == 0
        index = view.pieces(np.arange(len(layers)), np.arange(view.rows))
        for number, stream in enumerate(view.declared):
            assert np.array_equal(view.section(number)[index], content[stream.name])
        some = view.pieces([len(layers) - 1], [view.rows - 1])
        assert np.array_equal(view.section(0)[some][0, 0], content[view.declared[0].name][-1, -1])


def test_a_whole_frame_of_a_codec_that_is_not_here_is_no_damage() -> None:
    """What is damaged is cut off a journal; this waits for the package that knows it."""
    frame, table, _, _ = build(1, [3], [0])
    for codec, error in (("elsewhere:k=3", StoreError), ("pickle", StoreError), ("int8b64:k=3", CorruptError)):
        foreign = msgspec.structs.replace(frame, codec=codec)
        head, layout = encode_head(UUID, 3, FrameHeader(STREAM, 5, 0, foreign), table)
        data = memoryview(head + bytes(layout.total - len(head)))
        with pytest.raises(StoreError, match=codec.partition(":")[0]) as raised:
            parse_frame(data, 0, UUID, 3, "s")
        assert type(raised.value) is error
        if error is StoreError:
            with pytest.raises(StoreError, match=r"look up codec \w+: no codec of that name is installed here"):
                list(walk(data, UUID, 3, "s", verify=None))


def test_one_pass_proves_frames_and_hashes_their_rows(tmp_path: Path) -> None:
    """More pieces than are hashed at a time, of several codecs and widths."""
    for seq, (codec, width) in enumerate([("int8b64", 80), ("raw16", 80), ("int8b64", 192), ("topk8:k=5", 96)], 1):
        built = build(seq, [500, 1, 27], [3, 7, 9], codec, width)
        segment_of(tmp_path / str(seq), [built])
        data = bytearray((tmp_path / str(seq)).read_bytes())
        view = parse_frame(memoryview(data), 0, UUID, 3, "s")
        main, *sides = (built[3][stream.name] for stream in view.declared)
        found = prove_frame(view, "s")[view.pieces(range(3), range(view.rows))]
        for layer, row in ((0, 0), (0, 499), (1, 499), (2, 500), (0, 527), (2, 527)):
            seed = xxhash.xxh3_64_intdigest(b"".join(side[layer, row].tobytes() for side in sides)) if sides else 0
            assert found[layer, row] == xxhash.xxh3_64_intdigest(main[layer, row].tobytes(), seed)
        for part, start in zip(view.frame.streams, view.layout.parts, strict=True):
            for at in (start, start + part.nbytes // 2, start + part.nbytes - 1):
                data[at] ^= 1
                with pytest.raises(CorruptError, match=f"at byte 0: stream {part.name} does not match"):
                    prove_frame(view, "s")
                data[at] ^= 1
        assert (prove_frame(view, "s")[view.pieces(range(3), range(view.rows))] == found).all()


def middle(prelude_field: slice, value: bytes) -> Any:
    """An edit of the second frame's prelude."""

    def edit(data: bytearray, ends: list[int]) -> bytearray:
        start = ends[0]
        data[start + prelude_field.start : start + prelude_field.start + len(value)] = value
        return data

    return edit


def flip(where: Any) -> Any:
    def edit(data: bytearray, ends: list[int]) -> bytearray:
        data[where(ends)] ^= 0x10
        return data

    return edit


EDITS: dict[str, tuple[Any, int]] = {
    "untouched": (lambda data, ends: data, 3),
    "torn_last_byte": (lambda data, ends: data[:-1], 2),
    "torn_in_payload": (lambda data, ends: data[: ends[2] - 5000], 2),
    "torn_in_head": (lambda data, ends: data[: ends[1] + 100], 2),
    "torn_in_prelude": (lambda data, ends: data[: ends[1] + 10], 2),
    "torn_at_boundary": (lambda data, ends: data[: ends[1]], 2),
    "zeros_after_the_end": (lambda data, ends: data + bytes(9000), 3),
    "zeros_in_the_middle": (lambda data, ends: data[: ends[0]] + bytes(ends[1] - ends[0]) + data[ends[1] :], 1),
    "empty": (lambda data, ends: bytearray(), 0),
    "bad_magic": (middle(slice(0, 8), b"TAPFRM99"), 1),
    "bad_version": (middle(slice(8, 12), b"\x02\0\0\0"), 1),
    "bad_flags": (middle(slice(12, 16), b"\x01\0\0\0"), 1),
    "other_store": (middle(slice(16, 32), bytes(16)), 1),
    "other_segment": (middle(slice(32, 40), b"\x09" + bytes(7)), 1),
    "header_length_huge": (middle(slice(40, 44), b"\xff\xff\xff\xff"), 1),
    "header_length_zero": (middle(slice(40, 44), bytes(4)), 1),
    "table_length_huge": (middle(slice(44, 48), b"\xff\xff\xff\xff"), 1),
    "total_huge": (middle(slice(48, 56), b"\xff" * 8), 1),
    "total_zero": (middle(slice(48, 56), bytes(8)), 1),
    "bad_hash": (middle(slice(56, 64), bytes(8)), 1),
    "bit_in_header": (flip(lambda ends: ends[0] + PRELUDE.size + 20), 1),
    "bit_in_payload": (flip(lambda ends: ends[1] - 5000), 1),
    "bit_in_first": (flip(lambda ends: 70), 0),
    "bit_in_padding": (flip(lambda ends: ends[1] - 1), 3),  # says nothing: padding is never read
}


@pytest.mark.parametrize("name", EDITS)
def test_the_longest_valid_prefix_survives(tmp_path: Path, name: str) -> None:
    ends = segment_of(tmp_path / "s", [build(seq, [3, 40], [0, 1, 2]) for seq in (1, 2, 3)])
    edit, survivors = EDITS[name]
    data = edit(bytearray((tmp_path / "s").read_bytes()), ends)
    views = list(walk(memoryview(bytes(data)), UUID, 3, "s", verify=verify_payload))
    assert [view.frame.seq for view in views] == [1, 2, 3][:survivors]


def test_a_frame_of_another_store_or_segment_is_none(tmp_path: Path) -> None:
    """Whole as it is: bytes of a file that was used before, or lies where another should."""
    segment_of(tmp_path / "s", [build(1, [3], [0])])
    data = memoryview((tmp_path / "s").read_bytes())
    assert parse_frame(data, 0, UUID, 3, "s").rows == 3
    for uuid, number in ((bytes(16), 3), (UUID, 4)):
        with pytest.raises(CorruptError, match="belongs to another store or segment"):
            parse_frame(data, 0, uuid, number, "s")


def test_a_corrupt_frame_is_named(tmp_path: Path) -> None:
    ends = segment_of(tmp_path / "s", [build(seq, [3], [0]) for seq in (1, 2)])
    data = bytearray((tmp_path / "s").read_bytes())
    data[ends[0] + 80] ^= 1
    with pytest.raises(CorruptError, match=f"blocks/b at byte {ends[0]}: the head does not match"):
        parse_frame(memoryview(bytes(data)), ends[0], UUID, 3, "blocks/b")
    data = bytearray((tmp_path / "s").read_bytes())
    view = parse_frame(memoryview(bytes(data)), 0, UUID, 3, "b")
    data[view.layout.parts[0] + 1] ^= 1
    with pytest.raises(CorruptError, match="stream q does not match"):
        verify_payload(parse_frame(memoryview(bytes(data)), 0, UUID, 3, "b"), "b")


def test_a_header_that_lies_under_a_true_hash(tmp_path: Path) -> None:
    """Somebody who can compute the hash still cannot make the parser read outside the frame."""
    frame, table, _, _ = build(1, [3], [0])
    header = FrameHeader(STREAM, 5, 0, frame)
    head, layout = encode_head(UUID, 3, header, table)
    good = bytes(head) + bytes(layout.total - len(head))
    assert parse_frame(memoryview(good), 0, UUID, 3, "s").rows == 3
    for changes in (
        {"runs": [2**40]},
        {"runs": [-3]},
        {"runs": []},
        {"layers": [0, 0]},
        {"layers": [5, 1]},
        {"layers": [10**9]},
        {"width": 1 << 30},
        {"width": 64},
        {"codec": "raw"},
        {"codec": "topk:density=0.040"},
        {"codec": "kv8:head=3"},
        {"captures": ["../../x"]},
        {"captures": []},
        {"site": "nowhere"},
        {"streams": []},
        {"dtype": "object"},
        {"seq": 0},
    ):
        bad = msgspec.structs.replace(frame, **changes)
        body = msgspec.msgpack.encode(FrameHeader(STREAM, 5, 0, bad))
        head = seal_head(UUID, 3, 0, body, table, layout.total)
        with pytest.raises(CorruptError):
            parse_frame(memoryview(head + bytes(1 << 16)), 0, UUID, 3, "s")


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_bytes_make_the_walk_fail_or_read_changed_frames(data: st.DataObject) -> None:
    frame, table, buffers, _ = build(1, [2], [0, 1])
    head, layout = encode_head(UUID, 3, FrameHeader(STREAM, 5, 0, frame), table)
    body = bytearray(layout.total)
    body[: len(head)] = head
    for at, runs in zip(layout.parts, buffers, strict=True):
        joined = b"".join(runs)
        body[at : at + len(joined)] = joined
    original = bytes(body)
    checked = [range(PRELUDE.size)] + [
        range(at, at + p.nbytes) for at, p in zip(layout.parts, frame.streams, strict=True)
    ]
    for _ in range(data.draw(st.integers(1, 4))):
        zone = data.draw(st.sampled_from(checked))
        body[data.draw(st.sampled_from(zone))] ^= data.draw(st.integers(1, 255))
    views = list(walk(memoryview(bytes(body)), UUID, 3, "s", verify=verify_payload))
    assert len(views) == (1 if bytes(body) == original else 0)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=9000))
def test_arbitrary_bytes_hold_no_frame(junk: bytes) -> None:
    assert list(walk(memoryview(junk), UUID, 3, "s", verify=verify_payload)) == []
