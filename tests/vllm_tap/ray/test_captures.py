"""Captures through Ray Data, on a real Ray of two workers: every row once, the loader's numbers, whatever dies."""

from __future__ import annotations

import copy
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schemas import codecs, limits
from schemas.errors import CorruptError, LimitError, NotFoundError, SpecError, StoreError, TapError
from schemas.ids import new_ulid
from schemas.read.reader import StoreReader
from tests.support.ranks import COLUMNS, Ranks, values
from tests.support.store_helpers import Sender, WriterProcess, engine_info, expected_pieces, until
from tests.vllm_tap.loader.test_dataset import (  # noqa: F401
    CODECS,
    EVERY,
    WIDTH,
    Made,
    holed,
    made,
    sealed_copy,
)
from vllm_tap import open_store
from vllm_tap.client.listing import Filters
from vllm_tap.errors import MissingRows
from vllm_tap.loader.dataset import rows
from vllm_tap.loader.row_index import build_index
from vllm_tap.ray import read_captures
from vllm_tap.ray.row_part import columns_of
from vllm_tap.ray.stores import Chosen
from writer_service.tools.compaction import compact
from writer_service.upkeep.erasing import erase

TASK = 100_000  # bytes: a dozen tasks and more of the store


def test_a_ray_that_is_not_there_is_told_with_the_command(made: Made, monkeypatch: pytest.MonkeyPatch  # noqa: F811
                                                          ) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "ray.data", raising=False)
    with pytest.raises(TapError, match=r"read_captures\(\) needs ray.data: pip install 'vllm-tap\[ray\]'"):
        read_captures(made.path, sites="resid_post", layers=1)


def by_row(batches: Any, name: str) -> dict[tuple[str, int], bytes]:
    """The bytes of a tensor by capture and position; AssertionError where a row comes twice."""
    found: dict[tuple[str, int], bytes] = {}
    for batch in batches:
        for capture, position, value in zip(batch["capture"], batch["position"], batch[name], strict=True):
            assert (capture, int(position)) not in found
            found[capture, int(position)] = np.ascontiguousarray(value).tobytes()
    return found


def of_loader(path: Path, site: str, layer: int, **options: Any) -> dict[tuple[str, int], bytes]:
    data = rows(path, site, layer, **options)
    return by_row(({"capture": [data.captures[number] for number in batch["capture"]], "position": batch["position"],
                    data.names[0]: batch[data.names[0]].numpy()} for batch in data), data.names[0])


def batches(data: Any) -> list[dict[str, Any]]:
    return list(data.iter_batches(batch_size=None, batch_format="numpy"))


@pytest.mark.parametrize("site", CODECS)
def test_an_epoch_over_two_workers_is_the_loaders_rows(cluster: Any, made: Made, site: str,  # noqa: F811
                                                       tmp_path: Path) -> None:
    data = read_captures(made.path, sites=site, layers=2, codec=CODECS[site], task_bytes=TASK, concurrency=2)

    def tell_worker(batch: dict[str, Any]) -> dict[str, Any]:
        (seen / str(os.getpid())).mkdir(parents=True, exist_ok=True)
        until(lambda: len(list(seen.iterdir())) > 1)  # the other has begun too
        return {**batch, "worker": np.full(len(batch["row"]), os.getpid())}

    assert data.count() == made.rows
    for epoch in range(2):
        seen = tmp_path / str(epoch)
        told = batches(data.map_batches(tell_worker, batch_size=None))
        assert by_row(told, f"{site}.2") == of_loader(made.path, site, 2, codec=CODECS[site], verify=True)
        assert sorted(row for batch in told for row in batch["row"]) == list(range(made.rows))
        assert all((batch["token_id"] == batch["position"] + 5000).all() for batch in told)
        assert len({worker for batch in told for worker in batch["worker"]}) == 2
    assert sorted((made.number(name), position) for name, position in by_row(told, f"{site}.2")) == EVERY


def test_a_worker_that_is_killed_changes_nothing(cluster: Any, made: Made, tmp_path: Path) -> None:  # noqa: F811
    data = read_captures(made.path, sites=["resid_post", "mlp_out"], layers=[0, 3], where={"half": "1"},
                         task_bytes=TASK, concurrency=2)
    killed = tmp_path / "killed"

    def die_once(batch: dict[str, Any]) -> dict[str, Any]:
        if 500 in batch["row"]:  # of the second task or a later one
            try:
                (killed / "first").mkdir(parents=True)
            except FileExistsError:
                pass
            else:
                (killed / str(os.getpid())).mkdir()
                os.kill(os.getpid(), signal.SIGKILL)
        return batch

    told = batches(data.map_batches(die_once, batch_size=None))
    assert len(list(killed.iterdir())) == 2, "nobody was killed"
    for site, layer in (("resid_post", 0), ("mlp_out", 3)):
        assert by_row(told, f"{site}.{layer}") == of_loader(made.path, site, layer, where={"half": "1"},
                                                            codec=CODECS[site])


def source_of(path: Path, *keys: tuple[str, int], **options: Any) -> Any:
    from vllm_tap.ray.datasource import CaptureDatasource

    index = build_index(path, keys, **options)
    source = CaptureDatasource((Chosen(path, tuple(index.captures)),), index.keys, None, "float32", False, TASK,
                               columns_of(index, "float32"))
    source.keep([index])
    return source


def test_tasks_are_of_the_bytes_asked_for(cluster: Any, made: Made) -> None:  # noqa: F811
    tasks = source_of(made.path, ("resid_post", 1), ("mlp_out", 2)).get_read_tasks(200)
    sizes = [task.metadata.num_rows for task in tasks]
    assert sum(sizes) == made.rows and set(sizes[:-1]) == {128} and len(tasks) > 10  # 128 rows are 82 kB
    for task in (tasks[0], tasks[-1]):
        table, = task()
        assert (table.schema, table.num_rows) == (task.schema, task.metadata.num_rows)
        assert 0.8 * task.metadata.size_bytes < table.nbytes <= task.metadata.size_bytes <= TASK
        part = task.read_fn.__self__.index  # its own rows alone, and what they need
        assert part.rows == len(part.capture) == len(part.row[1]) == task.metadata.num_rows
        assert len(part.captures) < 20 and len(part.frames) < 20 and len(part.segments) < 5
    assert [table.num_rows for table in source_of(made.path, ("mlp_out", 2)).get_read_tasks(1, 5)[0]()] == [5]


def test_columns_that_are_not_asked_for_are_not_read(cluster: Any, sealed_copy: Path) -> None:  # noqa: F811
    """The bytes of all of mlp_out are gone."""
    data = read_captures(sealed_copy, sites=["resid_post", "mlp_out"], layers=1, task_bytes=TASK, verify=True)
    assert data.columns() == ["capture", "position", "token_id", "row", "resid_post.1", "mlp_out.1"]
    want = of_loader(sealed_copy, "resid_post", 1, codec="int8b64")
    with StoreReader(sealed_copy) as reader:
        for number in rows(sealed_copy, "mlp_out", 1).index.segments:
            assert reader.segment(number).site == "mlp_out"
            for block in (sealed_copy / "blocks").glob(f"*{number:08d}.zarr"):
                shutil.rmtree(block / "x")
    told = batches(data.select_columns(["resid_post.1", "position", "capture"]))
    assert by_row(told, "resid_post.1") == want and set(told[0]) == {"resid_post.1", "position", "capture"}
    told = batches(read_captures(sealed_copy, sites=["resid_post", "mlp_out"], layers=1, task_bytes=TASK,
                                 columns=["token_id", "row"]))
    assert sorted(row for batch in told for row in batch["row"]) == list(range(len(want)))
    assert list(told[0]) == ["token_id", "row"]
    with pytest.raises(StoreError, match=r"w0-.*/x/c"):
        data.materialize()


def test_rows_that_are_not_asked_for_are_not_read(cluster: Any, made: Made) -> None:  # noqa: F811
    from ray.data.expressions import col

    want = {key: value for key, value in of_loader(made.path, "resid_post", 1, codec="int8b64").items()
            if key[1] >= 70 and key[0] != made.ids[10]}
    known = (col("position") >= 70) & (col("capture") != made.ids[10])
    data = read_captures(made.path, sites="resid_post", layers=1, codec="int8b64", task_bytes=TASK)
    assert by_row(batches(data.filter(expr=known)), "resid_post.1") == want and len(want) > 100
    both = data.filter(expr=known).filter(expr=col("token_id") < 5075)
    assert by_row(batches(both), "resid_post.1") == {key: value for key, value in want.items() if key[1] < 75}

    assert both.count() == sum(key[1] < 75 for key in want)  # Ray asks for no columns
    assert sum(table.num_rows for task in source_of(made.path, ("mlp_out", 1)).apply_projection({}).get_read_tasks(1)
               for table in task()) == made.rows

    source = source_of(made.path, ("resid_post", 1), codec="int8b64")
    fewer = source.apply_predicate(known)
    assert sum(task.metadata.num_rows for task in fewer.get_read_tasks(1)) == len(want)
    assert source.apply_predicate(col("token_id") < 5) is source, "tokens are known only once rows are read"
    nothing = source.apply_predicate(col("position") > 10**6)
    assert nothing.get_read_tasks(1) == [] and nothing.estimate_inmemory_data_size() == 0
    assert data.filter(expr=col("position") > 10**6).count() == 0


@pytest.mark.parametrize("site", CODECS)
def test_rows_as_float16_and_as_codes(cluster: Any, made: Made, site: str) -> None:  # noqa: F811
    import torch

    asked = {"sites": site, "layers": 3, "codec": CODECS[site], "where": {"half": "0"}}
    halves = batches(read_captures(made.path, dtype="float16", **asked))
    assert by_row(halves, f"{site}.3") == of_loader(made.path, site, 3, dtype=torch.float16, codec=CODECS[site],
                                                    where={"half": "0"})
    codes = batches(read_captures(made.path, dtype="codes", **asked))
    for stream in codecs.streams(CODECS[site], WIDTH, "bfloat16"):
        for (capture, position), value in by_row(codes, f"{site}.3.{stream.name}").items():
            want = expected_pieces(made.number(capture), [position], [3], CODECS[site], WIDTH, "bfloat16")
            assert value == want[stream.name].tobytes()
        assert codes[0][f"{site}.3.{stream.name}"].shape[1:] == tuple(stream.shape)


def test_a_store_that_is_compacted_meanwhile_is_read_the_same(cluster: Any, sealed_copy: Path) -> None:  # noqa: F811
    data = read_captures(sealed_copy, sites="mlp_out", layers=[0, 2], task_bytes=TASK)
    want = of_loader(sealed_copy, "mlp_out", 2)
    for lock in sealed_copy.rglob("LOCK"):
        lock.unlink()
    assert compact(sealed_copy).cold
    assert by_row(batches(data), "mlp_out.2") == want


def test_a_capture_that_is_deleted_meanwhile_is_an_error(cluster: Any, sealed_copy: Path, made: Made  # noqa: F811
                                                         ) -> None:
    gone = made.ids[4]
    data = read_captures(sealed_copy, sites="resid_post", layers=1, codec="int8b64", task_bytes=TASK)
    index = rows(sealed_copy, "resid_post", 1, codec="int8b64").index
    for number in index.segments:
        erase(sealed_copy, index.uuid, number, [gone])
    with pytest.raises(NotFoundError, match=f"capture {gone} was deleted after"):
        data.materialize()


def test_a_node_that_does_not_see_the_store_is_told(cluster: Any, sealed_copy: Path, tmp_path: Path  # noqa: F811
                                                    ) -> None:
    data = read_captures(sealed_copy, sites="mlp_out", layers=1, task_bytes=TASK)
    sealed_copy.rename(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match=f"{sealed_copy}: no such folder .every node must see the store under"):
        data.materialize()
    write_captures(sealed_copy, {new_ulid(): 1}, codec="raw16")
    with pytest.raises(StoreError, match=f"{sealed_copy}: another store"):
        data.materialize()


def test_damage_is_told_with_its_place(cluster: Any, sealed_copy: Path) -> None:  # noqa: F811
    data = read_captures(sealed_copy, sites="resid_post", layers=1, codec="int8b64", task_bytes=TASK, verify=True)
    for main in (sealed_copy / "blocks").glob("*.zarr/q/c/0/0/0"):
        stored = bytearray(main.read_bytes())
        stored[len(stored) // 2] ^= 0xFF
        main.write_bytes(stored)
    with pytest.raises(StoreError, match="does not match its checksum") as raised:
        read_captures(sealed_copy, sites="resid_post", layers=[0, 1, 2, 3], codec="int8b64", verify=True).materialize()
    assert isinstance(raised.value, CorruptError) and data is not None


def test_a_source_goes_from_process_to_process_without_its_rows(cluster: Any, sealed_copy: Path, made: Made  # noqa: F811
                                                                ) -> None:
    source = source_of(sealed_copy, ("mlp_out", 2))
    sent = cluster.put(source)
    for again in (cluster.get(sent), copy.deepcopy(source)):
        assert again._indexes is None
        assert [next(iter(task())) for task in again.get_read_tasks(1)] == [next(iter(task()))
                                                                           for task in source.get_read_tasks(1)]
    assert copy.copy(source)._indexes is source._indexes, "made anew for each column that is chosen"
    deleted = made.ids[7]
    with WriterProcess(sealed_copy) as writer, Sender(writer.endpoint) as sender:
        sender.delete(deleted)
        sender.wait()
        with StoreReader(sealed_copy) as reader:
            assert until(lambda: [row.id for row in Filters("deleted").of(reader)] == [deleted])
    with pytest.raises(NotFoundError, match=f"capture {deleted} was deleted after"):
        cluster.get(sent).get_read_tasks(1)


def test_trainers_that_share_an_epoch_have_every_row_once(cluster: Any, made: Made) -> None:  # noqa: F811
    """As Ray Train deals a dataset out: an actor plans it, from the source that was sent there."""
    data = read_captures(made.path, sites="mlp_out", layers=0, task_bytes=TASK).select_columns(["row", "mlp_out.0"])

    @cluster.remote(num_cpus=0)
    def train(shard: Any) -> list[dict[str, Any]]:
        return [{name: batch[name].numpy() for name in ("row", "mlp_out.0")}
                for batch in shard.iter_torch_batches(batch_size=64)]

    parts = cluster.get([train.remote(shard) for shard in data.streaming_split(2)])
    assert all(parts), "one had nothing"
    told = [batch for part in parts for batch in part]
    assert sorted(row for batch in told for row in batch["row"]) == list(range(made.rows))
    want = of_loader(made.path, "mlp_out", 0)
    assert sorted(row.tobytes() for batch in told for row in batch["mlp_out.0"]) == sorted(want.values())


def test_missing_rows_are_told_and_taken_only_when_allowed(cluster: Any, holed: tuple[Path, list[str]]  # noqa: F811
                                                           ) -> None:
    path, ids = holed
    with pytest.raises(MissingRows, match=rf"resid_post, layer 3 of capture {ids[1]} lacks positions \[2, 4\) dropped; "
                                          r"allow_missing=True \(of slice, attention, rows or read_captures\)"):
        read_captures(path, sites="resid_post", layers=[1, 3])
    there = batches(read_captures(path, sites="resid_post", layers=[1, 3], allow_missing=True))
    assert by_row(there, "resid_post.3") == of_loader(path, "resid_post", 3)
    assert set(by_row(there, "resid_post.1")) == {(ids[0], position) for position in range(8)} | {
        (ids[1], position) for position in (0, 1, 4, 5, 6, 7)}
    for chosen in ({"layers": [1, 2]}, {"layers": 3, "where": {"number": "0"}}):  # nothing of these is missing
        assert read_captures(path, sites="resid_post", **chosen).count() == (16 if "where" not in chosen else 8)


def test_rows_whose_columns_ranks_share_out_are_whole(cluster: Any, tmp_path: Path) -> None:
    path = tmp_path / "store"
    with WriterProcess(path) as writer, Ranks(writer.endpoint, 3) as engine:
        engine.number = 2
        engine.begin(5)
        for position in range(9):
            engine.step([position], position)
        engine.end(9, 5)
        engine.wait()
        with StoreReader(path) as reader:
            assert until(lambda: reader.capture(engine.capture).status == "complete")
    told = batches(read_captures(path, sites=["q", "resid_post"], layers=[1, 3], task_bytes=4000))
    assert told[0]["q.1"].shape[1:] == (3 * COLUMNS,) and told[0]["resid_post.3"].shape[1:] == (COLUMNS,)
    for site in ("q", "resid_post"):
        for layer in (1, 3):
            want = values(3, 2, site, range(9))[layer]
            assert by_row(told, f"{site}.{layer}") == {(engine.capture, position): row.tobytes()
                                                       for position, row in enumerate(want)}
    with pytest.raises(SpecError, match=r"^dtype = 'codes': ranks share out the columns of q.1"):
        read_captures(path, sites=["resid_post", "q"], layers=1, dtype="codes")


def write_captures(path: Path, captures: dict[str, int], lacking: str = "", codec: str = "int8b64") -> None:
    """A store of captures of eight rows, their contents by a number; one lacks its last."""
    with WriterProcess(path) as writer, Sender(writer.endpoint, engine=engine_info()) as sender:
        for capture, number in captures.items():
            sender.own(capture)
            sender.open(capture, 8, codec=codec)
            sender.frame([(capture, number, range(7 if capture == lacking else 8))], codec=codec)
            if capture == lacking:
                sender.dropped(capture, 7, 8)
            sender.finish(capture, 8, output=1)
        sender.wait()
        with StoreReader(path) as reader:
            until(lambda: all(reader.capture(name).status in ("complete", "incomplete") for name in captures))


def test_a_capture_that_several_stores_have_is_counted_once(cluster: Any, tmp_path: Path) -> None:
    first, both, mended, last, raw = (new_ulid() for _ in range(5))
    stores = [tmp_path / name for name in "abc"]
    write_captures(stores[0], {first: 1, both: 2, mended: 3}, lacking=mended)
    write_captures(stores[1], {both: 2, mended: 3, last: 4})
    write_captures(stores[2], {both: 2, raw: 5}, codec="raw")
    data = read_captures(stores[:2], sites="resid_post", layers=[0, 3], task_bytes=2000)
    told = batches(data)
    assert sorted(row for batch in told for row in batch["row"]) == list(range(32))
    found = by_row(told, "resid_post.3")
    assert found == {key: value for store, names in ((stores[0], {first, both}), (stores[1], {mended, last}))
                     for key, value in of_loader(store, "resid_post", 3).items() if key[0] in names}
    assert set(found) == {(name, position) for name in (first, both, mended, last) for position in range(8)}
    from ray.data.expressions import col

    assert sorted(row["row"] for row in data.filter(expr=col("row") >= 15).take_all()) == list(range(15, 32))
    with pytest.raises(MissingRows, match=mended):
        read_captures([stores[0], stores[2]], sites="resid_post", layers=0)
    with pytest.raises(SpecError, match=r"^codec = None: .*/b and .*/c hold rows of different kinds"):
        read_captures([stores[1], stores[2]], sites="resid_post", layers=0, where=lambda row: row.id != mended)
    with pytest.raises(NotFoundError, match="none of 2 stores has such rows"):
        read_captures(stores[:2], sites="attn_out", layers=0)


def test_what_cannot_be_had_is_refused(cluster: Any, made: Made, tmp_path: Path,  # noqa: F811
                                       monkeypatch: pytest.MonkeyPatch) -> None:
    for options, word in (
            ({"dtype": "bfloat16"}, "^dtype = 'bfloat16': valid: float32, float16, codes"),
            ({"columns": ["resid_post.2"]}, "^columns = .*valid: each once of capture, position, token_id, row, resid"),
            ({"columns": []}, "^columns = "), ({"columns": "row"}, "^columns = "),
            ({"columns": ["row", "row"]}, "^columns = "), ({"where": "run"}, "^where = "),
            ({"task_bytes": 0}, "^task_bytes = 0: valid: 1 to 268435456"), ({"task_bytes": 1 << 29}, "^task_bytes = "),
            ({"override_num_blocks": 3}, "^override_num_blocks = 3: tasks are cut by task_bytes"),
            ({"layer": 2}, r"^layer = 2: neither an argument of read_captures\(\) nor an option of ray.data"),
            ({"sites": "resid_pots"}, "^sites = 'resid_pots': "), ({"layers": True}, "^layers = True"),
            ({"codec": None}, "^codec = None: resid_post is stored in several ways")):
        with pytest.raises(SpecError, match=word):
            read_captures(made.path, **{"sites": "resid_post", "layers": 1, "codec": "int8b64", **options})
    for stores in ([], [made.path, made.path]):
        with pytest.raises(SpecError, match=r"^store = .*each once"):
            read_captures(stores, sites="mlp_out", layers=1)
    with pytest.raises(SpecError, match=r"^layers = None: name a layer of resid_post"):
        read_captures(made.path, sites="resid_post")
    with pytest.raises(NotFoundError, match=r"where = {'half': '2'} chooses has these sites"):
        read_captures(made.path, sites="mlp_out", layers=1, where={"half": "2"})
    with pytest.raises(StoreError):
        read_captures(tmp_path, sites="mlp_out", layers=1)
    monkeypatch.setattr(limits, "ray_tasks_max", 100)
    with pytest.raises(LimitError, match=rf"^tasks: {made.rows} asked, limit 100; give a larger task_bytes"):
        read_captures(made.path, sites="mlp_out", layers=1, task_bytes=1)


def test_a_store_that_is_open_is_taken_as_it_is(cluster: Any, made: Made) -> None:  # noqa: F811
    with open_store(made.path) as store:
        assert read_captures(store, sites=["blocks.2.hook_mlp_out"]).take(1)[0]["mlp_out.2"].shape == (WIDTH,)
