"""The bench of the line: what it says of rows is what the store has, and its timers stand where the bytes go."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench.sustained.__main__ import parse
from bench.sustained.beside import Beside
from bench.sustained.chart import grouped, touched
from bench.sustained.trial import Bench, Setting, bench

SETTING = Setting(shape="small", codec="int8b64", load="small", ring=96 << 20, control_s=0.1, profile=True)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("sustained")
    with bench(dataclasses.replace(SETTING, folder=str(folder)), print) as running:
        yield running


def test_a_rate_that_is_low_holds_and_is_told_by_stage(made: Bench) -> None:
    # A machine with company may not hold it at once; one that never does has a line that does not.
    for _ in range(6):
        trial = made.trial(0.05e9, 1.0)
        if trial.held:
            break
    assert trial.held and trial.rows_dropped == 0 and trial.missing == {}
    assert trial.rows_stored == trial.rows_offered > 10_000
    assert 0 < trial.durable_p50_ms <= trial.durable_p99_ms < 10_000
    assert 0 < trial.offered_gb_s < 0.07
    stages: dict[str, dict[str, list[float]]] = {}  # of all threads
    for process, counts in trial.stages.items():
        for name, sums in counts["stages"].items():
            kept = stages.setdefault(process, {}).setdefault(name.partition("/")[2], [0.0] * len(sums))
            kept[:] = [a + b for a, b in zip(kept, sums, strict=True)]
    nbytes = 1e9 * trial.offered_gb_s * trial.seconds
    for process, stage in (("sender", "hash"), ("writer", "check hash, hash rows"), ("writer", "ring to file: write")):
        assert stages[process][stage][4] == pytest.approx(nbytes, rel=0.3), stage  # bytes read
    read, written, hashed = touched(trial)
    assert read > 2 and written > 1 and hashed > 2
    parts = grouped(trial)
    assert parts["sender: hash"] > 0 and parts["writer: ring to file"] > 0 and parts["catalog"] > 0


def test_rows_that_find_no_room_are_counted_as_the_store_names_them(made: Bench) -> None:
    os.kill(made.line.process.pid, signal.SIGSTOP)  # a ring of rows comes in a fraction of that second
    again = threading.Timer(2.0, os.kill, (made.line.process.pid, signal.SIGCONT))
    again.start()
    trial = made.trial(50e9, 1.0)
    again.join()
    assert not trial.held and trial.rows_dropped > 0
    assert trial.missing == {"dropped": trial.rows_dropped}
    assert trial.rows_stored + trial.rows_dropped == trial.rows_offered


def test_the_control_writes_and_leaves_nothing(made: Bench) -> None:
    rate, cpu = made.control()
    assert rate > 0 and cpu > 0
    assert not list(made.work.glob("plain-*"))


def test_flags_become_a_setting(tmp_path: Path) -> None:
    flags = ["--store", "disk", "--folder", str(tmp_path), "--beside", "readers,retention", "--no-control"]
    setting, args = parse(flags)
    assert (setting.store, setting.folder, setting.beside) == ("disk", str(tmp_path), ("readers", "retention"))
    assert setting.control_s == 0 and setting.room > 0 and args.seconds == 60
    with pytest.raises(SystemExit):
        parse(["--beside", "writers"])


def test_who_reads_beside_it_reads(made: Bench) -> None:
    found = dict.fromkeys(("readers", "loader"), 0)
    for _ in range(6):  # how soon they find rows is the machine's
        others = {kind: Beside(kind, made.line.store) for kind in found}
        made.trial(0.03e9, 4.0)
        found = {kind: int(other.close()["rows"]) for kind, other in others.items()}
        if all(found.values()):
            break
    assert all(found.values()), found


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_real_engine_generates_and_everything_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    setting, args = parse(["--engine", "real", "--shape", "small", "--load", "small", "--folder", str(tmp_path),
                           "--ring-gb", "0.1"])
    assert args.rate is None and setting.control_s == 0
    with bench(setting, print) as running:
        trial = running.trial(None, 1.0)
    assert trial.held and not trial.missing and len(trial.rounds_s) >= 1
    assert trial.rows_stored == trial.rows_offered == len(trial.rounds_s) * 8 * (128 + 32 - 1) * 12
    assert 0 < trial.durable_p50_ms <= trial.durable_max_ms and trial.cpu_s_per_gb["engine"] > 0
