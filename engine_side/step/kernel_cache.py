"""The cache of kernels: the usual ones are compiled before the first request, others beside the steps, none in one."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Final

import torch

from engine_side import kernels
from engine_side.tap.staging import Staging
from schemas import codecs
from schemas.errors import SpecError
from schemas.spec import Armed, parse_spec, resolve

_KERNELS_MAX: Final = 256  # more identities than that are served by the reference encoders

logger = logging.getLogger("vllm.tap")


class KernelCache:
    """Kernels of a worker by codec identity and width, or by probe; ``on_ready`` gets the codec of every new one."""

    def __init__(self, staging: Staging, on_device: bool, on_ready: Callable[[str], None]) -> None:
        self.on_device = on_device
        self._staging, self._on_ready = staging, on_ready
        self._requested: set[tuple[str, int]] = set()
        self.ready: set[tuple[str, int]] = set()
        self._wanted: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def precompile(self, armed: Armed) -> None:
        """Compile kernels of codecs with their usual parameters, and of every probe, at the start of the engine."""
        begin = time.monotonic()
        for name, family in codecs.CODECS.items():
            if family.projected:  # a product takes seconds to compile, and few ask for one: it is made when one does
                continue
            for site in self._staging.buffers:
                with contextlib.suppress(SpecError):  # not for this site
                    identity = resolve(parse_spec({"sites": [site], "codec": name}), armed).codec[site]
                    if self._claim(identity, site):
                        self._compile(identity, site)
        for site in self._staging.probes:
            if self._claim("raw", site):
                self._compile("raw", site)
        if self.ready:
            logger.info("vllm-tap: compiled %d kernels in %.1f s", len(self.ready), time.monotonic() - begin)

    def has(self, codec: str, site: str) -> bool:
        """Whether rows of a site in a codec have a kernel now."""
        return self._kind(codec, site) in self.ready

    def compile_later(self, codec: str, site: str) -> None:
        """Compile a kernel beside the steps, if there can be one."""
        if len(self._requested) < _KERNELS_MAX and self._claim(codec, site):
            self._wanted.put((codec, site))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="vllm-tap-compiler", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        """Compile one after the other: compiling takes the interpreter's lock that the steps need too."""
        while True:
            self._compile(*self._wanted.get())

    def _kind(self, codec: str, site: str) -> tuple[str, int]:
        probe = self._staging.probes.get(site)
        return (site, probe.count) if probe else (codec, int(self._staging.buffers[site].shape[-1]))

    def _claim(self, codec: str, site: str) -> bool:
        """Whether there could be a kernel that was not requested yet; it counts as requested from now on."""
        kind = self._kind(codec, site)
        if not self.on_device or kind in self._requested:
            return False
        buffer = self._staging.buffers[self._staging.source(site)]
        known = kernels.scored(kind[1], buffer.shape[-1], buffer.dtype) if site in self._staging.probes else (
            kernels.supported(*kind, buffer.dtype) and kernels.fits(*kind, buffer.dtype, buffer.device))
        if not known:
            return False
        self._requested.add(kind)
        return True

    def _compile(self, codec: str, site: str) -> None:
        kind, buffer = self._kind(codec, site), self._staging.buffers[self._staging.source(site)]
        probe = self._staging.probes.get(site)
        try:
            # A thread begins on the first device, whichever is the worker's.
            with torch.cuda.device(buffer.device) if buffer.is_cuda else contextlib.nullcontext():
                if probe:
                    kernels.warm_scores(probe.directions, probe.bias, probe.sigmoid, buffer.dtype)
                else:
                    kernels.warm(*kind, buffer.dtype, buffer.device)
        except Exception:  # the reference encoder does the same, slower
            logger.exception("vllm-tap: compiling the kernel for %s at %s failed; the slower reference encoder is "
                             "used", codec, site)
            return
        self.ready.add(kind)
        self._on_ready(codec)
