"""What ``vllm-tap capture`` says of the stage that held generation up: of a real line, and of times by hand."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from schemas.wire.line_times import LineTimes, line_times_of
from tests.engine_side.transport.test_sender import LAYERS, MIB, TOKENS, WIDTH, Tapped, manifest_of
from tests.support.processes import PATIENCE_S
from tests.support.store_helpers import PROGRAMS, WriterProcess
from vllm_tap.offline.job import CaptureJob
from vllm_tap.offline.limit import limit_lines
from vllm_tap.offline.prompt_source import PromptSource
from vllm_tap.tiny_model import tiny_model

SLOW_S = 1.0  # a sync of rows


@pytest.fixture
def job(tmp_path: Path) -> CaptureJob:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "x"}\n')
    return CaptureJob(PromptSource(str(prompts)), str(tiny_model()), tmp_path / "store", sites="resid_post")


def times_of(store: Path, durability: str, ring_bytes: int) -> tuple[LineTimes, float]:
    """What a writer on a slow disk tells of a prompt of 8 MiB of rows, and the seconds that its step took."""
    with WriterProcess(store, "--durability", durability, script=PROGRAMS / "slow_writer.py") as writer:
        tapped = Tapped(writer.endpoint, on_full="wait", ring_bytes=ring_bytes)
        began = time.monotonic()
        capture = tapped.whole(TOKENS)
        seconds = time.monotonic() - began
        assert manifest_of(store, capture).status == "complete"
        tapped.close(timeout_s=PATIENCE_S)
        lines = writer.stop().splitlines()
    assert any(line.startswith("writer stopped") for line in lines)
    return next((found for line in lines if (found := line_times_of(line)) is not None), LineTimes()), seconds


def test_a_slow_disk_is_named_and_what_would_lift_it(tmp_path: Path, job: CaptureJob,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOW_S", str(SLOW_S))
    times, seconds = times_of(tmp_path / "slow", "fsync", 4 * MIB)
    assert 0 < times.writer <= times.waited <= seconds  # room comes with a sync, and twice the ring is needed
    assert times.syncing > SLOW_S and times.payload_bytes == TOKENS * LAYERS * WIDTH * 4
    limit, remedy = limit_lines(times, seconds, job)
    assert limit.startswith(f"generation waited {times.waited:.2f} s of {seconds:.2f} s (") and "8.39 MB" in limit
    assert "the limit: the disk, which the writer synced for" in limit
    assert remedy == ("what would lift it: another disk for --store, or --durability os, or --codec nf4b64, or fewer "
                      "--layers, or fewer --positions")


def test_a_ring_with_room_says_nothing_however_slow_the_disk(tmp_path: Path, job: CaptureJob,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOW_S", str(SLOW_S))
    times, seconds = times_of(tmp_path / "slow", "fsync", 32 * MIB)
    assert times == LineTimes() and limit_lines(times, seconds, job) == []


WRITER = LineTimes(writer=8.0, syncing=6.0, appending=5.0, payload_bytes=10**9)


@pytest.mark.parametrize(("times", "durability", "limit", "remedies"), [
    (LineTimes(copies=3.0, sender=2.0, writer=2.5, syncing=9.0), "fsync", "copies from the device (3.00 s)", []),
    (LineTimes(sender=3.0, writer=2.0, syncing=9.0), "fsync", "the sender, which hashes", ["more processors"]),
    (WRITER, "fsync", "the disk, which the writer synced for 6.00 s", ["another disk", "--durability os"]),
    (WRITER, "os", "the writer, which checked and wrote rows for 5.00 s", ["another disk", "more processors"]),
    (LineTimes(writer=8.0, held=6.0, syncing=5.0), "fsync", "received nothing for 6.00 s", ["another disk"]),
    (LineTimes(writer=8.0, syncing=3.9), "fsync", "none was at work for half",
     ["VLLM_TAP_RING_BYTES", "more processors"]),
])
def test_every_stage_is_named_with_its_remedies(job: CaptureJob, times: LineTimes, durability: str, limit: str,
                                                remedies: list[str]) -> None:
    found, remedy = limit_lines(times, 10.0, replace(job, durability=durability))
    assert limit in found.partition("; the limit: ")[2]
    all_remedies = ("VLLM_TAP_RING_BYTES", "another disk", "more processors", "--durability os")
    assert [name for name in all_remedies if name in remedy] == sorted(remedies, key=all_remedies.index)
    assert "--codec nf4b64" in remedy and "fewer --layers" in remedy


@pytest.mark.parametrize(("change", "fewer"), [
    ({"codec": "raw16"}, "--codec int8b64, or fewer --layers, or fewer --positions"),
    ({"codec": "nf4b64", "layers": "2", "positions": "last_prompt"}, None),
    ({"sites": "resid_post,attn_out", "layers": "1"}, "--codec nf4b64, or fewer --sites, or fewer --positions"),
    ({"sites": "resid_post,attn_out", "codec": "nf4b64"}, "fewer --layers or --sites, or fewer --positions"),
])
def test_fewer_bytes_are_asked_for_only_where_there_are_fewer(job: CaptureJob, change: dict[str, str],
                                                             fewer: str | None) -> None:
    _, remedy = limit_lines(WRITER, 10.0, replace(job, **change))  # type: ignore[arg-type]
    assert remedy == "what would lift it: another disk for --store, or --durability os" + (f", or {fewer}" if fewer
                                                                                          else "")


def test_a_writer_that_was_killed_is_not_passed_over(job: CaptureJob) -> None:
    (said,) = limit_lines(None, 10.0, job)
    assert "did not end in order" in said and "not known" in said


def test_times_travel_as_a_line() -> None:
    assert line_times_of(WRITER.line()) == WRITER
    assert line_times_of("writer stopped frames=1") is None and line_times_of("writer times {") is None
