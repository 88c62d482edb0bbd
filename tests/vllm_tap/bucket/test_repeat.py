"""``push --every``: what is new goes up by itself, what goes wrong passes, and without news the head is asked for."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from schemas.errors import ArgumentError, BucketError, FencedError, TapError
from schemas.ids import new_ulid
from schemas.objects import objects
from schemas.store.paths import pushing_name
from schemas.store.pushing import Pushing, forget_pushing, read_pushing, write_pushing
from tests.support.buckets import FaultProxy
from tests.support.processes import PATIENCE_S
from tests.support.store_helpers import until
from tests.vllm_tap.bucket.conftest import Sample, grow
from tests.vllm_tap.bucket.serving.test_api import beside
from tests.vllm_tap.bucket.test_fencing import head_of
from vllm_tap import open_store
from vllm_tap.bucket.check import check
from vllm_tap.bucket.deletion import hide
from vllm_tap.bucket.push import Pushed, push
from vllm_tap.bucket.removal import Sweeper, Swept
from vllm_tap.bucket.repeat import keep_pushing
from vllm_tap.cli.main import app
from writer_service.tools.compaction import compact

Told = list[Pushed | Exception | None]


class Turns(threading.Event):
    """A stop that comes behind so many turns; between two of them something happens in the place of time."""

    def __init__(self, *between: Callable[[], object]) -> None:
        super().__init__()
        self._between = list(between)

    def wait(self, timeout: float | None = None) -> bool:
        self._between.pop(0)()
        if not self._between:
            self.set()
        return self.is_set()


class Pushes:
    """Pushes of a store to a URL, counted; ``told`` is what was told of them."""

    def __init__(self, store: Path, url: str) -> None:
        self.store, self.url, self.count, self.told = store, url, 0, Told()

    def __call__(self) -> Pushed:
        self.count += 1
        return push(self.store, self.url)

    def go_on(self, *between: Callable[[], object]) -> None:
        keep_pushing(self.store, self.url, self, 30.0, Turns(*between), self.told.append)

    @property
    def done(self) -> list[Pushed]:
        return [one for one in self.told if isinstance(one, Pushed)]


def ids(url: str, cache: Path) -> set[str]:
    with open_store(url, cache) as found:
        return {row.id for row in found.captures()}


def nothing() -> None:
    pass


def test_what_is_sealed_goes_up_by_itself_and_what_is_deleted_there_is_deleted_here(
        sample: Sample, store: Path, tmp_path: Path, url: str) -> None:
    cache, going, new, counts = tmp_path / "cache", Pushes(store, url), list[str](), list[int]()

    def first() -> None:
        assert going.told[0] is None and len(going.done) == 1  # ready before anything went up
        new.append(grow(store))

    def deleted_there() -> None:
        assert new[0] in ids(url, cache) and len(going.done) == 2
        counts.append(going.count)
        hide(url, new)  # in the bucket alone: the catalog here is as it was

    def followed() -> None:
        assert going.done[-1].followed == 1 and new[0] not in ids(url, cache)

    going.go_on(first, nothing, lambda: counts.append(going.count), deleted_there, followed)
    assert counts[0] == counts[1] == 3  # the third found nothing new, and the fourth turn did not push
    assert sample.captures["few"] in ids(url, cache) and not push(store, url).changed


def test_a_turn_without_news_asks_for_the_head_alone(store: Path, s3: FaultProxy) -> None:
    Pushes(store, f"s3://bucket/{new_ulid()}").go_on(nothing, s3.seen.clear, nothing)
    assert [(method, path.rpartition("/")[2].partition("?")[0]) for method, path in s3.seen] == 2 * [
        ("GET", "head.json")]


def test_what_is_sealed_last_goes_up_at_the_stop(store: Path, tmp_path: Path) -> None:
    going, new = Pushes(store, (tmp_path / "bucket").as_uri()), list[str]()
    going.go_on(lambda: new.append(grow(store)))
    assert len(going.done) == 2 and new[0] in ids(going.url, tmp_path / "cache")


def test_what_goes_wrong_is_told_once_and_passes(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong, going = ["first", "first", "second"], Pushes(store, (tmp_path / "bucket").as_uri())

    def run() -> Pushed:
        if wrong:
            raise TapError(wrong.pop(0))
        return push(store, going.url)

    keep_pushing(store, going.url, run, 30.0, Turns(nothing, nothing, nothing, nothing), going.told.append)
    assert [str(one) for one in going.told if isinstance(one, Exception)] == ["first", "second"]
    assert len(going.done) == 1 and ids(going.url, tmp_path / "cache")


def test_a_file_in_the_store_says_how_it_goes(store: Path, tmp_path: Path) -> None:
    """With the time of the last turn that succeeded, whatever fails afterwards; and nothing once the pushes end."""
    url, began_ms = (tmp_path / "bucket").as_uri(), time.time_ns() // 1_000_000
    wrong, seen = [TapError("first"), None, None, TapError("full" * 1000), None], list[Pushing | None]()

    def run() -> Pushed:
        if (error := wrong.pop(0)) is not None:
            raise error
        return push(store, url)

    def look() -> None:
        seen.append(read_pushing(store))
        (store / "catalog.sqlite").touch()  # something is new

    keep_pushing(store, url, run, 30.0, Turns(look, look, look, look, lambda: None), lambda what: None)
    first, second, third, last = [each for each in seen if each is not None]
    assert first == Pushing(url, 30.0, 0, "first")
    assert began_ms <= second.pushed_ms <= third.pushed_ms == last.pushed_ms and second.failed == third.failed == ""
    assert last.failed == "full" * 250
    assert read_pushing(store) is None


def test_a_file_that_cannot_be_written_stops_no_push(store: Path, tmp_path: Path) -> None:
    (store / pushing_name()).mkdir()
    going = Pushes(store, (tmp_path / "bucket").as_uri())
    going.go_on(nothing, nothing)
    assert len(going.done) == 1 and read_pushing(store) is None


def test_a_service_beside_the_writer_tells_them_as_metrics(store: Path, tmp_path: Path) -> None:
    url = "s3://bucket/a"
    with beside(tmp_path / "a", store) as client:
        for state, said in [
            (None, {}), (Pushing(url, 60.0), {"push_up": 0, "pushed_seconds": 0}),
            (Pushing(url, 60.0, 1_800_000_000_000), {"push_up": 1, "pushed_seconds": 1.8e9}),
            (Pushing(url, 60.0, 1_800_000_000_000, "away"), {"push_up": 0, "pushed_seconds": 1.8e9}), (None, {}),
        ]:
            forget_pushing(store) if state is None else write_pushing(store, state)
            found = {line.partition("{")[0].removeprefix("vllm_tap_api_"): float(line.rpartition(" ")[2])
                     for line in client.get("/metrics").text.splitlines() if line.startswith("vllm_tap_api_push")}
            assert found == said
        (store / pushing_name()).write_bytes(b"[")
        assert client.get("/metrics").status_code == 200


def test_a_bucket_that_is_away_is_waited_for_and_one_that_is_not_ours_is_not(
        store: Path, s3: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are safe on the disk meanwhile."""
    monkeypatch.setattr(objects, "_RETRIES", 0)
    url, copied = f"s3://bucket/{new_ulid()}", Path(shutil.copytree(store, tmp_path / "copy"))
    going, s3.fault = Pushes(store, url), lambda method, path: "503"
    going.go_on(lambda: setattr(s3, "fault", lambda method, path: None), nothing)
    first, ready, *_ = going.told
    assert isinstance(first, BucketError) and first.passing and ready is None and len(going.done) == 1
    before = head_of(url)
    with pytest.raises(FencedError, match="did not push"):
        Pushes(copied, url).go_on(nothing)
    assert head_of(url) == before


@pytest.mark.parametrize(("words", "match"), [
    (["--every", "60"], "--every = '60': a number and its unit"), (["--every", "0.5s"], "at least 1s"),
    (["--every", "60s", "--take-over"], "leave out --take-over"), (["--every", "60s", "--verify"], "and --verify")])
def test_what_does_not_go_with_it_is_refused(words: list[str], match: str, store: Path, tmp_path: Path) -> None:
    with pytest.raises((ArgumentError, TapError), match=match):
        app(["push", str(store), (tmp_path / "bucket").as_uri(), *words], standalone_mode=False)


def test_the_command_pushes_until_a_signal_and_once_more(store: Path, tmp_path: Path) -> None:
    url = (tmp_path / "bucket").as_uri()
    with subprocess.Popen([sys.executable, "-m", "vllm_tap", "push", str(store), url, "--every", "1000s"],
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None and process.stdout is not None
        assert process.stderr.readline() == f"push ready: {url} every 1000 s\n"
        assert process.stdout.readline().startswith(f"{url}: generation 1;")
        new = grow(store)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0 and process.stdout.readline().startswith(f"{url}: generation 2;")
    assert until(lambda: new in ids(url, tmp_path / "cache"))


def test_what_no_head_names_goes_by_itself_once_readers_had_time(sample: Sample, store: Path, tmp_path: Path, url: str
                                                                 ) -> None:
    """Replaced blocks, and what a push that was killed had sent: at the second look that finds them."""
    going, before = Pushes(store, url), list[int]()

    def killed(done: int, total: int) -> None:
        raise KeyboardInterrupt

    def replaced() -> None:
        grow(store)
        with pytest.raises(KeyboardInterrupt):
            push(store, url, killed)
        compact(store)

    def looked() -> None:
        before.append(check(url).orphans)
        assert not [one for one in going.told if isinstance(one, Swept)], "readers of the last head may need them"

    sweeper = Sweeper(url)
    keep_pushing(store, url, going, 30.0, Turns(replaced, looked, nothing, nothing), going.told.append, sweeper, 0.0)
    (swept,) = [one for one in going.told if isinstance(one, Swept)]
    assert swept.objects == before[0] > 10 and swept.nbytes > 0
    report = check(url, deep=True)
    assert not report.orphans and not report.bad and head_of(url).epoch == 1
    assert sweeper() == Swept(url) and head_of(url).epoch == 1
    assert {sample.captures["few"]} < ids(url, tmp_path / "cache") and not push(store, url).changed


def test_a_sweep_deletes_nothing_where_a_head_cannot_be_read(store: Path, tmp_path: Path) -> None:
    url = (tmp_path / "bucket").as_uri()
    push(store, url)
    compact(store)
    push(store, url)
    sweeper, orphans = Sweeper(url), check(url).orphans
    assert sweeper() == Swept(url) and orphans
    for file in (tmp_path / "bucket" / "catalog").rglob("*.gz"):
        file.write_bytes(b"not a catalog")
    before = sorted((tmp_path / "bucket").rglob("*"))
    with pytest.raises(BucketError):
        sweeper()
    assert sorted((tmp_path / "bucket").rglob("*")) == before
