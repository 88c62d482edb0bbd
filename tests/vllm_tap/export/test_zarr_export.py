"""Exports as Zarr: what lies in the folder or the bucket is the capture, whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import obstore
import obstore.store
import pytest
import tensorstore
import xarray
import zarr
from zarr.storage import ObjectStore

from schemas.errors import TapError
from schemas.ids import new_ulid
from schemas.manifest import FINAL
from schemas.zarr_view.view import NotFinalError
from tests.support.forked import tap
from tests.support.store_helpers import SITE, Sender, WriterProcess, until
from vllm_tap import Store, open_store
from vllm_tap.export.array_files import replacing_folder
from vllm_tap.export.command import choose
from vllm_tap.export.zarr_export import export_zarr

every = partial(choose, sites=None, layers="all")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with WriterProcess(tmp_path_factory.mktemp("export") / "store") as writer:
        with Sender(writer.endpoint) as engine, open_store(writer.store) as store:
            for number in range(2):
                capture = new_ulid()
                engine.open(capture, prompt_len=8)
                engine.frame([(capture, number, range(8))])
                engine.dropped(capture, 2, 4)
                engine.finish(capture, end=9)
            engine.wait()
            assert until(lambda: [row.status in FINAL for row in store.captures()] == [True, True])
            yield store
        writer.stop()


def ids(store: Store) -> list[str]:
    return [row.id for row in store.captures()]


def wanted(store: Store, capture: str, layers: list[int]) -> np.ndarray:
    rows = store[capture].slice(SITE, layers, allow_missing=True)
    found = np.full((9, len(layers), 64), np.nan, np.float32)
    found[rows.positions] = rows.values.transpose(1, 0, 2)
    return found


def test_the_command_writes_a_folder_that_others_read(store: Store, tmp_path: Path) -> None:
    capture = ids(store)[0]
    done = tap("export", capture, "--store", store.path.resolve(), "--format", "zarr", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{capture}.zarr\n"), done.stderr
    folder = tmp_path / f"{capture}.zarr"
    values = wanted(store, capture, [0, 1, 2, 3])
    assert np.isnan(values[[2, 3, 8]]).all()
    other = tensorstore.open({"driver": "zarr3", "kvstore": {
        "driver": "file", "path": f"{folder}/{SITE}/rows/"}}, open=True).result().read().result()
    with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
        rust = zarr.open_array(folder, path=f"{SITE}/rows", mode="r")[:]
    opened = xarray.open_zarr(folder, group=SITE, chunks={})
    for found in (other, rust, zarr.open_group(folder, mode="r")[f"{SITE}/rows"][:], opened["rows"].values):
        assert np.array_equal(found.view(np.uint32), values.view(np.uint32))
    assert xarray.open_datatree(folder, engine="zarr").attrs["manifest"]["id"] == capture


def test_some_layers_alone(store: Store, tmp_path: Path) -> None:
    capture = ids(store)[0]
    export_zarr(store.path, capture, str(tmp_path / "some"), partial(choose, sites=f"{SITE}.3", layers="all"), False)
    opened = xarray.open_zarr(tmp_path / "some", group=SITE, chunks=None)
    assert opened["layer"].values.tolist() == [3]
    assert np.array_equal(opened["rows"].values, wanted(store, capture, [3]), equal_nan=True)


def test_what_is_there_is_not_lost_by_accident(store: Store, tmp_path: Path) -> None:
    first, second = ids(store)
    out, precious = tmp_path / "out.zarr", tmp_path / "precious"
    precious.mkdir()
    (precious / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    export_zarr(store.path, first, str(out), every, False)
    with pytest.raises(TapError, match="--force"):
        export_zarr(store.path, second, str(out), every, False)
    export_zarr(store.path, second, str(out), every, True)
    assert np.array_equal(zarr.open_array(out, path=f"{SITE}/rows", mode="r")[:],
                          wanted(store, second, [0, 1, 2, 3]), equal_nan=True)
    with pytest.raises(TapError, match="something else"):
        export_zarr(store.path, second, str(precious), every, True)
    with pytest.raises(TapError, match="this is a file"):
        export_zarr(store.path, second, str(tmp_path / "file"), every, True)
    with pytest.raises(TapError, match="/proc/x"):
        export_zarr(store.path, second, "/proc/x/y", every, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "out.zarr", "precious"]
    assert (precious / "notes.txt").read_text() == "mine"


def test_what_still_runs_is_refused(tmp_path: Path) -> None:
    with WriterProcess(tmp_path / "store") as writer, Sender(writer.endpoint) as engine:
        capture = new_ulid()
        engine.open(capture)
        engine.wait()
        with open_store(writer.store) as store:
            assert until(lambda: store[capture].status == "running")
        with pytest.raises(NotFinalError, match="is running"):
            export_zarr(writer.store, capture, str(tmp_path / "out"), lambda _: {SITE: [0]}, False)
        assert not (tmp_path / "out").exists()


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "old").touch()
    with pytest.raises(FileNotFoundError), replacing_folder(target):
        pass  # nothing was made that could take its place
    with pytest.raises(KeyboardInterrupt), replacing_folder(target) as made:
        made.mkdir()
        raise KeyboardInterrupt
    assert [path.name for path in target.iterdir()] == ["old"]
    with replacing_folder(target) as made:
        made.mkdir()
        (made / "new").touch()
    assert [path.name for path in target.iterdir()] == ["new"] and list(tmp_path.iterdir()) == [target]


def test_a_bucket_gets_an_object_a_key(store: Store, tmp_path: Path) -> None:
    """Over obstore, as to S3; here the bucket is a folder."""
    first, second = ids(store)
    (tmp_path / "bucket").mkdir()
    url = f"{(tmp_path / 'bucket').as_uri()}/"
    assert export_zarr(store.path, first, url, every, False) == [url]
    with pytest.raises(TapError, match="--force"):
        export_zarr(store.path, second, url, every, False)
    export_zarr(store.path, second, url, every, True)
    bucket = obstore.store.from_url(url)
    rows = zarr.open_group(ObjectStore(bucket, read_only=True), mode="r")[f"{SITE}/rows"][:]
    assert np.array_equal(rows, wanted(store, second, [0, 1, 2, 3]), equal_nan=True)
    obstore.delete(bucket, ["zarr.json"])
    obstore.put(bucket, "vllm-tap-export-begun", b"")  # as an export leaves it that was cut off
    with pytest.raises(TapError, match="interrupted already; name another or add --force"):
        export_zarr(store.path, second, url, every, False)
    export_zarr(store.path, second, url, every, True)
    assert "vllm-tap-export-begun" not in [entry["path"] for page in obstore.list(bucket) for entry in page]
    obstore.delete(bucket, ["zarr.json"])
    with pytest.raises(TapError, match="something else"):
        export_zarr(store.path, second, url, every, True)
    with pytest.raises(TapError, match="nosuch"):
        export_zarr(store.path, second, "nosuch://bucket/prefix", every, True)
