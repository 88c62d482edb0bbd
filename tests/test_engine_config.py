"""The engine's settings: defaults, and refusals that name the variable, its value and what is valid."""

from __future__ import annotations

import pytest

from engine_side.config import from_environment, in_tested_range
from schemas.errors import StartError

ENDPOINT = {"VLLM_TAP_ENDPOINT": "ipc:///tmp/t/writer.sock"}


def test_without_an_endpoint_the_plugin_is_inert() -> None:
    assert from_environment({"VLLM_TAP_ARM": "nonsense"}) is None


def test_defaults_and_spellings() -> None:
    config = from_environment(ENDPOINT)
    assert config is not None and config.arm == ("resid_post",) and config.on_full == "drop"
    armed = from_environment({**ENDPOINT, "VLLM_TAP_ARM": " mlp_out, resid_post,mlp_out "})
    assert armed is not None and armed.arm == ("mlp_out", "resid_post")
    assert config.salt() != armed.salt()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"VLLM_TAP_ENDPOINT": "tcp://0.0.0.0:5555"}, "must be ipc://PATH"),
        ({"VLLM_TAP_ENDPOINT": "ipc://" + "x" * 120}, "at most 100 characters"),
        ({"VLLM_TAP_ARM": "nope"}, "unknown site"),
        ({"VLLM_TAP_ARM": "blocks.3.hook_out"}, "fixes a layer"),
        ({"VLLM_TAP_ARM": " , "}, "names no site"),
        ({"VLLM_TAP_ON_FULL": "maybe"}, "valid: drop, wait"),
        ({"VLLM_TAP_RING_BYTES": "1GB"}, "must be a number of bytes"),
        ({"VLLM_TAP_RING_BYTES": "100"}, "at least"),
    ],
)
def test_refusals(settings: dict[str, str], says: str) -> None:
    with pytest.raises(StartError) as raised:
        from_environment({**ENDPOINT, **settings})
    (name,) = settings
    assert name in str(raised.value) and says in str(raised.value)


@pytest.mark.parametrize(
    ("version", "is_tested"),
    [("0.26.0", True), ("0.32.0", True), ("0.30.1rc2+cpu", True), ("0.25.9", False), ("0.33.0", False), ("1.0", False),
     ("dev", False)],
)
def test_the_range_of_tested_versions(version: str, is_tested: bool) -> None:
    assert in_tested_range(version) is is_tested
