"""Encoders (torch) against decoders (NumPy): bit-exact where promised, above their SQNR bar elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine_side.codecs import TORCH_DTYPES, encode
from schemas import codecs

WIDTHS = [8, 64, 100, 256, 4096]


def _round_trip(codec: str, rows: torch.Tensor) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    dtype, width = str(rows.dtype).removeprefix("torch."), rows.shape[-1]
    pieces = {}
    for stream in codecs.streams(codec, width, dtype):
        piece = encode(codec, rows)[stream.name]
        assert piece.dtype == TORCH_DTYPES[stream.dtype] and piece.shape[1:] == stream.shape
        pieces[stream.name] = piece.numpy()
    return codecs.decode(codec, pieces, width, dtype), pieces


def _sqnr(x: np.ndarray, y: np.ndarray) -> float:
    return float(10 * np.log10((x.astype(np.float64) ** 2).sum() / ((x.astype(np.float64) - y) ** 2).sum()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", WIDTHS)
def test_raw_is_exact(dtype: torch.dtype, width: int) -> None:
    rows = torch.randn(7, width).to(dtype)
    decoded, _ = _round_trip("raw", rows)
    assert np.array_equal(decoded, rows.float().numpy())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_raw16_is_the_row_cast_to_16_bits(dtype: torch.dtype) -> None:
    rows = torch.randn(7, 100).to(dtype)
    cast = rows.to(torch.bfloat16) if dtype == torch.float32 else rows
    assert np.array_equal(_round_trip("raw16", rows)[0], cast.float().numpy())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [256, 2048, 4096])
def test_int8b64_meets_its_bar_on_gaussian_rows(dtype: torch.dtype, width: int) -> None:
    rows = torch.randn(64, width, generator=torch.Generator().manual_seed(1)).to(dtype)
    decoded, _ = _round_trip("int8b64", rows)
    assert _sqnr(rows.float().numpy(), decoded) >= 41


@pytest.mark.parametrize("factor", [10.0, 1e3, 1e5])
@pytest.mark.parametrize("columns", [(5,), (5, 6, 7, 8), (1, 2, 70, 71, 900, 901, 902, 4095)])
def test_int8b64_keeps_the_other_columns_beside_massive_ones(factor: float, columns: tuple[int, ...]) -> None:
    rows = torch.randn(64, 4096, generator=torch.Generator().manual_seed(2))
    rows[:, list(columns)] = factor * (1 + torch.rand(64, len(columns)))
    decoded, _ = _round_trip("int8b64", rows)
    other = np.setdiff1d(np.arange(4096), columns)
    x = rows.numpy()
    assert _sqnr(x[:, other], decoded[:, other]) >= 40
    assert np.abs(decoded[:, list(columns)] / x[:, list(columns)] - 1).max() <= 2**-8


def test_int8b64_stays_within_its_declared_bound_a_column() -> None:
    rows = torch.randn(32, 1000, generator=torch.Generator().manual_seed(3)) * 100
    decoded, pieces = _round_trip("int8b64", rows)
    scale = np.repeat((pieces["scale"].astype(np.uint32) << 16).view(np.float32), 64, axis=-1)[:, :1000]
    error = np.abs(decoded - rows.numpy())
    np.put_along_axis(error, pieces["outlier_index"].astype(np.int64), 0, axis=-1)
    assert (error <= 0.51 * scale).all()


def test_int8b64_on_rows_that_are_hard_to_scale() -> None:
    rows = torch.zeros(5, 128)
    rows[1, 3] = float("inf")
    rows[2, 100] = float("nan")
    rows[3] = 1e-42  # below what a bfloat16 scale can hold
    rows[4] = torch.arange(128) * 2e36
    decoded, pieces = _round_trip("int8b64", rows)
    assert (pieces["q"] != -128).all()
    assert np.array_equal(decoded[0], np.zeros(128))
    assert np.isinf(decoded[1, 3]) and np.isfinite(np.delete(decoded[1], 3)).all()
    assert np.isnan(decoded[2, 100]) and np.isfinite(np.delete(decoded[2], 100)).all()
    assert np.abs(decoded[3]).max() <= 1e-40
    assert _sqnr(rows[4].double().numpy(), decoded[4]) > 35
