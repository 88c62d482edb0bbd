"""What an offline run does again, and what it leaves: held against a store of a real writer, without an engine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.ids import new_ulid
from schemas.read.reader import StoreReader
from schemas.spec import parse_spec
from schemas.wire.records import ClientFinish, Delete, Own
from tests.support.engines.engine_player import EnginePlayer
from tests.support.store_helpers import until
from tests.vllm_tap.cli.test_cli import tap
from vllm_tap.offline.job import CaptureJob
from vllm_tap.offline.prompt_source import PromptSource
from vllm_tap.offline.resume import WORK, Resume, read_resume
from vllm_tap.serve.services import make_socket_dir
from vllm_tap.serve.writer_process import WriterProcess
from vllm_tap.tiny_model import tiny_model

PROMPT, OUTPUT = [7, 8, 9, 10, 11], [12, 13, 14]


class Run:
    """An earlier run of a file of prompts, as its engine and its writer would have it."""

    def __init__(self, folder: Path, lines: list[dict[str, object]]) -> None:
        file = folder / "prompts.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        self.job = CaptureJob(PromptSource(str(file)), str(tiny_model()), folder / "store", sites="resid_post")
        self.prompts = {prompt.line: prompt for prompt in self.job.prompts}
        self.first = Resume(self.job.settings())

    def capture(self, engine: EnginePlayer, line: int, reason: str | None, rows: int = 7) -> None:
        """A prompt captured in full, or as far as an end of this ``reason`` let it; none: not begun."""
        prompt = self.prompts[line]
        capture = self.first.capture_of(prompt)
        engine.record(Own, capture=capture, count=1, owner="", aliases=[], created_ms=1,
                      tags={WORK: self.first.work_of(prompt)})
        if reason is None:
            return
        resolved = engine.open(capture, parse_spec({"id": capture, "sites": ["resid_post"]}), PROMPT)
        engine.send_rows(capture, line, resolved, len(PROMPT), PROMPT + OUTPUT, list(range(rows)))
        engine.finish(capture, "abort" if reason == "stop string" else reason, OUTPUT[:rows - 4], rows)
        if reason == "stop string":
            engine.record(ClientFinish, capture=capture, reason="stop", stop_reason=".",
                          output_token_ids=b"".join(token.to_bytes(4, "little") for token in OUTPUT))


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """By line: ended, ended by a stop string, cut off by an interrupt, never begun; then the same with ids of their own
    (ended, cut off, never begun, deleted)."""
    folder, sockets = tmp_path_factory.mktemp("resume"), make_socket_dir()
    run = Run(folder, [*({"prompt": f"story {n}"} for n in range(4)),
                       *({"prompt": f"named {n}", "id": new_ulid()} for n in range(4))])
    endpoint = f"ipc://{sockets}/writer.sock"
    with WriterProcess(run.job.store, endpoint):
        engine = EnginePlayer(endpoint)
        for line, reason in enumerate(("length", "stop string", "abort", None), 1):
            run.capture(engine, line, reason, 6 if reason == "abort" else 7)
        for line, reason in enumerate(("length", "abort", None, "length"), 5):
            run.capture(engine, line, reason)
        engine.record(Delete, capture=run.prompts[8].id)
        engine.close()
        with StoreReader(run.job.store) as reader:
            until(lambda: len(reader.captures()) == 7)
    shutil.rmtree(sockets)
    yield run


def test_a_capture_that_was_cut_off_is_not_done(earlier: Run) -> None:
    """An engine that is shut down in order closes its captures: complete, as far as they went, is not the whole."""
    with StoreReader(earlier.job.store) as reader:
        assert reader.capture(earlier.first.capture_of(earlier.prompts[3])).status == "complete"
        found = read_resume(iter(earlier.job.prompts), earlier.job.settings(), reader)
    assert sorted(found.done) == [1, 2, 5]
    assert sorted(found.stale) == sorted(earlier.first.capture_of(earlier.prompts[line]) for line in (3, 4))
    for line in (3, 4):
        again = found.capture_of(earlier.prompts[line])
        assert again not in (*found.stale, *found.done.values())
    assert sorted(found.refused) == [6, 7, 8]
    for line, word in ((6, "abort"), (7, "pending"), (8, "deleted")):
        assert str(earlier.prompts[line].id) in found.refused[line] and word in found.refused[line]


def test_an_id_that_is_used_up_ends_its_own_line_alone(earlier: Run, tmp_path: Path) -> None:
    """The others are captured, or, as here, are captured already; no engine is needed to say so."""
    store = tmp_path / "store"
    shutil.copytree(earlier.job.store, store)
    file, lines = Path(earlier.job.prompts.given), Path(earlier.job.prompts.given).read_text().splitlines()
    left = tmp_path / file.name
    left.write_text("\n".join(line if number in (1, 2, 5, 6, 7) else "" for number, line in enumerate(lines, 1)))
    done = tap("capture", left, "--tiny", "--store", store, "--sites", "resid_post")
    assert done.returncode == 1 and "starting vLLM" not in done.stderr, done.stderr
    assert "3 of 5 prompts are captured already" in done.stderr
    assert "line 6 was refused: id = " in done.stderr and "line 7 was refused: id = " in done.stderr
