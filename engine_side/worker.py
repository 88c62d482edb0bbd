"""The worker's own tap: recorder, ring and sender, one set a process, started by the loader seam."""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import torch

from engine_side import kernels
from engine_side.codecs import matrices
from engine_side.config import EngineConfig
from engine_side.edits import nodes
from engine_side.edits.conditions import Conditions
from engine_side.edits.editor import Editor
from engine_side.step.recorder import Recorder
from engine_side.tap.architectures import Embedding, Sum
from engine_side.tap.budget import ring_choice
from engine_side.tap.shares import layers_sent
from engine_side.tap.staging import Staging
from engine_side.transport.device_copies import DeviceToHost, Scratch
from engine_side.transport.ring import Ring
from engine_side.transport.ring_files import free_bytes
from engine_side.transport.sender_process import SenderProcess
from engine_side.transport.shared_memory import Outbox
from schemas.errors import StartError
from schemas.wire import engine_info
from schemas.wire.ask_store import ask_store
from schemas.wire.engine_info import EngineInfo
from schemas.wire.layout import Part

logger = logging.getLogger("vllm.tap")

_ASK_S = 3.0  # that a start waits for what the store takes


@dataclass(frozen=True, slots=True)
class Checks:
    """Facts that the self-test holds a tapped model and its rows against."""

    homes: Mapping[str, tuple[torch.nn.Module, str]] = field(default_factory=dict)  # by path: the module, its sites
    embedding: Embedding | None = None  # the first rows are those of the embedding
    sums: Sequence[Sum] = ()  # rows of one site are made of those of others


@dataclass(frozen=True, slots=True)
class Seat:
    """Place of a worker among the ranks of its engine, of which ``on_host`` are on this host, in ``stages`` of a
    pipeline.
    """

    rank: int = 0
    on_host: int = 1
    stages: int = 1


@dataclass(frozen=True, slots=True)
class Tapped:
    """The memory that a worker's taps write into, and the facts of a model that has them."""

    staging: Staging
    scratch: Scratch | None = None
    editor: Editor | None = None  # None where nothing is armed for edits
    checks: Checks = field(default_factory=Checks)


@dataclass(slots=True)
class Worker:
    """The parts of a tapped worker."""

    info: EngineInfo
    model: torch.nn.Module  # the one with the taps
    checks: Checks
    staging: Staging
    recorder: Recorder
    sender: SenderProcess
    editor: Editor | None  # None where nothing is armed for edits
    pid: int  # of the process whose it is: one that was forked from it has no part in it


CURRENT: Worker | None = None


def start(config: EngineConfig, info: EngineInfo, model: torch.nn.Module, tapped: Tapped, seat: Seat) -> None:
    """Make the recorder and the sender of a rank."""
    global CURRENT
    stop()
    staging, scratch, editor = tapped.staging, tapped.scratch, tapped.editor
    if editor is not None and staging.probes:
        editor.conditions = made = Conditions(staging, editor.tables.size.requests)
        for name, kept in (("switches", made.switches), ("unseen", made.unseen)):  # see below
            model.register_buffer(f"vllm_tap_{name}", kept, persistent=False)
    part = info.layout[seat.rank] if info.layout else None
    ring, why = _ring(config, staging, scratch, part, seat.on_host)
    info = msgspec.structs.replace(info, ring=engine_info.Ring(ring.capacity, why, config.on_full))
    device = next(model.parameters()).device
    to_host = DeviceToHost(device, ring, scratch, Outbox(ring.shared))
    if scratch is not None:  # a deep sleep gives away what was allocated while the model was loaded, but its buffers
        model.register_buffer("vllm_tap_numbers", to_host.numbers, persistent=False)
    counted = info.edits.counted[seat.rank] if info.edits is not None and info.edits.counted else None
    recorder = Recorder(staging, info.model_dtype, config.on_full, to_host, part=part, layers=info.sent,
                        counted=counted, batches=seat.stages, divided=info.divided or None)
    sender = SenderProcess(config.endpoint, ring.shared, config.curve, seat.rank)
    CURRENT = Worker(info, model, tapped.checks, staging, recorder, sender, editor, os.getpid())
    if editor is not None:
        nodes.install(editor)
    atexit.register(stop)


def _ring(config: EngineConfig, staging: Staging, scratch: Scratch | None, part: Part | None, ranks: int
          ) -> tuple[Ring, str]:
    """The worker's ring, and why it has this size. It is this rank's share of what the ``ranks`` of this host have.
    StartError where the settings or the machine leave no room for it.
    """
    row, step = bytes_sent(staging, part)
    for name, value, among in (("RING", config.ring_bytes, ranks), ("SCRATCH", config.scratch_bytes, 1)):
        if 0 < value < 4 * row * among:
            raise StartError(f"VLLM_TAP_{name}_BYTES={value}: must be at least {4 * row * among}, four rows of all "
                             f"layers ({row * among} bytes each)")
    nbytes, why = ring_size(config, 0 if scratch is None else step * ranks)
    size = nbytes // ranks
    logger.info("vllm-tap: the ring to the writer has %s MiB: %s%s", f"{size / 2**20:,.0f}", why,
                f"; shared by {ranks} ranks" if ranks > 1 else "")
    try:
        return Ring(size, pinned=scratch is not None), why
    except OSError as error:
        raise StartError(f"vllm-tap: shared memory has no room for a ring of {size / 2**20:,.0f} MiB ({error}); lower "
                         "VLLM_TAP_RING_BYTES, or enlarge /dev/shm (containers: --shm-size)") from None


def bytes_sent(staging: Staging, part: Part | None) -> tuple[int, int]:
    """Bytes that a rank sends of the site of which it sends most, as staged: of one row in all layers, of a full step.

    Each rank sends as much as the others (``layout_of``), whatever it stages.
    """
    rows = [(len(layers_sent(part, site, staging.layers[site])) * buffer[0, 0].nbytes, buffer.shape[1])
            for site, buffer in staging.buffers.items()]
    row, tokens = max(rows, default=(0, 0))
    return row, row * tokens


def ring_size(config: EngineConfig, step: int) -> tuple[int, str]:
    """Bytes of the rings of this host's ranks, and why so many. The size is the one that is set. If none is, it is for
    steps of ``step`` bytes (0 on a CPU), by what the store takes; the writer is asked for that.
    """
    if config.ring_bytes:
        return config.ring_bytes, "VLLM_TAP_RING_BYTES"
    rate = ask_store(config.endpoint, config.curve, _ASK_S).bytes_s if step else 0.0
    return ring_choice(step, free_bytes(), rate)


def announce(runner: str) -> None:
    """Announce the engine, whose steps are run by ``runner`` (module.class), to the writer."""
    assert CURRENT is not None
    CURRENT.info = msgspec.structs.replace(CURRENT.info, runner=runner)
    CURRENT.recorder.layouts.kernel_cache.precompile(CURRENT.info.armed)
    CURRENT.sender.begin(CURRENT.info)


def stop() -> None:
    """Flush and end the sender; a second call does nothing."""
    global CURRENT
    current, CURRENT = CURRENT, None
    if current is None or current.pid != os.getpid():
        return
    nodes.uninstall()
    try:
        current.recorder.flush()
    except Exception:  # of the device: what lies in the ring can still go, and vLLM has to end too
        logger.exception("vllm-tap: the engine ends, and copying its last rows from the GPU failed; they are missing")
    current.sender.close()
    kernels.forget()  # all that was launched is over: its rows have crossed
    matrices.forget()
    current.recorder.to_host.ring.close()
    logger.info("vllm-tap: stopped; %s", current.recorder.counters)
