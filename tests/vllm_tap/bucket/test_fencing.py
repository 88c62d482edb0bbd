"""Fencing: a folder that was put back or copied never pushes over a later head; taking over loses nothing."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest

from schemas.errors import ArgumentError, BucketError, FencedError, OutrunError, StoreError
from schemas.ids import new_ulid
from schemas.objects.layout import HEAD, INDEX, Head
from schemas.objects.objects import Objects, Version
from schemas.read.reader import StoreReader
from schemas.store.paths import pushed_name
from tests.support.buckets import FaultProxy
from tests.support.forked import tap
from tests.support.store_helpers import ROOT, SITE
from tests.vllm_tap.bucket.conftest import Sample, erase, grow
from tests.vllm_tap.bucket.test_push import keys
from vllm_tap import open_store
from vllm_tap.bucket.known import KnownHead, KnownHeads
from vllm_tap.bucket.push import push
from writer_service.tools.compaction import compact


def copy(store: Path, name: str) -> Path:
    return Path(shutil.copytree(store, store.parent / name))


def head_of(url: str) -> Head:
    return msgspec.json.decode(keys(url)[HEAD], type=Head)


def assert_equal(url: str, store: Path, cache: Path, captures: int) -> None:
    """The bucket gives what the folder does, bit for bit."""
    with open_store(url, cache) as opened, StoreReader(store) as local:
        listed = [row.id for row in opened.captures()]
        assert len(listed) == captures
        for capture in listed:
            layers = sorted({one.layer for one in local.manifest(capture).rows})
            assert opened.reader.slice(capture, SITE, layers).values().tobytes() == local.slice(
                capture, SITE, layers).values().tobytes()


def test_a_folder_that_was_put_back_is_refused_and_changes_nothing(store: Path, tmp_path: Path, url: str) -> None:
    push(store, url)
    backup = copy(store, "backup")
    later = grow(store)
    assert push(store, url).generation == 2
    mine = grow(backup)  # it goes on from the earlier state
    before = keys(url)
    with pytest.raises(FencedError, match=r"generation 2 of 20\d\d-.* did not push \(the last it knows is generation 1"
                                          r"\): the folder was put back .*--take-over"):
        push(backup, url)
    assert keys(url) == before
    assert push(store, url).changed is False  # who pushed last goes on
    done = push(backup, url, take_over=True)
    assert (done.generation, done.changed, done.only_retired, done.captures) == (3, True, 1, 8)
    assert done.retired == msgspec.json.decode(before[HEAD], type=Head).push
    assert_equal(url, backup, tmp_path / "cache", 8)
    retired = f"{url}#{done.retired}"
    assert_equal(retired, store, tmp_path / "cache", 8)
    with open_store(url, tmp_path / "cache") as now, open_store(retired, tmp_path / "cache") as then:
        assert mine in {row.id for row in now.captures()} and later not in {row.id for row in now.captures()}
        assert later in {row.id for row in then.captures()} and mine not in {row.id for row in then.captures()}
        assert then.refresh() is False
    assert {key: data for key, data in keys(url).items() if key in before and key != HEAD} == {
        key: data for key, data in before.items() if key != HEAD}
    with pytest.raises(FencedError, match=r"generation 3"):  # and the other one is fenced in turn
        push(store, url)
    grow(backup)
    assert push(backup, url).generation == 4


def test_of_a_folder_and_its_copy_who_pushes_first_goes_on(store: Path, url: str) -> None:
    push(store, url)
    clone = copy(store, "clone")
    grow(clone)
    grow(store)
    assert push(clone, url).generation == 2
    for _ in range(2):
        with pytest.raises(FencedError, match="generation 2"):
            push(store, url)
    assert push(clone, url).changed is False


def test_two_with_one_lease_at_once(store: Path, url: str) -> None:
    """Both know the head, and both have begun: the conditional write decides."""
    push(store, url)
    clone = copy(store, "clone")
    grow(store)
    grow(clone)
    done: list[int] = []

    def meanwhile(now: int, total: int) -> None:
        if not done:
            done.append(push(clone, url).generation)

    with pytest.raises(OutrunError, match=r"another push was first, generation 2, from a copy .*--take-over"):
        push(store, url, meanwhile)
    won = keys(url)[HEAD]
    with pytest.raises(FencedError):
        push(store, url)
    assert keys(url)[HEAD] == won


def test_a_copy_from_before_the_first_push_is_refused(store: Path, url: str) -> None:
    other = copy(store, "other")
    push(store, url)
    with pytest.raises(FencedError, match="it has pushed nothing there"):
        push(other, url)
    assert push(other, url, take_over=True).generation == 2
    with pytest.raises(FencedError):
        push(store, url)


def test_a_head_that_has_more_is_refused_although_it_is_known(sample: Sample, store: Path, url: str) -> None:
    """A backup without the file that remembers, or with a later one."""
    early = copy(store, "early")
    late = grow(store)
    push(store, url)
    shutil.copy(store / pushed_name(), early / pushed_name())
    with pytest.raises(FencedError, match=rf"has 1 captures that .* has not whole, {late} first"):
        push(early, url)
    erase(store, sample.captures["few"])
    push(store, url)
    shutil.copy(store / pushed_name(), early / pushed_name())
    back = copy(store, "back")
    shutil.copy(early / "catalog.sqlite", back / "catalog.sqlite")
    with pytest.raises(FencedError, match="captures that"):
        push(early, url)


def test_what_was_deleted_is_not_brought_back_by_a_take_over(sample: Sample, store: Path, tmp_path: Path,
                                                             url: str) -> None:
    few = sample.captures["few"]
    push(store, url)
    backup = copy(store, "backup")
    erase(store, few)
    push(store, url)
    for take_over, says in ((False, "did not push"), (True, rf"1 captures .* were deleted there, {few} first")):
        with pytest.raises(FencedError, match=says):
            push(backup, url, take_over=take_over)
    shutil.copy(store / pushed_name(), backup / pushed_name())
    with pytest.raises(FencedError, match=rf"its head has deleted 1 captures that .* still has, {few} first"):
        push(backup, url)
    erase(backup, few)
    assert push(backup, url, take_over=True).captures == 6
    with open_store(url, tmp_path / "cache") as opened:
        assert few not in {row.id for row in opened.captures()}


def test_a_folder_that_cannot_remember_sends_nothing(store: Path, tmp_path: Path) -> None:
    (store / pushed_name()).mkdir()
    with pytest.raises(StoreError, match=r"pushed\.json"):
        push(store, (tmp_path / "bucket").as_uri())
    assert not list((tmp_path / "bucket").rglob("*.zarr"))
    (store / pushed_name()).rmdir()
    (store / pushed_name()).write_bytes(b'[{"url": 3}]')
    with pytest.raises(StoreError, match=r"malformed.*remove it, and push with --take-over"):
        push(store, (tmp_path / "bucket").as_uri())


def test_it_remembers_few(store: Path) -> None:
    known = KnownHeads(store, "s3://x")
    push(store, (store.parent / "bucket").as_uri())
    head = head_of((store.parent / "bucket").as_uri())
    for number in range(5):
        known.begin(msgspec.structs.replace(head, push=f"{number:032x}", parent=head.push))
    known.begin(msgspec.structs.replace(head, push="a" * 32, parent="b" * 32))
    assert len(known.read()) == 7
    known.settle(head)
    assert [one.push for one in known.read()] == [head.push, *(f"{number:032x}" for number in range(5))]
    known.settle(msgspec.structs.replace(head, push=f"{4:032x}"))
    assert [one.push for one in known.read()] == [head.push, f"{4:032x}"]
    assert isinstance(known.read()[0], KnownHead) and known.read()[0].url != "s3://x"


def test_a_retired_head_is_named_right_or_not_at_all(store: Path, tmp_path: Path) -> None:
    url = (tmp_path / "bucket").as_uri()
    push(store, url)
    with pytest.raises(ArgumentError, match="32 hex digits"):
        open_store(f"{url}#../head", tmp_path / "cache")
    with pytest.raises(BucketError, match=r"no retired/0{32}\.json in it \(was it removed"):
        open_store(f"{url}#{'0' * 32}", tmp_path / "cache")


# ── the answer of the write that shows all is lost; whoever pushes is killed ──────────────────────────────────────


@pytest.mark.parametrize("happened", [True, False])
def test_who_ends_in_the_write_of_the_head_knows_it_again(store: Path, url: str, happened: bool,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """It was written or not, and nothing was remembered behind it."""
    class EndedError(Exception):
        pass

    real = Objects.swap

    def swap(self: Objects, key: str, data: bytes, seen: Version | None) -> None:
        if happened:
            real(self, key, data, seen)
        raise EndedError

    for generation in (1, 2):
        with monkeypatch.context() as patch:
            patch.setattr(Objects, "swap", swap)
            with pytest.raises(EndedError):
                push(store, url)
        assert (HEAD in keys(url)) == (happened or generation == 2)
        done = push(store, url)
        assert (done.generation, done.changed) == (generation, not happened)
        compact(store)


@pytest.mark.soak
@pytest.mark.parametrize("take_over", [pytest.param(False, marks=pytest.mark.soak), True])
def test_every_end_on_the_way_to_a_second_head_leaves_the_first(store: Path, tmp_path: Path, url: str, take_over: bool,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is put every object is the last one once; readers see the first head whole until the second is there."""
    class EndedError(Exception):
        pass

    push(store, url)
    pusher = copy(store, "backup") if take_over else store
    if take_over:
        grow(store)
        push(store, url)
    first = keys(url)[HEAD]
    compact(pusher)
    left, real_put, real_swap = 0, Objects.put, Objects.swap

    def spend() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise EndedError

    def put(self: Objects, key: str, data: Any) -> None:
        spend()
        real_put(self, key, data)

    def swap(self: Objects, key: str, data: bytes, seen: Version | None) -> None:
        spend()
        real_swap(self, key, data, seen)

    ended = 0
    with monkeypatch.context() as patch:
        patch.setattr(Objects, "put", put)
        patch.setattr(Objects, "swap", swap)
        while True:
            left = 4
            try:
                done = push(pusher, url, take_over=take_over)
                break
            except EndedError:
                ended += 1
                assert keys(url)[HEAD] == first
    assert ended > 3 and done.changed and done.generation == 2 + take_over
    assert_equal(url, pusher, tmp_path / "cache", 7)
    if take_over:
        assert_equal(f"{url}#{done.retired}", store, tmp_path / "cache", 8)


PUSH_PROGRAM = """import sys
from pathlib import Path
from vllm_tap.bucket.push import push
push(Path(sys.argv[1]), sys.argv[2], take_over=sys.argv[3] == "True")
"""


@pytest.mark.parametrize("arrives", [True, False])
@pytest.mark.parametrize("at", [HEAD, f"/{INDEX}", *(pytest.param(at, marks=pytest.mark.soak) for at in (
    "/zarr.json", "/c/0/0/0", ".sqlite.gz", ".conditions", ".json"))])
def test_a_push_that_is_killed_at_a_step_is_taken_up(store: Path, tmp_path: Path, s3: FaultProxy, at: str,
                                                     arrives: bool) -> None:
    """kill -9 while an object is on its way, which arrives all the same or does not; ``.json``: a retired head."""
    url = f"s3://bucket/{new_ulid()}"
    push(store, url)
    pusher, retires = store, at == ".json"
    if retires:
        pusher = copy(store, "backup")
        grow(store)
        push(store, url)
    first = head_of(url)
    compact(pusher)
    process: list[subprocess.Popen[str]] = []

    def kill(method: str, path: str) -> str | None:
        key = urlsplit(path).path
        if process and method in ("PUT", "POST") and key.endswith(at) and ("/retired/" in key) == retires:
            process.pop().send_signal(signal.SIGKILL)
            return "lost" if arrives else "503"
        return None

    s3.fault = kill
    command = [sys.executable, "-c", PUSH_PROGRAM, str(pusher), url, str(retires)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    running = subprocess.Popen(command, env=environment, text=True)
    process.append(running)
    assert running.wait(300) == -signal.SIGKILL
    time.sleep(0.2)  # what was on its way arrives
    s3.fault = lambda method, path: None
    written = at == HEAD and arrives
    assert (head_of(url) == first) != written
    done = push(pusher, url, take_over=retires)
    assert done.changed != written and done.generation == first.generation + 1
    assert_equal(url, pusher, tmp_path / "cache", 7)
    if retires:
        assert_equal(f"{url}#{first.push}", store, tmp_path / "cache", 8)


def test_a_lost_answer_while_a_copy_pushes(store: Path, s3: FaultProxy) -> None:
    """The write did not happen, no answer came, and a copy was first: neither takes the other's head for its own."""
    url = f"s3://bucket/{new_ulid()}"
    push(store, url)
    clone = copy(store, "clone")
    grow(store)
    grow(clone)
    met: list[Callable[[], Any]] = [lambda: push(clone, url)]

    def fault(method: str, path: str) -> str | None:
        if method == "PUT" and urlsplit(path).path.endswith(HEAD) and met:
            met.pop()()
            return "lost"
        return None

    s3.fault = fault
    with pytest.raises(OutrunError, match="another push was first, generation 2, from a copy"):
        push(store, url)


def test_the_command_takes_over(store: Path, tmp_path: Path) -> None:
    run = partial(tap, "push")
    url = (tmp_path / "bucket").as_uri()
    other = copy(store, "other")
    later = grow(store)
    push(store, url)
    refused = run(str(other), url)
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1 and "--take-over" in refused.stderr
    done = run(str(other), url, "--take-over")
    assert done.returncode == 0 and "1 captures are in it alone" in done.stderr, done.stderr
    retired = f"{url}#{done.stderr.partition(f'{url}#')[2][:32]}"
    with open_store(retired, tmp_path / "cache") as opened:
        assert later in {row.id for row in opened.captures()}
