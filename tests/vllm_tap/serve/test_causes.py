"""What an engine says while it starts is heard, and passed on as it comes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from vllm_tap.serve.model_config import read_config

TALKS = """
import os, sys
from vllm_tap.serve.causes import output_heard
with output_heard() as causes:
    os.write(1, b"\\rloading 1/5")
    sys.stdin.read()
    os.write(1, b"\\n" + b"x" * 100_000 + b"\\nSomeError: too little\\n")
import time
while causes.raised is None: time.sleep(0.01)
os.write(1, b"heard " + causes.raised.encode())
"""


def test_a_progress_bar_is_seen_before_its_line_ends() -> None:
    said = subprocess.Popen([sys.executable, "-c", TALKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                            stderr=subprocess.DEVNULL)
    assert said.stdin is not None and said.stdout is not None
    assert said.stdout.read(len(b"\rloading 1/5")) == b"\rloading 1/5"
    said.stdin.close()
    rest = said.stdout.read()
    assert said.wait() == 0 and b"x" * 100_000 in rest and b"heard SomeError: too little" in rest


@pytest.mark.parametrize("model", ["s3://bucket/model", "a/b/c", "org/X-GGUF:Q4"])
def test_a_name_that_is_none_of_the_hubs_is_left_to_vllm(model: str) -> None:
    assert read_config(model, ()) is None
