"""Deaths and stops of the supervisor and its children: real processes, killed for real."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from schemas.checks import check_can_listen
from schemas.errors import StartError, TapError
from tests.programs.supervised import PACE
from tests.support.processes import PATIENCE_S, free_port, runs
from vllm_tap.cli.main import app
from vllm_tap.serve.child import ServiceCommand, ServiceProcess, SessionGuard
from vllm_tap.serve.guard import session_members
from vllm_tap.serve.services import ServeConfig, folder_of, make_socket_dir, services
from vllm_tap.tiny_model import tiny_model

ROOT = Path(__file__).parents[3]
PROGRAM = ROOT / "tests" / "programs" / "supervised.py"


class Supervised:
    """One run of the program: its output, and the processes that it started by name."""

    def __init__(self, folder: Path, mode: str = "") -> None:
        self.folder, self.port = folder, free_port()
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(PROGRAM), str(folder), str(self.port), mode], stdout=log, stderr=log,
                start_new_session=True)

    def text(self) -> str:
        return self.log.read_text()

    def pids(self, name: str) -> list[int]:
        file = self.folder / f"{name}.pids"
        return [int(line) for line in file.read_text().split()] if file.exists() else []

    def everything(self) -> list[int]:
        return [pid for name in ("writer", "engine", "worker", "api") for pid in self.pids(name)]

    def guard(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return next(int(pid) for pid in children
                    if b"guard\0" in Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"guard.py", b""))

    def until_ready(self) -> None:
        until(lambda: "ALL READY" in self.text(), explain=self.text)

    def assert_nothing_left(self, seconds: float) -> None:
        until(lambda: not any(map(runs, self.everything())), seconds,
              lambda: f"left: {[pid for pid in self.everything() if runs(pid)]}\n{self.text()}")

    def end(self) -> None:
        for pid in [self.process.pid, *self.everything()]:
            if runs(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(PATIENCE_S)


def until(condition: Callable[[], bool], seconds: float = PATIENCE_S, explain: Callable[[], str] = lambda: "") -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {explain()}"
        time.sleep(0.03)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Supervised]]:
    begun: list[Supervised] = []

    def begin(mode: str = "") -> Supervised:
        begun.append(Supervised(tmp_path, mode))
        return begun[-1]

    yield begin
    for run in begun:
        run.end()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_stops_everything_in_order(start: Callable[..., Supervised], number: int) -> None:
    run = start()
    run.until_ready()
    run.process.send_signal(number)
    assert run.process.wait(PATIENCE_S) == 0
    run.assert_nothing_left(20)
    assert (run.folder / "order").read_text().split() == ["api", "writer"]
    assert "killed" not in run.text()
    assert not (run.folder / "sockets").exists()


def test_pushes_are_stopped_last_so_that_what_the_writer_sealed_goes_up(start: Callable[..., Supervised]) -> None:
    run = start("pushes")
    run.until_ready()
    run.process.send_signal(signal.SIGTERM)
    assert run.process.wait(PATIENCE_S) == 0
    assert (run.folder / "order").read_text().split() == ["api", "writer", "push"] and "at most 74 s" in run.text()


def test_pushes_that_die_again_and_again_end_nothing(start: Callable[..., Supervised]) -> None:
    run = start("push-dies")
    run.until_ready()
    until(lambda: len(run.pids("push")) > 7, 60, run.text)
    assert run.process.poll() is None and len(run.pids("writer")) == len(run.pids("api")) == 1
    run.process.send_signal(signal.SIGTERM)
    assert run.process.wait(PATIENCE_S) == 0


def test_a_stubborn_engine_is_killed_within_the_time(start: Callable[..., Supervised]) -> None:
    run = start("stubborn")
    run.until_ready()
    began = time.monotonic()
    run.process.send_signal(signal.SIGTERM)
    assert run.process.wait(PATIENCE_S) == 0
    assert 12 * PACE < time.monotonic() - began < 14.5 * PACE + 10
    run.assert_nothing_left(20)
    assert "engine did not end in time and was killed" in run.text()
    assert (run.folder / "order").read_text().split() == ["api", "writer"]


def test_a_second_signal_ends_it_at_once(start: Callable[..., Supervised]) -> None:
    run = start("stubborn")
    run.until_ready()
    run.process.send_signal(signal.SIGINT)
    until(lambda: "stopping" in run.text())
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(4) == 0
    run.assert_nothing_left(20)


def test_a_stop_while_the_engine_is_still_loading(start: Callable[..., Supervised]) -> None:
    run = start()
    until(lambda: bool(run.pids("writer")))
    run.process.send_signal(signal.SIGTERM)
    assert run.process.wait(PATIENCE_S) == 0
    run.assert_nothing_left(20)


@pytest.mark.parametrize("name", ["writer", "api"])
def test_a_killed_writer_or_api_is_started_again(start: Callable[..., Supervised], name: str) -> None:
    run = start()
    run.until_ready()
    engine = run.pids("engine")
    os.kill(run.pids(name)[0], signal.SIGKILL)
    until(lambda: len(run.pids(name)) == 2 and runs(run.pids(name)[1]), 5, run.text)
    assert f"{name} ended (SIGKILL): starting it again" in run.text()
    assert run.pids("engine") == engine and runs(engine[0])
    run.process.send_signal(signal.SIGTERM)
    assert run.process.wait(PATIENCE_S) == 0
    run.assert_nothing_left(20)


def test_the_death_of_the_engine_ends_the_whole(start: Callable[..., Supervised]) -> None:
    run = start()
    run.until_ready()
    worker = run.pids("worker")[0]
    os.kill(run.pids("engine")[0], signal.SIGKILL)
    assert run.process.wait(PATIENCE_S) == 1
    assert not runs(worker)
    run.assert_nothing_left(20)
    assert "engine ended (SIGKILL); everything is stopped" in run.text()


def test_a_stop_does_not_wait_long_for_an_engine_that_is_still_loading(start: Callable[..., Supervised]) -> None:
    run = start("loading")
    until(lambda: bool(run.pids("engine")) and "api is ready" in run.text())
    began = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(PATIENCE_S) == 0
    assert time.monotonic() - began < 12
    run.assert_nothing_left(20)


def test_an_engine_that_cannot_start_ends_the_whole_with_its_last_lines(start: Callable[..., Supervised]) -> None:
    run = start("engine-fails")
    assert run.process.wait(PATIENCE_S) == 1
    assert "engine ended (exit code 3) before it was ready; its last lines:\n    " in run.text()
    # What vLLM prints after our own reason fills more lines than are kept.
    assert "    no such model\n    why: cannot arm q; this model offers: resid_post\n" in run.text()
    run.assert_nothing_left(20)


def test_of_what_an_engine_raises_the_cause_is_told_last(start: Callable[..., Supervised]) -> None:
    run = start("engine-raises")
    assert run.process.wait(PATIENCE_S) == 1
    assert ("\n    why: torch.OutOfMemoryError: no memory for that\n    what helps: `-- --gpu-memory-utilization 0.8`"
            ) in run.text()
    run.assert_nothing_left(20)


@pytest.mark.parametrize(("line", "raised"), [
    ("OSError: nowhere: 'x'", "OSError: nowhere: 'x'"), ("(APIServer pid=1) a.B.CError: x", "a.B.CError: x"),
    ("  Value error, Unrecognized model in x. [type=value_error, input_value=1]", "Unrecognized model in x."),
    ("x.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause.", None),
    ("(EngineCore pid=2) ERROR 1-1 [core.py:1] Exception: WorkerProc initialization failed due to an exception in a "
     "background process. See stack trace for root cause.", None),
    ("RuntimeError: Worker failed with error 'no room', please check the stack trace above for the root cause", None),
    ("(Worker pid=3) ERROR 1-1 [m.py:9] vllm-tap: StartError: vllm-tap: no place", "no place"),
    ("    raise ValueError('x')", None), ("INFO 1-1 [a.py:1] Error handling: on", None), ("it said Error: x", None),
])
def test_what_counts_as_raised(line: str, raised: str | None, tmp_path: Path) -> None:
    child = ServiceProcess(ServiceCommand("engine", ()), SessionGuard(tmp_path), lambda name, text: None)
    child._take(line.encode())
    child._take(b"nanobind: leaked 3 types!")
    assert child.causes.cause == raised and list(child.last_lines) == [line]


def test_arguments_that_the_engine_does_not_take_are_told_in_a_line(start: Callable[..., Supervised]) -> None:
    run = start("engine-refuses")
    assert run.process.wait(PATIENCE_S) == 2
    assert "engine ended (exit code 2) before it was ready" in run.text()
    assert "engine | engine: error: unrecognized arguments: --bogus" in run.text()
    assert "--flag" not in run.text(), "the engine's usage text buries its one line"
    run.assert_nothing_left(20)


def test_a_writer_that_keeps_dying_ends_the_whole(start: Callable[..., Supervised]) -> None:
    run = start("writer-dies")
    assert run.process.wait(PATIENCE_S) == 1
    assert len(run.pids("writer")) == 6
    assert "writer ended (exit code 7) for the 6th time" in run.text()
    run.assert_nothing_left(20)


@pytest.mark.parametrize("mode", ["", "stubborn"])
def test_nothing_outlives_a_killed_supervisor(start: Callable[..., Supervised], mode: str) -> None:
    run = start(mode)
    run.until_ready()
    guard = run.guard()
    run.process.kill()
    run.assert_nothing_left(12 * PACE + 20)
    until(lambda: not runs(guard))
    assert not (run.folder / "sockets").exists()


def test_nothing_outlives_a_supervisor_killed_while_starting(start: Callable[..., Supervised]) -> None:
    run = start()
    until(lambda: bool(run.pids("writer")))
    run.process.kill()
    run.assert_nothing_left(12)


def test_a_killed_guard_is_replaced_and_does_its_work(start: Callable[..., Supervised]) -> None:
    run = start("stubborn")
    run.until_ready()
    first = run.guard()
    os.kill(first, signal.SIGKILL)
    until(lambda: "starting another" in run.text())
    time.sleep(0.5)
    assert run.guard() != first
    run.process.kill()
    run.assert_nothing_left(12 * PACE + 20)


def test_supervisor_and_guard_killed_together_leave_nothing_that_heeds_a_signal(
    start: Callable[..., Supervised],
) -> None:
    run = start()
    run.until_ready()
    guard = run.guard()
    run.process.send_signal(signal.SIGSTOP)
    os.kill(guard, signal.SIGKILL)
    run.process.kill()
    run.assert_nothing_left(5)


def test_session_members_sees_processes_and_not_zombies() -> None:
    process = subprocess.Popen(["sleep", "30"], start_new_session=True)
    assert session_members(process.pid) == [process.pid]
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert session_members(process.pid) == []
    process.wait()


# ── what is refused before anything starts ──────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("changes, names", [
    ({"arm": "resid_poste"}, ["--arm", "resid_poste", "resid_post"]),
    ({"arm": "blocks.9.hook_resid_post"}, ["--arm", "resid_post.9", "layers 0 to 3"]),
    ({"model": "/nowhere/at/all"}, ["MODEL", "/nowhere/at/all", "no such folder"]),
    ({"port": 0}, ["--port", "0", "65535"]),
    ({"engine_port": 8100}, ["--engine-port", "8100"]),
    ({"host": "0.0.0.0"}, ["loopback", "vllm-tap keys make"]),
    ({"on_full": "explode"}, ["--on-full", "explode", "drop", "wait"]),
    ({"durability": "hope"}, ["--durability", "hope", "fsync"]),
    ({"ring_bytes": 5}, ["--ring-bytes", "5", "4194304"]),
    ({"seal_idle_s": 0.0}, ["--seal-idle-s"]),
    ({"engine_args": ("--port=1",)}, ["--port=1", "--engine-port"]),
    ({"store": Path("/proc/version/store")}, ["--store", "/proc/version", "not a folder"]),
    ({"bucket": "bucket/prefix"}, ["--bucket", "bucket/prefix", "s3://BUCKET/PREFIX"]),
    ({"bucket": "s3://bucket/*"}, ["--bucket", "one prefix"]),
    ({"bucket": "ftp://bucket/prefix"}, ["--bucket", "ftp://bucket/prefix"]),
    ({"bucket": "file:///tmp/b", "push_every_s": 0.5}, ["--push-every", "0.5", "1s to 1d"]),
    ({"local_bytes": 5}, ["--local-bytes", "5", "--bucket"]),
    ({"also": ["captures"]}, ["--also", "captures", "s3://BUCKET/PREFIX"]),
    ({"catalog": "postgresql://a/b"}, ["--catalog", "--bucket"]),
    ({"bucket": "file:///tmp/b", "catalog": "mysql://a/b"}, ["catalog = ", "postgresql://USER@HOST"]),
    ({"bucket": "file:///tmp/b", "local_bytes": 0}, ["--local-bytes", "0"]),
    ({"bucket": "file:///tmp/b", "local_bytes": 5, "retain_bytes": 5}, ["--retain-bytes", "--local-bytes"]),
])
def test_a_bad_setting_is_named_with_its_value_and_the_cure(changes: dict[str, object], names: list[str],
                                                            tmp_path: Path) -> None:
    good: dict[str, object] = {"model": str(tiny_model()), "store": tmp_path}
    ServeConfig(**good)  # type: ignore[arg-type]
    with pytest.raises(StartError) as caught:
        ServeConfig(**{**good, **changes})  # type: ignore[arg-type]
    for name in names:
        assert name in str(caught.value)


def test_a_port_in_use_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=f"--port {port} on 127.0.0.1: Address already in use"):
            check_can_listen("127.0.0.1", port, "--port")
        folder = make_socket_dir()
        with pytest.raises(StartError, match=f"--engine-port {port}"):
            services(ServeConfig(str(tiny_model()), tmp_path, port=free_port(), engine_port=port), folder)
        with pytest.raises(StartError, match=f"--metrics-port {port}"):
            services(ServeConfig(str(tiny_model()), tmp_path, port=free_port(), engine_port=free_port(),
                                 metrics_port=port), folder)
        folder.rmdir()
    check_can_listen("127.0.0.1", port, "--port")


def test_a_bucket_adds_pushes_of_the_stores_folder(tmp_path: Path) -> None:
    config = ServeConfig(str(tiny_model()), tmp_path, port=free_port(), engine_port=free_port(),
                         bucket="file:///tmp/a bucket", push_every_s=90.0, local_bytes=7)
    *_, push = services(config, tmp_path)
    assert push.command[-7:] == ("push", str(tmp_path), "file:///tmp/a bucket", "--every", "90.000s", "--local-bytes",
                                 "7")
    *_, cataloged = services(replace(config, catalog="postgresql://a@b/c"), tmp_path)
    *_, api = services(replace(config, bucket="", local_bytes=None, also=["s3://b/*", "s3://c"]), tmp_path)
    assert api.command[-4:] == ("--also", "s3://b/*", "--also", "s3://c")
    assert cataloged.command[-2:] == ("--catalog", "postgresql://a@b/c") and "postgresql" not in repr(config)
    assert [one.name for one in services(replace(config, bucket="", local_bytes=None), tmp_path)] == [
        "writer", "engine", "api"]


def test_a_store_that_is_known_by_its_url_has_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                                   ) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    urls = ["s3://bucket/a", "s3://bucket/a/", "s3://bucket/../a", "gs://bucket/a", "s3://bucket-a",
            "s3://" + "b" * 300]
    folders = [folder_of(url) for url in urls]
    assert folders[0] == folders[1] and len(set(folders)) == len(urls) - 1
    assert {folder.parent for folder in folders} == {tmp_path / "vllm-tap" / "stores"}
    assert all(len(folder.name) < 80 and ".." not in folder.name for folder in folders)


def test_a_url_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TapError, match="name the URL once"):
        app(["serve", "--tiny", "--store", "s3://bucket/a", "--bucket", "s3://bucket/b"], standalone_mode=False)


def test_the_socket_folder_is_private_and_short() -> None:
    folder = make_socket_dir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert len(bytes(folder / "writer.sock")) <= 100
    folder.rmdir()
