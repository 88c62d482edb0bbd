"""Memory that taps take, worked out before any is taken; plain numbers, so that a command can tell it without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

__all__ = ["RING_BYTES_MIN", "STAGING_BYTES_MAX", "ring_bytes", "scratch_bytes", "staging_sizes"]

STAGING_BYTES_MAX: Final = 8 << 30  # with scratch, on the device
RING_BYTES_MIN: Final = 256 << 20
_SCRATCH_BYTES_MIN: Final = 16 << 20
_SCRATCH_BYTES_MAX: Final = 4 << 30


def staging_sizes(widths: Mapping[str, int], layers: Mapping[str, Sequence[int]], tokens: int, itemsize: int
                  ) -> dict[str, int]:
    """Bytes of staging by site: a row of ``widths[site]`` numbers for every armed layer and token of a step."""
    return {site: len(layers[site]) * tokens * width * itemsize for site, width in widths.items()}


def scratch_bytes(site: int) -> int:
    """Room for a full step of a site, ``site`` bytes of staging, in the default codec (9/16 of 16-bit rows).

    With less, a long prompt's encoding waits for copies to the host, and the next step with it.
    """
    return min(max(site * 9 // 16, _SCRATCH_BYTES_MIN), _SCRATCH_BYTES_MAX)


def ring_bytes(scratch: int, free: int) -> int:
    """Host memory for two full steps on their way, at most a quarter of the ``free`` bytes of shared memory.

    ``scratch`` is 0 on a CPU.
    """
    return max(RING_BYTES_MIN, min(2 * scratch, free // 4))
