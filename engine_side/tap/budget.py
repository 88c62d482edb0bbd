"""Memory that taps take, worked out before any is taken; plain numbers, so that a command can tell it without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

__all__ = ["RING_BYTES_MAX", "RING_BYTES_MIN", "STAGING_BYTES_MAX", "ring_bytes", "ring_choice", "scratch_bytes",
           "staging_sizes"]

STAGING_BYTES_MAX: Final = 8 << 30  # with scratch, on the device
RING_BYTES_MIN: Final = 256 << 20
RING_BYTES_MAX: Final = 16 << 30
_RING_STEPS_MIN: Final = 2.0
_RING_STEPS_MAX: Final = 4.0
_RING_SYNC_S: Final = 0.5
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


def ring_bytes(step: int, free: int, rate: float = 0.0) -> int:
    """Host memory for rows on their way: ``ring_choice`` without its reason."""
    return ring_choice(step, free, rate)[0]


def ring_choice(step: int, free: int, rate: float = 0.0) -> tuple[int, str]:
    """Bytes of a ring whose size is not set, and why so many.

    The ring has room for two full steps, of ``step`` bytes each (0 on a CPU): a site's staging, as ``raw16`` has it,
    since the codecs that requests will name are not known. If the store's ``rate`` (bytes a second) is known, there
    may be more room. It is for up to four steps where the store takes longer than a second for one, because the next
    prompts come meanwhile. It is also for what the store takes in half a second, up to a step: that is held until it
    is synced. The ring has at most a quarter of the ``free`` bytes of memory, but never less than ``RING_BYTES_MIN``
    nor more than ``RING_BYTES_MAX``.
    """
    if not step:
        return RING_BYTES_MIN, "the least, as on every CPU"
    steps = min(max(_RING_STEPS_MIN, 1 + step / rate), _RING_STEPS_MAX) if rate else _RING_STEPS_MIN
    wanted = round(steps * step + min(rate * _RING_SYNC_S, step))
    found = max(RING_BYTES_MIN, min(wanted, free // 4, RING_BYTES_MAX))
    known = f"the store takes {rate / 1e6:,.0f} MB/s" if rate else "what the store takes was not known"
    why = f"room for {steps:.3g} full steps of {step / 2**20:,.0f} MiB, as {known}"
    if found > wanted:
        return found, f"the least; {why}, would be less"
    if found < wanted:
        most = "the most" if found == RING_BYTES_MAX else "a quarter of the free memory"
        return found, f"{most}; {why}, would be more"
    return found, why
