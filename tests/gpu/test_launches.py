"""Kernels that are launched again go straight to the driver; what they write is what Triton's launcher would write."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from engine_side import kernels
from engine_side.transport.cuda_calls import Function
from schemas.codecs import streams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: make bench-gpu on one")

CODECS = ["raw", "raw16", "int8b64", "nf4b64", "fp8row", "full8", "kv8:head=64", "qk8:head=64", "topk:density=0.04",
          "topk8:density=0.5", "rp8:k=40,seed=0", "sketch:k=200,bits=2,seed=0"]
ROWS, LAYERS, WIDTH, STREAM = 9, 3, 512, 1 << 16


def source(gathered: bool) -> kernels.StagedRows:
    torch.manual_seed(0)
    buffer = torch.randn(LAYERS, 20, WIDTH, device="cuda").bfloat16()
    numbers = torch.arange(20, device="cuda")
    rows: Any = torch.tensor([1, 3, 4, 5, 9, 11, 12, 18, 19], device="cuda") if gathered else 4
    return kernels.StagedRows(buffer, torch.tensor([0, 2], dtype=torch.int32, device="cuda"), rows, ROWS, numbers.int(),
                          numbers)


def room() -> torch.Tensor:
    return torch.zeros(16 * STREAM, dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("codec", CODECS)
def test_both_launchers_write_the_same(codec: str, gathered: bool) -> None:
    offsets = [STREAM * i for i in range(len(streams(codec, WIDTH, "bfloat16")) + 2)]
    kernels._kernel.cache_clear()
    kernels._product.cache_clear()
    rows, by_triton, by_driver = source(gathered), room(), room()
    kernels.launch(codec, rows, by_triton, offsets)(0)
    assert all(by_triton[at : at + STREAM].any() for at in offsets)
    launch = kernels.launch(codec, rows, by_driver, offsets, np.array([192, 0, 128]))
    parts = (launch._product, launch._codes) if isinstance(launch, kernels.Projected) else (launch,)
    assert all(part._launched is not None for part in parts), "this Triton's kernels are not as they are known here"
    for moved in (False, True):
        if moved:
            launch.move(np.array([64, 256]))
        for step, begin in enumerate((64, 256) if moved else (192, 0, 128)):
            by_driver.zero_()
            launch(step)
            assert torch.equal(by_triton[:-256], by_driver[begin:][: 16 * STREAM - 256])
            assert not by_driver[:begin].any()


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("codec", CODECS)
def test_a_launch_that_is_aimed_elsewhere_writes_what_a_new_one_would(codec: str, gathered: bool) -> None:
    offsets = [STREAM * i for i in range(len(streams(codec, WIDTH, "bfloat16")) + 2)]
    rows, anew, aimed = source(gathered), room(), room()
    kernels.launch(codec, rows, aimed, offsets)(0)  # compiles
    launch = kernels.launch(codec, rows, aimed, [at + 64 for at in offsets], np.array([64]))
    launch(0)
    where: Any = rows.rows[2:7] if isinstance(rows.rows, torch.Tensor) else 11
    begins = np.array([128, 0, 192])
    done = launch.aim(where, 5, offsets, begins)
    assert done is not isinstance(launch, kernels.Projected)
    if done:
        assert isinstance(launch, kernels.Launch) and launch._launched is not None
        kernels.launch(codec, replace(rows, rows=where, n=5), anew, offsets, begins)(2)
        aimed.zero_()
        launch(2)
        assert torch.equal(anew, aimed) and anew.any()
        assert not launch.aim(where if isinstance(where, int) else 3, 5, offsets, np.zeros(99, np.int64))
        assert not launch.aim(3 if gathered else torch.tensor([3], device="cuda"), 1, offsets, begins)


def test_a_stream_that_is_current_later_gets_the_launch() -> None:
    memory, offsets = room(), [0, STREAM, 2 * STREAM]
    kernels.launch("raw16", source(False), memory, offsets)(0)
    launch = kernels.launch("raw16", source(False), memory, offsets)
    memory.zero_()
    torch.cuda.synchronize()
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        torch.cuda._sleep(100_000_000)
        launch(0)
        after = torch.cuda.Event()
        after.record()
    assert not memory.any(), "it did not wait behind what is on its stream"
    after.synchronize()
    assert memory[:STREAM].any()


def test_a_kernel_that_wants_more_is_left_to_triton() -> None:
    kernels._kernel.cache_clear()
    kernels.launch("raw16", source(False), room(), [0, STREAM, 2 * STREAM])(0)
    compiled = kernels._kernel("raw16", kernels.Kind.of(source(False))).compiled
    assert Function.of(compiled, 14) is not None
    assert Function.of(compiled, 15 + 2) is None and Function.of(compiled, 11) is None
