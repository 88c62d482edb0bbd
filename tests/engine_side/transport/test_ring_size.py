"""The ring that nobody set: for the engine's steps, by what the store was measured to take, within bounds."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from engine_side.config import EngineConfig
from engine_side.tap.budget import RING_BYTES_MAX, RING_BYTES_MIN, ring_bytes, ring_choice
from engine_side.tap.shares import layout_of
from engine_side.tap.stages import Stage
from engine_side.tap.staging import allocate
from engine_side.transport.ring_files import group_free_bytes
from engine_side.worker import bytes_sent, ring_size
from schemas.wire.ask_store import ask_store
from schemas.wire.messages import StoreState
from tests.support.store_helpers import PROGRAMS, WriterProcess, socket_folder, until

GIB, MIB = 1 << 30, 1 << 20
LOTS = 1 << 40


@pytest.mark.parametrize(("step", "free", "rate", "nbytes", "why"), [
    (0, LOTS, 0.0, RING_BYTES_MIN, "the least, as on every CPU"),
    (GIB, LOTS, 0.0, 2 * GIB, "room for 2 full steps of 1,024 MiB, as what the store takes was not known"),
    (GIB, LOTS, float(GIB), 2 * GIB + GIB // 2, "room for 2 full steps of 1,024 MiB, as the store takes 1,074 MB/s"),
    (GIB, LOTS, float(8 * GIB), 3 * GIB, "room for 2 full steps of 1,024 MiB, as the store takes 8,590 MB/s"),
    (GIB, LOTS, float(GIB // 2), 3 * GIB + GIB // 4, "room for 3 full steps of 1,024 MiB, as the store takes 537 MB/s"),
    (GIB, LOTS, 1e6, 4 * GIB + 500_000, "room for 4 full steps of 1,024 MiB, as the store takes 1 MB/s"),
    (16 * MIB, LOTS, 1e6, RING_BYTES_MIN, "the least; room for 4 full steps of 16 MiB, as the store takes 1 MB/s, "
                                          "would be less"),
    (GIB, 4 * GIB, 1e6, GIB, "a quarter of the free memory; room for 4 full steps of 1,024 MiB, as the store takes "
                             "1 MB/s, would be more"),
    (GIB, MIB, 1e6, RING_BYTES_MIN, None),
    (8 * GIB, LOTS, 1e6, RING_BYTES_MAX, None),
])
def test_what_is_chosen_and_why(step: int, free: int, rate: float, nbytes: int, why: str | None) -> None:
    found, said = ring_choice(step, free, rate)
    assert found == nbytes == ring_bytes(step, free, rate)
    assert why is None or said == why


@pytest.mark.parametrize(("ranks", "stages"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)])
def test_the_ranks_together_have_room_for_a_whole_step(ranks: int, stages: int) -> None:
    """Staged by each: its stage's layers, whole rows of the residual or its own columns of the MLP."""
    layers, tokens, wholes = list(range(8)), 16, {"resid_post": 64, "mlp_post": 256}
    step = len(layers) * tokens * max(wholes.values()) * 2
    cut = [layers[len(layers) * stage // stages:len(layers) * (stage + 1) // stages] for stage in range(stages)]
    widths = {"resid_post": 64, "mlp_post": 256 // ranks}
    places = [Stage(number, stages, each[0], each[-1] + 1) for number, each in enumerate(cut)]
    layout = layout_of(dict.fromkeys(widths, layers), widths, wholes, ranks, places if stages > 1 else ())
    for rank in range(ranks * stages):
        staging, _ = allocate(widths, dict.fromkeys(widths, cut[rank // ranks]), tokens, torch.bfloat16,
                              torch.device("cpu"), GIB)
        row, sent = bytes_sent(staging, layout[rank] if layout else None)
        assert sent * ranks * stages == step and row * tokens == sent


def test_an_engine_asks_the_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROBE_S", "0.5")  # of 4 MiB
    with WriterProcess(tmp_path / "store", script=PROGRAMS / "slow_writer.py") as writer:
        assert until(lambda: ask_store(writer.endpoint, None, 30.0).bytes_s)
        config = EngineConfig(writer.endpoint)
        nbytes, why = ring_size(config, 64 * MIB)
        assert " MB/s" in why and "4 full steps of 64 MiB" in why
        assert RING_BYTES_MIN <= nbytes <= 4.5 * 64 * MIB
        assert ring_size(config, 0) == (RING_BYTES_MIN, "the least, as on every CPU")
        assert ring_size(EngineConfig(writer.endpoint, ring_bytes=5 * MIB), 64 * MIB) == (
            5 * MIB, "VLLM_TAP_RING_BYTES")
        counts = writer.stop().split()
    assert not [count for count in counts if count.startswith(("malformed=", "refused=", "gaps="))]


def test_a_writer_that_is_away_is_not_waited_for_long() -> None:
    began = time.monotonic()
    assert ask_store(f"ipc://{socket_folder()}/none", None, 0.5) == StoreState()
    assert time.monotonic() - began < 30


def test_the_limit_of_a_container_is_heeded(tmp_path: Path) -> None:
    assert group_free_bytes(tmp_path) == (1 << 63) - 1
    for name, text in (("memory.max", "max"), ("memory.current", "900"),
                       ("memory.stat", "anon 1\ninactive_file 300\n")):
        (tmp_path / name).write_text(text)
    assert group_free_bytes(tmp_path) == (1 << 63) - 1
    (tmp_path / "memory.max").write_text("1000")
    assert group_free_bytes(tmp_path) == 400
    (tmp_path / "memory.max").write_text("100")
    assert group_free_bytes(tmp_path) == 0
