"""The Triton encoders against the torch reference: on a GPU where there is one, else in Triton's interpreter.

Equal bit for bit, but where the reference leaves a choice (which of equal magnitudes are the largest) and but for the
share of energy that ``topk`` keeps (sums in another order). What multiplies by a matrix is held against the product in
float64, and against the codec's own rounding.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from engine_side import kernels
from engine_side.codecs import TORCH_DTYPES, encode, full8, int8b64, kernel_name, nf4b64
from engine_side.step.block import EntryRows, layout_of
from engine_side.step.burst import Burst
from engine_side.step.kernel_cache import KernelCache
from engine_side.tap.probe_scores import Scorer
from engine_side.tap.staging import Staging
from engine_side.transport.events import Entry
from schemas import codecs
from schemas.codecs import projection, sketch
from schemas.probes import Probe

GPU = torch.cuda.is_available()
HERE = find_spec("triton") is not None and (GPU or os.environ.get("TRITON_INTERPRET") == "1")
DEVICE = torch.device("cuda" if GPU else "cpu")
# The interpreter is slow: of the dtypes that GPUs are tested with, the usual one.
DTYPES = [torch.bfloat16, torch.float16, torch.float32] if GPU else [torch.bfloat16]
WIDTHS = [5, 64, 100, 1000, 2048, 4096, 8192, 18944] if GPU else [5, 200]
MULTIPLIED = torch.bfloat16 if GPU else torch.float16  # the interpreter multiplies bfloat16's bits as whole numbers
COLUMNS = {"outlier_index", "index"}  # streams of column numbers
ALL = ["raw", "raw16", "int8b64", "nf4b64", "fp8row", "full8", "kv8:head=20", "qk8:head=5", "topk:density=0.04",
       "topk8:density=0.5"]
PROJECTED = ["rp8:k=40,seed=3", "sketch:k=50,bits=1,seed=0", "sketch:k=33,bits=2,seed=1",
             *(["rp8:k=440,seed=0", "sketch:k=440,bits=2,seed=0"] if GPU else [])]
UNTOUCHED = 0xAB

if find_spec("triton") is not None:
    from engine_side.kernels import projected

kernel_test = pytest.mark.skipif(not HERE, reason="needs Triton, and a GPU or TRITON_INTERPRET=1")


@pytest.mark.skipif(HERE, reason="the tests below run in this process")
def test_in_the_interpreter() -> None:
    """A process of its own: Triton must know before it is imported."""
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed: NO KERNEL IS TESTED HERE (pip install triton)")
    others = [str(Path(__file__).parents[1] / name) for name in ("step/test_bursts.py", "kernels/test_edits.py")]
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, *others],
                          env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert "passed" in done.stdout


@pytest.fixture(autouse=True)
def kept_by_nobody() -> Iterator[None]:
    """What projections keep on a device is bounded, over all of them: each test begins without any."""
    yield
    kernels.forget()


def hard_rows(width: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows [kinds, width] of every kind that has gone wrong somewhere."""
    torch.manual_seed(width)
    rows = torch.randn(17, width)
    rows[1, [0, 3, 4, 40 % width]] *= 1000  # massive columns, three of them in one group of eight
    rows[2, :12] *= 1000  # more than are kept, side by side
    rows[3] = 0
    rows[4] = 1.5  # every magnitude the same
    rows[5, ::2] = -rows[5, 1::2][: rows[5, ::2].numel()].sum()  # ties, and among them the largest
    rows[6, 3:] = 0  # fewer numbers than are kept
    rows[7] = 1.875 * (torch.randint(-12, 12, (width,)) + 0.5)  # ties; 6.5 * 1.875 * (1 / 1.875) is over 6.5 in float32
    rows[7, 8::16] = 127 * 1.875
    rows[7, :8] = 1e4
    rows[8, 2] = torch.nan
    rows[9, [1, 4]] = torch.tensor([torch.inf, -torch.inf])
    rows[10, : min(width, 30)] = torch.nan  # more than are kept
    rows[11, : min(width, 30)] = -torch.inf
    rows[12] *= 1e-38  # scales that have no reciprocal
    rows[13] *= 1e-40
    rows[14] *= 3e37 if dtype != torch.float16 else 1e4
    rows[15, width // 2 :] *= 1e-39
    rows[16] = 1 + torch.arange(width) % 512 / 512  # between two numbers of bfloat16
    return rows.to(dtype)


def taken(codec: str, source: kernels.StagedRows, offset: int = 0) -> dict[str, torch.Tensor]:
    """What the kernel writes, as it should lie; nothing else of the buffer may change."""
    width, dtype = source.buffer.shape[-1], source.buffer.dtype
    assert kernels.supported(codec, width, dtype)
    n_layers, n = len(source.layers), source.n
    pieces = {stream.name: ((n_layers, n, *stream.shape), TORCH_DTYPES[stream.dtype])
              for stream in codecs.streams(codec, width, str(dtype).removeprefix("torch."))}
    pieces |= {"token_ids": ((n,), torch.int32), "positions": ((n,), torch.int64)}
    scratch = torch.full((8 << 20,), UNTOUCHED, dtype=torch.uint8, device=DEVICE)
    offsets, end = [], offset
    for shape, kind in pieces.values():
        offsets.append(end)
        end += -(-torch.Size(shape).numel() * kind.itemsize // 64) * 64 + 64
    begins, first = np.array([0, 64]), source.rows if isinstance(source.rows, int) else source.rows[:1]
    launch = kernels.launch(codec, replace(source, rows=first, n=1), scratch, offsets, begins)
    launch(0)  # compiles
    scratch.fill_(UNTOUCHED)
    at = [at - 64 for at in offsets]
    if not launch.aim(source.rows, n, at, begins):
        launch = kernels.launch(codec, source, scratch, at, begins)
    launch(1)
    scratch, out = scratch.cpu(), {}
    for begin, (name, (shape, kind)) in zip(offsets, pieces.items(), strict=True):
        part = scratch[begin : begin + torch.Size(shape).numel() * kind.itemsize]
        out[name] = part.view(kind).reshape(shape).clone()
        part.fill_(UNTOUCHED)
    assert (scratch == UNTOUCHED).all(), "bytes outside the streams were written"
    return out


def source_of(buffer: torch.Tensor, layers: list[int], rows: list[int] | tuple[int, int],
              wide_ids: bool = False) -> kernels.StagedRows:
    """Rows by number, or ``(first, n)``; token ids and positions that tell where they come from."""
    tokens = torch.arange(buffer.shape[1], device=DEVICE)
    token_ids = (100_000 + tokens).to(torch.int64 if wide_ids else torch.int32)
    positions = (7_000 + tokens).to(torch.int32 if wide_ids else torch.int64)
    where = rows[0] if isinstance(rows, tuple) else torch.tensor(rows, device=DEVICE)
    return kernels.StagedRows(buffer.to(DEVICE), torch.tensor(layers, dtype=torch.int32, device=DEVICE), where,
                          rows[1] if isinstance(rows, tuple) else len(rows), token_ids, positions)


def numbers(piece: torch.Tensor, view: str | None) -> torch.Tensor:
    return piece.view(torch.bfloat16).float() if view == "bfloat16" else piece.to(torch.float64)


def given(codec: str, x: torch.Tensor, chosen: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the reference makes of the columns that were chosen, which must be as large as those it chooses."""
    want, family = encode(codec, x), codec.partition(":")[0]
    for name in COLUMNS & set(want):
        index = chosen[name].long()
        assert (index.diff(dim=-1) > 0).all() and index.max() < x.shape[-1]
        values = x.float().gather(-1, index)
        as_large = x.float().gather(-1, want[name].long())
        assert torch.equal(values.abs().sort().values.nan_to_num(-1), as_large.abs().sort().values.nan_to_num(-1))
        want[name] = chosen[name]
        if family == "topk8":
            want |= full8.encode(values)
        else:
            want["value" if family == "topk" else "outlier_value"] = values.to(torch.bfloat16).view(torch.uint16)
        if name == "outlier_index":
            others = torch.nn.functional.pad(x.float().scatter(-1, index, 0.0), (0, -x.shape[-1] % 64))
            rest = int8b64.coded if family == "int8b64" else nf4b64.coded
            want |= rest(others.unflatten(-1, (-1, 64)), x.shape[-1])
    return want


def assert_as_the_reference(codec: str, x: torch.Tensor, got: dict[str, torch.Tensor]) -> None:
    """``got`` of rows ``x`` [layers, n, width] is what the reference makes."""
    if codec in PROJECTED:
        assert_projected(codec, x, got)
        return
    want = given(codec, x, got)
    for stream in codecs.streams(codec, x.shape[-1], str(x.dtype).removeprefix("torch.")):
        ours, theirs = (numbers(pieces[stream.name], stream.view) for pieces in (got, want))
        same = (ours == theirs) | (ours.isnan() & theirs.isnan())
        if stream.name == "kept":
            same |= (ours - theirs).abs() <= 1e-5
        assert same.all(), (stream.name, int((~same).sum()), (~same).nonzero()[:4].tolist())


def assert_projected(codec: str, x: torch.Tensor, got: dict[str, torch.Tensor]) -> None:
    """Codes and scales are those of the product, but where it lies on the edge between two codes."""
    known, width = codecs.identified(codec), x.shape[-1]
    k, seed = projection.columns(width, int(known.parameters["k"]), known.family.name), int(known.parameters["seed"])
    make = known.family.matrix
    assert make is not None
    finite = x.isfinite().all(-1, keepdim=True)
    x = torch.where(finite, x, 0).double()
    y = x @ torch.tensor(make(width, k, seed)).double()
    # Sums of float32 in any order, of numbers of which the last bits may be left out; what is tiny may be taken for 0.
    apart = 1e-4 * x.abs().amax(-1, keepdim=True) * (width / k) ** 0.5 + 1e-37
    scale = got["scale"].view(torch.bfloat16).double()
    large = y.abs().amax(-1, keepdim=True) > 1e38  # a sum on the way may be over float32's largest number
    assert (scale.isnan().eq(~finite) | large).all()
    y, scale = torch.where(scale.isnan(), 0, y), scale.nan_to_num(0)
    if known.family.name == "rp8":
        decoded = (got["q"].double() - got["zero"].double()) * scale
        assert ((decoded - y).abs() <= 0.501 * scale + apart)[finite.expand_as(y)].all()
        least = torch.maximum((y.amax(-1, keepdim=True) - y.amin(-1, keepdim=True)) / 253,
                              y.abs().amax(-1, keepdim=True) / 32000)
        assert (scale <= least * (1 + 2**-7) + apart).all() and (scale >= least - apart).all()
        return
    bits, root = int(known.parameters["bits"]), y.square().mean(-1, keepdim=True).sqrt()
    assert ((scale - root).abs() <= root * 2**-8 + apart).all()
    single = torch.from_numpy(np.unpackbits(got["q"].numpy()[..., None], axis=-1, bitorder="little"))
    assert (single[..., 7] == 0).all(), "255 would be a missing row"
    single = single[..., :7].flatten(-2)
    assert (single[..., k * bits :] == 0).all()
    single = single[..., : k * bits]
    codes = single if bits == 1 else single[..., 0::2] + 2 * single[..., 1::2]
    edges = torch.tensor(sketch.THRESHOLDS[bits])
    low, high = ((y[..., None] + by[..., None] >= edges * scale[..., None]).sum(-1) for by in (-apart, apart))
    usable = (scale > 0).expand_as(y)
    assert ((codes >= low) & (codes <= high))[usable].all()
    assert (codes == (edges <= 0).sum())[~usable].all()


def test_every_codec_with_a_kernel_is_tried_here() -> None:
    names = {name for name, family in codecs.CODECS.items() if kernel_name(family)}
    assert {codec.partition(":")[0] for codec in ALL + PROJECTED} == names


@kernel_test
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("codec", "dtype"), [
    *((codec, dtype) for codec in ALL for dtype in DTYPES
      if dtype != torch.float16 or codec not in ("int8b64", "nf4b64")),  # which have no kernel
    *((codec, dtype) for codec in PROJECTED for dtype in {MULTIPLIED, torch.float16}),
])
def test_hard_rows_as_the_reference(codec: str, dtype: torch.dtype, width: int) -> None:
    if codec.startswith(("kv8", "qk8")):
        width = -(-width // 20) * 20
    rows = hard_rows(width, dtype)
    assert_as_the_reference(codec, rows[None], taken(codec, source_of(rows[None], [0], (0, len(rows)))))


@kernel_test
@pytest.mark.parametrize("wide_ids", [False, True])
@pytest.mark.parametrize("rows", [[0, 2, 3, 7, 10], [10], (0, 5), (4, 3), (10, 1)])
@pytest.mark.parametrize("layers", [[0], [1, 3], [0, 1, 2, 3]])
def test_layers_and_rows_that_are_chosen(layers: list[int], rows: list[int] | tuple[int, int], wide_ids: bool) -> None:
    buffer = torch.randn(4, 11, 128, dtype=torch.bfloat16)
    number = torch.tensor(rows) if isinstance(rows, list) else torch.arange(rows[0], rows[0] + rows[1])
    got = taken("raw", source_of(buffer, layers, rows, wide_ids), offset=192)
    assert torch.equal(got.pop("token_ids"), (100_000 + number).int())
    assert torch.equal(got.pop("positions"), 7_000 + number)
    assert_as_the_reference("raw", buffer[layers][:, number], got)


@kernel_test
@pytest.mark.parametrize("codec", ALL + PROJECTED)
def test_rows_of_a_buffer_with_gaps(codec: str) -> None:
    """A site's rows may be part of wider ones, and lie on no boundary of a vector."""
    wider = torch.randn(9, 3, 203).to(MULTIPLIED if codec in PROJECTED else torch.bfloat16)
    source = source_of(wider.to(DEVICE).transpose(0, 1)[..., 1:101], [2, 0], [1, 4, 8])
    rows = wider.transpose(0, 1)[..., 1:101][[2, 0]][:, [1, 4, 8]]
    assert_as_the_reference(codec, rows, taken(codec, source))


@kernel_test
@pytest.mark.parametrize("codec", ALL + PROJECTED)
def test_nothing_is_written_of_no_rows(codec: str) -> None:
    rows = torch.randn(2, 3, 100).to(MULTIPLIED if codec in PROJECTED else torch.float32)
    taken(codec, source_of(rows, [1], (1, 0)))


@kernel_test
@pytest.mark.parametrize(("codec", "layers", "rows"), [
    (codec, layers, rows) for codec in PROJECTED
    for layers, rows in (([3, 0, 2], (2, 45)), ([0, 1, 2, 3], list(range(0, 60, 2))), ([1], [7]))
    if GPU or codec.startswith("rp8") or rows == [7]  # the interpreter takes six seconds for the others
])
def test_products_of_rows_of_several_layers(codec: str, layers: list[int], rows: list[int] | tuple[int, int]) -> None:
    """More than a tile, the last one partly used; large tiles as well as small ones."""
    buffer = torch.randn(4, 64, 130).to(MULTIPLIED)
    buffer[1, 8] = torch.nan  # of another row
    number = torch.tensor(rows) if isinstance(rows, list) else torch.arange(rows[0], rows[0] + rows[1])
    for few in (projected.FEW, 0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(projected, "FEW", few)
            got = taken(codec, source_of(buffer, layers, rows), offset=64)
        assert torch.equal(got["token_ids"], (100_000 + number).int())
        assert torch.equal(got["positions"], 7_000 + number)
        assert_projected(codec, buffer[layers][:, number], got)


@kernel_test
def test_a_product_stays_in_its_workspace() -> None:
    for codec, width in (("rp8:k=512,seed=0", 2048), ("sketch:k=5,bits=2,seed=0", 64)):
        most = kernels.rows_max(codec, width)
        assert 0 < most * 4 * projected.across(codecs.identified(codec), width) <= projected.SUMS_BYTES
        source = kernels.StagedRows(torch.zeros(1, 1, width, dtype=torch.bfloat16, device=DEVICE),
                                torch.zeros(1, dtype=torch.int32, device=DEVICE), 0, most + 1,
                                *(torch.zeros(1, dtype=torch.int64, device=DEVICE) for _ in range(2)))
        with pytest.raises(ValueError, match="workspace"):
            kernels.launch(codec, source, torch.empty(64, dtype=torch.uint8, device=DEVICE), [0] * 5)
    assert kernels.rows_max("int8b64", 2048) == 0
    layer = Staging({"resid_post": torch.zeros(36, 1, 2048, dtype=torch.bfloat16)}, {"resid_post": list(range(36))})
    entry = Entry("resid_post", "rp8:k=512,seed=0", tuple(range(36)))
    assert 36 * layout_of(entry, layer, "bfloat16", 1 << 40, True).rows_max <= kernels.rows_max(entry.codec, 2048)


@kernel_test
def test_projections_of_two_sites_in_a_burst_share_their_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in turn and chosen ones, step after step, and in a region of its own when the burst is renewed."""
    sites = {"resid_post": torch.zeros(3, 9, 40, dtype=MULTIPLIED, device=DEVICE),
             "mlp_post": torch.zeros(3, 9, 72, dtype=MULTIPLIED, device=DEVICE)}
    staging = Staging(sites, {site: [0, 1, 2] for site in sites})
    dtype = str(MULTIPLIED).removeprefix("torch.")
    entries = [Entry("resid_post", PROJECTED[0], (0, 2)), Entry("mlp_post", PROJECTED[2], (1,))]
    rows = [np.array([3, 4, 5]), np.array([1, 6])]
    layouts = [layout_of(entry, staging, dtype, 1 << 20, True) for entry in entries]
    pieces = [EntryRows(layout, row, np.zeros_like(row), 7_000 + row, np.zeros_like(row))
              for layout, row in zip(layouts, rows, strict=True)]
    none = np.zeros(1, np.int64)
    burst = Burst(pieces, 2, 6, ["a"], none, 9, 0.0, (none, none))
    ids, positions = torch.arange(9, dtype=torch.int32, device=DEVICE), torch.arange(9, device=DEVICE)
    ring = torch.zeros(1 << 16, dtype=torch.uint8, device=DEVICE)
    monkeypatch.setattr("engine_side.step.burst._index",
                        lambda entry_rows, *_: torch.tensor(entry_rows.row, device=DEVICE))
    for renewed in (False, True):
        burst = burst.renewed(0.0) if renewed else burst
        burst.assign_region(ring, 0, ring, 4096 * renewed)
        for step in range(2):
            for buffer in sites.values():
                buffer.normal_()
            burst.encode(ids, positions)
            for entry_rows, row in zip(burst.entries, rows, strict=True):
                begin, layout, got = int(entry_rows.begins[step]), entry_rows.layout, {}
                parts = entry_rows.block
                for name, shape, kind, at, size in zip(layout.names, layout.shapes, layout.dtypes, parts.offsets,
                                                       parts.sizes, strict=False):
                    got[name] = ring[begin + at : begin + at + size].cpu().view(kind).reshape(
                        len(layout.layers), len(row), *shape)
                assert_projected(layout.entry.codec, layout.buffer.cpu()[layout.layers][:, row], got)


@kernel_test
def test_what_a_projection_keeps_is_there_before_its_kernel_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step finds matrix and workspace; where there is no room for them the reference goes on."""
    kernels.forget()
    staging = Staging({"resid_post": torch.zeros(1, 2, 64, dtype=MULTIPLIED, device=DEVICE)}, {"resid_post": [0]})
    came: list[str] = []
    cache = KernelCache(staging, True, came.append)

    def has(codec: str) -> bool:
        if cache._claim(codec, "resid_post"):
            cache._compile(codec, "resid_post")
        return cache.has(codec, "resid_post")

    monkeypatch.setattr(projected, "MATRICES_BYTES", 2 * 2 * 64 * 128 * MULTIPLIED.itemsize)
    assert has("rp8:k=16,seed=1") and list(projected._sums) == [staging.buffers["resid_post"].device]
    assert has("sketch:k=16,bits=1,seed=1") and has("sketch:k=16,bits=2,seed=1"), "they have a matrix in common"
    assert len(projected._halves) == 2 and not has("rp8:k=16,seed=2"), "no room for a third one"
    with pytest.raises(MemoryError, match=r"rp8:k=16,seed=2 at width 64: no room"):
        projected.halves("rp8:k=16,seed=2", 64, MULTIPLIED, staging.buffers["resid_post"].device)
    kernels.forget()
    assert not projected._halves and not projected._sums and has("rp8:k=16,seed=3")
    monkeypatch.setattr(projected, "MATRICES_BYTES", 1 << 30)
    monkeypatch.setattr(projected, "sums", lambda _: torch.empty(-1))
    assert not has("rp8:k=16,seed=4"), "a device that gives no memory leaves it to the reference"
    assert came == ["rp8:k=16,seed=1", "sketch:k=16,bits=1,seed=1", "sketch:k=16,bits=2,seed=1", "rp8:k=16,seed=3"]
    kernels.forget()


@kernel_test
@pytest.mark.parametrize("identity", ["rp8:k=24,seed=0", "sketch:k=24,bits=2,seed=0"])
def test_a_matrix_in_two_halves_is_the_matrix(identity: str) -> None:
    known = codecs.identified(identity)
    assert known.family.matrix is not None
    matrix = known.family.matrix(100, 24, 0)
    for dtype, error in ((torch.bfloat16, 2**-16), (torch.float16, 2**-20)):
        high, low = (half.cpu().double() for half in projected.halves(identity, 100, dtype, DEVICE))
        both = high + low
        assert ((both[:100, :24] - torch.tensor(matrix)).abs() <= error * np.abs(matrix).max()).all()
        assert high.shape == (128, 128) and not both[100:].any() and not both[:, 24:].any()


@kernel_test
def test_warming_is_of_the_kernels_that_are_used() -> None:
    kernels.warm("rp8:k=16,seed=0", 192, MULTIPLIED, DEVICE)
    known = kernels._product.cache_info().misses, kernels._kernel.cache_info().misses
    for rows in ([2], (1, 2)):
        for few in (projected.FEW, 0):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(projected, "FEW", few)
                taken("rp8:k=16,seed=0", source_of(torch.randn(2, 3, 192).to(MULTIPLIED), [1], rows))
    assert (kernels._product.cache_info().misses, kernels._kernel.cache_info().misses) == known
    kernels.warm("int8b64", 192, torch.bfloat16, DEVICE)
    known = kernels._kernel.cache_info().misses
    for rows in ([2], (1, 2)):
        for wide_ids in (False, True):
            taken("int8b64", source_of(torch.randn(2, 3, 192).bfloat16(), [1], rows, wide_ids))
    assert kernels._kernel.cache_info().misses == known


@kernel_test
@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize("count", [1, 3, 16])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_of_a_probe(dtype: torch.dtype, width: int, count: int, sigmoid: bool) -> None:
    """As the reference makes them, but for sums in another order; of rows in turn, and of chosen ones."""
    torch.manual_seed(width + count)
    buffer = torch.randn(3, 9, width + 3).to(dtype)[..., 1 : width + 1]  # on no boundary of a vector
    probe = Scorer(Probe("resid_post", 2, [], "sigmoid" if sigmoid else "none", ""),
                   torch.randn(count, width), torch.randn(count))
    assert kernels.scored(count, width, dtype)
    there = [tensor.to(DEVICE) for tensor in (probe.directions, probe.bias)]
    for rows in ([1, 4, 5], (2, 6)):
        source = source_of(buffer.to(DEVICE), [2], rows)
        sizes = (4 * count * source.n, 4 * source.n, 8 * source.n)
        offsets = [0, *((-(-sum(sizes[:end]) // 64) + end) * 64 for end in (1, 2))]
        scratch = torch.full((offsets[-1] + sizes[-1] + 64,), UNTOUCHED, dtype=torch.uint8, device=DEVICE)
        kernels.score(*there, sigmoid, source, scratch, offsets)(0)
        scratch.fill_(UNTOUCHED)
        kernels.score(*there, sigmoid, source, scratch, offsets)(0)
        chosen = torch.tensor(rows) if isinstance(rows, list) else torch.arange(rows[0], rows[0] + rows[1])
        got, ids, places = (scratch.cpu()[at : at + size] for at, size in zip(offsets, sizes, strict=True))
        want = probe.encode(buffer[[2]][:, chosen])["x"][0]
        assert torch.allclose(got.view(torch.float32).reshape(-1, count), want, rtol=1e-4, atol=1e-4 * width**0.5)
        assert torch.equal(ids.view(torch.int32), (100_000 + chosen).int())
        assert torch.equal(places.view(torch.int64), 7_000 + chosen)
        assert (scratch.cpu()[offsets[0] + sizes[0] : offsets[1]] == UNTOUCHED).all()
    kernels.warm_scores(*there, sigmoid, dtype)


@kernel_test
def test_few_directions_get_the_kernel_and_many_the_product() -> None:
    if GPU:
        pytest.skip("on a GPU tests/engine/test_probes.py uses it")
    probes = {f"probe.{name}": Scorer(Probe("resid_post", 1, [""] * count, "none", ""), torch.randn(count, 40),
                                      torch.zeros(count)) for name, count in (("few", 3), ("many", 40))}
    rows = torch.randn(2, 8, 40).bfloat16()
    staging = Staging({"resid_post": rows}, {"resid_post": [0, 1]}, probes=probes)
    came: list[str] = []
    cache = KernelCache(staging, True, came.append)
    assert not cache.has("raw", "probe.few")
    for site in probes:
        if cache._claim("raw", site):
            cache._compile("raw", site)
    assert [cache.has("raw", site) for site in probes] == [True, False] and came == ["raw"]
    for site, probe in probes.items():
        layout = layout_of(Entry(site, "raw", (1,)), staging, "bfloat16", 1 << 20, cache.has("raw", site))
        assert (layout.kernel is not None) == (site == "probe.few")
        entry_rows = EntryRows(layout, *(np.array(column) for column in ([1, 4, 5], [0, 0, 0], [7, 8, 9], [0, 0, 0])))
        none = np.zeros(1, np.int64)
        burst = Burst([entry_rows], 1, 1, [], none, 8, 0.0, (none, none))
        memory = torch.zeros(burst.nbytes, dtype=torch.uint8)
        burst.assign_region(memory, 0, memory, 0)
        burst.encode(torch.arange(8, dtype=torch.int32), torch.arange(8))
        (run,) = burst.runs(burst.nbytes)
        begin, size = run.extents["x"]
        got = memory[begin : begin + size].view(torch.float32).reshape(3, -1)
        assert torch.allclose(got, rows[1, [1, 4, 5]].float() @ probe.directions.T, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("count", "width", "dtype"), [
    (17, 64, torch.bfloat16), (0, 64, torch.bfloat16), (1, 40_000, torch.bfloat16), (1, 64, torch.float64)])
def test_probes_that_are_left_to_torch(count: int, width: int, dtype: torch.dtype) -> None:
    assert not kernels.scored(count, width, dtype)


@pytest.mark.parametrize(("codec", "width", "dtype"), [
    ("rp8:k=8,seed=0", 64, torch.float32), ("sketch:k=8,bits=1,seed=0", 64, torch.float32),
    ("int8b64", 0, torch.float32), ("int8b64", 40_000, torch.float32), ("int8b64", 64, torch.float64),
    ("kv8", 64, torch.float32), ("kv8:head=5", 64, torch.float32),
])
def test_what_is_left_to_torch(codec: str, width: int, dtype: torch.dtype) -> None:
    assert not kernels.supported(codec, width, dtype)
