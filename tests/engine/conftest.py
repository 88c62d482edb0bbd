"""One writer, one store and one environment for all engine tests of a session; engines come one a module."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from schemas.read.reader import StoreReader
from schemas.wire.curve import make_sender
from tests.support.engines.engines import model
from tests.support.models.reference import Reference
from tests.support.processes import PATIENCE_S, free_port
from vllm_tap.tiny_model import cache_dir

ENVIRONMENT = {
    "VLLM_TAP_ARM": "resid_post,attn_out,mlp_out",
    "VLLM_TAP_RING_BYTES": str(64 << 20),
    "VLLM_TAP_ON_FULL": "wait",
    "VLLM_CPU_CI_ENV": "1",  # Dynamo traces the whole graph; only Inductor's C++ compilation is left out
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # on a GPU machine the test process may hold CUDA already
    "VLLM_LOGGING_LEVEL": "WARNING",
}


@dataclass
class Store:
    """A store and the real writer process that owns it."""

    path: Path
    writer: subprocess.Popen[str]  # a test that kills it starts another
    remote: dict[str, str]  # the settings of an engine that reaches it as from another host


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """The store that the engines of this session send to."""
    path = tmp_path_factory.mktemp("store")
    with tempfile.TemporaryDirectory(prefix="vllm-tap-") as directory:
        endpoint = f"ipc://{directory}/writer.sock"
        listen = f"tcp://127.0.0.1:{free_port()}"
        keys = make_sender(Path(directory) / "curve", "test")
        writer = subprocess.Popen(
            [sys.executable, "-m", "writer_service", "--store", str(path), "--endpoint", endpoint,
             "--listen", listen, "--curve", str(keys.parent)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None and "writer ready" in writer.stdout.readline()
        before = dict(os.environ)
        torch.set_num_threads(1)
        os.environ.update(ENVIRONMENT, VLLM_TAP_ENDPOINT=endpoint, VLLM_CACHE_ROOT=str(cache_dir() / "vllm"))
        made = Store(path, writer, {"VLLM_TAP_ENDPOINT": listen, "VLLM_TAP_CURVE": str(keys)})
        try:
            yield made
        finally:
            os.environ.clear()
            os.environ.update(before)
            made.writer.send_signal(signal.SIGCONT)
            made.writer.terminate()
            assert made.writer.wait(PATIENCE_S) == 0
            if made.writer.stdout is not None:
                made.writer.stdout.close()


@pytest.fixture(scope="session")
def reader(store: Store) -> Iterator[StoreReader]:
    """A reader on the session's store."""
    with StoreReader(store.path) as opened:
        yield opened


@pytest.fixture(scope="session")
def reference_of() -> Callable[[str], Reference]:
    """References by model family, made once."""
    made: dict[str, Reference] = {}

    def of(family: str) -> Reference:
        if family not in made:
            made[family] = Reference(model(family))
        return made[family]

    return of
