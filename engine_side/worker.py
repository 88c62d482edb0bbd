"""The worker's own tap: recorder, ring and sender, one set a process, started by the loader seam."""

from __future__ import annotations

import atexit
import logging
from dataclasses import dataclass

import torch

from engine_side.config import EngineConfig
from engine_side.device import SideStream
from engine_side.recorder import Recorder
from engine_side.ring import Ring
from engine_side.sender import Sender
from engine_side.staging import Staging
from schemas.control import EngineInfo

logger = logging.getLogger("vllm.tap")


@dataclass(slots=True)
class Worker:
    """What a tapped worker holds."""

    info: EngineInfo
    recorder: Recorder
    sender: Sender


CURRENT: Worker | None = None


def start(config: EngineConfig, info: EngineInfo, staging: Staging, device: torch.device) -> None:
    """Make the worker's recorder and start its sender."""
    global CURRENT
    stop()
    ring = Ring(config.ring_bytes, pinned=device.type == "cuda")
    recorder = Recorder(staging, ring, info.model_dtype, config.on_full, SideStream(device))
    sender = Sender(config.endpoint, info, ring, recorder.outbox, recorder.counters)
    CURRENT = Worker(info, recorder, sender)
    sender.start()
    atexit.register(stop)


def stop() -> None:
    """Flush and end the sender; a second call does nothing."""
    global CURRENT
    current, CURRENT = CURRENT, None
    if current is not None:
        current.sender.close()
        logger.info("vllm-tap: stopped; %s", current.recorder.counters)
