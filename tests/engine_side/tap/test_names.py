"""TransformerLens's names of a model in no table."""

from __future__ import annotations

import pytest

from engine_side.tap.architectures import found_names

FOUND = {"attn.hook_out": "attn_out", "mlp.hook_out": "mlp_out", "hook_embed": "embed"}


@pytest.mark.parametrize(("architecture", "names"), [
    ("GraniteForCausalLM", FOUND),
    ("BloomForCausalLM", {"hook_embed": "embed"}),  # its modules return the stream with what they made added
])
def test_a_name_that_is_another_tensor_there_is_left_out(architecture: str, names: dict[str, str]) -> None:
    assert found_names([architecture], FOUND) == names
