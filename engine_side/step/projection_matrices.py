"""Matrices that a worker's captures need: made beside the steps, held while a capture uses them."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from engine_side.codecs import projected
from engine_side.step.kernel_cache import KernelCache
from engine_side.step.selection import CaptureTable
from engine_side.tap.staging import Staging
from schemas.errors import SpecError
from schemas.spec import Resolved


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
                    projected.make(key)

    def ensure(self, codec: str, site: str) -> None:
        """Have what rows of a site in a codec need, if anything, from now on, while a capture asks for it.

        SpecError where it would be too large; MemoryError where there is no room for it beside those in use.
        """
        if key := self._key(codec, site):
            projected.keep(key, self._in_use())

    def has(self, codec: str, site: str) -> bool:
        """Whether such rows can be encoded at once."""
        key = self._key(codec, site)
        return key is None or projected.kept(key)

    def _in_use(self) -> set[projected.Key]:
        found = set()
        for entry in {entry for slot in self.captures.slot_of.values() for entry in self.captures.plan(slot)}:
            with contextlib.suppress(SpecError):
                if key := self._key(entry.codec, entry.site):
                    found.add(key)
        return found

    def _key(self, codec: str, site: str) -> projected.Key | None:
        """The matrix of a site in a codec; None where there is a kernel, or nothing to multiply by."""
        if site in self.staging.probes or self.kernel_cache.has(codec, site):
            return None
        buffer = self.staging.buffers[site]
        return projected.key_of(codec, int(buffer.shape[-1]), buffer.device)
