"""Copies by the CUDA runtime: found where it is loaded, refused loudly where it is not; they run in tests/gpu."""

from __future__ import annotations

import pytest
import torch

from engine_side import cuda_copies
from schemas.errors import StartError


def test_a_library_is_found_by_what_this_process_has_mapped() -> None:
    assert cuda_copies._loaded("libc.so").startswith("/")
    with pytest.raises(StartError, match="no libnothing among the libraries of this process"):
        cuda_copies._loaded("libnothing")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA runtime here")
def test_without_a_runtime_the_start_ends() -> None:
    with pytest.raises(StartError, match="no libcudart"):
        cuda_copies.device_to_host()
