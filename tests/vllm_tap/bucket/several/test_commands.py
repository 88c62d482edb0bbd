"""``ls``, ``show`` and ``export`` of several stores: what they print and write is that of each."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from schemas.errors import NotFoundError, TapError
from schemas.read.reader import StoreReader
from tests.support.forked import tap
from tests.vllm_tap.bucket.several.conftest import Nodes
from vllm_tap.bucket.push import push
from vllm_tap.cli.main import app


@pytest.fixture
def stores(places: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return [option for place in places for option in ("--store", place)]


def printed(capfd: pytest.CaptureFixture[bytes], *command: str) -> bytes:
    app(list(command), standalone_mode=False)
    return capfd.readouterr().out


def test_lists_and_manifests(nodes: Nodes, places: list[str], stores: list[str],
                             capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    lines = printed(capfdbinary, "ls", "--json", *stores).splitlines()
    assert [json.loads(line)["id"] for line in lines] == nodes.every
    page = printed(capfdbinary, "ls", "--json", *stores, "--limit", "4", "--before", nodes.every[4]).splitlines()
    assert page == lines[5:9]
    assert len(printed(capfdbinary, "ls", *stores, "--tag", "node=c").splitlines()) == 1 + 7
    for name, place in zip("abc", places, strict=True):
        capture = nodes.captures[name][4]
        alone = printed(capfdbinary, "show", capture, "--store", str(nodes.stores[name]))
        together = printed(capfdbinary, "show", f"cmpl-{capture}", *stores)
        facts = [line.split() for line in together.splitlines()]
        assert [words for words in facts if words[:1] != [b"store"]] == [line.split() for line in alone.splitlines()]
        assert [b"store", place.encode()] in facts
    with pytest.raises(NotFoundError):
        app(["show", "none", *stores], standalone_mode=False)


@pytest.mark.parametrize("format", ["npz", "safetensors", "npy", "zarr"])
def test_exports(format: str, nodes: Nodes, stores: list[str], tmp_path: Path) -> None:
    pytest.importorskip({"zarr": "zarr"}.get(format, "numpy"))
    for name in "ab":
        found = []
        for out, options in (("alone", ["--store", str(nodes.stores[name])]), ("together", stores)):
            target = tmp_path / f"{out}-{name}"
            app(["export", nodes.captures[name][1], *options, "--format", format, "--out", str(target)],
                standalone_mode=False)
            files = [target] if target.is_file() else sorted(path for path in target.rglob("*") if path.is_file())
            found.append([(path.relative_to(target), path.read_bytes()) for path in files])
        assert found[0] == found[1] and found[0]


def test_a_dataset_is_of_all(nodes: Nodes, stores: list[str], tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    app(["export", *stores, "--format", "hf", "--out", str(tmp_path / "set")], standalone_mode=False)
    table = datasets.load_from_disk(str(tmp_path / "set"))
    assert list(dict.fromkeys(table["capture"])) == nodes.every[::-1] and len(table) == 8 * len(nodes.every)


def test_the_variable_names_one_store_also_with_spaces(nodes: Nodes, tmp_path: Path) -> None:
    place = shutil.copytree(nodes.stores["a"], tmp_path / "with a space")
    done = tap("ls", "--json", VLLM_ACT_OUTDIR=str(place))
    assert [json.loads(line)["id"] for line in done.stdout.splitlines()] == nodes.captures["a"][::-1], done
    more = [option for name in "bc" for option in ("--store", str(nodes.stores[name]))]
    both = tap("ls", "--json", *more, VLLM_ACT_OUTDIR=str(place))
    assert len(both.stdout.splitlines()) == 14, both


@pytest.mark.parametrize("command", [["hold", "x"], ["push", "s3://b/q"], ["fsck"]])
def test_a_command_that_changes_a_store_takes_one_folder(command: list[str]) -> None:
    with pytest.raises(TapError, match=r"--store = 's3://b/p/\*'"):
        app([*command, "--store", "s3://b/p/*"], standalone_mode=False)


def test_captures_are_deleted_each_in_its_own_store(nodes: Nodes, places: list[str], stores: list[str],
                                                    capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """On the disk that is here, and in the bucket for the other nodes; none goes where one of the names is unknown."""
    gone = [nodes.captures[name][3] for name in "abc"]
    with pytest.raises(NotFoundError):
        app(["rm", *gone, "none", *stores], standalone_mode=False)
    names = [f"cmpl-{gone[0]}", gone[1], f"cmpl-{gone[2]}"]
    assert printed(capfdbinary, "rm", *names, *stores).decode().split() == gone
    lines = printed(capfdbinary, "ls", "--json", *stores).splitlines()
    assert [json.loads(line)["id"] for line in lines] == [one for one in nodes.every if one not in gone]
    for name, place in zip("abc", places, strict=True):
        if "://" in place:
            push(nodes.stores[name], place)
        with StoreReader(nodes.stores[name]) as reader, pytest.raises(NotFoundError):
            reader.manifest(gone["abc".index(name)])
