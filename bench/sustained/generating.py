"""A real engine in the place of the played one: vLLM generates the load again and again, every request captured."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

import psutil

from bench.engine_run import options
from bench.scenarios import ENGINES
from bench.shapes import LOADS, SHAPES, make_model, prompts
from bench.sustained.played import DTYPE, SITE, Played
from schemas import codecs
from schemas.errors import NotFoundError
from schemas.ids import new_ulid
from schemas.manifest import FINAL
from schemas.read.reader import StoreReader

_LOOK_S: Final = 0.002
_DURABLE_S: Final = 60.0


class GeneratingEngine:
    """``LLM`` of a shape with random weights, the tap as it comes: what it does where the ring is full is the default,
    as is the ring where ``ring`` (bytes) is 0.

    ``pid`` is vLLM's core.
    """

    def __init__(self, shape: str, codec: str, load: str, store: Path, endpoint: str, folder: Path, ring: int = 0
                 ) -> None:
        import torch

        settings = {"VLLM_TAP_ENDPOINT": endpoint, "VLLM_TAP_ARM": SITE, "VLLM_NO_USAGE_STATS": "1",
                    "VLLM_TAP_STAGING_BYTES_MAX": str(64 << 30), "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
        if ring:
            settings["VLLM_TAP_RING_BYTES"] = str(ring)
        self.load, self._name, self._codec, self._store = LOADS[load], load, codec, store
        self.layers = SHAPES[shape].layers
        self.row_bytes = self.layers * sum(
            stream.nbytes for stream in codecs.streams(codec, SHAPES[shape].hidden, DTYPE))
        on_gpu = torch.cuda.is_available()
        with patch.dict(os.environ, settings):
            from vllm import LLM

            self._llm: Any = LLM(str(make_model(shape, folder)), load_format="dummy", skip_tokenizer_init=True, seed=0,
                                 dtype=DTYPE if on_gpu else "float32", enable_prefix_caching=False,
                                 **options(ENGINES["tap"], shape, [self.load], on_gpu))
        inside = psutil.Process().children(recursive=True)
        sender = next(one for one in inside if any("sender_process" in word for word in one.cmdline()))
        self.sender = SimpleNamespace(pid=sender.pid)
        self.pid = sender.ppid()

    def play(self, seconds: float, rate: float | None, ended: Callable[[list[str]], None],
             tell: Callable[[float], None] = lambda done: None) -> Played:
        """Generate for so long, as fast as it goes (``rate`` is not looked at); as ``PlayedEngine.play`` otherwise.

        A latency is the time from the end of a round until its last capture has ended in the store. What was dropped
        the store tells.
        """
        assert rate is None, "a real engine generates as fast as it can"
        latencies: list[float] = []
        taken: list[float] = []
        rounds: list[tuple[str, float]] = []
        over = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(rounds, latencies, over))
        watcher.start()
        begun = time.monotonic()
        try:
            while (now := time.monotonic()) - begun < seconds:
                captures = self._generate()
                last = time.monotonic()
                taken.append(last - now)
                rounds.append((captures[-1], last))
                ended(captures)
                tell(min(last - begun, seconds))
        finally:
            over.set()
            watcher.join()  # when it has seen the last round
        rows = len(rounds) * self.load.batch * (self.load.prompt + self.load.generated - 1) * self.layers
        return Played(last - begun, last + latencies[-1] - begun, rows * self.row_bytes // self.layers, rows, 0,
                      latencies, taken)

    def _generate(self) -> list[str]:
        from vllm import SamplingParams

        captures = [new_ulid() for _ in range(self.load.batch)]
        params = [SamplingParams(temperature=0, max_tokens=self.load.generated, ignore_eos=True, detokenize=False,
                                 extra_args={"capture": {"id": capture, "codec": self._codec}})
                  for capture in captures]
        self._llm.generate(prompts(self.load, self._name), params, use_tqdm=False)
        return captures

    def _watch(self, rounds: list[tuple[str, float]], latencies: list[float], over: threading.Event) -> None:
        """Note when the last capture of each round has ended in the store, one round after the other."""
        with StoreReader(self._store) as reader:
            while len(latencies) < len(rounds) or not over.is_set():
                if len(latencies) < len(rounds):
                    capture, end = rounds[len(latencies)]
                    try:
                        known = reader.capture(capture).status in (*FINAL, "deleted")
                    except NotFoundError:
                        known = False
                    now = time.monotonic()
                    if known or now - end > _DURABLE_S:
                        latencies.append(now - end)
                        continue
                time.sleep(_LOOK_S)

    def close(self) -> None:
        """End the engine."""
        self._llm.llm_engine.engine_core.shutdown()
