"""A sealed segment is an ordinary Zarr v3 group: three independent readers see the same rows, missing ones as fill."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import threading
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray
import xxhash

from schemas import codecs
from schemas.errors import CorruptError
from schemas.ids import new_ulid
from schemas.read.reader import StoreReader, read_store_uuid
from schemas.sites import SITES
from schemas.store.block import open_block
from schemas.store.paths import open_name
from tests.schemas.store.test_segment import build
from tests.support.processes import free_port
from tests.support.store_helpers import (
    PROGRAMS,
    SITE,
    Sender,
    WriterProcess,
    assert_rows,
    engine_info,
    expected_pieces,
    until,
)
from writer_service import fs
from writer_service.journal import checksum_cache
from writer_service.journal.checksum_cache import ChecksumCache, FrameChecksums
from writer_service.recover.blocks import block_frames
from writer_service.recover.recovery import recover
from writer_service.seal.sealing import seal
from writer_service.tools.compaction import compact
from writer_service.tools.fsck import fsck
from writer_service.upkeep.erasing import erase

NATIVE = PROGRAMS / "native_writer.py"
DTYPES = {"int8b64": "bfloat16", "raw": "float32", "raw16": "float16", "topk8:k=5": "bfloat16",
          "rp8:k=32,seed=7": "bfloat16"}


def filled(tmp_path: Path, codec: str, width: int) -> tuple[Path, str]:
    """A store with one sealed block in which layers 0 and 2 lack some rows."""
    store, capture = tmp_path / "store", new_ulid()
    dtype = DTYPES.get(codec, "bfloat16")
    with WriterProcess(store) as writer, Sender(writer.endpoint, engine=engine_info(width, dtype=dtype)) as engine:
        engine.open(capture, codec=codec)
        args: dict[str, Any] = {"codec": codec, "width": width, "dtype": dtype}
        engine.frame([(capture, 1, range(5))], runs=[2, 3], **args)
        engine.frame([(capture, 1, range(5, 8))], layers=[1, 3], **args)
        engine.wait()
        writer.stop()
    return store / "blocks" / "w0-00000001.zarr", capture


def read_zarr(path: Path) -> np.ndarray:
    import zarr

    return np.asarray(zarr.open_array(str(path), mode="r")[...])


def read_zarrs(path: Path) -> np.ndarray:
    import zarr
    import zarrs  # noqa: F401

    with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
        return np.asarray(zarr.open_array(str(path), mode="r")[...])


def read_tensorstore(path: Path) -> np.ndarray:
    import tensorstore as ts

    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path)}}
    return np.asarray(ts.open(spec, open=True).result().read().result())


@pytest.mark.parametrize("codec", DTYPES)
def test_three_readers_agree_bit_for_bit(tmp_path: Path, codec: str) -> None:
    width = 96
    block, capture = filled(tmp_path, codec, width)
    attributes = json.loads((block / "zarr.json").read_text())["attributes"]
    assert attributes["layers"] == [0, 1, 2, 3] and attributes["captures"] == [capture]
    assert attributes["site"] == SITE and attributes["codec"]["name"] == codec
    assert attributes["codec"]["parameters"] == codecs.identified(codec).parameters
    assert [s["name"] for s in attributes["codec"]["streams"]] == [
        s.name for s in codecs.streams(codec, width, DTYPES[codec])
    ]
    assert attributes["streams"][0]["engine"]["model"] == "tiny"
    for read in (read_zarr, read_zarrs, read_tensorstore):
        present = read(block / "present")
        assert present[:5].all() and not present[5:, [0, 2]].any() and present[5:, [1, 3]].all()
        assert read(block / "position").tolist() == list(range(8))
        assert read(block / "token_id").tolist() == list(range(5000, 5008))
        assert read(block / "capture").tolist() == [0] * 8
        wanted = expected_pieces(1, range(8), range(4), codec, width, DTYPES[codec])
        for stream in codecs.streams(codec, width, DTYPES[codec]):
            got = read(block / stream.name)
            assert got.dtype == stream.dtype and got.shape == (8, 4, *stream.shape)
            stored = np.ascontiguousarray(got).view(np.uint8).reshape(8, 4, -1)
            for layer in range(4):
                rows = 5 if layer in (0, 2) else 8
                assert np.array_equal(stored[:rows, layer], wanted[stream.name][layer, :rows])
                fill = np.full(
                    got[rows:, layer].shape, float("nan") if stream.fill == "NaN" else stream.fill, got.dtype
                )
                assert np.array_equal(got[rows:, layer], fill, equal_nan=got.dtype.kind == "f")
        checksum = read(block / "checksum")
        main, *sides = [wanted[s.name][3, 4].tobytes() for s in codecs.streams(codec, width, DTYPES[codec])]
        seed = xxhash.xxh3_64_intdigest(b"".join(sides)) if sides else 0
        assert checksum[4, 3] == xxhash.xxh3_64_intdigest(main, seed)


@pytest.mark.parametrize("codec", [*DTYPES, "fp8row", "nf4b64", "full8", "topk:k=5", "sketch:k=32,bits=2,seed=7"])
def test_xarray_opens_a_block_of_every_codec(tmp_path: Path, codec: str) -> None:
    """And so does it once the block is cold. Of several streams each has a last axis of its own, of its own length."""
    block, _ = filled(tmp_path, codec, 128)
    declared = codecs.streams(codec, 128, DTYPES.get(codec, "bfloat16"))
    for cold in (False, True):
        if cold:
            assert compact(tmp_path / "store").cold == 1
            block, = (tmp_path / "store" / "blocks").glob("*.zarr")
        opened = xarray.open_zarr(block, chunks=None, consolidated=False)
        assert {stream.name for stream in declared} < set(opened.variables)
        for stream in declared:
            array = opened[stream.name]
            assert array.dims == ("row", "layer", f"{stream.name}_item") and array.sizes["row"] == 8
            assert np.array_equal(array.values, read_zarr(block / stream.name), equal_nan=array.dtype.kind == "f")
        assert opened["position"].values.tolist() == list(range(8)) and opened["present"].dims == ("row", "layer")


def test_the_group_opens_as_a_group(tmp_path: Path) -> None:
    import zarr

    block, _ = filled(tmp_path, "int8b64", 64)
    group = zarr.open_group(str(block), mode="r")
    names = {name for name, _ in group.arrays()}
    assert names == {
        "q",
        "scale",
        "outlier_index",
        "outlier_value",
        "capture",
        "position",
        "token_id",
        "flags",
        "present",
        "checksum",
        "frame",
        "frame_row",
    }
    assert group.attrs["format"] == "vllm-tap block" and group["scale"].attrs["view"] == "bfloat16"


def test_every_byte_and_name_of_a_block_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What its seal replaces is gone: a power loss must leave all of it."""
    store, capture = tmp_path / "store", new_ulid()
    with WriterProcess(store, "--seal-idle-s", "60") as writer, Sender(writer.endpoint) as engine:
        engine.open(capture)
        engine.frame([(capture, 1, range(8))])
        engine.wait()
        writer.kill()
    bytes_of: dict[int, int] = {}
    names_of: set[int] = set()
    sync_bytes, sync_names = fs.datasync, fs.sync_dir

    def noting_bytes(fd: int) -> None:
        sync_bytes(fd)
        bytes_of[os.fstat(fd).st_ino] = os.fstat(fd).st_size

    def noting_names(path: Path) -> None:
        sync_names(path)
        names_of.add(path.stat().st_ino)

    monkeypatch.setattr(fs, "datasync", noting_bytes)
    monkeypatch.setattr(fs, "sync_dir", noting_names)
    state = recover(store)
    fd = fs.open_existing(store / open_name(1))
    assert seal(store, state.uuid, 1, fd, state.epoch, {})
    fs.close(fd)
    fs.close(state.lock)
    for path in (store / "blocks" / "w0-00000001.zarr").rglob("*"):
        info = path.stat()
        assert info.st_ino in names_of if path.is_dir() else bytes_of.get(info.st_ino) == info.st_size, path


def pages_in_memory(path: Path) -> int:
    """How many pages of a file the page cache has."""
    size = path.stat().st_size
    libc, found = ctypes.CDLL(None), (ctypes.c_ubyte * (-(-size // mmap.PAGESIZE)))()
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as data:
        start = ctypes.c_char.from_buffer(data)
        assert libc.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), found) == 0
        del start
    return sum(page & 1 for page in found)


@pytest.mark.parametrize("off", [0, 1], ids=["aligned", "as it lies"])
@pytest.mark.parametrize("nbytes", [0, 5, 4096, 40_960, 70_000])
def test_a_direct_write_writes_the_same_bytes(tmp_path: Path, nbytes: int, off: int) -> None:
    """Behind what is there, with what follows; whole blocks that lie well leave nothing in memory, or a page."""
    room = np.random.default_rng(nbytes).integers(0, 256, nbytes + 2 * fs.direct_align, np.uint8)
    start = -room.ctypes.data % fs.direct_align + off
    data, path = room[start : start + nbytes].data, tmp_path / "file"
    path.write_bytes(b"")
    fd = fs.open_existing(path)
    try:
        os.pwrite(fd, b"before" * 2000, 0)
        assert fs.write_direct(fd, [data, b"behind"], 8192) == 8192 + nbytes + 6
        assert fs.write_at(fd, [b"and on"], 8192 + nbytes + 6) == 8192 + nbytes + 12  # an ordinary write again
        fs.datasync(fd)
        direct = not off and can_write_direct(tmp_path)
        assert pages_in_memory(path) <= 5 if direct else pages_in_memory(path) == -(-(8192 + nbytes + 12) // 4096)
    finally:
        fs.close(fd)
    assert path.read_bytes() == b"before" * (8192 // 6) + b"be" + bytes(data) + b"behindand on" + (
        b"" if nbytes > 4096 else (b"before" * 2000)[8192 + nbytes + 12 :])


def can_write_direct(folder: Path) -> bool:
    """Whether the file system does without its cache."""
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        try:
            fd = os.open(folder / "try", os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
            os.pwrite(fd, page, 0)
            os.close(fd)
        except OSError:
            return False
    return pages_in_memory(folder / "try") == 0


def test_side_streams_and_index_are_written_past_the_cache(tmp_path: Path) -> None:
    """It is most of what sealing writes, nobody of this project reads it, and new pages were half of the cost."""
    if not can_write_direct(tmp_path):
        pytest.skip("the file system writes nothing past the cache")
    store, capture, width, rows = tmp_path / "store", new_ulid(), 4096, 256
    dtype = "bfloat16"
    with WriterProcess(store) as writer, Sender(writer.endpoint, engine=engine_info(width, dtype=dtype)) as engine:
        engine.open(capture)
        engine.frame([(capture, 1, range(rows))], width=width, dtype=dtype)
        engine.wait()
        writer.stop()
    block = store / "blocks" / "w0-00000001.zarr"
    scale = block / "scale" / "c" / "0" / "0" / "0"
    assert scale.stat().st_size > 100_000 and pages_in_memory(scale) <= 1


def spoiled(path: Path, wanted: np.ndarray[Any, Any]) -> int:
    """Flip a bit of the bytes in a file; where."""
    at = path.read_bytes().index(wanted.tobytes())
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes([wanted.reshape(-1).view(np.uint8)[0] ^ 1]))
    return at


def test_checksums_are_of_what_was_acknowledged(tmp_path: Path) -> None:
    """They are made as rows come; what the disk gives back later does not get into them. Sealing reads sides alone."""
    store, capture, width = tmp_path / "store", new_ulid(), 192
    args: dict[str, Any] = {"width": width, "dtype": "bfloat16"}
    port = free_port()
    flags = ("--seal-idle-s", "60", "--metrics-port", str(port))
    with WriterProcess(store, *flags, script=NATIVE) as writer, \
            Sender(writer.endpoint, engine=engine_info(width, dtype="bfloat16")) as engine:
        engine.open(capture)
        engine.frame([(capture, 1, range(5))], runs=[2, 3], **args)
        engine.frame([(capture, 1, range(5, 8))], **args)
        engine.wait()
        metrics = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
        assert "vllm_tap_writer_frames_checksummed_total 2.0\n" in metrics
        pieces = expected_pieces(1, range(8), range(4), **args)
        journal = store / open_name(1)
        spoiled(journal, pieces["q"][2, 1])
        second = spoiled(journal, pieces["outlier_value"][:, 5:8])
        writer.stop()
    block = open_block(store / "blocks" / "w0-00000001.zarr")
    assert block.frames.tolist() == [0] and second > 4096  # the second is damaged in what sealing copies
    wanted = [[xxhash.xxh3_64_intdigest(pieces["q"][layer, row].tobytes(), xxhash.xxh3_64_intdigest(b"".join(
        pieces[side][layer, row].tobytes() for side in list(pieces)[1:]))) for layer in range(4)] for row in range(5)]
    assert block.checksum.tolist() == wanted and block.present.all()
    with StoreReader(store) as reader:
        assert_rows(reader.slice(capture, SITE, [0, 1, 3], 0, 5), 1, range(5))
        assert_rows(reader.slice(capture, SITE, [2], 2, 5), 1, range(2, 5))
        with pytest.raises(CorruptError, match="at byte 0: a row does not match"):
            reader.slice(capture, SITE, [2], 0, 2)
    found = [(bad.layers, bad.positions) for bad in fsck(store).bad if bad.positions]
    assert found == [((2,), (1,)), ((0, 1, 2, 3), (5, 6, 7))]


def test_a_damaged_row_is_named_in_its_own_file_after_another_was_erased(tmp_path: Path) -> None:
    """Erasing hashes what is left of the frame as it lies there, so that only the row's own checksum tells."""
    store, kept_one, gone = tmp_path / "store", new_ulid(), new_ulid()
    with WriterProcess(store) as writer, Sender(writer.endpoint) as engine:
        for capture in (kept_one, gone):
            engine.open(capture)
        engine.frame([(kept_one, 1, range(5)), (gone, 2, range(3))], width=192)
        engine.frame([(kept_one, 1, range(5, 7))], width=192)
        engine.wait()
        writer.stop()
    block = store / "blocks" / "w0-00000001.zarr"
    main = block / "q" / "c" / "0" / "0" / "0"
    spoiled(main, expected_pieces(1, [3], [2], width=192)["q"][0, 0])
    checksum = np.memmap(block / "checksum" / "c" / "0" / "0", np.uint64, "r+", shape=(10, 4))
    checksum[9, 1] ^= np.uint64(1)  # of a frame that is as it was: the array is wrong
    checksum.flush()

    def found() -> list[tuple[str, int | None, tuple[int, ...], tuple[int, ...]]]:
        return sorted((str(Path(bad.file).relative_to(block.relative_to(store))), bad.offset, bad.layers, bad.positions)
                      for bad in fsck(store).bad if bad.capture == kept_one)

    wanted = [("checksum", None, (1,), (6,)), ("q/c/0/0/0", 0, (2,), (3,))]
    assert found() == wanted
    assert erase(store, read_store_uuid(store), 1, [gone]) == 3
    assert found() == wanted


def test_what_was_found_after_a_crash_is_read_to_be_sealed(tmp_path: Path) -> None:
    """So are frames that checksums of others are kept for."""
    store, capture, width = tmp_path / "store", new_ulid(), 192
    with WriterProcess(store, "--seal-idle-s", "60", script=NATIVE) as writer, Sender(writer.endpoint) as engine:
        engine.open(capture)
        for start in (0, 4):
            engine.frame([(capture, 1, range(start, start + 4))], width=width)
        engine.wait()
        writer.kill()
    second = spoiled(store / open_name(1), expected_pieces(1, [5], [2], width=width)["q"][0, 0])
    state = recover(store)
    fd = fs.open_existing(store / open_name(1))
    others = {0: FrameChecksums((1, 2, 3, 4), np.zeros(16, np.uint64))}
    assert seal(store, state.uuid, 1, fd, state.epoch, {}, [(0, 8192), (8192, 8192)], others)
    fs.close(fd)
    fs.close(state.lock)
    block = open_block(store / "blocks" / "w0-00000001.zarr")
    assert block.frames.tolist() == [0] and second > 8192 and block.checksum.all()


def test_only_so_many_checksums_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum_cache, "cache_bytes_max", 4096)
    frame, _ = build(1, [3], [0])[:2]
    checksums = ChecksumCache()
    for number in range(10):
        checksums.put(number, 0, frame, np.zeros(100, np.uint64))
    assert [len(checksums.get(number)) for number in range(10)] == [1] * 3 + [0] * 7
    assert not checksums.full
    checksums.forget(1)
    checksums.put(4, 0, frame, np.zeros(250, np.uint64))
    assert not checksums.get(4) and not checksums.get(1)
    checksums.put(4, 0, frame, np.zeros(100, np.uint64))
    assert checksums.get(4)[0].matches(frame)


def test_readers_go_on_while_segments_are_sealed(tmp_path: Path) -> None:
    """Tiny segments, sealed all the time under a reader's feet: it never sees anything but the rows."""
    store, capture = tmp_path / "store", new_ulid()
    with (
        WriterProcess(store, "--segment-bytes", "65536", "--seal-idle-s", "0.2") as writer,
        Sender(writer.endpoint) as engine,
    ):
        engine.open(capture, prompt_len=1)
        engine.frame([(capture, 1, [0])])
        engine.wait()
        done = threading.Event()
        failures: list[BaseException] = []
        reads = [0]

        def read() -> None:
            try:
                while not done.is_set():
                    with StoreReader(store) as reader:  # a cold cache each time
                        got = reader.slice(capture, SITE, [0, 2], 0, None)
                        assert_rows(got, 1, range(len(got.positions)))
                        reads[0] += 1
            except BaseException as error:
                failures.append(error)

        with StoreReader(store) as first:
            until(lambda: first.captures() and first.manifest(capture).captured)
        threads = [threading.Thread(target=read) for _ in range(2)]
        for thread in threads:
            thread.start()
        for start in range(1, 161, 4):
            engine.frame([(capture, 1, range(start, start + 4))])
            if start % 5 == 0:
                engine.wait()
        engine.finish(capture, end=161, output=161)
        engine.wait()
        until(lambda: len(list((store / "blocks").glob("w0-*.zarr"))) > 3)
        done.set()
        for thread in threads:
            thread.join()
        assert not failures, failures
        assert reads[0] > 3
        with StoreReader(store) as reader:
            assert until(lambda: reader.capture(capture).status == "complete")
            assert_rows(reader.slice(capture, SITE, [0, 1, 2, 3], 0, 161), 1, range(161))


def test_one_reader_in_many_threads(tmp_path: Path) -> None:
    block, capture = filled(tmp_path, "int8b64", 64)
    failures: list[BaseException] = []
    with StoreReader(block.parent.parent) as reader:

        def read(layer: int) -> None:
            try:
                for _ in range(20):
                    assert_rows(reader.slice(capture, SITE, [layer], 0, 5), 1, range(5))
                    assert reader.manifest(capture).captured == 26
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=read, args=(layer,)) for layer in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures, failures


def test_rot_in_a_block_is_named_and_costs_only_its_frame(tmp_path: Path) -> None:
    from schemas.errors import CorruptError

    block, capture = filled(tmp_path, "int8b64", 64)
    main = block / "q" / "c" / "0" / "0" / "0"
    data = bytearray(main.read_bytes())
    second = int(np.fromfile(block / "frame" / "c" / "0", "<u8")[1])
    data[second + 8192] ^= 0x01  # somewhere in the second frame's payload
    main.write_bytes(data)
    with StoreReader(block.parent.parent) as reader:
        assert_rows(reader.slice(capture, SITE, [1], 0, 5), 1, range(5))
        with pytest.raises(CorruptError, match=f"w0-00000001.zarr/q/c/0/0/0 at byte {second}"):
            reader.slice(capture, SITE, [1], 5, 8)


def test_a_frame_that_a_block_leaves_out_is_not_taken_from_it(tmp_path: Path) -> None:
    """It was given up before: its sender sends it again, and the next erasure clears its place."""
    block, _ = filled(tmp_path, "int8b64", 64)
    uuid, listed = read_store_uuid(tmp_path / "store"), block / "frame" / "c" / "0"
    offsets = np.fromfile(listed, "<u8").tolist()
    assert len(offsets) > 1 and [view.offset for view in block_frames(block, 1, uuid)] == offsets
    np.array(offsets[1:], "<u8").tofile(listed)
    assert [view.offset for view in block_frames(block, 1, uuid)] == offsets[1:]
    listed.unlink()  # then every whole one counts
    assert [view.offset for view in block_frames(block, 1, uuid)] == offsets


def test_every_site_has_a_name_that_can_be_stored() -> None:
    assert all(name.isidentifier() for name in SITES)


def test_a_bit_that_flips_after_a_read_is_seen_at_the_next(tmp_path: Path) -> None:
    block, capture = filled(tmp_path, "raw", 64)
    with StoreReader(tmp_path / "store") as reader:
        before = reader.slice(capture, SITE, [1], 0, 8)
        main = block / "x" / "c" / "0" / "0" / "0"
        with main.open("r+b") as file:
            at = main.read_bytes().index(before.pieces["x"][0, 2].tobytes())
            file.seek(at)
            file.write(bytes([before.pieces["x"][0, 2].view(np.uint8)[0] ^ 1]))
        with pytest.raises(CorruptError, match=block.name):
            reader.slice(capture, SITE, [1], 0, 8)
