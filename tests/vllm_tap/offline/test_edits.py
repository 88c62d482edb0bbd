"""``vllm-tap capture`` with edits: of every prompt or of one, made by a real engine, and part of what a run is."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from schemas.edits.arms import EditArms
from schemas.edits.vectors import digest_of
from schemas.errors import TapError
from schemas.probes import parse_probes
from tests.support.processes import PATIENCE_S
from vllm_tap import open_store
from vllm_tap.offline.job import CaptureJob
from vllm_tap.offline.prompt_file import read_edits
from vllm_tap.offline.prompt_source import PromptSource
from vllm_tap.offline.resume import Resume
from vllm_tap.offline.run import run
from vllm_tap.tiny_model import tiny_model

WIDTH = 256
TONE = np.linspace(-1, 1, WIDTH).astype(np.float32)
ADD = {"site": "resid_post.1", "op": "add", "vector": "tone", "scale": 3}
SCALE = {"site": "resid_post.1", "op": "scale", "by": 2}


def rows_edit(rows: Any, positions: list[int]) -> dict[str, Any]:
    return {"site": "resid_post.2", "op": "set", "positions": positions, "rows": {
        "base64": base64.b64encode(np.asarray(rows, "<f4").tobytes()).decode()}}


def written(folder: Path, lines: list[dict[str, Any]]) -> Path:
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def job(folder: Path, lines: list[dict[str, Any]], edit: list[dict[str, Any]] | None = None,
        places: str = "resid_post", tone: Any = TONE) -> CaptureJob:
    save_file({"vector": tone}, folder / "tone.safetensors")
    vectors = parse_probes([f"tone={folder / 'tone.safetensors'}"], "--vector", "vector") if places else ()
    return CaptureJob(PromptSource(str(written(folder, lines))), str(tiny_model()), folder / "store",
                      arms=EditArms(places, None, 4 if places else None, vectors), edit=edit or [])


def work(of: CaptureJob) -> list[str]:
    """What a run is known by, line for line."""
    resume = Resume(of.settings())
    return [resume.work_of(prompt) for prompt in of.prompts]


def test_edits_are_part_of_what_a_run_is(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [{"prompt": "a"}, {"prompt": "b", "edit": [SCALE]}]
    plain = work(job(tmp_path, lines[:1], places=""))
    armed, edited = work(job(tmp_path, lines)), work(job(tmp_path, lines, [ADD]))
    assert work(job(tmp_path, lines, [ADD])) == edited
    others = [work(job(tmp_path, lines, [SCALE])), work(job(tmp_path, lines, [ADD], "resid_post.1"))]
    assert len({plain[0], armed[0], edited[0], *(each[0] for each in others)}) == 5
    moved = work(job(tmp_path, [lines[0], {**lines[1], "edit": [ADD]}], [ADD]))
    assert moved[0] == edited[0] and moved[1] != edited[1]  # another line's edit is its own
    none = work(job(tmp_path, [{"prompt": "a", "edit": []}], [ADD]))
    null = work(job(tmp_path, [{"prompt": "a", "edit": None}], [ADD]))
    assert none[0] != edited[0] and null[0] == edited[0]
    assert work(job(tmp_path, lines, [ADD], tone=TONE * 2))[0] != edited[0]


@pytest.mark.parametrize(("edit", "says"), [
    ([{**SCALE, "op": "turn"}], "line 1: edit[0].op = 'turn'"), (SCALE, "line 1: edit = {"),
    ("[]", "line 1: edit = '[]'"),
    ([{**ADD, "vector": "calm"}], "line 1: edit[0].vector = 'calm': no such vector; registered: tone"),
    ([{**ADD, "vector": [1, 2]}], "line 1: edit[0].vector = '2 numbers': rows of resid_post have 256"),
    ([{**SCALE, "site": "mlp_out"}], "line 1: edit[0].site = 'mlp_out': not armed for edits"),
    ([{**SCALE, "site": "resid_post.9"}], "line 1: edit[0].layers = [9]"),
    ([SCALE] * 9, "line 1: edits: 9 asked, limit 8"),
    ([SCALE] * 3, "line 1: edit[2].layers = 1: edit 3 of resid_post.1"),
    ([rows_edit(np.zeros((5, WIDTH)), [0, 1, 2, 3, 4])], "line 1: edit = '5 rows': the engine keeps 4 for all"),
    ([{"site": "resid_post.1", "op": "set", "positions": [0], "from": {"capture": "01KBJ8Z6X4R2T0N5QW3E7M9YHC"}}],
     "line 1: edit[0].from = '01KBJ8Z6X4R2T0N5QW3E7M9YHC': offline no service looks it up; read the rows"),
])
def test_edits_that_cannot_be_made_end_it_before_it_starts(tmp_path: Path, edit: Any, says: str) -> None:
    with pytest.raises(TapError, match=re.escape(says)):
        run(job(tmp_path, [{"prompt": "a", "edit": edit}]))
    if isinstance(edit, list) and "from" not in edit[0]:
        with pytest.raises(TapError, match=re.escape(says.removeprefix("line 1: "))):
            file = tmp_path / "edits.json"
            file.write_text(json.dumps(edit))
            job(tmp_path, [{"prompt": "a"}], read_edits(file))


def test_a_file_of_edits_is_named_where_it_is_none(tmp_path: Path) -> None:
    file = tmp_path / "edits.json"
    with pytest.raises(TapError, match=r"--edits = .*edits.json': No such file"):
        read_edits(file)
    for text, says in (("{", "Expecting"), ("{}", "edit = {}: must be a list"), ("[" * 100_000, "nested too deeply"),
                       ("[7]", re.escape("edit[0] = 7"))):
        file.write_text(text)
        with pytest.raises(TapError, match=f"--edits = .*{says}"):
            read_edits(file)
    with pytest.raises(TapError, match=r"--edits: edit = .*nothing is armed for edits; name sites with --edit"):
        job(tmp_path, [{"prompt": "a"}], [SCALE], "")


def test_an_engine_makes_them_prompt_by_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The prompts of one run edited each in its way; rows wait for their room, and a second run has nothing to do."""
    pytest.importorskip("vllm")
    tokens, store, out = [300, 301, 302, 303], tmp_path / "store", tmp_path / "out.jsonl"
    own = np.random.default_rng(1).standard_normal((8, 2, WIDTH)).astype(np.float32)
    lines: list[dict[str, Any]] = [{"prompt_token_ids": tokens}, {"prompt_token_ids": tokens, "edit": []},
                                   {"prompt_token_ids": tokens, "edit": [SCALE]}]
    lines += [{"prompt_token_ids": tokens, "edit": [rows_edit(each, [3, 0])]} for each in own]  # each half of the room
    save_file({"vector": TONE}, tmp_path / "tone.safetensors")
    (tmp_path / "edits.json").write_text(json.dumps([ADD]))
    command = [sys.executable, "-m", "vllm_tap", "capture", str(written(tmp_path, lines)), "--tiny", "--store",
               str(store), "--sites", "resid_post", "--codec", "raw", "--max-tokens", "3", "--output", str(out),
               "--edit", "resid_post.1,resid_post.2", "--edit-rows", "4", "--edits", str(tmp_path / "edits.json"),
               "--vector", f"tone={tmp_path / 'tone.safetensors'}"]
    environment = {**os.environ, "VLLM_CPU_CI_ENV": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    captures = {line["line"]: line["capture"] for line in map(json.loads, out.read_text().splitlines())}
    assert sorted(captures) == list(range(1, len(lines) + 1))
    with open_store(store) as opened:
        rows = {line: opened[capture]["resid_post", 1] for line, capture in captures.items()}
        told = {line: opened[capture].manifest().edits for line, capture in captures.items()}
        for edit in (edit for edits in told.values() for edit in edits):
            assert all(rows["applied"] + rows["cached"] == rows["expected"] > 0 for rows in edit.pop("rows")), edit
        assert np.allclose(rows[1][:4], rows[2][:4] + 3 * TONE, atol=1e-5)
        assert np.allclose(rows[3][:4], rows[2][:4] * 2, atol=1e-5)
        for line, each in enumerate(own, 4):
            found = opened[captures[line]]["resid_post", 2]
            assert np.array_equal(found[[3, 0]], each) and np.array_equal(rows[line][:4], rows[2][:4])
    assert told[1] == [{"site": "resid_post", "layers": [1], "op": "add", "scale": 3, "vector": "tone",
                        "digest": digest_of(TONE)}]
    assert told[2] == [] and told[3][0]["op"] == "scale" and told[4][0]["digest"] == digest_of(own[0][[1, 0]])
    vectors = parse_probes([f"tone={tmp_path / 'tone.safetensors'}"], "--vector", "vector")
    same = CaptureJob(PromptSource(str(tmp_path / "prompts.jsonl")), str(tiny_model()), store, "resid_post",
                      codec="raw", max_tokens=3, edit=[ADD],
                      arms=EditArms("resid_post.1,resid_post.2", None, 4, vectors))
    assert run(same) == 0
    said = capsys.readouterr().err
    assert f"{len(lines)} of {len(lines)} prompts are captured already" in said and "starting vLLM" not in said


def test_conditions_are_held_against_the_probes_of_the_run(tmp_path: Path) -> None:
    save_file({"directions": np.ones((1, WIDTH), np.float32)}, tmp_path / "mood.safetensors",
              {"site": "resid_post", "layer": "2"})
    probes = parse_probes([f"mood={tmp_path / 'mood.safetensors'}"])
    known = replace(job(tmp_path, [{"prompt": "a"}]), probes=probes)
    known.check_edits([{**SCALE, "when": {"probe": "mood", "above": 1}}])
    with pytest.raises(TapError, match=re.escape("edit[0].when.probe = 'tune'")):
        known.check_edits([{**SCALE, "when": {"probe": "tune", "above": 1}}])
    unarmed = replace(job(tmp_path, [{"prompt": "a"}], places=""), probes=probes)
    unarmed.check_edits([{"op": "stop", "when": {"probe": "mood", "above": 1}}])  # which needs nothing armed
    with pytest.raises(TapError, match=re.escape("edit[0].when.probe = 'tune'")):
        unarmed.check_edits([{"op": "stop", "when": {"probe": "tune", "above": 1}}])
