"""Calls of CUDA's libraries: found where they are loaded, refused loudly where not; they run in tests/gpu."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine_side import kernels
from engine_side.transport import cuda_calls
from schemas.errors import StartError


def test_a_library_is_found_by_what_this_process_has_mapped() -> None:
    assert cuda_calls._loaded("libc.so").startswith("/")
    with pytest.raises(StartError, match=r"libnothing.* is not loaded in this process"):
        cuda_calls._loaded("libnothing")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA runtime here")
def test_without_a_runtime_the_start_ends() -> None:
    with pytest.raises(StartError, match=r"libcudart.* is not loaded"):
        cuda_calls.device_to_host()


def compiled(*kinds: str, **about: int) -> Any:
    """What Triton's launch returns, of a kernel whose parameters are of such kinds."""
    known = {"num_warps": 4, "shared": 0, "num_ctas": 1, "global_scratch_size": 0, **about}
    return SimpleNamespace(metadata=SimpleNamespace(**known), function=1,
                           src=SimpleNamespace(signature={str(number): kind for number, kind in enumerate(kinds)}))


def test_kernels_that_want_more_than_is_known_are_left_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_calls, "_library", lambda name: SimpleNamespace(cuLaunchKernelEx=SimpleNamespace()))
    for parameters, of, taken in (
        (4, compiled("*bf16", "i64", "constexpr"), True),  # and two that Triton adds
        (2, compiled("*bf16", "i64"), True),
        (3, compiled("*bf16", "constexpr", "constexpr"), False),  # one of what is given became a constant
        (5, compiled("*bf16", "i64"), False),
        (1, compiled("*bf16", "i64"), False),
        (-1, compiled("*bf16", "i64"), False),  # one is wider than a number, or the driver does not tell
        (4, compiled("*bf16", "i64", global_scratch_size=16), False),
        (4, compiled("*bf16", "i64", num_ctas=2), False),
    ):
        monkeypatch.setattr(cuda_calls, "_parameters", lambda _handle, found=parameters: found)
        assert (cuda_calls.Function.of(of, 2) is not None) == taken, (parameters, of)


def test_what_the_driver_refuses_triton_launches(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
                                                 ) -> None:
    class Refused:
        def __call__(self, step: int) -> None:
            raise RuntimeError("cuLaunchKernelEx: error 1")

    by_triton: list[tuple[Any, ...]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, int, int]) -> Any:
            def launched(*args: Any, **_options: Any) -> Any:
                by_triton.append(args)
                return SimpleNamespace(__getitem__=self.__getitem__)
            return launched

    tokens = torch.arange(4)
    source = kernels.StagedRows(torch.zeros(2, 4, 8), torch.tensor([1], dtype=torch.int32), 1, 2, tokens.int(), tokens)
    kernel = kernels.Kernel(Kernel(), (), 4)
    launch = kernels.Launch(kernel, source, torch.zeros(512, dtype=torch.uint8), [0, 64, 128], np.array([0, 256]))
    monkeypatch.setattr(kernels, "_left", False)
    with caplog.at_level(logging.ERROR, "vllm.tap"):
        launch(1)  # what Triton returned is none that is known: no metadata
        assert [args[-3:] for args in by_triton] == [(256, 320, 384)] and kernel.loaded is None
        kernel.compiled, kernel.loaded, launch._launched = None, SimpleNamespace(), Refused()  # type: ignore[assignment]
        launch(0)
        assert by_triton[-1][-3:] == (0, 64, 128) and launch._launched is None
    assert [record.getMessage()[:32] for record in caplog.records] == ["vllm-tap: launching a kernel dir"]
