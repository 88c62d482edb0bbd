"""What the writer tells: Prometheus metrics, and lines of JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from schemas.ids import new_ulid
from schemas.wire.messages import TapCounters
from tests.engine_side.transport.test_sender import LAYERS, Tapped
from tests.support.processes import PATIENCE_S, free_port
from tests.support.store_helpers import ROOT, Sender, WriterProcess, until
from writer_service.metrics import HELP, PREFIX, TAP_HELP, TAP_PREFIX


def scrape(port: int) -> dict[str, float]:
    text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    return {sample.name + "".join(f"[{value}]" for value in sample.labels.values()): sample.value
            for family in text_string_to_metric_families(text) for sample in family.samples}


def test_metrics_and_json_lines(tmp_path: Path) -> None:
    store, capture, port = tmp_path / "store", new_ulid(), free_port()
    flags = ("--metrics-port", str(port), "--log-format", "json", "--seal-idle-s", "0.2", "--keep-s", "0.1")
    with WriterProcess(store, *flags) as writer:
        with Sender(writer.endpoint) as engine:
            engine.open(capture, prompt_len=9)
            engine.frame([(capture, 1, range(9))])
            engine.dropped(capture, 9, 12)
            engine.finish(capture, end=12)
            engine.wait()
            assert until(lambda: scrape(port)[f"{PREFIX}sealed_total"]) == 1
            found = scrape(port)
            assert found[f"{PREFIX}frames_total"] == 1 and found[f"{PREFIX}rows_total"] == 9
            assert found[f"{PREFIX}dropped_total[dropped]"] == 12 and found[f"{PREFIX}records_total"] == 3
            assert found[f"{PREFIX}acks_total"] >= 1 and found[f"{PREFIX}commits_total"] >= 1
            assert found[f"{PREFIX}sync_seconds_count"] >= 2 and found[f"{PREFIX}sync_seconds_sum"] > 0
            assert found[f"{PREFIX}recovery_seconds"] > 0
            assert until(lambda: scrape(port)[f"{PREFIX}store_bytes"]) > 4096
            assert until(lambda: scrape(port)[f"{PREFIX}lag_seconds"] == 0)
            engine.delete(capture)
            engine.wait()
            assert until(lambda: scrape(port)[f"{PREFIX}blocks_removed_total"]) == 1
            taken = subprocess.run(
                [sys.executable, "-m", "writer_service", "--store", str(tmp_path / "other"), "--endpoint",
                 f"ipc://{writer.folder}/x", "--metrics-port", str(port)], capture_output=True, text=True, cwd=ROOT)
            assert taken.returncode == 2 and f"--metrics-port {port} on 127.0.0.1" in taken.stderr
            assert not (tmp_path / "other").exists()  # it was looked at before the store was
        writer.process.terminate()
        _, errors = writer.process.communicate(timeout=PATIENCE_S)
    lines = [json.loads(line) for line in errors.splitlines()]
    assert [line["event"] for line in lines if line["event"] != "upkeep"] == ["recovered", "sealed"]
    assert all({"time", "level", "message"} <= set(line) for line in lines)


def test_every_counter_has_a_help_text_and_a_line_on_the_page() -> None:
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    assert all(HELP.values()) and len(HELP) > 20
    assert list(TAP_HELP) == list(TapCounters.__struct_fields__)
    for name in HELP:
        assert f"`{PREFIX}{name}_total`" in page


def test_what_an_engine_says_of_itself(tmp_path: Path) -> None:
    port = free_port()
    with WriterProcess(tmp_path / "store", "--metrics-port", str(port)) as writer:
        tapped = Tapped(writer.endpoint)
        tapped.whole(10)
        tapped.recorder.before_step(0)  # the engine rests, and tells its sender what it has counted
        name = f"[{tapped.sender.window.stream}]"
        until(lambda: scrape(port).get(f"{TAP_PREFIX}rows_total{name}") == 10 * LAYERS, 10.0)
        found = scrape(port)
        assert found[f"{TAP_PREFIX}steps_total{name}"] == 1 and found[f"{TAP_PREFIX}dropped_total{name}"] == 0
        assert found[f"{TAP_PREFIX}ring_bytes{name}"] == tapped.ring.capacity
        tapped.close()
        until(lambda: not any(name in key for key in scrape(port)), 10.0)
