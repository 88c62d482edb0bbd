"""One engine whose two stages send to a writer each: every store has some layers, and both together the capture."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from safetensors.numpy import load
from typer.testing import CliRunner

from engine_side.tap.shares import layout_of
from engine_side.tap.stages import Stage
from engine_side.tap.writers import divided
from schemas.bucket.divided import DividedReader
from schemas.bucket.reader import open_reader
from schemas.errors import ArgumentError, ConflictError, NotFoundError
from schemas.ids import new_ulid
from schemas.read.reader import StoreReader
from schemas.wire.ask_store import reached_store
from schemas.wire.engine_info import EngineInfo
from tests.engine_side.transport.test_sender import LAYERS, WIDTH, Tapped
from tests.support.store_helpers import SITE, Sender, WriterProcess, engine_info, until
from tests.vllm_tap.bucket.serving.test_api import OFTEN, code
from tests.vllm_tap.bucket.several.test_beside import also
from tests.vllm_tap.bucket.several.test_serving import listed
from vllm_tap import rows
from vllm_tap.bucket.push import push
from vllm_tap.cli.main import app
from vllm_tap.errors import MissingRows
from vllm_tap.ray.stores import index_stores
from vllm_tap.store import open_store

STAGES = [Stage(0, 2, 0, 3), Stage(1, 2, 3, 4)]  # layers 0 to 2, and 3
PROMPT = 40


@dataclass
class Hosts:
    """Two hosts, each with a writer and a stage of the engine."""

    writers: list[WriterProcess]
    stages: list[Tapped]
    number: int = 0
    made: list[str] = field(default_factory=list)

    @property
    def stores(self) -> list[Path]:
        return [writer.store for writer in self.writers]

    def open(self, count: int = 1, **asked: Any) -> str:
        """Begin a request, or the first of its samples, on both."""
        capture = self.stages[0].open(PROMPT, count=count, **asked)
        self.stages[1].open(PROMPT, count=count, **{**asked, "id": capture})
        self.made.append(capture)
        return capture

    def step(self, capture: str, who: list[Tapped] | None = None) -> None:
        self.number += 1
        for stage in who or self.stages:
            stage.step(capture, 0, PROMPT, self.number)

    def finish(self, capture: str) -> None:
        for stage in self.stages:
            stage.finish(capture, PROMPT)

    def whole(self, **asked: Any) -> str:
        """One request from begin to end; every store knows that it ended."""
        capture = self.open(**asked)
        self.step(capture)
        self.finish(capture)
        wanted = asked.get("layers", [0, 3])
        for store in self.stores[:1 + (3 in wanted)]:  # the first is told of every capture
            assert until(lambda store=store: ended(store, f"{capture}.0" if "count" in asked else capture))
        return capture

    def row(self, layer: int) -> np.ndarray[Any, Any]:
        """What the model computed of a layer."""
        found: np.ndarray[Any, Any] = self.stages[layer == 3].staging.buffers[SITE][layer, :PROMPT].numpy()
        return found


def ended(store: Path, capture: str) -> bool:
    """Whether a store says so."""
    with StoreReader(store) as reader:
        try:
            return reader.capture(capture).status not in ("pending", "running")
        except NotFoundError:  # it has not heard of it yet
            return False


def sealed(store: Path) -> bool:
    """Whether all that a store has can be pushed."""

    def look() -> bool:
        with closing(sqlite3.connect(f"file:{store}/catalog.sqlite?mode=ro", uri=True)) as db:
            return db.execute("SELECT MIN(sealed) FROM segments").fetchone() == (1,)

    return until(look)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with running(tmp_path, [0, 1, 2, 3]) as made:
        yield made


def engine(layers: list[int], stages: list[Stage] = STAGES, name: str = "job-0") -> EngineInfo:
    """An engine whose model has the site in these layers."""
    info = engine_info(WIDTH, LAYERS)
    return structs.replace(info, group=name, instance=name, armed=structs.replace(info.armed, sites={SITE: layers}),
                           layout=layout_of({SITE: layers}, {SITE: WIDTH}, {SITE: WIDTH}, 1, stages))


@contextmanager
def running(tmp_path: Path, layers: list[int]) -> Iterator[Hosts]:
    """Hosts of such an engine."""
    whole = engine(layers)
    with ExitStack() as stack:
        writers = [stack.enter_context(WriterProcess(tmp_path / name, "--seal-idle-s", "0.3", "--keep-s", "0.2"))
                   for name in ("a", "b")]
        stores = [reached_store(writer.endpoint, None, 20.0) for writer in writers]
        assert all(stores) and len(set(stores)) == 2
        stages = []
        for rank, writer in enumerate(writers):
            stages.append(Tapped(writer.endpoint, group=divided(whole, rank, stores)))
            stack.callback(stages[-1].close)
        yield Hosts(writers, stages)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))


def test_a_store_alone_says_what_is_elsewhere(hosts: Hosts) -> None:
    capture = hosts.whole()
    for store, mine in zip(hosts.stores, ([0, 1, 2], [3]), strict=True):
        with StoreReader(store) as reader:
            manifest = reader.manifest(capture)
            assert manifest.status == "incomplete" and manifest.resolved["layers"] == {SITE: [0, 1, 2, 3]}
            for row in manifest.rows:
                here = row.layer in mine
                assert row.captured == (PROMPT if here else 0)
                assert [(gap.start, gap.stop, gap.reason) for gap in row.missing] == (
                    [] if here else [(0, PROMPT, "elsewhere")])
                found = reader.slice(capture, SITE, [row.layer])
                assert len(found.positions) == row.captured and found.missing == row.missing
                if here:
                    assert np.array_equal(found.values()[0], hosts.row(row.layer))


def test_a_rebuilt_catalog_says_the_same(hosts: Hosts) -> None:
    capture = hosts.whole()
    assert all(map(sealed, hosts.stores))
    for writer, stage in zip(hosts.writers, hosts.stages, strict=True):
        stage.close()
        with StoreReader(writer.store) as reader:
            before = reader.manifest(capture)
        writer.stop()
        done = CliRunner().invoke(app, ["fsck", "--store", str(writer.store)])
        assert done.exit_code == 0, done.output
        for file in writer.store.glob("catalog.sqlite*"):
            file.unlink()
        writer.start()
        assert until(lambda writer=writer: ended(writer.store, capture))
        with StoreReader(writer.store) as reader:
            assert reader.manifest(capture) == before


def test_both_together_have_every_row(hosts: Hosts, cache: None) -> None:
    capture, other = hosts.whole(), hosts.whole(layers=[1, 3])
    with open_store(hosts.stores[::-1]) as store:
        manifest = store.manifest(capture)
        assert (manifest.status, manifest.expected, manifest.captured) == ("complete", 4 * PROMPT, 4 * PROMPT)
        assert [(row.site, row.layer) for row in manifest.rows] == [(SITE, layer) for layer in range(4)]
        assert "elsewhere" not in manifest.resolved and not any(row.missing for row in manifest.rows)
        assert [(row.id, row.status) for row in store.captures()] == [(other, "complete"), (capture, "complete")]
        assert store.store_of(capture) == str(hosts.stores[0])
        for layers in ([0], [3], [3, 0], [0, 1, 2, 3]):
            found = store.reader.slice(capture, SITE, layers, 5, 30)
            assert found.layers == layers and found.positions.tolist() == list(range(5, 30)) and not found.missing
            for got, layer in zip(found.values(), layers, strict=True):
                assert np.array_equal(got, hosts.row(layer)[5:30])
        mixed = [(capture, 7), (other, 3), (capture, 0)]
        at = store.reader.rows_at(mixed, SITE, [3, 1])
        assert np.array_equal(at.values(), np.stack([hosts.row(layer)[[7, 3, 0]] for layer in (3, 1)]))
        assert at.token_ids.tolist() == [7, 3, 0]
        progress = store.reader.progress(other)
        assert (progress.status, progress.expected, progress.missing) == ("complete", 2 * PROMPT, 0)
        assert store.reader.slice(other, SITE, [1], 0, 10**6).clipped
        with pytest.raises(NotFoundError, match=r"has no layer \[0\] of resid_post"):
            store.reader.slice(other, SITE, [0])


def test_any_zarr_client_reads_both_as_one(hosts: Hosts, cache: None) -> None:
    zarr = pytest.importorskip("zarr")
    capture = hosts.whole()
    with open_store(hosts.stores) as store:
        group = zarr.open_group(store[capture].zarr(), mode="r")
        got = group[SITE]["rows"][:]
        assert np.array_equal(got, np.stack([hosts.row(layer) for layer in range(4)], axis=1))


def test_specs_of_one_stage_alone(hosts: Hosts, cache: None) -> None:
    """The first writer is told of every capture, the others of those that have something for them."""
    first, second = hosts.whole(layers=[0]), hosts.whole(layers=[3])
    with StoreReader(hosts.stores[1]) as reader:
        assert [row.id for row in reader.captures()] == [second] and reader.capture(second).status == "complete"
    with open_store(hosts.stores) as store:
        assert [(row.id, row.status) for row in store.captures()] == [(second, "complete"), (first, "complete")]
        assert np.array_equal(store.reader.slice(second, SITE, [3]).values()[0], hosts.row(3))
        assert np.array_equal(store.reader.slice(first, SITE, [0]).values()[0], hosts.row(0))
        assert store.reader.places_of(first) == [str(hosts.stores[0])]
        assert store.reader.places_of(second) == [*map(str, hosts.stores)]


def test_layers_that_the_model_lacks(tmp_path: Path, cache: None) -> None:
    """One that was asked for by its number is missing once, of the first store; "all" means what is there."""
    with running(tmp_path, [0, 1, 3]) as hosts:
        named, every = hosts.whole(layers=[1, 2, 3]), hosts.whole()
        with open_reader([str(store) for store in hosts.stores]) as reader:
            told = {row.layer: (row.captured, [gap.reason for gap in row.missing])
                    for row in reader.manifest(named).rows}
            assert told == {1: (PROMPT, []), 2: (0, ["not_armed"]), 3: (PROMPT, [])}
            assert [row.layer for row in reader.manifest(every).rows] == [0, 1, 3]
            assert reader.capture(named).status == "incomplete" and reader.capture(every).status == "complete"


def test_what_one_writer_lacks_is_named(hosts: Hosts, cache: None) -> None:
    """A stage behind, then one whose engine is lost."""
    capture = hosts.open()
    hosts.step(capture, hosts.stages[:1])
    with open_reader([str(store) for store in hosts.stores]) as reader:
        assert until(lambda: reader.progress(capture).captured == 3 * PROMPT)
        hosts.stages[0].step(capture, PROMPT, 1, 2)  # a token more than the other stage has begun
        hosts.stages[0].recorder.flush()
        assert until(lambda: reader.progress(capture).captured == 3 * PROMPT + 3)
        found = reader.slice(capture, SITE, [2, 3])
        assert [(gap.start, gap.stop, gap.reason) for gap in found.missing] == [(0, PROMPT + 1, "pending")]
        assert not len(found.positions) and reader.capture(capture).status == "running"
        for row in reader.manifest(capture).rows:
            assert row.expected == row.captured + sum(gap.rows for gap in row.missing) == PROMPT + 1
        hosts.stages[0].finish(capture, PROMPT)
        assert until(lambda: ended(hosts.stores[0], capture))
        assert reader.manifest(capture).status == "running", "the other stage has not ended it"
        hosts.stages[1].finish(capture, PROMPT)
        assert until(lambda: ended(hosts.stores[1], capture))
        manifest = reader.manifest(capture)
        assert manifest.status == "incomplete"
        assert {(row.layer, row.captured, *(gap.reason for gap in row.missing)) for row in manifest.rows} == {
            *((layer, PROMPT) for layer in range(3)), (3, 0, "dropped")}


def test_engines_that_divided_their_layers_otherwise(hosts: Hosts, cache: None) -> None:
    """An engine that started again with another cut: rows of captures of both in one call."""
    before = hosts.whole()
    stores = [reached_store(writer.endpoint, None, 20.0) for writer in hosts.writers]
    again = engine([0, 1, 2, 3], [Stage(0, 2, 0, 1), Stage(1, 2, 1, 4)], "later-0")
    with ExitStack() as stack:
        later = Hosts(hosts.writers, [])
        for rank, writer in enumerate(hosts.writers):
            later.stages.append(Tapped(writer.endpoint, group=divided(again, rank, stores)))
            stack.callback(later.stages[-1].close)
        after = later.whole()
        with open_reader([str(store) for store in hosts.stores]) as reader:
            mixed = [(after, 3), (before, 5), (after, 0), (before, 39)]
            found = reader.rows_at(mixed, SITE, [2, 0])
            for number, (capture, position) in enumerate(mixed):
                for layer, got in zip((2, 0), found.values()[:, number], strict=True):
                    stage = (later.stages[layer > 0] if capture == after else hosts.stages[layer == 3])
                    assert np.array_equal(got, stage.staging.buffers[SITE][layer, position].numpy())


def test_samples_that_no_engine_has_begun(hosts: Hosts, cache: None) -> None:
    with Sender(hosts.writers[0].endpoint, role="api") as api:
        api.own(request := new_ulid(), count=2)
        api.wait()
    hosts.whole(id=request, count=2)
    begun, waits = f"{request}.0", f"{request}.1"
    with open_reader([str(store) for store in hosts.stores]) as reader:
        assert reader.samples(request) == [begun, waits]
        assert reader.capture(begun).status == "complete" and reader.manifest(waits).status == "pending"
        assert reader.progress(waits).status == reader.capture(waits).status == "pending"
        assert sorted(row.id for row in reader.captures()) == [begun, waits]
        with pytest.raises(NotFoundError, match="no engine has started it yet"):
            reader.slice(waits, SITE, [0])


def test_guesses_of_several_stores_are_not_matched(hosts: Hosts, cache: None) -> None:
    capture = hosts.whole()
    with open_reader([str(store) for store in hosts.stores]) as reader:
        assert not len(reader.slice(capture, SITE, [0, 2], rejected=True).positions)
        with pytest.raises(ArgumentError, match=r"ask for those of one store, such as \[0\]"):
            reader.slice(capture, SITE, [0, 3], rejected=True)


def test_a_store_that_is_not_there_yet(hosts: Hosts, url: str, cache: None) -> None:
    """The second node pushes later: until then its layers are elsewhere; then they are read from the bucket."""
    capture = hosts.whole()
    assert all(map(sealed, hosts.stores))
    push(hosts.stores[0], f"{url}/a")
    with open_store(f"{url}/*") as store:
        assert store.manifest(capture).status == "incomplete"
        with pytest.raises(MissingRows, match="elsewhere; open the stores of all its writers as one"):
            store[capture].slice(SITE, [0, 3])
        push(hosts.stores[1], f"{url}/b")
        assert store.refresh()
        assert store.manifest(capture).status == "complete"
        got = store.reader.slice(capture, SITE, [0, 3]).values()
        assert np.array_equal(got, np.stack([hosts.row(0), hosts.row(3)]))


def test_training_reads_each_layer_where_it_is(hosts: Hosts, cache: None) -> None:
    made = [hosts.whole() for _ in range(3)]
    assert all(map(sealed, hosts.stores))
    for layer in range(4):
        read = rows([str(store) for store in hosts.stores], SITE, layer, allow_missing=False)
        assert read.rows == len(made) * PROMPT and sorted(read.captures) == sorted(made)
        for batch in read:
            assert np.array_equal(batch[f"{SITE}.{layer}"].numpy(), hosts.row(layer)[batch["position"].numpy()])
    with pytest.raises(NotFoundError, match="none has the layers"):
        rows([str(store) for store in hosts.stores], SITE, [0, 3])


def test_ray_counts_each_row_once(hosts: Hosts, cache: None) -> None:
    made = sorted(hosts.whole() for _ in range(2))
    assert all(map(sealed, hosts.stores))
    for layer, number in ((1, 0), (3, 1)):
        (index,) = index_stores(hosts.stores, ((SITE, layer),), None, None, False, True)
        assert (index.store, sorted(index.captures), index.rows) == (hosts.stores[number], made, 2 * PROMPT)


def test_lists_by_status(hosts: Hosts, cache: None) -> None:
    """No store alone has a whole capture."""
    whole, open_ = [hosts.whole() for _ in range(5)], hosts.open()
    part = hosts.whole(layers=[2])
    with open_reader([str(store) for store in hosts.stores]) as reader:
        def listed(status: str, size: int) -> list[str]:
            found, before = list[str](), None
            while True:
                rows, before = reader.page(status=status, limit=size, before=before)
                found += [row.id for row in rows]
                if before is None:
                    return found

        assert until(lambda: reader.capture(open_).status == "running")
        for size in (1, 2, 3, 100):
            assert listed("complete", size) == [part, *whole[::-1]], size
            assert listed("running", size) == [open_] and listed("incomplete", size) == []


def test_lists_where_stores_say_other_times(hosts: Hosts, cache: None) -> None:
    """The first writer hears when a request came in, the other when its engine began it."""
    now = time.time_ns() // 1_000_000
    made = {new_ulid(): now + 7_000 * (-1) ** number * number for number in range(9)}
    with Sender(hosts.writers[0].endpoint, role="api") as api:
        for capture, came_ms in made.items():
            api.own(capture, created_ms=came_ms)
        api.wait()
    for capture in made:
        hosts.whole(id=capture)
    alone = [hosts.whole(layers=[0]) for _ in range(2)]
    every = sorted([*made, *alone], key=lambda one: (made.get(one, now + 1), one), reverse=True)
    with open_store(hosts.stores) as store:
        assert [row.id for row in store.captures(limit=1000)] == every
        for size in range(1, 13):
            found, before = list[str](), None
            for _ in range(40):
                rows, before = store.reader.page(limit=size, before=before)
                found += [row.id for row in rows]
                if before is None:
                    break
            assert found == every, size


def test_rm_deletes_in_every_store(hosts: Hosts, url: str, cache: None) -> None:
    """One in a bucket, by a name that only the first writer knows."""
    capture, kept = hosts.whole(), hosts.whole()
    with Sender(hosts.writers[0].endpoint, role="api") as api:
        api.own(late := new_ulid(), aliases=["cmpl-1"])
        api.wait()
    hosts.whole(id=late)
    assert sealed(hosts.stores[1])
    push(hosts.stores[1], f"{url}/b")
    places = ["--store", str(hosts.stores[0]), "--store", f"{url}/b"]
    for ref in (capture, "cmpl-1"):
        done = CliRunner().invoke(app, ["rm", ref, *places])
        assert done.exit_code == 0 and not done.stderr, done.output
    with open_store([str(hosts.stores[0]), f"{url}/b"]) as store:
        assert until(lambda: [row.id for row in store.captures()] == [kept])
        assert until(lambda: len(list(store.captures(status="deleted"))) == 2)
        first, following = store.reader.page(status="deleted", limit=1)
        second, end = store.reader.page(status="deleted", limit=1, before=following)
        assert {first[0].id, second[0].id} == {capture, late}
        assert end is None or store.reader.page(status="deleted", limit=1, before=end) == ([], None)
    done = CliRunner().invoke(app, ["rm", kept, *places[:2]])
    assert done.exit_code == 0 and f"layers of {kept} are in other writers' stores" in done.stderr


def test_owners_see_their_own(hosts: Hosts, cache: None) -> None:
    """An engine's other writers hear of no owner: the first one's word counts."""
    with Sender(hosts.writers[0].endpoint, role="api") as api:
        api.own(capture := new_ulid(), owner="anna")
        api.wait()
    hosts.whole(id=capture)
    with open_reader([str(store) for store in hosts.stores]) as reader:
        assert np.array_equal(reader.slice(capture, SITE, [3], owner="anna").values()[0], hosts.row(3))
        assert isinstance(reader.home(capture, "anna"), DividedReader)
        assert [(row.id, row.status) for row in reader.captures("anna")] == [(capture, "complete")]
        assert [row.id for row in reader.captures("anna", "complete")] == [capture]
        assert reader.captures("bob") == []
        with pytest.raises(NotFoundError):
            reader.slice(capture, SITE, [3], owner="bob")


def test_twins_are_still_refused(hosts: Hosts, tmp_path: Path, cache: None) -> None:
    """The same layers twice: of a job that ran twice with one id."""
    capture = hosts.whole()
    third = tmp_path / "c"
    with WriterProcess(third) as writer:
        twin = Tapped(writer.endpoint, group=(hosts.stages[1].info, 0))
        twin.open(PROMPT, id=capture)
        twin.step(capture, 0, PROMPT, 1)
        twin.finish(capture, PROMPT)
        assert until(lambda: ended(third, capture))
        twin.close()
        writer.stop()
    with open_reader([*map(str, hosts.stores), str(third)]) as reader:
        for call in (lambda: reader.manifest(capture), reader.captures):
            with pytest.raises(ConflictError, match=f"capture {capture} is in several stores"):
                call()


def test_the_service_of_a_node_reads_what_the_other_pushed(hosts: Hosts, url: str, tmp_path: Path) -> None:
    capture, half = hosts.whole(), hosts.whole(layers=[1])
    assert sealed(hosts.stores[1])
    path, missing = f"/v1/captures/{capture}", "elsewhere"
    with also(tmp_path / "alone", hosts.stores[0], writer=hosts.writers[0]) as client:
        assert client.get(f"{path}?wait=complete&timeout=20").json()["status"] == "incomplete"
        found = client.get(f"{path}/activations?site={SITE}&layer=0,3")
        assert found.status_code == 200 and missing in found.headers["x-tap-missing"]
        assert code(client.delete(path)) == (409, "conflict"), "layers would stay elsewhere"
    (tmp_path / "bucket").mkdir()
    with also(tmp_path / "both", hosts.stores[0], "--also", f"{url}/*", "--deletes", *OFTEN, writer=hosts.writers[0]
              ) as client:
        assert code(client.delete(path)) == (409, "conflict"), "the other node has not pushed yet"
        push(hosts.stores[1], f"{url}/b")
        assert until(lambda: client.get(path).json()["status"] == "complete")
        assert client.get(f"{path}?wait=complete&timeout=20").json()["missing"] == 0
        found = client.get(f"{path}/activations?site={SITE}&layer=3,0&format=safetensors&wait=rows")
        assert found.status_code == 200 and found.headers["x-tap-missing"] == "[]"
        loaded = load(found.content)
        for layer in (0, 3):
            assert np.array_equal(loaded[f"{SITE}.{layer}"], hosts.row(layer))
        assert listed(client) == [half, capture]
        assert client.get(f"{path}/map?site={SITE}").status_code == 200
        assert client.delete(path).status_code == 204 and client.get(path).status_code == 404
        assert client.delete(f"/v1/captures/{half}").status_code == 204
        assert listed(client) == []
    assert push(hosts.stores[1], f"{url}/b").followed == 1
    assert until(lambda: not ids_of(hosts.stores[1]))


def ids_of(store: Path) -> list[str]:
    with StoreReader(store) as reader:
        return [row.id for row in reader.captures()]
