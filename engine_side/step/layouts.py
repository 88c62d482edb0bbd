"""The layouts of the entries that captures ask for: by a kernel where one is ready, else by a reference encoder."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from typing import Final

import torch

from engine_side.codecs import matrices
from engine_side.step.block import EntryLayout, layout_of
from engine_side.step.kernel_cache import KernelCache
from engine_side.step.selection import CaptureTable, Plan
from engine_side.tap.staging import Staging
from engine_side.transport.events import Entry
from schemas import codecs
from schemas.errors import SpecError
from schemas.spec import Resolved

logger = logging.getLogger("vllm.tap")

_LAYOUTS_MAX: Final = 4096


@dataclass(frozen=True, slots=True)
class ProjectionMatrices:
    """Matrices that the reference encoders of a worker multiply rows by; kernels have their own."""

    staging: Staging
    kernel_cache: KernelCache
    captures: CaptureTable

    def prepare(self, resolved: Resolved) -> None:
        """Make what takes long before a capture of such rows is opened: any thread may, beside the steps."""
        for site, codec in resolved.codec.items():
            with contextlib.suppress(SpecError):  # of one that does not fit is told when the capture begins
                if site in self.staging.buffers and (key := self._key(codec, site)):
                    matrices.make(key)

    def ensure(self, codec: str, site: str) -> None:
        """Have what rows of a site in a codec need, if anything, from now on, while a capture asks for it.

        SpecError where it would be too large; MemoryError where there is no room for it beside those in use.
        """
        if key := self._key(codec, site):
            matrices.ensure(key, self._in_use())

    def has(self, codec: str, site: str) -> bool:
        """Whether such rows can be encoded at once."""
        key = self._key(codec, site)
        return key is None or matrices.has(key)

    def _in_use(self) -> set[matrices.Key]:
        found = set()
        for entry in {entry for slot in self.captures.slot_of.values() for entry in self.captures.plan(slot)}:
            with contextlib.suppress(SpecError):
                if key := self._key(entry.codec, entry.site):
                    found.add(key)
        return found

    def _key(self, codec: str, site: str) -> matrices.Key | None:
        """The matrix of a site in a codec; None where there is a kernel, or nothing to multiply by."""
        if site in self.staging.probes or self.kernel_cache.has(codec, site):
            return None
        buffer = self.staging.buffers[site]
        return matrices.key_of(codec, int(buffer.shape[-1]), buffer.device)


class Layouts:
    """Layouts of a worker's entries, in blocks of at most ``bytes_max``, each made when it is first asked for."""

    def __init__(self, staging: Staging, dtype: str, captures: CaptureTable, bytes_max: int, on_device: bool) -> None:
        self.bytes_max = bytes_max
        self.outdated = False  # a kernel became ready: a running burst has a layout that there is a better one for
        self.kernel_cache = KernelCache(staging, on_device, self.forget)
        self.matrices = ProjectionMatrices(staging, self.kernel_cache, captures)
        self._staging, self._dtype = staging, dtype
        self._made: dict[Entry, EntryLayout | None] = {}  # None: its rows cannot be encoded

    def of(self, entry: Entry) -> EntryLayout | None:
        """The layout of an entry; None where its codec does not fit the site's width, or its matrix has no room."""
        try:
            return self._made[entry]
        except KeyError:
            pass
        if len(self._made) >= _LAYOUTS_MAX:
            self._made.clear()
        compiled = self.kernel_cache.has(entry.codec, entry.site)
        layout: EntryLayout | None = None
        try:
            self.matrices.ensure(entry.codec, entry.site)
            layout = layout_of(entry, self._staging, self._dtype, self.bytes_max, compiled)
        except (SpecError, MemoryError, torch.OutOfMemoryError) as error:
            logger.error("vllm-tap: rows of %s cannot be encoded as %s, so they are dropped: "
                         "%s", entry.site, entry.codec, error)
        self._made[entry] = layout
        if compiled != self.kernel_cache.has(entry.codec, entry.site):  # its kernel came in between: look again
            self._made.pop(entry, None)
        return layout

    def prepare(self, plan: Plan) -> None:
        """Make what the first step of a plan needs before it: a projection, by encoding a row; a kernel, beside steps.
        """
        for entry in plan:
            try:
                self.kernel_cache.compile_later(entry.codec, entry.site)  # meanwhile the reference encoder serves
                if codecs.identified(entry.codec).family.projected:
                    if self._made.get(entry) is None or not self.matrices.has(entry.codec, entry.site):
                        self._made.pop(entry, None)  # its matrix had no room, or gave it to another
                    if (layout := self.of(entry)) is not None and layout.kernel is None:
                        with torch.inference_mode():
                            layout.encode(self._staging.buffers[entry.site][:1, :1])
            except Exception:
                logger.exception("vllm-tap: preparing %s for %s failed; the next step tries "
                                 "again", entry.codec, entry.site)

    def forget(self, codec: str) -> None:
        """Forget the layouts of a codec whose kernel became ready: the next ones are made with it. Any thread may."""
        for entry in [entry for entry in list(self._made) if entry.codec == codec]:
            self._made.pop(entry, None)
        self.outdated = True

    def clear(self) -> None:
        """Forget all."""
        self._made.clear()
