"""``vllm_tap.recording`` in a script of the user's own, compared with Hugging Face."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from schemas.errors import StartError
from schemas.ids import new_ulid
from schemas.wire.control_channel import ControlChannel
from schemas.wire.records import Own
from tests.engine.conftest import ENVIRONMENT
from tests.engine_side.transport.test_sender import MIB, TOKENS, Tapped
from tests.programs.slow_disk import slow_down
from tests.support.models.reference import Reference
from tests.support.processes import PATIENCE_S
from vllm_tap import open_store, recording
from vllm_tap.serve import writer_process
from vllm_tap.serve.services import make_socket_dir
from vllm_tap.serve.writer_process import WriterProcess
from vllm_tap.tiny_model import cache_dir


@pytest.mark.soak  # a script in a process of its own: half a minute
def test_a_script_that_records(tmp_path: Path, reference_of: Callable[[str], Reference]) -> None:
    environment = {key: value for key, value in (os.environ | ENVIRONMENT).items() if not key.startswith("VLLM_TAP_")}
    run = subprocess.run([sys.executable, "-m", "tests.programs.records", str(tmp_path / "store")], text=True,
                         env=environment | {"VLLM_CACHE_ROOT": str(cache_dir() / "vllm")}, timeout=380,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=Path(__file__).parents[3])
    lines = [line for line in run.stdout.splitlines() if line.startswith("SEEN ")]
    assert run.returncode == 0 and lines, run.stdout[-6000:]
    seen = json.loads(lines[0].removeprefix("SEEN "))
    for name, words in {
        "outside": "TapError: capture_args(): no recording is running", "second": "StartError: a recording is running",
        "untapped": "this engine was started without taps; create it inside vllm_tap.recording()",
        "bad": "SpecError: capture.sites = 'resid_poste'", "plain": "was generated without a capture",
        "after": "the recording of this engine has ended",
    }.items():
        assert words in seen[name], (name, seen[name])
    assert seen["environment"] == [] and seen["goes_on"] == 1
    assert seen["manifests"] == ["complete"] * 2 and seen["samples"] == [True, True]
    tokens = seen["tokens"]
    assert [shape[0] for shape in seen["shapes"]] == [len(one) - 1 for one in tokens]
    assert seen["page"][0][0] == len(seen["page"][1]) - 1  # the block of docs/howto/look-inside.md
    assert np.array_equal(seen["edited"], np.ones((5, 256))) and seen["edits"][0]["vector"] == "ones"
    shape, one, scores = seen["probe"]  # the block of docs/howto/probes.md
    assert shape == [len(one) - 1, 2]
    sums = reference_of("qwen3").rows(tuple(one))["resid_post", 2][:-1].sum(-1, keepdims=True)
    assert np.abs(np.asarray(scores) - sums).max() < 1e-3 * np.abs(sums).max()
    with open_store(tmp_path / "store") as store:
        assert len(list(store.captures("complete"))) == len(list(store.captures())) == 9
        assert {row.id for row in store.captures(tags={"run": "a"})} >= set(seen["ids"])
        for capture, sequence in zip(seen["ids"], tokens, strict=True):
            want = reference_of("qwen3").rows(tuple(sequence))
            assert store[capture].sites == {"resid_post": [1], "mlp_out": [0, 1, 2, 3]}
            for site, layer in (("resid_post", 1), ("mlp_out", 3)):
                got = store[capture][site, layer]
                assert np.abs(got - want[site, layer][:len(got)]).max() < 1e-4


def test_what_was_killed_before_a_recording_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No engine will ever begin it: the recording of later would end with an error, after a minute."""
    monkeypatch.delenv("VLLM_TAP_ENDPOINT", raising=False)  # of an engine that another test made in this process
    store, mine = tmp_path / "store", new_ulid()
    sockets = make_socket_dir()
    endpoint = f"ipc://{sockets}/writer.sock"
    with WriterProcess(store, endpoint):
        channel = ControlChannel(endpoint, "cli")
        channel.submit(lambda seq: Own(seq=seq, capture=mine, count=1, owner="", aliases=[], tags={}, created_ms=1))
        channel.close()
    shutil.rmtree(sockets)
    with recording(store, wait_s=2.0) as tape:
        assert [row.status for row in tape.store.captures()] == ["pending"]


def test_what_a_recording_arms_for_edits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told to the engines of the process, and taken back; refused by name before anything starts."""
    monkeypatch.delenv("VLLM_TAP_ENDPOINT", raising=False)
    monkeypatch.delenv("VLLM_TAP_EDIT", raising=False)
    save_file({"vector": np.ones(8, np.float32)}, file := tmp_path / "tone.safetensors")
    with recording(tmp_path / "store", edit=["resid_post.1", "z"], vectors={"tone": file}):
        assert (os.environ["VLLM_TAP_EDIT"], os.environ["VLLM_TAP_VECTORS"]) == ("resid_post.1,z", f"tone={file}")
    assert "VLLM_TAP_EDIT" not in os.environ
    for wrong, says in (({"edit": "embed"}, "edit = 'embed'"), ({"vectors": {"tone": file}}, "name sites with edit"),
                        ({"edit": "z", "vectors": {"tone": tmp_path / "none"}}, "vector 'tone'")):
        with pytest.raises(StartError, match=says):
            recording(tmp_path / "other", **wrong).__enter__()  # type: ignore[arg-type]


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_recording_tells_which_stage_held_generation_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, interrupted: bool
) -> None:
    """However it ends, and whatever level vLLM's imports gave the root logger; the rows are those of a recorder and a
    sender without a model."""
    monkeypatch.setattr(logging.getLogger("vllm_tap"), "parent", logging.getLogger())  # caplog's, whoever ran before
    monkeypatch.setattr(logging.getLogger(), "level", logging.ERROR)
    monkeypatch.delenv("VLLM_TAP_ENDPOINT", raising=False)
    monkeypatch.setenv("SLOW_S", "1")
    monkeypatch.setattr(writer_process, "writer_command", writer_process.writer_command)
    slow_down()
    with pytest.raises(KeyboardInterrupt) if interrupted else nullcontext(), recording(tmp_path / "store") as tape:
        tapped = Tapped(os.environ["VLLM_TAP_ENDPOINT"], on_full="wait", ring_bytes=4 * MIB)
        capture = tapped.whole(TOKENS)  # twice the ring
        assert tape.store[capture].wait(PATIENCE_S).status == "complete"
        tapped.close(timeout_s=PATIENCE_S)
        if interrupted:
            raise KeyboardInterrupt
    limit, remedy = [record.message for record in caplog.records if record.name == "vllm_tap.recording"]
    assert re.fullmatch(r"vllm-tap: generation waited [0-9.]+ s for room for its rows \(8.39 MB\); the limit: the "
                        r"disk, which the writer synced for [0-9.]+ s", limit)
    assert remedy == ('vllm-tap: what would lift it: another disk for store, or durability="os", or a codec of fewer '
                      "bytes, or fewer sites, layers or positions")


def test_a_recording_without_rows_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("VLLM_TAP_ENDPOINT", raising=False)
    with recording(tmp_path / "store"):
        pass
    assert not [record for record in caplog.records if record.name.startswith("vllm_tap")]


def test_a_script_without_a_guard_is_told_what_it_lacks(tmp_path: Path) -> None:
    """A process that is spawned imports the script again, and would begin a recording of its own."""
    script = tmp_path / "script.py"
    script.write_text("import multiprocessing\nimport vllm_tap\n"
                      "if __name__ == '__main__':\n"
                      "    child = multiprocessing.get_context('spawn').Process(target=print)\n"
                      "    child.start()\n    child.join()\n"
                      "else:\n    vllm_tap.recording('captures').__enter__()\n")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True,
                          timeout=PATIENCE_S, cwd=tmp_path)
    assert 'put what the script does under `if __name__ == "__main__":`' in done.stderr
    assert not (tmp_path / "captures").exists()
