"""Children that run ``python -m MODULE``, forked out of a process that has imported the module: they start in
milliseconds, where an interpreter of their own takes half a second of processor time for its imports.

For the rest they are as ``subprocess.Popen`` makes them: children of this process, with their own environment and
pipes, that run the module as ``__main__`` from its first line. For each module, and for each setting of what Python and
its libraries read before a program does, one process is kept to fork from. It ends with this process.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from schemas.native.loops import load

ROOT: Final = Path(__file__).resolve().parents[2]
# They start nothing when they are imported.
MODULES: Final = ("api", "tests.support.upstream_server", "tests.support.writers.broken", "vllm_tap", "writer_service")
_AT_START: Final = ("PYTHON", "LD_", "OMP_", "OPENBLAS_", "NUMBA_", "MALLOC_", "PROMETHEUS_", "LANG", "LC_", "TZ")
_MESSAGE_BYTES: Final = 1 << 18
_SUBREAPER: Final = 36  # PR_SET_CHILD_SUBREAPER: takes children whose parents have ended
_lock = threading.Lock()


def started(module: str, args: Sequence[str], stderr: Any = subprocess.PIPE, stdout: Any = subprocess.PIPE, **more: str
            ) -> subprocess.Popen[str]:
    """A child that runs ``python -m MODULE ARGS``, with ``more`` in its environment. What it says is text."""
    kind: type[subprocess.Popen[str]] = _Forked if module in MODULES else subprocess.Popen
    return kind([sys.executable, "-m", module, *args], cwd=ROOT, stdout=stdout, stderr=stderr, text=True,
                env={**os.environ, **more})


def tap(*arguments: object, cwd: Path = ROOT, **more: str) -> subprocess.CompletedProcess[str]:
    """``vllm-tap ARGUMENTS``, run to its end."""
    command = [sys.executable, "-m", "vllm_tap", *map(str, arguments)]
    with _Forked(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                 env={**os.environ, **more}) as process:
        try:
            said = process.communicate(timeout=300)
        finally:
            process.kill()
    return subprocess.CompletedProcess(command, process.returncode, *said)


class _Forked(subprocess.Popen[str]):
    """A child that another process has forked, twice: the one between ends, and this process is its parent then."""

    def _execute_child(self, args: list[str], *rest: Any) -> None:
        """In place of a fork and an exec, as Python 3.11 to 3.14 ask for them."""
        (folder, environment), pipes = rest[4:6], rest[9:15]
        ends = [0 if pipes[0] == -1 else pipes[0], *(number if end == -1 else end
                                                     for number, end in ((1, pipes[3]), (2, pipes[5])))]
        at_start = {name: value for name, value in environment.items() if name.startswith(_AT_START)}
        message = json.dumps([args[3:], str(folder), environment]).encode()
        with _lock:
            parent = _parent(args[2], json.dumps(at_start, sort_keys=True))
            ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(parent, [message], ends)
                self.pid = int(parent.recv(_MESSAGE_BYTES))
            finally:
                ctypes.CDLL(None).prctl(_SUBREAPER, 0, 0, 0, 0)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


@cache
def _parent(module: str, at_start: str) -> socket.socket:
    """The way to the process that has imported a module."""
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for way in (mine, its):
        way.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MESSAGE_BYTES)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_AT_START)}
    process = subprocess.Popen([sys.executable, "-m", "tests.support.forked", module, str(its.fileno())], cwd=ROOT,
                               pass_fds=[its.fileno()], env={**kept, **json.loads(at_start)})
    its.close()

    def end() -> None:
        mine.close()
        process.wait()

    atexit.register(end)
    return mine


def serve(module: str, asked: socket.socket) -> None:
    """Fork children as they are asked for, until nobody can ask any more."""
    name = f"{module}.__main__" if (ROOT / module.replace(".", "/")).is_dir() else module
    importlib.import_module(name)
    del sys.modules[name]  # each child runs it anew
    if module == "api":
        load()  # as each child would, for two seconds of a processor
    gc.collect()
    gc.freeze()  # children share what is there
    while True:
        message, ends, _, _ = socket.recv_fds(asked, _MESSAGE_BYTES, 3)
        if not message:
            return
        read, write = os.pipe()
        if not (between := os.fork()):
            if not (child := os.fork()):
                os.close(read)
                os.close(write)
                asked.close()
                _run(module, json.loads(message), ends)
            os.write(write, b"%d" % child)
            os._exit(0)
        os.waitpid(between, 0)
        asked.send(os.read(read, 100))
        for descriptor in (read, write, *ends):
            os.close(descriptor)


def _run(module: str, asked: tuple[list[str], str, dict[str, str]], ends: Sequence[int]) -> None:
    """The module's program in this process, to its end."""
    args, folder, environment = asked
    os.chdir(folder)
    for standard, descriptor in enumerate(ends):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = args
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.exit()


if __name__ == "__main__":
    serve(sys.argv[1], socket.socket(fileno=int(sys.argv[2])))
