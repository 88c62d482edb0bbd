"""Weights without loss in a buffer that all matrices share, unpacked before each use: what decides is the order alone.

The buffer is filled by copies on a stream of their own, which come late (tests/support/engines/late_copies.py). Where
the model waits for them it computes what it did; where it does not, it multiplies by what was in the buffer before.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tests.support.engines.late_copies import HOST, Copies, Event
from vllm_tap.tiny_model import tiny_model

PROMPT = [5, 80, 311, 42, 977, 23, 640, 15]
GENERATED = 6


@dataclass
class Unpacked:
    """Matrices, packed without loss, and the buffers in which they are unpacked in turn."""

    buffers: list[torch.Tensor]
    waits: bool  # whether the model waits for the copy that fills a buffer
    copies: Copies = field(default_factory=lambda: Copies(HOST))
    taken: int = 0
    on_its_way: torch.Tensor | None = None

    def fill(self, packed: bytes, module: Any) -> None:
        """Unpack a weight into the next buffer, from where the module then takes it."""
        buffer = self.buffers[self.taken % len(self.buffers)]
        self.taken += 1
        unpacked = torch.frombuffer(bytearray(zlib.decompress(packed)), dtype=buffer.dtype)
        if not self.waits:
            self.copies.make(self.copies.begun)  # those before have come by now; this one has not
        self.copies.copy(buffer.data_ptr(), unpacked.data_ptr(), unpacked.nbytes)
        self.on_its_way = unpacked
        if self.waits:
            event = Event()
            event.record(self.copies)
            event.wait()
        module.weight.data = buffer.view(module.weight.shape)


@contextmanager
def unpacking(model: Any, layers: Sequence[int], buffers: int, waits: bool) -> Iterator[None]:
    """The model with the three matrices of some layers' MLP packed."""
    modules = [getattr(model.model.layers[layer].mlp, name) for layer in layers
               for name in ("gate_proj", "up_proj", "down_proj")]
    before = [module.weight.data for module in modules]
    unpacked = Unpacked([torch.zeros_like(before[0]).flatten() for _ in range(buffers)], waits)
    packed = [zlib.compress(weight.numpy().tobytes()) for weight in before]
    hooks = [module.register_forward_pre_hook(lambda module, args, data=data: unpacked.fill(data, module))
             for module, data in zip(modules, packed, strict=True)]
    try:
        yield
    finally:
        for module, weight, hook in zip(modules, before, hooks, strict=True):
            hook.remove()
            module.weight.data = weight


@torch.inference_mode()
def generated(model: Any) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens, each from the whole text anew, and the last logits [vocabulary]."""
    tokens, logits = list(PROMPT), torch.zeros(1)
    for _ in range(GENERATED):
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
        tokens.append(int(logits.argmax()))
    return tokens, logits


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.float32).eval()


@pytest.mark.parametrize("buffers", [1, 2])
def test_with_order_nothing_changes(model: Any, buffers: int) -> None:
    """In every layer, with one buffer and with two."""
    tokens, logits = generated(model)
    with unpacking(model, range(4), buffers, waits=True):
        again, others = generated(model)
    assert again == tokens and torch.equal(others, logits)


@pytest.mark.parametrize("layers", [range(4), [1, 2], [3]], ids=["all", "two", "one"])
def test_without_order_the_answer_is_another(model: Any, layers: Sequence[int]) -> None:
    """Nothing is lost of any weight here either: afterwards the model gives the same bits as before."""
    tokens, logits = generated(model)
    with unpacking(model, layers, 1, waits=False):
        others, _ = generated(model)
    assert others[: len(PROMPT)] == PROMPT and others != tokens
    after, bits = generated(model)
    assert after == tokens and torch.equal(bits, logits)
