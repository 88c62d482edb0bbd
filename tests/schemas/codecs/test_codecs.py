"""Encoders (torch) against decoders (NumPy): every codec meets the bound that it declares, whatever the rows."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import engine_side.codecs
from api.slices.formats import cast
from bench import codec_tables
from engine_side.codecs import TORCH_DTYPES, encode
from schemas import codecs
from schemas.codecs import projection, sketch
from schemas.codecs.registry import STREAM_DTYPES, checked
from schemas.errors import CorruptError, SpecError

F32 = npt.NDArray[np.float32]
Pieces = dict[str, npt.NDArray[np.generic]]

# Every codec, with its defaults where nothing else is said.
PARAMETERS = {"topk": ["density=0.04", "k=5"], "sketch": ["k=64,bits=1,seed=0", "k=64,bits=2,seed=3"],
              "kv8": ["head=4"], "qk8": ["head=4"], "rp8": ["k=32,seed=7"]}
ALL = [f"{name}:{text}" if text else codec_tables.shown(name)
       for name in codecs.CODECS for text in PARAMETERS.get(name, [""])]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def round_trip(codec: str, rows: torch.Tensor) -> tuple[F32, Pieces]:
    """Decoded rows and stored pieces; what the encoder makes must be what the codec declares."""
    dtype, width = str(rows.dtype).removeprefix("torch."), rows.shape[-1]
    declared, pieces = codecs.streams(codec, width, dtype), encode(codec, rows)
    assert set(pieces) == {stream.name for stream in declared}
    for stream in declared:
        assert pieces[stream.name].dtype == TORCH_DTYPES[stream.dtype]
        assert pieces[stream.name].shape[1:] == stream.shape
    stored = {name: piece.numpy() for name, piece in pieces.items()}
    decoded = codecs.decode(codec, stored, width, dtype)
    assert decoded.dtype == np.float32
    assert decoded.shape == (*rows.shape[:-1], codecs.identified(codec).decoded_width(width))
    return decoded, stored


def bfloat16(bits: npt.NDArray[np.generic]) -> F32:
    return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def target(codec: str, rows: torch.Tensor) -> F32:
    """What a decoded row should be: the row, its largest entries, or its projection."""
    known, x = codecs.identified(codec), rows.float()
    if not known.family.projected:
        return x.numpy()
    k, seed = known.decoded_width(x.shape[-1]), int(known.parameters["seed"])
    make = known.family.matrix
    assert make is not None
    with np.errstate(all="ignore"):
        return x.numpy() @ make(x.shape[-1], k, seed)


def bound(codec: str, x: F32, pieces: Pieces) -> F32:
    """The largest error that the codec declares for each number, of finite rows; nothing is declared for 'sketch'."""
    name, width = codec.partition(":")[0], x.shape[-1]
    rounding = np.abs(x) * 2.0**-8 + 1e-40
    if name in ("raw", "raw16"):
        return np.zeros_like(x) if name == "raw" else rounding
    if name in ("topk", "topk8"):
        index = pieces["index"].astype(np.int64)
        allowed = np.full_like(x, np.inf)  # what is not kept may be anything up to the smallest that is
        kept = np.take_along_axis(rounding, index, -1)
        if name == "topk8":
            kept = np.broadcast_to(0.51 * bfloat16(pieces["scale"]), index.shape)
        np.put_along_axis(allowed, index, kept, -1)
        smallest = np.abs(np.take_along_axis(x, index, -1)).min(-1, keepdims=True)
        return np.minimum(allowed, smallest + kept.max(-1, keepdims=True))
    scale = bfloat16(pieces["scale"])
    if name in ("full8", "rp8"):
        return np.broadcast_to(0.51 * scale, x.shape)
    if name == "fp8row":
        return np.maximum(np.abs(x) * 2.0**-4, scale * 2.0**-10) * 1.01
    if name in ("kv8", "qk8"):
        return np.repeat(0.51 * scale, width // scale.shape[-1], -1)
    share = {"int8b64": 0.51, "nf4b64": 0.153}[name]  # a KeyError: a new codec says here what its error is
    allowed = np.repeat(share * scale, 64, -1)[..., :width]
    index = pieces["outlier_index"].astype(np.int64)
    np.put_along_axis(allowed, index, np.take_along_axis(rounding, index, -1), -1)
    return allowed


def assert_bound(codec: str, rows: torch.Tensor) -> None:
    decoded, pieces = round_trip(codec, rows)
    assert_no_fill(codec, rows, pieces)
    if codec.startswith("sketch"):
        return
    x = target(codec, rows)
    excess = np.abs(decoded - x) - bound(codec, x, pieces) * (1 + 1e-5)
    # A projection in another order of adding differs by a little.
    allowed = 1e-5 * np.abs(x).max(-1, keepdims=True) if codec.startswith("rp8") else np.float32(1e-38)
    assert (excess <= allowed).all(), (codec, float(excess.max()))


def assert_no_fill(codec: str, rows: torch.Tensor, pieces: Pieces) -> None:
    """A reader tells a missing row by the fill of the main stream: no encoder emits it."""
    main = codecs.streams(codec, rows.shape[-1], str(rows.dtype).removeprefix("torch."))[0]
    if isinstance(main.fill, int) and main.view != "bfloat16":
        assert (pieces[main.name] != main.fill).all(), codec


def sqnr(x: F32, y: F32) -> float:
    noise = ((x.astype(np.float64) - y) ** 2).sum()
    return float("inf") if noise == 0 else float(10 * np.log10((x.astype(np.float64) ** 2).sum() / noise))


def gaussian(n: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed))


# ── every codec ─────────────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(ALL), st.sampled_from(DTYPES), st.sampled_from([1, 4, 8, 63, 64, 65, 100, 256]))
def test_rows_decode_within_the_declared_bound(data: st.DataObject, codec: str, dtype: torch.dtype, width: int) -> None:
    width = -(-width // 4) * 4 if "head" in codec else width
    rows = gaussian(3, width, data.draw(st.integers(0, 1000))) * 10.0 ** data.draw(st.integers(-6, 4))
    rows += 10.0 ** data.draw(st.integers(-6, 4)) * data.draw(st.sampled_from([0, 0, 1]))
    for column in data.draw(st.lists(st.integers(0, width - 1), max_size=9)):
        rows[:, column] *= data.draw(st.sampled_from([0.0, 10.0, 1e3, 1e5]))
    rows[2] = data.draw(st.sampled_from([0.0, 1.0, -3e-5]))
    assert_bound(codec, rows.clamp(-6e4, 6e4).to(dtype))


@pytest.mark.parametrize("codec", ALL)
def test_rows_at_the_ends_of_float32(codec: str) -> None:
    rows = gaussian(4, 128, 1)
    rows[0] *= 1e37
    rows[1] = 1e-42  # below what a scale can hold
    rows[2] = torch.linspace(-1, 1, 128) * 3e38
    rows[3] *= 1e-38
    decoded, pieces = round_trip(codec, rows)
    assert_no_fill(codec, rows, pieces)
    # What float32 or bfloat16 cannot add up or round is NaN or infinite, never a plausible number.
    assert np.isfinite(decoded[[0, 1, 3]]).all() or codec.startswith("rp8")
    if not codecs.identified(codec).family.projected and not codec.startswith("topk"):
        assert np.abs(decoded[1] - 1e-42).max() <= 1e-40
        assert sqnr(rows[2].numpy(), decoded[2]) > 18


@pytest.mark.parametrize("codec", ["fp8row", "nf4b64", "topk8:k=5", "kv8:head=4", "full8"])
def test_the_bound_holds_where_a_scale_has_few_digits_left(codec: str) -> None:
    """Below 2^-126 bfloat16 loses digits: a scale that was rounded down would clip the numbers that it is made of."""
    x = gaussian(64, 128, 8) * 1e-38
    decoded, pieces = round_trip(codec, x)
    allowed = bound(codec, x.numpy(), pieces) * (1 + 1e-5) + 2e-45
    assert (np.abs(decoded - x.numpy()) <= allowed).all()


@pytest.mark.parametrize("codec", ALL)
def test_a_number_that_is_none_never_becomes_one(codec: str) -> None:
    rows = gaussian(4, 128, 2)
    rows[1, 3], rows[2, 100] = float("inf"), float("nan")
    rows[3] = float("-inf")
    decoded, pieces = round_trip(codec, rows)
    assert_no_fill(codec, rows, pieces)
    assert np.isfinite(decoded[0]).all()
    if codecs.identified(codec).family.projected:
        assert np.isnan(decoded[1:]).all()
    else:
        assert not np.isfinite([decoded[1, 3], decoded[2, 100]]).any()
    kept = codecs.kept_energy(pieces)
    if kept is not None:
        assert 0 < kept[0] < 1 and np.isnan(kept[1:]).all()
    elif codec in ("int8b64", "nf4b64"):
        # One of the outliers is nothing to the others; a row of infinities is.
        assert np.isfinite(np.delete(decoded[1], 3)).all() and not np.isfinite(decoded[3]).any()


@pytest.mark.parametrize("codec", ALL)
def test_rows_of_zeros_are_zeros(codec: str) -> None:
    decoded, pieces = round_trip(codec, torch.zeros(2, 128))
    assert (decoded == 0).all()
    kept = codecs.kept_energy(pieces)
    assert kept is None or (kept == 1).all()


@pytest.mark.parametrize("codec", [codec for codec in ALL if "head" not in codec])
def test_a_row_of_one_number(codec: str) -> None:
    assert_bound(codec, torch.tensor([[3.25], [-1e4], [0.0]]))


@pytest.mark.parametrize(("width", "dtype"), [(65535, "uint16"), (65536, "uint32"), (70000, "uint32")])
@pytest.mark.parametrize("codec", ["int8b64", "nf4b64", "topk:k=9", "topk8:k=9"])
def test_columns_past_16_bits(codec: str, width: int, dtype: str) -> None:
    rows = gaussian(2, width)
    rows[:, width - 1] = 1e4
    decoded, pieces = round_trip(codec, rows)
    index = pieces["index" if "index" in pieces else "outlier_index"]
    assert index.dtype == dtype and (index != np.iinfo(dtype).max).all()
    assert np.allclose(decoded[:, width - 1], 1e4, rtol=0.01)


@pytest.mark.parametrize("codec", ALL)
@pytest.mark.parametrize("dtype", DTYPES)
def test_encoding_is_the_same_every_time_and_row_by_row(codec: str, dtype: torch.dtype) -> None:
    rows = gaussian(9, 128, 4).to(dtype)
    first, again = encode(codec, rows), encode(codec, rows)
    assert all(torch.equal(first[name], again[name]) for name in first)
    if not codecs.identified(codec).family.projected:  # a matrix product may add in another order
        single = [encode(codec, rows[i : i + 1]) for i in range(9)]
        assert all(torch.equal(first[name], torch.cat([piece[name] for piece in single])) for name in first)


def test_decoding_needs_no_torch() -> None:
    rows = gaussian(3, 128, 5)
    stored = {codec: {name: (piece.tolist(), piece.dtype.str) for name, piece in round_trip(codec, rows)[1].items()}
              for codec in ALL}
    program = """
import json, sys
import numpy as np
from schemas import codecs
for codec, pieces in json.load(sys.stdin).items():
    arrays = {name: np.array(values, dtype) for name, (values, dtype) in pieces.items()}
    print(codec, np.abs(codecs.decode(codec, arrays, 128, "float32")).sum() > 0)
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], input=json.dumps(stored), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [word for codec in ALL for word in (codec, "True")]


# ── the bars ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [256, 2048, 4096])
@pytest.mark.parametrize(("codec", "bar"), [("int8b64", 41), ("fp8row", 31), ("nf4b64", 19.5), ("full8", 40),
                                            ("kv8:head=64", 41), ("qk8:head=128", 41)])
def test_signal_over_noise_on_gaussian_rows(codec: str, bar: float, width: int, dtype: torch.dtype) -> None:
    rows = gaussian(64, width, 1).to(dtype)
    assert sqnr(rows.float().numpy(), round_trip(codec, rows)[0]) >= bar


@pytest.mark.parametrize("factor", [10.0, 1e3, 1e5])
@pytest.mark.parametrize("columns", [(5,), (5, 6, 7, 8), (1, 2, 70, 71, 900, 901, 902, 4095)])
@pytest.mark.parametrize(("codec", "bar"), [("int8b64", 40), ("nf4b64", 19.5)])
def test_other_columns_beside_massive_ones(codec: str, bar: float, columns: tuple[int, ...], factor: float) -> None:
    rows = gaussian(64, 4096, 2)
    rows[:, list(columns)] = factor * (1 + torch.rand(64, len(columns)))
    decoded, _ = round_trip(codec, rows)
    other = np.setdiff1d(np.arange(4096), columns)
    x = rows.numpy()
    assert sqnr(x[:, other], decoded[:, other]) >= bar
    assert np.abs(decoded[:, list(columns)] / x[:, list(columns)] - 1).max() <= 2**-8


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 64, 100, 256, 4096])
def test_raw_is_exact(dtype: torch.dtype, width: int) -> None:
    rows = torch.randn(7, width).to(dtype)
    assert np.array_equal(round_trip("raw", rows)[0], rows.float().numpy())


@pytest.mark.parametrize("dtype", DTYPES)
def test_raw16_is_the_row_cast_to_16_bits(dtype: torch.dtype) -> None:
    rows = torch.randn(7, 100).to(dtype)
    cast = rows.to(torch.bfloat16) if dtype == torch.float32 else rows
    assert np.array_equal(round_trip("raw16", rows)[0], cast.float().numpy())


@pytest.mark.parametrize("name", ["raw", "raw16"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_what_is_kept_as_it_is_wanted_is_handed_out_as_it_is(name: str, dtype: str) -> None:
    """Every number of 16 bits, what decoding and rounding makes of it; a NaN has the bits that the model gave it."""
    codec, every = codecs.identified(name), np.arange(1 << 16, dtype=np.uint16).reshape(1, 2, -1)
    pieces = {"x": every.view(codec.streams(1 << 15, dtype)[0].dtype)}
    found, decoded = codec.decode_as(pieces, 1 << 15, dtype, dtype), codec.decode(pieces, 1 << 15, dtype)
    assert found is not None and np.array_equal(found.view(np.uint16), every)
    rounded, nan = cast(decoded, dtype), np.isnan(decoded)
    assert found.dtype == rounded.dtype and np.array_equal(rounded.view(np.uint16)[~nan], every[~nan])
    for other in {"float32", "float16", "bfloat16"} - {dtype}:
        assert codec.decode_as(pieces, 1 << 15, dtype, other) is None


@pytest.mark.parametrize("density", [0.01, 0.04, 0.5, 1.0])
@pytest.mark.parametrize("name", ["topk", "topk8"])
def test_kept_energy_is_that_of_what_is_kept(name: str, density: float) -> None:
    rows = gaussian(32, 4096, 3)
    decoded, pieces = round_trip(f"{name}:density={density:g}", rows)
    x = rows.double().numpy()
    assert ((decoded != 0).sum(-1) <= np.ceil(density * 4096)).all()
    kept = codecs.kept_energy(pieces)
    assert kept is not None
    assert np.allclose(kept, (decoded.astype(np.float64) ** 2).sum(-1) / (x**2).sum(-1), rtol=0.01)


def test_a_zero_point_far_from_the_codes_keeps_its_precision() -> None:
    rows = 1000 + gaussian(16, 512, 4)
    decoded, pieces = round_trip("full8", rows)
    assert np.abs(pieces["zero"]).min() > 255
    assert np.abs(decoded - rows.numpy()).max() <= 0.51 * (rows.amax() - rows.amin()) / 253 * 1.3


# ── projections ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_matrices_are_these_for_ever() -> None:
    """Readers make them from (width, k, seed): other numbers here would make every stored projection unreadable."""
    assert np.allclose(projection.gaussian(5, 3, 7)[0], [-0.08494435, 0.28989458, -0.6299475], atol=1e-6)
    whole = projection.hadamard(100, 3, 7)[:3] * np.sqrt(128 * 3)
    assert np.allclose(whole, [[-4, 16, 8], [12, 0, 0], [0, -12, 20]], atol=1e-5)


def test_the_matrices_are_what_they_are_called() -> None:
    normal = projection.gaussian(2000, 64, 1) * 8
    assert abs(float(normal.mean())) < 0.01 and abs(float(normal.std()) - 1) < 0.01
    assert abs(float((normal**4).mean()) - 3) < 0.1
    transform = projection.hadamard(256, 256, 2).astype(np.float64)
    assert np.allclose(transform.T @ transform, np.eye(256), atol=1e-6)
    assert projection.hadamard(200, 64, 2).shape == (200, 64)
    for make in (projection.gaussian, projection.hadamard):  # as manifests name them, where a model is narrower than k
        assert np.array_equal(make(20, 512, 3), make(20, 20, 3))


def cosines(rows: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    unit = rows.astype(np.float64)
    unit /= np.linalg.norm(unit, axis=-1, keepdims=True)
    return (unit @ unit.T)[np.triu_indices(len(unit), 1)]


@pytest.mark.parametrize("width", [256, 3584, 4096])
@pytest.mark.parametrize("alike", [0.0, 0.3, 0.7, 0.95])
def test_cosines_of_sketches(width: int, alike: float) -> None:
    k = width // 8
    squares = []
    for seed in range(4):
        rows = alike**0.5 * gaussian(1, width, 10 + seed) + (1 - alike) ** 0.5 * gaussian(64, width, 20 + seed)
        decoded, _ = round_trip(f"sketch:k={k},bits=2,seed={seed}", rows)
        estimated = sketch.cosine(decoded, decoded, 2)
        assert np.allclose(np.diag(estimated), 1)
        squares.append((estimated[np.triu_indices(64, 1)] - cosines(rows.numpy())) ** 2)
        if alike == 0:
            plain = np.sqrt(np.mean((cosines(decoded) - cosines(rows.numpy())) ** 2))
            assert plain <= 1.15 * np.sqrt((1 - k / width) / k)
    assert np.sqrt(np.mean(squares)) <= 1.15 * np.sqrt((1 - k / width) / k)


def test_cosines_of_sketches_beside_massive_columns() -> None:
    squares = []
    for seed in range(6):  # three numbers make such a row: a projection's luck with them is for all pairs the same
        rows = gaussian(64, 4096, 5 + seed)
        rows[:, [3, 70, 900]] *= 1000
        decoded, _ = round_trip(f"sketch:k=512,bits=2,seed={seed}", rows)
        error = sketch.cosine(decoded, decoded, 2)[np.triu_indices(64, 1)] - cosines(rows.numpy())
        squares.append(error**2)
    assert np.sqrt(np.mean(squares)) <= 1.15 * np.sqrt((1 - 512 / 4096) / 512)


def test_rp8_keeps_cosines_as_well_as_it_says() -> None:
    rows = gaussian(100, 4096, 6)
    decoded, _ = round_trip("rp8:k=512,seed=0", rows)
    error = np.sqrt(np.mean((cosines(decoded) - cosines(rows.numpy())) ** 2))
    assert 0.8 / 512**0.5 <= error <= 1.1 / 512**0.5


def test_attention_from_qk8_names_the_same_tokens() -> None:
    """The eight keys that each query attends to most, from codes and from the rows themselves."""
    heads, head, tokens = 8, 64, 256
    common = gaussian(tokens, heads * head, 7)  # queries and keys that have something to do with each other
    q, k = common + gaussian(tokens, heads * head, 8), common + gaussian(tokens, heads * head, 9)
    k[:, ::64] += 2  # keys have columns that stand out

    def top(q: F32, k: F32) -> npt.NDArray[np.bool_]:
        scores = np.einsum("thd,shd->hts", *(x.reshape(tokens, heads, head) for x in (q, k)))
        scores[:, ~np.tri(tokens, dtype=bool)] = -np.inf
        return scores >= np.sort(scores, -1)[..., -8:-7]

    kept = top(*(round_trip(f"qk8:head={head}", x)[0] for x in (q, k)))[:, 8:]
    assert (kept & top(q.numpy(), k.numpy())[:, 8:]).sum() / (8 * kept.shape[0] * kept.shape[1]) >= 0.99


# ── names ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("text", "identity"), [
    ("int8b64", "int8b64"), ("rp8", "rp8:k=512,seed=0"), ("rp8:seed=3,k=256", "rp8:k=256,seed=3"),
    ("topk", "topk:density=0.04"), ("topk:density=.040", "topk:density=0.04"), ("topk8:k=64", "topk8:k=64"),
    ("topk:density=1e-06", "topk:density=1e-06"), ("topk:density=1.0", "topk:density=1"),
    ("sketch:bits=1", "sketch:k=512,bits=1,seed=0"), ("kv8:head=064", "kv8:head=64"),
])
def test_a_codec_has_one_identity(text: str, identity: str) -> None:
    assert codecs.parse_codec(text).identity == identity
    assert codecs.parse_codec(identity).identity == identity and codecs.is_identity(identity)
    assert codecs.is_identity(text) == (text == identity)


@pytest.mark.parametrize(("text", "says"), [
    ("zip", "valid: raw, raw16, fp8row"), ("raw:k=1", "raw has no parameters"), ("rp8:", "rp8 has k, seed"),
    ("rp8:bits=8", "k=512,seed=0"), ("rp8:k=1,k=1", "each once"), ("rp8:k", "k = '': valid: a whole number from 1"),
    ("rp8:k=0", "from 1 to 16384"), ("rp8:k=-1", "from 1 to 16384"), ("rp8:k=99999999999", "from 1 to 16384"),
    ("rp8:k=1e2", "a whole number"), ("rp8:seed=4294967296", "from 0 to 4294967295"), ("sketch:bits=3", "from 1 to 2"),
    ("topk:density=0", "from 1e-06 to 1"), ("topk:density=nan", "a number from"), ("topk:density=2", "from 1e-06 to 1"),
    ("topk:k=4,density=0.5", "not both"), ("kv8:head=0", "from 1"), ("rp8" * 100, "unknown codec"), ("", "unknown"),
    ("topk:density=e-1", "a number"), ("rp8:k=٣", "a whole number"),
])
def test_refusals_name_field_value_and_what_is_valid(text: str, says: str) -> None:
    with pytest.raises(SpecError) as raised:
        codecs.parse_codec(text)
    assert raised.value.field == "codec" and says in str(raised.value)
    assert not codecs.is_identity(text)


def test_parameters_that_do_not_fit_the_width() -> None:
    with pytest.raises(SpecError, match="k up to 2048"):
        codecs.streams("rp8:k=2049,seed=0", 4096, "float32")
    with pytest.raises(SpecError, match="divides it"):
        codecs.streams("kv8:head=48", 128, "float32")
    assert codecs.streams("sketch:k=512,bits=2,seed=0", 8, "float32")[0].shape == (3,)
    assert not codecs.is_identity("kv8"), "a head that is left open is no codec to store rows in"


def test_an_index_past_the_row_is_damage() -> None:
    _, pieces = round_trip("topk:k=5", gaussian(2, 64))
    pieces["index"] = np.full_like(pieces["index"], 64)
    with pytest.raises(CorruptError):
        codecs.decode("topk:k=5", pieces, 64, "float32")


@pytest.mark.parametrize("table", [codec_tables.declared(), codec_tables.formulas()])
def test_the_page_says_what_is_declared(table: str) -> None:
    page = Path(__file__).parents[3] / "docs" / "reference" / "codecs.md"
    assert table in page.read_text(), "python -m bench.codec_fidelity --write docs/reference/codecs.md"


def test_every_codec_has_an_encoder_and_every_encoder_a_codec() -> None:
    folder = Path(str(engine_side.codecs.__file__)).parent
    modules = [importlib.import_module(f"engine_side.codecs.{path.stem}") for path in folder.glob("[a-z]*.py")]
    assert {module.__name__.rpartition(".")[2] for module in modules if hasattr(module, "encode")} == set(codecs.CODECS)
    assert set(TORCH_DTYPES) == set(STREAM_DTYPES)
    for name, family in codecs.CODECS.items():  # as a codec of another package is checked
        assert checked(name, SimpleNamespace(FAMILY=replace(family, encoder="…"))).name == name
