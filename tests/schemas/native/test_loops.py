"""Many pieces hashed in one call of machine code: the same numbers as one by one; no harm where it cannot be made."""

from __future__ import annotations

import mmap
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from random import Random

import numpy as np
import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from api.slices.formats import cast
from schemas import codecs
from schemas.errors import CorruptError
from schemas.native import loops as native_loops
from schemas.native.loops import load, loops_for
from schemas.store.frame_hashes import hash_streams
from schemas.store.row_checksums import piece_digests
from tests.support.processes import PATIENCE_S
from tests.support.store_helpers import until

# Prints whether the loop was made, and what the rows' checksums are with or without it.
PROGRAM = """
{before}
import numpy as np
from schemas.native.loops import load
from schemas.store.row_checksums import piece_digests
made = load() is not None
print(made, piece_digests(np.arange(600, dtype=np.uint8).reshape(2, 300), []).tolist())
"""
# PR_SET_MDWE, which Linux 6.3 brought
NO_EXECUTABLE_MEMORY = "import ctypes, sys; ctypes.CDLL(None).prctl(65, 1, 0, 0, 0) == 0 or sys.exit(77)"
NO_NUMBA = "import sys; sys.modules['numba'] = None"
# Forks while the thread is importing numba; exits as the child did: 0 where it has both the module and the loop.
FORK = """
import os, signal, sys, threading, time
from schemas.native.loops import loops_for, pieces_before

class Slow:
    importing = threading.Event()

    def find_spec(self, name, path=None, target=None):
        if name == "numba":
            self.importing.set()
            time.sleep(0.5)

sys.meta_path.insert(0, Slow())
loops_for(pieces_before)
Slow.importing.wait()
child = os.fork()
if not child:
    signal.alarm(20)
    import numba
    os._exit(loops_for(0) is None)
status = os.waitpid(child, 0)[1]
assert loops_for(0) is not None
sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.fixture
def unmade(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the start of a process."""
    monkeypatch.setattr(native_loops, "_loops", None)
    monkeypatch.setattr(native_loops, "_maker", None)
    monkeypatch.setattr(native_loops, "_wanted", 0)


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 40), st.integers(1, 1500), st.lists(st.integers(1, 300), max_size=2), st.integers(0, 2**32),
       st.booleans())
@example(3, 4096, [128, 8], 1, True)
def test_one_call_equals_many(count: int, nbytes: int, side_bytes: list[int], seed: int, some: bool) -> None:
    rng = np.random.default_rng(seed)
    main, *sides = (rng.integers(0, 256, (count, size), np.uint8) for size in (nbytes, *side_bytes))
    which = rng.integers(0, count, 2 * count) if some else np.arange(count)
    loop = load()
    assert loop is not None
    seeds = [xxhash.xxh3_64_intdigest(b"".join(side[row].tobytes() for side in sides)) if sides else 0 for row in which]
    wanted = [xxhash.xxh3_64_intdigest(main[row].tobytes(), seed) for row, seed in zip(which, seeds, strict=True)]
    assert piece_digests(main, sides, which if some else None).tolist() == wanted


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.sampled_from([("int8b64", 192), ("raw16", 75), ("topk8:k=5", 96)]), st.randoms(),
       st.booleans())
def test_streams_in_buffers_that_end_anywhere(pieces: int, kind: tuple[str, int], random: Random, made: bool) -> None:
    """Runs in a ring are of whole pieces, parts of a message of any size; with the loop and in Python."""
    declared, cut = codecs.streams(*kind, "bfloat16"), random.choice([1, None])
    whole = [random.randbytes(pieces * stream.nbytes) for stream in declared]
    buffers = []
    for stream, data in zip(declared, whole, strict=True):
        step = cut or stream.nbytes
        inner = sorted(step * random.randrange(1, len(data) // step + 1) for _ in range(random.randrange(4)))
        buffers.append([memoryview(data)[a:b] for a, b in pairwise([0, *inner, len(data)]) if a < b])
    native_loops._loops = load() if made else None
    native_loops._maker = threading.Thread()
    try:
        streams, rows = hash_streams(declared, buffers)
    finally:
        load()
    main, *sides = ([data[at * stream.nbytes:(at + 1) * stream.nbytes] for at in range(pieces)]
                    for stream, data in zip(declared, whole, strict=True))
    seeds = [xxhash.xxh3_64_intdigest(b"".join(row)) for row in zip(*sides, strict=True)] if sides else [0] * pieces
    assert streams == [xxhash.xxh3_64_intdigest(data) for data in whole]
    assert rows.tolist() == [xxhash.xxh3_64_intdigest(*row) for row in zip(main, seeds, strict=True)]


def test_what_lies_beyond_is_not_read() -> None:
    loop = load()
    assert loop is not None
    pieces = np.zeros((4, 8), np.uint8)
    for bad in (4, -1):
        with pytest.raises(IndexError):
            loop.digests(pieces, np.array([0, bad]), None)
    with pytest.raises(ValueError, match="seeds"):
        loop.digests(pieces, None, np.zeros(3, np.uint64))
    with pytest.raises(ValueError, match="middle"):
        loop.stream([memoryview(bytes(9))], 8, None)
    turned = np.arange(64, dtype=np.uint8).reshape(8, 8).T
    assert loop.digests(turned, None, None)[1] == xxhash.xxh3_64_intdigest(turned[1].tobytes())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("made", [True, False])
def test_numbers_made_narrow_are_what_torch_makes(dtype: str, made: bool) -> None:
    """Every upper half of a float32, with lower halves on either side of where rounding turns; any count of them."""
    import torch

    rng, loops = np.random.default_rng(0), load()
    halves = [0, 1, 0xFFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF]
    bits = (np.arange(1 << 16, dtype=np.uint32) << 16)[:, None] + np.array(halves, np.uint32)
    x = np.concatenate([bits.reshape(-1), rng.integers(0, 1 << 32, 100_000, np.uint32)]).view(np.float32)
    native_loops._loops = loops if made else None
    native_loops._maker = threading.Thread()
    try:
        for count in (0, 63, 64, 65, len(x)):
            found = cast(x[:count], dtype).view(np.uint16)
            wanted = torch.from_numpy(x[:count]).to(getattr(torch, dtype))
            nan = np.isnan(x[:count])
            assert (found == wanted.view(torch.uint16).numpy())[~nan].all()
            assert torch.from_numpy(found[nan]).view(getattr(torch, dtype)).isnan().all()
    finally:
        native_loops._loops = loops
    assert loops is not None
    with pytest.raises(ValueError, match="numbers"):
        loops.narrowed(x, dtype, np.empty(len(x) - 1, np.uint16))


@pytest.mark.parametrize("made", [True, False])
def test_float16_is_widened_to_what_it_is(made: bool) -> None:
    """Every float16 there is, as the rows of a model of such numbers; any count of them, in any order in memory."""
    loops, every = load(), np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    assert loops is not None
    native_loops._loops = loops if made else None
    native_loops._maker = threading.Thread()
    try:
        for x in (every[:0], every[:63], every[:65], every, every.reshape(4, 2, 8192), every[::-3]):
            for codec in ("raw", "raw16"):
                found = codecs.identified(codec).decode({"x": x}, x.shape[-1], "float16")
                assert found.dtype == np.float32 and found.shape == x.shape
                assert np.array_equal(found, x.astype(np.float32), equal_nan=True)
                assert (np.signbit(found) == np.signbit(x)).all()
    finally:
        native_loops._loops = loops
    with pytest.raises(ValueError, match="numbers"):
        loops.widened(every.view(np.uint16), np.empty(9, np.float32))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 9), st.sampled_from([64, 192, 4096]), st.integers(0, 2**32), st.booleans())
def test_codes_are_decoded_to_what_numpy_makes(rows: int, width: int, seed: int, turned: bool) -> None:
    """To the bit, as float32 and rounded from it, for scales and outliers of any bits: 0, infinite, NaN, denormal."""
    rng, loop = np.random.default_rng(seed), load()
    assert loop is not None
    shape, blocks = (2, rows, width), (2, rows, width // 64)
    q = rng.integers(-128, 128, shape[::-1] if turned else shape, np.int8)
    odd = np.array([0, 0x8000, 1, 0x8001, 0x7F80, 0xFF80, 0x7F81, 0xFFC1, 0x3300, 0x3380, 0x477F, 0x4780], np.uint16)
    scale, values = (np.where(rng.random(size) < 0.5, rng.choice(odd, size), rng.integers(0, 1 << 16, size, np.uint16))
                     for size in (blocks, (2, rows, 8)))
    pieces = {"q": q.T if turned else q, "scale": scale, "outlier_value": values,
              "outlier_index": rng.integers(0, width, (2, rows, 8), np.uint16)}  # now and then one twice
    codec = codecs.identified("int8b64")
    found = {dtype: codec.decode_as(pieces, width, "bfloat16", dtype) for dtype in ("float16", "bfloat16")}
    decoded = codec.decode(pieces, width, "bfloat16")
    native_loops._loops = None
    try:
        assert codec.decode_as(pieces, width, "bfloat16", "float16") is None
        with np.errstate(over="ignore"):  # no encoder makes such scales
            wanted = codec.decode(pieces, width, "bfloat16")
    finally:
        native_loops._loops = loop
    assert np.array_equal(decoded.view(np.uint32), wanted.view(np.uint32))
    for dtype, made in found.items():
        assert made is not None and made.dtype == cast(wanted, dtype).dtype
        rounded = np.empty(wanted.size, np.uint16)
        loop.narrowed(wanted.reshape(-1), dtype, rounded)
        assert np.array_equal(made.view(np.uint16), rounded.reshape(shape))
    if rows:
        pieces["outlier_index"][-1, -1, 0] = width
        with pytest.raises(CorruptError):
            codec.decode(pieces, width, "bfloat16")
        with pytest.raises(CorruptError):
            codec.decode_as(pieces, width, "bfloat16", "float16")
    with pytest.raises(ValueError, match="scales"):
        loop.decoded(q, np.zeros(q.size // 64 + 1, np.float32), np.zeros((0, 8), np.int64),
                     np.zeros((0, 8), np.float32), "float32")


def test_pieces_are_copied_from_anywhere_to_anywhere() -> None:
    loop, rng = load(), np.random.default_rng(0)
    assert loop is not None
    data = memoryview(rng.bytes(9000))
    out, starts, target = np.zeros((40, 700), np.uint8), rng.integers(0, 8301, 25), rng.permutation(40)[:25]
    starts[:2] = 0, 8300  # the first and the last that there can be
    loop.gather(data, starts, out, target)
    loop.gather(data, starts[:0], out, target[:0])
    wanted = {at: bytes(data[start:start + 700]) for start, at in zip(starts.tolist(), target.tolist(), strict=True)}
    assert [row.tobytes() for row in out] == [wanted.get(at, bytes(700)) for at in range(40)]
    for bad_starts, bad_target in (([8301], [0]), ([-1], [0]), ([0], [40]), ([0], [-1]), ([0, 0], [0])):
        with pytest.raises(IndexError):
            loop.gather(data, np.array(bad_starts), out, np.array(bad_target))
    with pytest.raises(IndexError):
        loop.gather(data, starts[:3], out.T[:700], target[:3])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 9), st.sampled_from([1, 16, 4096, 8192]), st.integers(0, 2**32))
def test_pieces_of_any_buffers_are_copied(rows: int, nbytes: int, seed: int) -> None:
    """At the very end of what is mapped too: the piece that is fetched ahead is the last one itself."""
    rng, loop = np.random.default_rng(seed), load()
    assert loop is not None
    with mmap.mmap(-1, 4 * 4096) as first, mmap.mmap(-1, 4 * 4096) as second:
        buffers = [np.frombuffer(each, np.uint8) for each in (first, second)]
        for each in buffers:
            each[:] = rng.integers(0, 256, len(each), np.uint8)
        which, starts = rng.integers(0, 2, rows), rng.integers(0, 4 * 4096 - nbytes + 1, rows)
        starts[-1:] = 4 * 4096 - nbytes
        out = np.zeros((rows, nbytes), np.uint8)
        at = np.array([buffers[one].ctypes.data for one in which], np.int64) + starts
        loop.copy(at, out)
        wanted = [buffers[one][start:start + nbytes].tobytes() for one, start in zip(which, starts, strict=True)]
        assert [row.tobytes() for row in out] == wanted
        for seeds in (None, rng.integers(0, 2**64, rows, np.uint64)):
            out[:] = 0
            digests = loop.copy_hashed(at, out, seeds)
            assert [row.tobytes() for row in out] == wanted
            each_seed = [0] * rows if seeds is None else seeds.tolist()
            assert digests.tolist() == [xxhash.xxh3_64_intdigest(piece, seed)
                                        for piece, seed in zip(wanted, each_seed, strict=True)]
        with pytest.raises(ValueError, match="seeds"):
            loop.copy_hashed(at, out, np.zeros(rows + 1, np.uint64))
        for bad in (out[:, ::2], np.zeros((rows + 1, nbytes), np.uint8)):
            if len(bad) > rows or rows > 1 < nbytes:
                with pytest.raises(ValueError, match="addresses"):
                    loop.copy(np.zeros(rows, np.int64), bad)
        del buffers, each


def test_it_is_made_for_who_hashes_many(unmade: None) -> None:
    assert loops_for(native_loops.pieces_before - 1) is None and native_loops._maker is None
    assert loops_for(1) is None  # a thread makes it
    made: Callable[[], object] = lambda: loops_for(1)  # noqa: E731
    assert until(made) and loops_for(0) is not None
    assert not any(thread.name == "native-loops" for thread in threading.enumerate())


def test_a_child_forked_meanwhile_has_it_too() -> None:
    """As a DataLoader's workers are, right after a read: a lock of the import that is copied held is never released."""
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, (done.returncode, done.stderr)


def test_without_a_thread_to_make_it_python_goes_on(unmade: None) -> None:
    before = threading.stack_size(1 << 50)  # more than there are addresses
    try:
        assert loops_for(native_loops.pieces_before) is None
    finally:
        threading.stack_size(before)
    assert loops_for(native_loops.pieces_before) is None
    assert len(piece_digests(np.zeros((3, 8), np.uint8), [])) == 3


@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize("how", ["stream", "rows", "named rows"])
def test_of_many_small_pieces_little_more_than_the_result_is_held(how: str, seeded: bool) -> None:
    loop, count, size = load(), 1 << 21, 4
    assert loop is not None
    data = np.random.default_rng(0).integers(0, 256, (count, size), np.uint8)
    seeds = np.arange(count, dtype=np.uint64) if seeded else None
    which = np.arange(count)[::-1] if how == "named rows" else np.arange(count)
    cuts = [0, 1, 65535, 65537, 65538, 400_000, count]
    buffers = [data[a:b].reshape(-1).data for a, b in pairwise(cuts)]
    tracemalloc.start()
    try:
        if how == "stream":
            whole, found = loop.stream(buffers, size, seeds)
        else:
            whole, found = None, loop.digests(data, which if how == "named rows" else None, seeds)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < found.nbytes + 4 * 2**20
    assert whole in (None, xxhash.xxh3_64_intdigest(data.data))
    some = {at + off for at in (*cuts[:-1], *range(0, count, 65536)) for off in (0, 1)} | {count - 1}
    for at in some:
        assert found[at] == xxhash.xxh3_64_intdigest(data[which[at]].tobytes(), at if seeded else 0), at


def test_where_it_cannot_be_made_python_goes_on() -> None:
    """No numba, and memory that may not become code (a hardened service): the same numbers, and no crash."""
    outputs = {}
    for name, before in (("made", ""), ("no library", NO_NUMBA), ("no executable memory", NO_EXECUTABLE_MEMORY)):
        done = subprocess.run([sys.executable, "-c", PROGRAM.format(before=before)], capture_output=True, text=True)
        if done.returncode != 77:
            assert done.returncode == 0, (name, done.stderr)
            outputs[name] = done.stdout.split(maxsplit=1)
    made, digests = outputs.pop("made")
    assert made == "True" and outputs
    for name, found in outputs.items():
        assert found == ["False", digests], name
