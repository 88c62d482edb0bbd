"""Real vLLM engines for tests, each with the plugin, all sending to one real writer process."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine_side.plugin import register
from schemas.errors import NotFoundError, StartError
from schemas.ids import new_ulid
from schemas.manifest import Manifest
from schemas.read.reader import StoreReader
from tests.support.models.blocks_reference import BlocksReference
from tests.support.models.reference import Reference
from tests.support.processes import PATIENCE_S
from vllm_tap.tiny_model import LAYERS, tiny_model

SITES = ("resid_post", "attn_out", "mlp_out")
ON_GPU = torch.cuda.is_available()
DTYPE = "bfloat16" if ON_GPU else "float32"  # the GPU's attention kernels know no float32
# There vLLM's kernels for int8 know no float32.
AMX = not ON_GPU and torch.cpu._is_amx_tile_supported()
# Fixed: engines of other tests are there, too, and those that start side by side would count each other's memory.
SHARED: dict[str, Any] = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 1 << 30} if ON_GPU else {}


@dataclass
class Captured:
    """A finished request with its capture."""

    id: str
    tokens: tuple[int, ...]  # prompt + generated
    prompt_len: int
    output: Any
    manifest: Manifest


@dataclass
class Engine:
    """An ``LLM`` and the store that its captures arrive in."""

    llm: Any
    reader: StoreReader
    reference: Reference | BlocksReference
    limits: dict[str, Any] = field(default_factory=dict)

    def run(self, prompts: Sequence[Sequence[int]], params: Sequence[dict[str, Any]],
            specs: Sequence[Any]) -> list[Any]:
        """Generate all at once, with the ``edit`` of parameters; a spec of None captures nothing. Returns Captured, or
        the RequestOutput alone.
        """
        from vllm import SamplingParams

        ids = [None if spec is None else new_ulid() for spec in specs]
        sampling = [
            SamplingParams(temperature=options.pop("temperature", 0.0), extra_args=None if spec is None else {
                "capture": {**spec, "id": id_}, **({"edit": edit} if edit else {})}, **options)
            for options, edit, spec, id_ in zip(
                [{name: value for name, value in p.items() if name != "edit"} for p in params],
                [p.get("edit") for p in params], specs, ids, strict=True)
        ]
        outputs = self.llm.generate([{"prompt_token_ids": list(p)} for p in prompts], sampling, use_tqdm=False)
        return [output if id_ is None else self.captured(id_, output) for id_, output in zip(ids, outputs, strict=True)]

    def captured(self, id_: str, output: Any, sample: int = 0) -> Captured:
        """Wait until the capture is final and read its manifest."""
        manifest = self.final(id_)
        tokens = (*output.prompt_token_ids, *output.outputs[sample].token_ids)
        return Captured(id_, tokens, len(output.prompt_token_ids), output, manifest)

    def final(self, id_: str, timeout_s: float = PATIENCE_S) -> Manifest:
        """The manifest once its status is final."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                manifest = self.reader.manifest(id_)
                if manifest.status not in ("pending", "running") and manifest.client_finish_reason is not None:
                    return manifest
            except NotFoundError:
                manifest = None
            assert time.monotonic() < deadline, f"{id_} did not end: {manifest and manifest.status}"
            time.sleep(0.02)

    def check(self, captured: Captured) -> int:
        """Every row of a ``raw`` capture against the reference; the manifest against itself. Returns rows seen."""
        manifest, reference = captured.manifest, self.reference.rows(captured.tokens)
        assert manifest.prompt_token_ids == list(captured.tokens[: captured.prompt_len])
        assert manifest.output_token_ids == list(captured.tokens[captured.prompt_len :])
        seen = 0
        for entry in manifest.rows:
            assert entry.expected == entry.captured + sum(missing.rows for missing in entry.missing)
            rows = self.reader.slice(captured.id, entry.site, [entry.layer], 0, len(captured.tokens))
            assert len(rows.positions) == entry.captured
            assert (np.diff(rows.positions.astype(np.int64)) > 0).all()
            assert np.array_equal(rows.token_ids, np.asarray(captured.tokens, np.uint32)[rows.positions])
            error = row_errors(rows.values()[0], reference[entry.site, entry.layer][rows.positions])
            assert (error <= 1).all(), f"{entry.site}.{entry.layer}: {error.max()} times the tolerance"
            seen += entry.captured
        return seen

    def close(self) -> None:
        """End the engine: its processes, or what it holds of this one."""
        llm, self.llm = self.llm, None
        shut_down(llm)


class OneAtATime:
    """One engine at a time, which ``start`` makes of a key; another one where another key is asked for."""

    def __init__(self, start: Callable[..., Engine]) -> None:
        self.start = start
        self.key: tuple[str, ...] = ()
        self.engine: Engine | None = None

    def of(self, *key: str) -> Engine:
        """The engine of a key."""
        if self.engine is None or self.key != key:
            self.close()
            self.engine, self.key = self.start(*key), key
        return self.engine

    def close(self) -> None:
        """End the engine that is there."""
        if self.engine is not None:
            self.engine.close()
        self.engine = None


def shut_down(llm: Any) -> None:
    """End an engine, and make room for another where it lived in this process."""
    llm.llm_engine.engine_core.shutdown()
    if torch.distributed.is_initialized():  # before vLLM 0.32
        from vllm.distributed import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()


def row_errors(rows: Any, reference: Any) -> Any:
    """By row, how many times the tolerance it is off: 1e-4 on float32 models, 10 % of its length on bfloat16 ones.

    A row of another token, layer or request is off by more than its own length.
    """
    difference = np.abs(rows - reference)
    if not ON_GPU:
        return difference.max(axis=-1) / 1e-4
    return np.linalg.norm(difference, axis=-1) / np.linalg.norm(reference, axis=-1) / 0.1


def model(family: str) -> Path:
    """The tiny model in the dtype of this machine's tests."""
    return tiny_model(family, dtype=DTYPE)


_freeze = gc.freeze


def _leave() -> None:
    """Leave the heap as it is."""


@contextmanager
def in_this_process(yes: bool = True) -> Iterator[None]:
    """An ``LLM`` made here has its engine in this process, which takes 2 s; else in two of its own, each of which
    imports vLLM first: 20 s more. A model that vLLM runs by Hugging Face's classes changes them for references as well.
    """
    before = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if yes else "1"
    if not ON_GPU:
        # vLLM asks each family it has not met about itself in a process that imports vLLM, 8 s, to leave CUDA alone.
        from vllm.model_executor.models import registry

        registry._run_in_subprocess = lambda ask: ask()
    register()  # vLLM loads plugins once a process: what a test before has loaded without a tap would stay so
    # Speculative decoding imports it; the next start of vLLM looks at what all modules have, and fails at this one.
    hidden = sys.modules.pop("llvmlite.binding.ffi", None)
    if yes:
        # vLLM collects garbage several times as it starts and ends: of all that is here already, half a second each. So
        # that stays out of sight (what an engine left was collected at its end), and the engine's own never goes.
        _freeze()
        gc.freeze = gc.unfreeze = _leave  # type: ignore[assignment]
    try:
        yield
    finally:
        if hidden is not None:
            sys.modules["llvmlite.binding.ffi"] = hidden
        del os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"]
        if before is not None:
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = before


@contextmanager
def refused_start(match: str, error: type[Exception] = StartError) -> Iterator[None]:
    """An engine in this process that must not start, with an error that says ``match``; nothing of it is left."""
    from vllm.distributed import cleanup_dist_env_and_memory

    with pytest.raises(error, match=match):
        yield
    cleanup_dist_env_and_memory()


def start(reader: StoreReader, reference: Reference, family: str, *, here: bool = True, **options: Any) -> Engine:
    """An engine on the tiny model in float32, ``here`` in this process or in processes of its own.

    On a GPU always the latter: what one engine captured and compiled is in the way of the next.
    """
    from vllm import LLM

    options = {"max_model_len": 512, "max_num_seqs": 16, "block_size": 32, "dtype": DTYPE, "seed": 0,
               **SHARED, **options}
    with in_this_process(here and not ON_GPU):
        llm: Any = LLM(str(model(family)), **options)
    assert hasattr(llm.llm_engine.input_processor, "vllm_tap"), (
        f"nothing is captured: the settings of this process are {tap_settings()}")
    return Engine(llm, reader, reference, options)


def tap_settings() -> dict[str, str]:
    """What this process tells the plugin."""
    return {name: value for name, value in os.environ.items() if name.startswith("VLLM_TAP_")}


def prompt(length: int, seed: int) -> list[int]:
    """Random tokens of the tiny model's vocabulary (no special ones)."""
    return [int(t) for t in np.random.default_rng(seed).integers(10, 2000, length)]


ALL_ROWS = len(SITES) * LAYERS
