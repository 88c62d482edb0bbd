"""What all processes of tests have in common, and what one test leaves behind for the next in its process: nothing that
another would take for its own settings.
"""

from __future__ import annotations

import os
import runpy
from collections.abc import Generator, Iterator
from pathlib import Path

import httpx
import pytest

from engine_side.config import GROUP
from schemas.native import loops
from tests.support.processes import PATIENCE_S

ROOT = Path(__file__).parents[1]
START = ROOT / "tests" / "support" / "start"  # a module of this name is read at the start of every Python below
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(START), str(ROOT), os.environ.get("PYTHONPATH"))))
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):  # processes outnumber cores
    os.environ.setdefault(name, "1")
runpy.run_path(str(START / "sitecustomize.py"))  # this process has started already
for _phase in ("connect", "read", "write", "pool"):  # of requests that name no limit: httpx gives up after 5 s
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, _phase, PATIENCE_S)

_OURS = ("VLLM_TAP_", "VLLM_ACT_", "VLLM_PLUGINS", "VLLM_ENABLE_V1_MULTIPROCESSING", "XDG_", "HF_HUB_CACHE", "TMPDIR")


def _settings() -> dict[str, str]:
    """Variables that decide whether and how an engine or a service of this process, or of its children, works."""
    return {name: value for name, value in os.environ.items() if name.startswith(_OURS) and name != GROUP}


@pytest.fixture(autouse=True)
def settings_stay(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves other settings or another working directory than it found, and put them back."""
    before, folder = _settings(), Path.cwd()
    yield
    after, last = _settings(), Path.cwd()
    for name in before.keys() | after.keys():
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    os.chdir(folder)
    changed = {name: (before.get(name), after.get(name)) for name in before.keys() | after.keys()
               if before.get(name) != after.get(name)}
    assert not changed, f"{request.node.nodeid} changed settings, from and to: {changed}"
    assert last == folder, f"{request.node.nodeid} left the working directory {last}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, object, object]:
    """Fixtures of a test: see ``pytest_runtest_call``."""
    found = yield
    _loops_made()
    return found


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """A test; a thread that it began has imported numba when it ends. Imports make loggers, over which pytest iterates
    before a teardown.
    """
    try:
        return (yield)
    finally:
        _loops_made()


def _loops_made() -> None:
    if loops._maker is not None and loops._maker.ident is not None:
        loops._maker.join()
