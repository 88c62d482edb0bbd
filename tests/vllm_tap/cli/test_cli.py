"""The ``vllm-tap`` command as its users run it: a process, its exit code, its output."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from typer.main import get_command

from api.auth.keys import make_key
from api.routes.captures import ListParameters
from schemas.catalog.filters import milliseconds
from schemas.edits.arms import EditArms
from schemas.errors import ArgumentError, SpecError, StartError, TapError
from schemas.ids import new_ulid
from schemas.probes import parse_probes
from schemas.spec import parse_spec
from schemas.store.paths import KEYS_FILE
from schemas.wire.records import Own
from tests.support.engines.engine_player import WIDTH, EnginePlayer, decoded
from tests.support.forked import tap
from tests.support.processes import PATIENCE_S, free_port, runs
from tests.vllm_tap.serve.test_supervisor import until
from vllm_tap import AsyncClient, Client, open_store
from vllm_tap import Store as TapStore
from vllm_tap.cli.keys import app as keys_app
from vllm_tap.cli.main import app, list_captures
from vllm_tap.cli.show import when
from vllm_tap.client.listing import Filters
from vllm_tap.export.command import choose_layers
from vllm_tap.offline.engine import token_ids
from vllm_tap.offline.job import CaptureJob
from vllm_tap.offline.prompt_file import Prompt, read_prompts
from vllm_tap.offline.prompt_source import PromptSource
from vllm_tap.serve import writer_process
from vllm_tap.serve.command import _ready_text
from vllm_tap.serve.model_config import ModelConfig, check_arguments, read_config
from vllm_tap.serve.services import ServeConfig, make_socket_dir, tap_environment
from vllm_tap.serve.writer_process import WriterProcess
from vllm_tap.tiny_model import tiny_model
from writer_service.recover.store_lock import is_free

ROOT = Path(__file__).parents[3]


def assert_refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """Exit code 2, nothing on standard output, one line that holds the words."""
    assert done.returncode == 2, done
    assert done.stdout == ""
    assert done.stderr.startswith("vllm-tap: ") and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.count("vllm-tap: ") == 1, done.stderr
    for word in words:
        assert word in done.stderr, done.stderr


@dataclass
class Stored:
    """A store with a whole capture, and one with a hole."""

    path: Path
    whole: str
    holed: str


PROMPT, OUTPUT = [7, 8, 9, 10, 11], [12, 13, 14]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stored]:
    path = tmp_path_factory.mktemp("cli") / "store"
    sockets = make_socket_dir()
    endpoint = f"ipc://{sockets}/writer.sock"
    with WriterProcess(path, endpoint):
        engine = EnginePlayer(endpoint, dtype="float32")
        whole, holed = new_ulid(), new_ulid()
        engine.record(Own, capture=whole, count=1, owner="", aliases=["chatcmpl-abc"], tags={"run": "a"}, created_ms=1)
        for number, capture in enumerate((whole, holed)):
            spec = parse_spec({"id": capture, "codec": {"resid_post": "raw"}, "sites": ["resid_post", "attn_out"]})
            resolved = engine.open(capture, spec, PROMPT)
            engine.send_rows(capture, number, resolved, len(PROMPT), PROMPT + OUTPUT, list(range(7)))
            if capture == holed:
                engine.drop(capture, "attn_out", [2], 3, 5)
            engine.finish(capture, "length", OUTPUT, 7)
        engine.close()
    shutil.rmtree(sockets)
    yield Stored(path, whole, holed)


# ── ls, show, version ───────────────────────────────────────────────────────────────────────────────────────────


def test_ls_names_every_capture_with_its_state(stored: Stored) -> None:
    done = tap("ls", "--store", stored.path)
    assert done.returncode == 0, done.stderr
    lines = {line.split()[0]: line for line in done.stdout.splitlines()[1:]}
    assert set(lines) == {stored.whole, stored.holed}
    assert all(word in lines[stored.whole] for word in (" complete ", "run=a", "resid_post"))
    assert " incomplete " in lines[stored.holed]
    rows = [json.loads(line) for line in tap("ls", "--store", stored.path, "--json").stdout.splitlines()]
    assert {row["id"]: (row["prompt_len"], row["total_len"]) for row in rows} == {
        stored.whole: (5, 8), stored.holed: (5, 8)}
    only = tap("ls", "--store", stored.path, "--status", "incomplete", "--json").stdout.splitlines()
    assert [json.loads(line)["id"] for line in only] == [stored.holed]


@pytest.mark.parametrize("asked, found", [
    (["--tag", "run=a"], "whole"), (["--tag", "run", "--model", "played", "--site", "hook_embed"], ""),
    (["--site", "blocks.0.hook_attn_out", "--until", "1970-01-01T00:00:00.002Z", "--text", "CHATCMPL"], "whole"),
    (["--since", "2", "--tag", "run"], ""), (["--tag", "run=b"], ""), (["--limit", "1"], "holed"),
])
def test_ls_takes_the_filters_of_the_service(stored: Stored, asked: list[str], found: str) -> None:
    done = tap("ls", "--store", stored.path, "--json", *asked)
    assert [json.loads(line)["id"] for line in done.stdout.splitlines()] == ([getattr(stored, found)] if found else [])
    assert done.returncode == 0, done.stderr
    if not found:
        assert "no captures in" in (told := tap("ls", "--store", stored.path, *asked).stdout) and "filters" in told


def test_all_lists_know_the_same_filters() -> None:
    names = {"tags" if name == "tag" else name for name in ListParameters.model_fields}
    for each in (Client.captures, AsyncClient.captures, TapStore.captures):
        assert set(inspect.signature(each).parameters) - {"self"} == names
    assert {field.name for field in fields(Filters)} == names - {"limit", "before"}
    options = {"tags" if name == "tag" else name for name in inspect.signature(list_captures).parameters}
    assert options - {"store", "catalog", "json"} == names


@pytest.mark.parametrize("when, ms", [
    (datetime(1970, 1, 1, tzinfo=UTC), 0), (datetime(2026, 1, 31, 12, 0, 0, 1000, UTC), 1_769_860_800_001),
    (datetime(2026, 1, 31, 12, 0, 0, 1001, UTC), 1_769_860_800_002),
    (datetime(1969, 12, 31, 23, tzinfo=UTC), -3_600_000),
    *((datetime.fromtimestamp(ms // 1000, UTC).replace(microsecond=ms % 1000 * 1000), ms)
      for ms in range(1_790_000_000_000, 1_790_000_000_200, 7)),
])
def test_times_are_whole_milliseconds(when: datetime, ms: int) -> None:
    """One that is between two is the later: what was made before it has the earlier, or one before that."""
    assert milliseconds(when) == ms


def test_show_says_what_is_missing_and_why(stored: Stored) -> None:
    done = tap("show", stored.holed, "--store", stored.path)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["resid_post", "0–3", "raw", str(WIDTH), "7", "7", "–"] in rows
    assert ["attn_out", "0–1,", "3", "int8b64", str(WIDTH), "7", "7", "–"] in rows
    assert ["attn_out", "2", "int8b64", str(WIDTH), "7", "5", "3–4", "dropped"] in rows
    assert ["rows", "54", "of", "56", "expected"] in rows
    manifest = json.loads(tap("show", "chatcmpl-abc", "--store", stored.path, "--json").stdout)
    assert manifest["id"] == stored.whole and manifest["prompt_token_ids"] == PROMPT


def test_every_command_on_a_store_takes_it_as_store() -> None:
    commands = [*get_command(app).commands.items(), *get_command(keys_app).commands.items()]  # type: ignore[attr-defined]
    taken = {name for name, command in commands for param in command.params if "--store" in param.opts}
    assert {name for name, _ in commands} - taken == {
        "curve-keys", "fidelity", "keys", "recommend", "sites", "sizes", "verify", "version"}


@pytest.mark.parametrize("asked", [[], ["keys"]])
def test_who_asks_for_nothing_gets_the_help(asked: list[str]) -> None:
    done = tap(*asked)
    assert (done.returncode, done.stderr) == (2, "") and "\nCommands:\n" in done.stdout


@pytest.mark.parametrize("asked", ["version", "--version"])
def test_version_names_the_project(asked: str) -> None:
    done = tap(asked)
    assert done.returncode == 0 and done.stdout.startswith("vllm-tap ")


# ── export ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_format_holds_the_same_numbers(stored: Stored, tmp_path: Path) -> None:
    for format in ("npz", "safetensors", "npy"):
        done = tap("export", stored.whole, "--store", stored.path, "--format", format, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert all((tmp_path / line).is_file() for line in done.stdout.split())
    npz = np.load(tmp_path / f"{stored.whole}.npz", allow_pickle=False)
    safetensors = load_file(tmp_path / f"{stored.whole}.safetensors")
    assert json.loads(str(npz["manifest"]))["id"] == stored.whole
    names = {f"{site}.{layer}" for site in ("resid_post", "attn_out") for layer in range(4)}
    names |= {"positions", "token_ids"}
    assert set(safetensors) == names and set(npz) == names | {"manifest"}
    for name in names:
        npy = np.load(tmp_path / stored.whole / f"{name}.npy", allow_pickle=False)
        assert npy.dtype == npz[name].dtype == safetensors[name].dtype
        assert np.array_equal(npy, npz[name]) and np.array_equal(npy, safetensors[name])
    for site, codec in (("resid_post", "raw"), ("attn_out", "int8b64")):
        for layer in range(4):
            truth = decoded(codec, 0, site, layer, list(range(7)), "float32")
            assert np.array_equal(npz[f"{site}.{layer}"], truth)
    assert npz["positions"].tolist() == list(range(7)) and npz["token_ids"].tolist() == (PROMPT + OUTPUT)[:7]


def test_an_export_as_a_hugging_face_dataset(stored: Stored, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    for arguments in ([stored.holed, "--sites", "attn_out", "--out", "one"],
                      ["--layers", "1", "--tag", "run=a", "--out", "all"],
                      [stored.holed, "--sites", "blocks.2.hook_attn_out,blocks.3.hook_resid_post", "--context", "2",
                       "--out", "contexts"]):
        done = tap("export", *arguments, "--format", "hf", "--store", stored.path, cwd=tmp_path)
        assert done.returncode == 0 and done.stdout.strip() == arguments[-1], done.stderr
    one = datasets.load_from_disk(str(tmp_path / "one")).with_format("numpy")
    assert one["position"][:].tolist() == [0, 1, 2, 5, 6] and set(one["capture"][:]) == {stored.holed}
    assert np.array_equal(one["attn_out.2"][:], decoded("int8b64", 1, "attn_out", 2, [0, 1, 2, 5, 6], "float32"))
    every = datasets.load_from_disk(str(tmp_path / "all")).with_format("numpy")
    assert every.column_names == ["capture", "position", "token_id", "resid_post.1", "attn_out.1"]
    assert set(every["capture"][:]) == {stored.whole} and every["token_id"][:].tolist() == (PROMPT + OUTPUT)[:7]
    assert np.array_equal(every["resid_post.1"][:], decoded("raw", 0, "resid_post", 1, list(range(7)), "float32"))
    contexts = datasets.load_from_disk(str(tmp_path / "contexts")).with_format("numpy")
    assert contexts.features["blocks.2.hook_attn_out"] == datasets.Array2D((2, WIDTH), "float32")
    kept = [[0, 1], [5, 6]]  # position 2 has no neighbour left
    assert contexts["token_ids"][:].tolist() == [[(PROMPT + OUTPUT)[p] for p in pair] for pair in kept]
    for row, pair in zip(contexts["blocks.3.hook_resid_post"][:], kept, strict=True):
        assert np.array_equal(row, decoded("raw", 1, "resid_post", 3, pair, "float32"))
    assert_refused(tap("export", "--format", "hf", "--tag", "run=b", "--store", stored.path, cwd=tmp_path),
                   "no complete captures", "run")
    refused = tap("export", "--format", "hf", "--context", "8", "--store", stored.path, "--out", "none", "--sites",
                  "resid_post", cwd=tmp_path)
    assert refused.returncode == 2 and "--context = 8" in refused.stderr and "run is of 7" in refused.stderr
    assert not (tmp_path / "none").exists()
    assert_refused(tap("export", "--store", stored.path, cwd=tmp_path), "name a capture")
    assert_refused(tap("export", stored.whole, "--format", "hf", "--out", "one", "--store", stored.path, cwd=tmp_path),
                   "exists already")

    # What is not a dataset stays, whatever --force says: a folder of somebody's, a store, a file.
    (tmp_path / "mine" / "deep").mkdir(parents=True)
    for name in ("mine/deep/file", "one/notes.txt", "file"):
        (tmp_path / name).write_text("precious")
    for name in ("mine", "one", "file", str(stored.path)):
        assert_refused(tap("export", stored.whole, "--format", "hf", "--out", name, "--force", "--store", stored.path,
                           cwd=tmp_path), "--out", name, "even with --force")
    assert [(tmp_path / name).read_text() for name in ("mine/deep/file", "one/notes.txt", "file")] == ["precious"] * 3
    done = tap("export", stored.whole, "--format", "hf", "--out", "all", "--force", "--store", stored.path, "--layers",
               "0", cwd=tmp_path)
    assert done.returncode == 0 and "resid_post.0" in datasets.load_from_disk(str(tmp_path / "all")).column_names
    assert not [each for each in tmp_path.iterdir() if each.name.startswith(".")]


def test_an_export_leaves_out_positions_that_a_chosen_layer_lacks(stored: Stored, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "file.npz"
    assert tap("export", stored.holed, "--store", stored.path, "--out", out).returncode == 0
    with np.load(out, allow_pickle=False) as npz:
        assert npz["positions"].tolist() == [0, 1, 2, 5, 6]
        assert np.array_equal(npz["resid_post.1"], decoded("raw", 1, "resid_post", 1, [0, 1, 2, 5, 6], "float32"))
    done = tap("export", stored.holed, "--store", stored.path, "--out", out, "--force",
               "--sites", "blocks.1.hook_attn_out,resid_post", "--layers", "::3")
    assert done.returncode == 0, done.stderr
    with np.load(out, allow_pickle=False) as npz:
        assert set(npz) == {"attn_out.1", "resid_post.0", "resid_post.3", "positions", "token_ids", "manifest"}
        assert npz["positions"].tolist() == list(range(7))


def test_an_export_of_what_still_runs_has_the_tokens_of_its_rows(tmp_path: Path) -> None:
    """Before its finish, and after an engine that was lost, the manifest does not know the generated tokens."""
    sockets = make_socket_dir()
    endpoint = f"ipc://{sockets}/writer.sock"
    with WriterProcess(tmp_path / "store", endpoint):
        engine = EnginePlayer(endpoint, dtype="float32")
        capture = new_ulid()
        resolved = engine.open(capture, parse_spec({"id": capture, "codec": "raw"}), PROMPT)
        engine.send_rows(capture, 0, resolved, len(PROMPT), PROMPT + OUTPUT, list(range(7)))
        done = tap("export", capture, "--store", tmp_path / "store", "--out", tmp_path / "running.npz")
        engine.close()
    shutil.rmtree(sockets)
    assert done.returncode == 0, done.stderr
    lost = tap("export", capture, "--store", tmp_path / "store", "--out", tmp_path / "lost.npz")
    assert lost.returncode == 0, lost.stderr
    for name in ("running.npz", "lost.npz"):
        with np.load(tmp_path / name, allow_pickle=False) as npz:
            assert npz["token_ids"].tolist() == (PROMPT + OUTPUT)[:7] and npz["positions"].tolist() == list(range(7))


def test_an_export_to_where_nothing_can_be_written_is_refused(stored: Stored, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for format in ("npz", "npy", "hf"):
        for out in ("/proc/x.out", tmp_path / "file" / "x.out"):
            assert_refused(tap("export", stored.whole, "--store", stored.path, "--format", format, "--out", out),
                           "--out", str(out))


def test_an_export_does_not_overwrite_by_accident(stored: Stored, tmp_path: Path) -> None:
    out = tmp_path / "mine.npz"
    out.write_text("precious")
    assert_refused(tap("export", stored.whole, "--store", stored.path, "--out", out), str(out), "--force")
    assert out.read_text() == "precious"
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("text, chosen", [
    ("all", [0, 2, 3]), ("2", [2]), ("3,0", [3, 0]), ("1:", [2, 3]), ("::2", [0, 2]),
])
def test_layers_are_chosen_among_the_captured(text: str, chosen: list[int]) -> None:
    assert choose_layers(text, [0, 2, 3]) == chosen


@pytest.mark.parametrize("text", ["1", "x", "::0", ""])
def test_layers_that_cannot_be_chosen_are_refused(text: str) -> None:
    with pytest.raises(SpecError, match="layers"):
        choose_layers(text, [0, 2, 3])


# ── bad input ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("arguments, words", [
    (["serve"], ["--tiny"]),
    (["serve", "--tiny", "model"], ["not both"]),
    (["serve", "/nowhere"], ["MODEL", "/nowhere"]),
    (["serve", "--tiny", "--arm", "resid_poste"], ["--arm", "resid_poste", "resid_post"]),
    (["serve", "--tiny", "--port", "http"], ["--port", "http"]),
    (["serve", "--tiny", "--on-full", "burst"], ["--on-full", "drop", "wait"]),
    (["serve", "--tiny", "--", "--port", "1"], ["--port", "--engine-port"]),
    (["serve", "--tiny", "--activation-capture", "--act-mode", "rp8", "--rp-k", "0"], ["--rp-k", "'0'", "from 1 to"]),
    (["serve", "--tiny", "--act-mode", "rp8"], ["--act-mode", "add --activation-capture"]),
    (["capture", "/nowhere.jsonl", "--tiny", "--codec", "raw", "--act-mode", "rp8"], ["--codec", "not both"]),
    (["ls", "--", "x"], ["--"]),
    (["fetch"], ["fetch"]),
    (["ls", "--store", "/nowhere"], ["/nowhere", "store"]),
    (["ls", "--limit", "0"], ["--limit", "0"]),
    (["ls", "--since", "yesterday"], ["--since", "yesterday", "2026-01-31"]),
    (["ls", "--tag", ""], ["--tag", "''", "1 to"]),
    (["ls", "--site", "resid"], ["--site", "'resid'", "resid_post"]),
    (["ls", "--status", "done"], ["--status", "'done'", "incomplete"]),
    (["ls", "--before", "x"], ["--before", "'x'", "capture id"]),
    (["capture", "/nowhere.jsonl", "--tiny"], ["/nowhere.jsonl", "no such file"]),
    (["capture", "/nowhere.jsonl"], ["--model", "--tiny"]),
    (["capture", "/nowhere.jsonl", "--tiny", "--output", "/proc/x"], ["--output", "/proc/x"]),
    (["capture", "/nowhere.jsonl", "--tiny", "--store", "/proc/store"], ["--store", "/proc/store"]),
    (["serve", "--tiny", "--store", "/proc/store"], ["--store", "/proc/store"]),
    (["capture", "/nowhere.jsonl", "--tiny", "--codec", "zip"], ["codec", "zip", "int8b64"]),
    (["capture", "/nowhere.jsonl", "--tiny", "--sites", "resid"], ["resid", "resid_post"]),
    (["capture", "/nowhere.jsonl", "--tiny", "--positions", "[[5, 2]]"], ["positions", "[5, 2]", "start < stop"]),
    (["capture", "/nowhere.jsonl", "--tiny", "--layers", "last"], ["--layers", "last"]),
    (["capture", "/nowhere.jsonl", "--tiny", "--layers", "[[1"], ["--layers", "[[1"]),
    (["capture", "/nowhere.jsonl", "--tiny", "--layers", "1,9"], ["--layers", "[9]", "0 to 3"]),
    (["capture", "/nowhere.jsonl", "--tiny", "--sites", "embed,resid_post.4"], ["--sites", "resid_post.4", "0 to 3"]),
    (["capture", "/nowhere.jsonl", "--tiny", "--sites", "router_logits"], ["--sites", "router_logits", "mlp_post, q"]),
    (["capture", "/nowhere.jsonl", "--tiny", "--arm", "experts"], ["--arm", "experts", "resid_post"]),
    (["capture", "/nowhere.jsonl", "--tiny", "--arm", "q", "--sites", "k"], ["--sites", "'k'", "armed: q"]),
    (["capture", "/nowhere.jsonl", "--tiny", "--codec", "kv8"], ["--codec", "kv8", "resid_post has no heads"]),
    (["capture", "/nowhere.jsonl", "--tiny", "--sites", "k", "--codec", "kv8:head=32"], ["--codec", "64 columns"]),
    (["serve", "--tiny", "--arm", "resid_post,experts"], ["--arm", "experts", "resid_post"]),
    (["capture", "/nowhere.jsonl", "--tiny", "--max-tokens", "0"], ["--max-tokens", "0"]),
    (["capture", "/nowhere.jsonl", "--tiny", "--max-tokens", "4", "--max-tokens=0"], ["(given: '0')"]),
    (["serve", "--tiny", "--retain-bytes", "2TX"], ["--retain-bytes", "'2TX'", "1.5TB"]),
    (["export", "x", "--format", "zip"], ["--format", "'zip'", "npz"]),
    (["curve-keys", "gpu", "--folder", "/proc/keys"], ["/proc/keys", "cannot be made"]),
])
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], words: list[str], tmp_path: Path) -> None:
    assert_refused(tap(*arguments, cwd=tmp_path), *words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ref", ["../../etc/passwd", "nope", "01ARZ3NDEKTSV4RRFFQ69G5FAV", "a\nb"])
def test_a_name_that_is_not_there_is_refused(stored: Stored, ref: str) -> None:
    assert_refused(tap("show", ref, "--store", stored.path), "no capture")
    assert_refused(tap("export", ref, "--store", stored.path), "no capture")


@pytest.mark.parametrize("arguments", [["ls", "--text", "x\udce9"], ["ls", "--tag", "a=\udce9"], ["show", "\udce9"]])
def test_an_argument_that_is_no_text_is_refused(stored: Stored, arguments: list[str]) -> None:
    assert_refused(tap(*arguments, "--store", stored.path), "\\udce9", "UTF-8")


def test_a_moment_that_no_calendar_has() -> None:
    assert when(1 << 62) == f"{1 << 62} ms"


@pytest.mark.parametrize("command", ["ls", "ls --json", "show", "show --json", "fsck", "fsck --json", "version"])
@pytest.mark.parametrize(("output", "ends"), [
    ("> /dev/full", (1, "vllm-tap: cannot write: [Errno 28] No space left on device\n")),
    ("| sleep 0", (0, "")),  # who reads has enough, as ``head`` has
    (">&-", (0, "")),
])
def test_output_that_cannot_be_written_is_one_line_or_none(
        command: str, output: str, ends: tuple[int, str], stored: Stored) -> None:
    name, *flags = command.split()
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    asked = [sys.executable, "-m", "vllm_tap", name, *([stored.whole] if name == "show" else []), *flags,
             *(["--store", str(stored.path)] if name != "version" else [])]
    done = subprocess.run(["bash", "-c", f'"$@" {output}; exit ${{PIPESTATUS[0]}}', "-", *asked], env=environment,
                          stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == ends


def test_export_of_what_was_not_captured_names_what_was(stored: Stored, tmp_path: Path) -> None:
    for extra, words in ((["--sites", "mlp_out"], ["mlp_out", "resid_post, attn_out"]),
                         (["--layers", "9"], [" --layers = [9]", "[0, 1, 2, 3]"])):
        assert_refused(tap("export", stored.whole, "--store", stored.path, *extra, cwd=tmp_path), *words)
    for extra, words in ((["--layers", "5:2"], ["--layers = '5:2'", "[0, 1, 2, 3]"]),
                         (["--context", "8"], ["--context", "--format hf"])):
        assert_refused(tap("export", stored.whole, "--store", stored.path, *extra, cwd=tmp_path), *words)
    assert list(tmp_path.iterdir()) == []


def test_an_export_replaces_no_device_and_no_link(stored: Stored, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    asked = ["export", stored.whole, "--store", stored.path, "--force", "--out"]
    assert_refused(tap(*asked, tmp_path / "fifo"), "fifo", "no regular file")
    assert tap(*asked, tmp_path / "link").returncode == 0
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_bytes()[:2] == b"PK"


# ── the file of prompts ─────────────────────────────────────────────────────────────────────────────────────────


def test_every_kind_of_prompt_is_read(tmp_path: Path) -> None:
    ulid = new_ulid()
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '{"prompt": "héllo", "tags": {"set": "a"}}\n\n'
        '{"messages": [{"role": "user", "content": "hi"}]}\n'
        f'{{"prompt_token_ids": [1, 2], "id": "{ulid}"}}')
    prompts = list(read_prompts(file))
    assert [prompt.line for prompt in prompts] == [1, 3, 4]
    assert prompts[0].text == "héllo" and prompts[0].tags == {"set": "a"}
    assert prompts[1].messages == [{"role": "user", "content": "hi"}]
    assert prompts[2].token_ids == [1, 2] and prompts[2].id == ulid


@pytest.mark.parametrize("line, words", [
    ("{", ["malformed JSON"]),
    ("[1]", ["must be an object"]),
    ("{}", ["exactly one of", "none"]),
    ('{"prompt": "a", "messages": []}', ["exactly one of", "prompt, messages"]),
    ('{"prompt": ""}', ["prompt = '': ", "at least one character"]),
    ('{"prompt": 5}', ["prompt = 5: must be a text"]),
    (r'{"prompt": "x\ud800y"}', [r"prompt = 'x\ud800y': ", "lone surrogate"]),
    ('{"prompt": "a", "capture": {}}', ["unknown field 'capture'"]),
    ('{"prompt": "a", "id": "../x"}', ["id = '../x': ", "ULID"]),
    ('{"prompt": "a", "tags": {"a b": "c"}}', ["tags = 'a b': ", "a key is"]),
    (json.dumps({"prompt": "a", "tags": {f"k{n}": "" for n in range(63)}}), ["tags = '63 of them': ", "at most 62"]),
    ('{"prompt": "a", "tags": 3}', ["tags = 3: ", "pairs of strings"]),
    ('{"prompt_token_ids": []}', ["prompt_token_ids = []: ", "at least one token id"]),
    ('{"prompt_token_ids": [1, true]}', ["prompt_token_ids[1] = True: ", "token id"]),
    ('{"prompt_token_ids": [7, -1]}', ["prompt_token_ids[1] = -1: ", "token id"]),
    ('{"messages": [{"role": "wizard", "content": "x"}]}', ["messages[0] = {'role': 'wizard'", "role"]),
    ('{"messages": "hi"}', ["messages = 'hi': must be a list"]),
    ('{"messages": [{"role": "user", "content": {"a": 1}}]}', ["messages[0].content = {'a': 1}: ", "parts"]),
    ('{"messages": [{"role": "user", "content": 5}]}', ["messages[0].content = 5: "]),
    (r'{"messages": [{"role": "user", "content": "x\ud800y"}]}', ["messages = ", "lone surrogate"]),
    ('{"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": [{"type": "text", "text": "a"}, '
     '{"type": "image_url", "image_url": {"url": "data:,"}}]}]}', ["messages[1].content[1] = ", "image_url", "text"]),
    ('{"messages": [{"role": "user", "content": ["a"]}]}', ["messages[0].content[0] = 'a': "]),
    ("\xff", ["line 2"]),
    ("[" * 100_000, ["line 2"]),
])
def test_a_malformed_line_is_named(line: str, words: list[str], tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'{"prompt": "fine"}\n' + line.encode("latin-1") + b"\n")
    with pytest.raises(TapError) as caught:
        list(read_prompts(file))
    assert f"{file}, line 2: " in str(caught.value)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_malformed_line_ends_the_command_before_anything_starts(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "fine"}\n{"prompt": 1}\n')
    assert_refused(tap("capture", file, "--tiny", "--store", tmp_path / "store"), "line 2", "prompt = 1: must be")
    ulid = new_ulid()
    file.write_text(f'{{"prompt": "a", "id": "{ulid}"}}\n{{"prompt": "b", "id": "{ulid}"}}\n')
    assert_refused(tap("capture", file, "--tiny", "--store", tmp_path / "store"), "line 2", ulid, "line 1")
    file.write_text("\n")
    assert_refused(tap("capture", file, "--tiny", "--store", tmp_path / "store"), "holds no prompt")
    os.mkfifo(tmp_path / "pipe")
    assert_refused(tap("capture", tmp_path / "pipe", "--tiny", "--store", tmp_path / "store"), "PROMPTS = ",
                   "must be a file", "more than once")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("sites, arm, armed", [
    (None, None, "resid_post.0,resid_post.2"),
    ("blocks.2.hook_mlp_out, attn_out,mlp_out,embed", None, "mlp_out.2,attn_out.0,attn_out.2,mlp_out.0,embed"),
    ("resid_post", "resid_post,attn_out", "resid_post,attn_out"),
])
def test_what_is_asked_for_is_armed(sites: str | None, arm: str | None, armed: str, tmp_path: Path) -> None:
    job = CaptureJob(PromptSource("p"), str(tiny_model()), tmp_path, sites=sites, arm=arm, layers="0, 2",
                     positions="last_prompt")
    assert job.armed == armed
    every = {None: "resid_post"}.get(sites, "mlp_out.2,attn_out,mlp_out,embed")
    assert replace(job, layers="::2").armed == (arm or every)
    assert job.spec().layers == [0, 2] and job.spec().positions == "last_prompt"
    for layers, says in (("9", "the model has layers 0 to 3"), ("10000", "0 to 3"), ("[-1]", ""), ("[[0, 1]]", "")):
        with pytest.raises(TapError, match=f"--layers = .*{says}"):
            replace(job, layers=layers)


def test_what_only_some_blocks_have_is_armed_wherever_it_is(tmp_path: Path) -> None:
    """The first block of a sparse model may be dense: its manifest says that the layer has no such rows."""
    job = CaptureJob(PromptSource("p"), "some/sparse-model", tmp_path, sites="router_logits,resid_post,mlp_post",
                     layers="0,1")
    assert job.armed == "router_logits,resid_post.0,resid_post.1,mlp_post"


def test_what_serve_arms_for_edits(tmp_path: Path) -> None:
    """Told to the engine; refused by flag, value and what would be valid, before anything starts."""
    save_file({"vector": np.ones(256, np.float32)}, file := tmp_path / "v.safetensors")
    tiny = str(tiny_model())
    config = ServeConfig(tiny, tmp_path / "store", edits=EditArms("resid_post.1, z", 3, 64, parse_probes(
        [f"tone={file}"], "--vector", "vector")))
    told = tap_environment(config, "ipc:///tmp/none")
    assert [told[f"VLLM_TAP_{name}"] for name in ("EDIT", "EDIT_DEPTH", "EDIT_ROWS", "VECTORS")] == [
        "resid_post.1,z", "3", "64", f"tone={file}"]
    for arms, says in ((EditArms("embed"), "--edit = 'embed'"), (EditArms("z", 9), "--edit-depth = 9"),
                       (EditArms("z", rows=-1), "--edit-rows = -1: must be 0 to"),
                       (EditArms("", 2), "--edit-depth = 2: nothing is armed for edits; name sites with --edit"),
                       (EditArms("resid_post.7"), "--edit = resid_post.7: .* layers 0 to 3"),
                       (replace(config.edits, places="", depth=None, rows=None),
                        "--vector = tone=.*name sites with --edit")):
        with pytest.raises(StartError, match=says):
            ServeConfig(tiny, tmp_path / "store", edits=arms)
    assert_refused(tap("serve", tiny, "--edit", "z", "--edit-depth", "3", "--vector", "tone=none"), "vector 'tone'")


def test_probes_of_an_offline_run(tmp_path: Path) -> None:
    """Without sites scores are all that is taken; other numbers under the same name make it another run."""
    def job(number: float) -> CaptureJob:
        save_file({"directions": np.full(256, number, np.float32)}, tmp_path / "p.safetensors")
        return CaptureJob(PromptSource("p"), str(tiny_model()), tmp_path,
                          probes=parse_probes([f"tone={tmp_path}/p.safetensors@resid_post.1"]))

    first = job(1.0)
    assert (first.spec().probe, first.spec().sites, first.armed) == (["tone"], None, "resid_post")
    before = first.settings()
    assert before == first.settings() != job(2.0).settings()
    assert_refused(tap("capture", tmp_path / "p", "--tiny", "--probe", f"tone={tmp_path}/none"), "probe 'tone'", "none")
    for place, word in (("resid_post.4", "layers 0 to 3"), ("k.0", "k have 128"), ("router_logits.0", "no such site")):
        with pytest.raises(TapError, match=f"--probe = .*{word}"):
            CaptureJob(PromptSource("p"), str(tiny_model()), tmp_path,
                       probes=parse_probes([f"tone={tmp_path}/p.safetensors@{place}"]))
    assert_refused(tap("serve", "--tiny", "--probe", "to.ne=x"), "--probe", "'to.ne'", "A-Z a-z 0-9")
    assert_refused(tap("serve", "--tiny", "--arm", "probe.tone"), "--arm", "registered by --probe NAME=FILE")


def test_a_configuration_that_may_become_another_is_left_to_the_engine(tmp_path: Path) -> None:
    def config(text: str, *arguments: str) -> ModelConfig | None:
        (tmp_path / "config.json").write_text(text)
        return read_config(str(tmp_path), arguments)

    known = '{"architectures": ["Gemma3ForCausalLM"], "text_config": {"num_hidden_layers": 2, "hidden_size": 8}}'
    found = config(known, "--max-model-len", "64")
    assert found is not None and (found.n_layers, found.widths["resid_post"]) == (2, 8) and "q" not in found.widths
    assert read_config("Qwen/Qwen3-0.6B", ()) is None
    for changes in ("--hf-overrides={}", "--hf_overrides", "--hf-overrides.num_hidden_layers", "--hf-over", "--h",
                    "--hf_config_path=x", "--config_format", "--conf", "--model", "--mod=x"):
        assert config(known, changes, "4") is None, changes
    assert config(known, "--max_num_seqs", "-1", "", "--gpu-memory-utilization=0.5") is not None
    for malformed in ("", "[]", "{}", '{"architectures": 1}', '{"architectures": [], "text_config": 1}'):
        assert config(malformed) is None
    assert config('{"architectures": ["GPTNeoXForCausalLM"]}') is not None
    check_arguments(str(tmp_path), ("--model-impl", "transformers"))  # vLLM runs it by these anyway
    unsaid = config('{"architectures": ["OPTForCausalLM"], "num_hidden_layers": "many"}')
    assert unsaid is not None
    unsaid.check_spec(parse_spec({"layers": [999]}), ("resid_post",), ())
    new = ModelConfig(("NewForCausalLM",), 1, 1, 1, 1, 1)
    new.check_sites("--arm", ["resid_post", "q"])  # they are looked for as the engine starts


@pytest.mark.parametrize("wrong, more, says", [
    ({"architectures": ["WhisperForConditionalGeneration"], "is_encoder_decoder": True}, [],
     "WhisperForConditionalGeneration: its decoder reads an encoder's output"),
    ({"num_hidden_layers": 2}, [], "layers 0 to 1"),
    ({}, ["--", "--max-num-seqs", "4", "--model_impl=transformers"], "Qwen3ForCausalLM are known in vLLM's own code"),
    ({}, ["--", "--model-impl", "transformers"], "--model-impl = 'transformers' after --"),
])
def test_what_a_configuration_says_is_told_before_anything_is_loaded(
    wrong: dict[str, object], more: list[str], says: str, tmp_path: Path
) -> None:
    """Of a folder, and of a name on the hub that was fetched before; without the seconds that torch or vLLM take."""
    said = {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 4, "hidden_size": 64, **wrong}
    fetched = tmp_path / "hub" / "models--one--model"
    for folder in (tmp_path / "model", fetched / "snapshots" / "1f"):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(said))
    (fetched / "refs").mkdir()
    (fetched / "refs" / "main").write_text("1f")
    script = ("import sys\nfrom vllm_tap.cli.main import main\ntry:\n    main()\nfinally:\n"
              "    assert not {'torch', 'vllm', 'transformers'} & set(sys.modules)\n")
    for command in (["serve", tmp_path / "model", "--arm", "resid_post.3"],
                    ["serve", "one/model", "--arm", "mlp_out.3"],
                    ["capture", "x.jsonl", "--model", "one/model", "--sites", "resid_post.3"]):
        done = subprocess.run([sys.executable, "-c", script, *map(str, command), *more], capture_output=True, text=True,
                              timeout=PATIENCE_S, cwd=tmp_path, check=False, env={
                                  **os.environ, "HF_HUB_CACHE": str(tmp_path / "hub")})
        assert_refused(done, says)


def test_what_a_configuration_does_not_say_is_not_guessed(tmp_path: Path) -> None:
    """An architecture has sizes of its own for heads: 128 columns whatever the hidden size, 8 for keys of 32."""
    said = {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    sites, spec = ("q", "k", "resid_post"), {"layers": [1], "codec": {"k": "kv8:head=128", "q": "qk8"}}

    def config(**more: int) -> ModelConfig:
        (tmp_path / "config.json").write_text(json.dumps({**said, **more}))
        found = read_config(str(tmp_path), ())
        assert found is not None
        return found

    assert not {"q", "k"} & set(config().widths) and "k" not in config(head_dim=16).widths
    config().check_spec(parse_spec(spec), sites, ())
    for known, wrong, says in ((config(), {"codec": {"q": "kv8"}}, "no heads for it to"),
                               (config(), {"layers": [2]}, "0 to 1"), (config(head_dim=16), spec, "16 columns")):
        with pytest.raises(ArgumentError, match=says):
            known.check_spec(parse_spec(wrong), sites, ())


def test_a_prompt_that_cannot_be_put_into_tokens_is_the_one_refused(tmp_path: Path) -> None:
    """Whatever a chat template or a tokenizer raises is a ValueError, which refuses its line alone."""
    tokenizer = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(tiny_model())
    chat = [{"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "user", "content": "b"}]
    whole = token_ids(tokenizer, Prompt(1, messages=chat))
    said = [f"<|im_start|>user\n{text}<|im_end|>\n" for text in "ab"]
    assert tokenizer.decode(whole) == "".join(said) + "<|im_start|>assistant\n"
    with pytest.raises(ValueError, match="TypeError"):
        token_ids(tokenizer, Prompt(1, messages=[{"role": "user", "content": None}]))
    with pytest.raises(ValueError, match="TypeError"):
        token_ids(tokenizer, Prompt(1, text="x\ud800y"))
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    assert tokenizer.decode(token_ids(tokenizer, Prompt(1, messages=chat[1:]))) == "b"
    with pytest.raises(ValueError, match="takes content as a text"):
        token_ids(tokenizer, Prompt(1, messages=chat))
    tokenizer.chat_template = "{{ raise_exception('Conversation roles must alternate') }}"
    with pytest.raises(ValueError, match=r"TemplateError.*must alternate"):
        token_ids(tokenizer, Prompt(1, messages=chat))


# ── the writer beside an offline run ────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def sockets() -> Iterator[Path]:
    folder = make_socket_dir()
    yield folder
    shutil.rmtree(folder)


def test_a_killed_writer_is_started_again(tmp_path: Path, sockets: Path) -> None:
    with WriterProcess(tmp_path / "store", f"ipc://{sockets}/writer.sock") as writer:
        first = writer.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        until(lambda: writer.pid not in (first, None) and runs(writer.pid or 0), 10)
        second = writer.pid
    assert second is not None and not runs(second)


@pytest.mark.parametrize("window_s, kept", [(0.5, True), (60.0, False)])
def test_a_writer_that_dies_now_and_then_is_always_started_again(
        window_s: float, kept: bool, tmp_path: Path, sockets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_process, "_RESTARTS_MAX", 1)
    monkeypatch.setattr(writer_process, "_RESTARTS_WINDOW_S", window_s)
    given_up = threading.Event()
    with WriterProcess(tmp_path / "store", f"ipc://{sockets}/writer.sock", give_up=given_up.set) as writer:
        for _ in range(2):
            until(lambda: not is_free(tmp_path / "store"), 10)
            time.sleep(window_s if kept else 0.0)
            died = writer.pid
            os.kill(died or 0, signal.SIGKILL)
            until(lambda died=died: writer.pid != died or given_up.is_set(), 10)  # type: ignore[misc]
        assert given_up.is_set() == (not kept) and (writer.failed is None) == kept, writer.failed


def test_a_second_writer_on_a_store_is_told_so(tmp_path: Path, sockets: Path) -> None:
    with (WriterProcess(tmp_path / "store", f"ipc://{sockets}/a.sock"),
          pytest.raises(TapError, match="writer did not start"),
          WriterProcess(tmp_path / "store", f"ipc://{sockets}/b.sock")):
        pass


@pytest.mark.parametrize("command", [["serve"], ["capture", "prompts.jsonl"]])
def test_a_length_that_no_model_has_is_refused(command: list[str], tmp_path: Path) -> None:
    assert_refused(tap(*command, "--tiny", "--store", tmp_path / "store", "--max-model-len", "0"),
                   "--max-model-len = 0: at least 1")


def test_what_serve_says_to_try_has_a_key_where_one_is_needed(tmp_path: Path) -> None:
    config = ServeConfig(model="m", store=tmp_path)
    assert "Authorization" not in _ready_text(config, 1)
    assert f"{config.store.absolute()}\n" in _ready_text(config, 1)
    assert f"{config.store.absolute()}      (takes 1.23 GB of rows a second)\n" in _ready_text(config, 1, 1.2345e9)
    make_key(tmp_path / KEYS_FILE, "alice")
    assert "completions -H 'Authorization: Bearer KEY' -H" in _ready_text(config, 1)
    assert f"{tmp_path / KEYS_FILE}: every request needs one" in _ready_text(config, 1)


def test_serve_on_a_store_that_another_writer_has_is_refused(tmp_path: Path, sockets: Path) -> None:
    store = tmp_path / "store"
    ports = ["--port", free_port(), "--engine-port", free_port()]
    with WriterProcess(store, f"ipc://{sockets}/a.sock"):
        assert_refused(tap("serve", "--tiny", "--store", store, *ports), str(store), "another writer has it")


# ── the whole of it, on vLLM ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.soak  # an engine's start: a minute
def test_an_engine_that_does_not_start_says_why_and_what_helps(tmp_path: Path) -> None:
    """Its own process knows it, and the command's knows of an engine that failed."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "The sea"}\n')
    done = tap("capture", "prompts.jsonl", "--model", tiny_model(), "--", "--dtype", "float32",
               "--kv-cache-memory-bytes", "1000", cwd=tmp_path, VLLM_CPU_CI_ENV="1")
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and last.startswith("vllm-tap: vLLM did not start: ValueError: No available memory")
    assert "what helps: a smaller --max-model-len" in last, done.stderr


def test_what_is_said_beside_a_start_is_passed_on_and_heard(tmp_path: Path) -> None:
    script = ("import os, subprocess, sys\nfrom vllm_tap.serve.causes import output_heard\ntry:\n"
              "    with output_heard() as causes:\n        print('mine')\n"
              "        subprocess.run([sys.executable, '-c', 'import sys; print(1); sys.exit(\"a.BError: theirs\")'])\n"
              "        raise ValueError\nexcept ValueError:\n    print('heard', causes.cause)\n")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S, cwd=ROOT)
    assert (done.stdout, done.stderr) == ("mine\n1\nheard a.BError: theirs\n", "a.BError: theirs\n")


def test_a_capture_that_is_terminated_leaves_nothing_behind(tmp_path: Path, sockets: Path) -> None:
    pytest.importorskip("vllm")
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "The sea"}\n')
    environment = {**os.environ, "VLLM_CPU_CI_ENV": "1", "TMPDIR": str(sockets)}
    command = [sys.executable, "-m", "vllm_tap", "capture", str(file), "--tiny", "--store", str(tmp_path / "store")]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any("starting vLLM" in line for line in process.stderr)
        assert [each for each in sockets.iterdir() if each.name.startswith("vllm-tap-")]
        process.terminate()
        process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + signal.SIGTERM
    assert not [each for each in sockets.iterdir() if each.name.startswith("vllm-tap-")]
    assert is_free(tmp_path / "store")


@pytest.mark.soak  # three engines: half a minute
def test_capture_runs_a_file_of_prompts_and_goes_on_after_a_kill(tmp_path: Path) -> None:
    """kill -9 in the middle: what was complete stays as it is, the rest is done, and nothing is there twice."""
    pytest.importorskip("vllm")
    file, store, out = tmp_path / "prompts.jsonl", tmp_path / "store", tmp_path / "made" / "out.jsonl"
    ulid, count = new_ulid(), 16
    file.write_text(
        '{"prompt": "The sea", "tags": {"set": "a"}}\n'
        f'{{"messages": [{{"role": "user", "content": "Hello"}}], "id": "{ulid}"}}\n'
        '{"prompt_token_ids": [300, 301, 302]}\n'
        '{"prompt_token_ids": [300, 999999]}\n'
        '{"messages": [{"role": "assistant", "content": null}]}\n'
        + "".join(f'{{"prompt": "story {n}: "}}\n' for n in range(6, count + 1)))
    # An engine in the process of the command: one kill ends all of it, and it starts sooner.
    environment = {**os.environ, "VLLM_CPU_CI_ENV": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    command = [sys.executable, "-m", "vllm_tap", "capture", str(file), "--tiny", "--store", str(store), "--sites",
               "resid_post,blocks.1.hook_mlp_out", "--codec", "raw", "--max-tokens", "40", "--output", str(out), "--",
               "--max-num-seqs", "3"]
    first = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def complete() -> dict[str, int]:
        with contextlib.suppress(TapError), open_store(store) as opened:
            return {row.id: row.created_ms for row in opened.captures("complete")}
        return {}

    until(lambda: ({ulid} <= complete().keys() and len(complete()) >= 4) or first.poll() is not None, 200)
    first.kill()
    said = first.communicate()[1]
    assert first.returncode == -signal.SIGKILL, said
    before = complete()
    assert 4 <= len(before) < count - 2 and ulid in before

    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stderr  # two prompts were refused
    assert "line 4 was refused" in done.stderr and "line 5 was refused: TypeError" in done.stderr
    assert f"of {count} prompts are captured already" in done.stderr
    assert "rows/s" in done.stderr
    lines = {line["line"]: line for line in map(json.loads, out.read_text().splitlines())}
    assert sorted(lines) == [n for n in range(1, count + 1) if n not in (4, 5)] and lines[2]["capture"] == ulid
    assert len(out.read_text().splitlines()) == count - 2
    assert {line["finish_reason"] for line in lines.values()} <= {"length", "stop"}
    listed = tap("ls", "--store", store, "--json")
    rows = {row["id"]: row for row in map(json.loads, listed.stdout.splitlines())}
    assert {row.pop("status") for row in rows.values() if row["tags"]["line"] not in ("4", "5")} == {"complete"}
    assert sorted(int(row["tags"]["line"]) for row in rows.values()) == list(range(1, count + 1))
    assert {id: row["created_ms"] for id, row in rows.items() if id in before} == before
    for number, line in lines.items():
        row = rows[line["capture"]]
        assert row["tags"]["line"] == str(number)
        assert row["total_len"] == line["prompt_tokens"] + line["generated_tokens"]
    assert rows[lines[1]["capture"]]["tags"]["set"] == "a"
    assert [row.get("status") for row in rows.values()].count("failed") == 2
    assert lines[1]["capture"] in tap("ls", "--store", store, "--model", "tiny").stdout
    manifest = json.loads(tap("show", ulid, "--store", store, "--json").stdout)
    assert {(row["site"], row["layer"]) for row in manifest["rows"]} == {
        *(("resid_post", layer) for layer in range(4)), ("mlp_out", 1)}
    assert all(row["expected"] == row["captured"] > 6 for row in manifest["rows"])

    # Where nothing is left to do, no engine is started for it.
    whole = [*command[:command.index("--output")], "--limit", "3"]
    third = subprocess.run(whole, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert third.returncode == 0 and "3 of 3 prompts are captured already" in third.stderr
    assert "starting vLLM" not in third.stderr

    # The same id for something else: refused by name, and the first capture stays what it was.
    file.write_text(f'{{"prompt": "again", "id": "{ulid}"}}\n')
    again = tap("capture", file, "--tiny", "--store", store, VLLM_CPU_CI_ENV="1")
    assert again.returncode == 2 and "line 1" in again.stderr and ulid in again.stderr
    assert json.loads(tap("show", ulid, "--store", store, "--json").stdout) == manifest


def test_a_malformed_file_in_a_folder_is_told_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"')
    with pytest.raises(TapError, match=r"PROMPTS = .*: ArrowInvalid: JSON parse error") as told:
        list(PromptSource(str(tmp_path)))
    assert "\n" not in str(told.value)


def test_a_folder_of_very_many_files_is_not_looked_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_tap.offline.prompt_source._FILES_MAX", 3)
    for number in range(4):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "a.jsonl").write_text('{"text": "x"}\n')
    with pytest.raises(TapError, match="holds more than 3 files; name the folder of the dataset"):
        list(PromptSource(str(tmp_path)))
    assert len(list(PromptSource(str(tmp_path / "0")))) == 1


@pytest.mark.parametrize("options, words", [
    (["--column", "story"], ["--column", "story", "n, text"]), (["--split", "test"], ["test"]),
    (["--limit", "0"], ["--limit", "0"]), (["--column", "n"], ["row 1", "column n", "prompt = 1: must be a text"]),
])
def test_a_dataset_that_cannot_be_sent_is_refused(options: list[str], words: list[str], tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_dict({"n": [1], "text": ["a"]})
    datasets.DatasetDict({"train": made}).save_to_disk(str(tmp_path / "dataset"))
    assert_refused(tap("capture", tmp_path / "dataset", "--tiny", *options, cwd=tmp_path), *words)


def test_every_kind_of_dataset_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    chat = [{"role": "user", "content": "hi"}]
    made = datasets.Dataset.from_dict({"a": ["x", "y"], "messages": [chat, chat], "input_ids": [[1, 2], [3]]})
    made.save_to_disk(str(tmp_path / "plain"))
    datasets.DatasetDict({"test": made}).save_to_disk(str(tmp_path / "dict"))
    (tmp_path / "files").mkdir()
    made.to_parquet(str(tmp_path / "files" / "train.parquet"))
    for folder, split in (("plain", None), ("dict", "test"), ("files", None)):
        source = str(tmp_path / folder)
        assert [prompt.messages for prompt in PromptSource(source, split)] == [chat, chat]
        assert [prompt.text for prompt in PromptSource(source, split, "a", 1)] == ["x"]
        assert [(p.line, p.token_ids) for p in PromptSource(source, split, "input_ids")] == [(1, [1, 2]), (2, [3])]
    with pytest.raises(TapError, match="this is a file"):
        PromptSource(str(tmp_path / "prompts.jsonl"), column="text")
