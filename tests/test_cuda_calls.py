"""Calls of CUDA's libraries: found where they are loaded, refused loudly where not; they run in tests/gpu."""

from __future__ import annotations

import pytest
import torch

from engine_side import cuda_calls
from schemas.errors import StartError


def test_a_library_is_found_by_what_this_process_has_mapped() -> None:
    assert cuda_calls._loaded("libc.so").startswith("/")
    with pytest.raises(StartError, match="no libnothing among the libraries of this process"):
        cuda_calls._loaded("libnothing")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA runtime here")
def test_without_a_runtime_the_start_ends() -> None:
    with pytest.raises(StartError, match="no libcudart"):
        cuda_calls.device_to_host()
