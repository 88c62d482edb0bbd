"""The commands that only read a store, given the URL of one in a bucket: what they print and write is the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from schemas.errors import BucketError, NotFoundError, StoreError, TapError
from tests.support.forked import tap
from tests.vllm_tap.bucket.conftest import Sample
from vllm_tap.bucket.push import push
from vllm_tap.cli.main import app


@pytest.fixture
def pushed(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    url = (tmp_path / "a bucket").as_uri()
    push(store, url)
    return url


def test_lists_and_manifests_are_those_of_the_folder(sample: Sample, store: Path, pushed: str,
                                                     capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    said = []
    for place in (str(store), pushed):
        for command in (["ls", "--status", "complete"], ["ls", "--status", "complete", "--json", "--limit", "3"],
                        ["show", sample.captures["long"]], ["show", sample.captures["few"], "--json"]):
            app([*command, "--store", place], standalone_mode=False)
        said.append(capfdbinary.readouterr().out)
    assert said[0] == said[1] and len(said[0].splitlines()) > 20


@pytest.mark.parametrize("format", ["npz", "safetensors", "npy", "hf", "zarr"])
def test_exports_are_those_of_the_folder(format: str, sample: Sample, store: Path, pushed: str, tmp_path: Path) -> None:
    pytest.importorskip({"hf": "datasets", "zarr": "zarr"}.get(format, "numpy"))
    found = []
    for name, place in (("a", str(store)), ("b", pushed)):
        out = tmp_path / name
        app(["export", sample.captures["long"], "--store", place, "--format", format, "--out", str(out)],
            standalone_mode=False)
        files = [out] if out.is_file() else sorted(path for path in out.rglob("*") if path.is_file())
        found.append([(path.relative_to(out), path.read_bytes()) for path in files if path.name != "state.json"])
    assert found[0] == found[1] and found[0]


def test_the_variable_names_a_bucket_too_and_a_head_that_was_taken_over_from(sample: Sample, pushed: str) -> None:
    done = tap("ls", "--json", "--limit", "1", VLLM_ACT_OUTDIR=pushed)
    assert done.returncode == 0 and done.stdout.startswith('{"id":'), done
    with pytest.raises(BucketError, match="was it removed"):
        app(["ls", "--store", f"{pushed}#{'0' * 32}"], standalone_mode=False)


def test_what_is_not_there_is_named(pushed: str, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        app(["show", "none", "--store", pushed], standalone_mode=False)
    (tmp_path / "empty").mkdir()
    with pytest.raises(BucketError, match="vllm-tap push"):
        app(["ls", "--store", (tmp_path / "empty").as_uri()], standalone_mode=False)
    with pytest.raises(StoreError):
        app(["ls", "--store", str(tmp_path / "empty")], standalone_mode=False)


@pytest.mark.parametrize("command", [
    ["hold", "x"], ["release", "x"], ["fsck"], ["rebuild"], ["compact"], ["recall"], ["push", "s3://b/q"],
    ["capture", "prompts.jsonl", "--tiny"],
])
def test_a_command_that_changes_a_store_refuses_a_bucket(command: list[str]) -> None:
    with pytest.raises(TapError, match=r"--store = 's3://b/p': .* fsck --bucket URL checks it"):
        app([*command, "--store", "s3://b/p"], standalone_mode=False)
