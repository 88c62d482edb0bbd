"""What a start takes after a kill, beside hashing the same bytes once."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import xxhash

from bench.sustained.line import Line
from bench.sustained.played import PlayedEngine
from bench.sustained.trial import Setting
from engine_side.transport.ring import Ring
from engine_side.transport.sender_process import SenderProcess
from schemas.store.map_file import map_file
from writer_service.recover.recovery import recover

_CHUNK: Final = 8 << 20
_RING: Final = 256 << 20


def recovery(setting: Setting, nbytes: float) -> dict[str, float]:
    """GB/s of hashing a journal of ``nbytes``, and then of recovering it; processor s/GB of the latter."""
    with TemporaryDirectory(prefix="vllm-tap-bench-", dir=setting.folder) as work:
        line = Line(Path(work) / "store", "--segment-bytes", str(1 << 50), "--seal-idle-s", "3600")

        def start(ring: Ring) -> SenderProcess:
            return SenderProcess(line.endpoint, ring.shared)

        engine = PlayedEngine(setting.shape, setting.codec, setting.load, setting.step_tokens, _RING, start)
        written = 0
        try:
            while written < nbytes:
                written += engine.play(0.5, None, lambda captures: None).nbytes
        finally:
            engine.close()
            line.close(signal.SIGKILL)
        began = time.perf_counter()
        for path in (line.store / "writers" / "w0" / "journal").glob("*.open"):
            data = map_file(path)
            for at in range(0, len(data), _CHUNK):
                xxhash.xxh3_64_intdigest(data[at : at + _CHUNK])
        hashed, cpu = time.perf_counter(), time.process_time()
        os.close(recover(line.store).lock)
        return {"hash_gb_s": written / (hashed - began) / 1e9,
                "recovery_gb_s": written / (time.perf_counter() - hashed) / 1e9,
                "recovery_cpu_s_per_gb": (time.process_time() - cpu) / written * 1e9}
