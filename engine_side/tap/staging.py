"""Staging: one static buffer a site, [armed layers, tokens, width], that the compiled graph writes and we read."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from engine_side.tap.budget import scratch_bytes, staging_sizes
from engine_side.tap.probe_scores import Scorer
from engine_side.transport.device_copies import Scratch
from schemas.errors import StartError

JOINT: Final = ("q", "k", "v")

logger = logging.getLogger("vllm.tap")

# No model writes a row of this one number. NaN would not do: a dummy step's attention leaves memory unwritten, and
# what follows from it may be NaN although every tap is live.
_POISON = -0.0123456789


@dataclass(frozen=True, slots=True)
class Staging:
    """The buffers by site; row r of layer l of the current step is ``buffers[site][index(site, l), r]``.

    ``joint``: where q, k and v of the same layers are armed, the one buffer that theirs are parts of. A projection
    makes them side by side, and one copy for each layer takes all three. ``probes`` are sites without a buffer of their
    own: their scores are made of another site's rows.
    """

    buffers: dict[str, torch.Tensor]
    layers: dict[str, list[int]]
    joint: torch.Tensor | None = None
    probes: dict[str, Scorer] = field(default_factory=dict)
    _of_layer: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)

    def source(self, site: str) -> str:
        """The site whose buffer has the rows that a site's are made of."""
        return self.probes[site].about.site if site in self.probes else site

    def index(self, site: str, layer: int) -> int:
        """Index of a layer in the buffer of its source."""
        return self.layers[self.source(site)].index(layer)

    def of_layer(self, site: str, layer: int) -> torch.Tensor:
        """The buffer [tokens, width] of a layer, always the same tensor: so the compiler sees who reads what.

        It is no view of the buffer of all layers. The compiler takes a write into a view for a write into the whole
        tensor behind it. It copies that tensor where it cannot see that nothing else reads it.
        """
        if (site, layer) not in self._of_layer:
            whole, number = (self.joint, self.index(JOINT[0], layer)) if site == "qkv" else (
                self.buffers[site], self.index(site, layer))
            assert whole is not None
            self._of_layer[site, layer] = torch.from_dlpack(whole[number])
        return self._of_layer[site, layer]

    def layers_of(self, site: str) -> list[int]:
        """The layers that a site has."""
        return [self.probes[site].about.layer] if site in self.probes else self.layers.get(site, [])

    def poison(self) -> None:
        """Fill with one odd number, so that what no tap writes is seen."""
        for buffer in self.buffers.values():
            buffer.fill_(_POISON)

    def unwritten(self, rows: int) -> list[str]:
        """``site.layer`` of every tap that left some of the first ``rows`` rows as ``poison`` made them."""
        return [
            f"{site}.{layer}"
            for site, buffer in self.buffers.items()
            for number, layer in enumerate(self.layers[site])
            if bool((buffer[number, :rows] == buffer.new_tensor(_POISON)).all(dim=-1).any())
        ]


def allocate(widths: dict[str, int], layers: dict[str, list[int]], tokens: int, dtype: torch.dtype,
             device: torch.device, bytes_max: int, scratch: int = 0) -> tuple[Staging, Scratch | None]:
    """Buffers for every armed site and, on CUDA, ``scratch`` bytes (0: as many as they need) for what is encoded.

    Refuses above ``bytes_max`` before taking memory. vLLM takes its profile afterwards, so both are in its sums.
    """
    sizes = staging_sizes(widths, layers, tokens, dtype.itemsize)
    staging = sum(sizes.values())
    if device.type != "cuda":
        scratch = 0
    elif scratch == 0:
        scratch = scratch_bytes(max(sizes.values(), default=0))
    shown = " + ".join(f"{site} {len(layers[site])}×{tokens}×{width}" for site, width in widths.items())
    shown = f"{staging / 2**20:,.1f} MiB ({shown}, {dtype}), scratch {scratch / 2**20:,.1f} MiB"
    if staging + scratch > bytes_max:
        raise StartError(f"vllm-tap: staging needs {shown}; the budget is {bytes_max / 2**20:,.1f} MiB; arm fewer "
                         "sites (VLLM_TAP_ARM), lower max_num_batched_tokens or VLLM_TAP_SCRATCH_BYTES, or raise "
                         "VLLM_TAP_STAGING_BYTES_MAX")
    logger.info("vllm-tap: staging %s", shown)

    def zeros(sites: Sequence[str]) -> torch.Tensor:
        """Room for sites of the same layers, side by side."""
        width = sum(widths[site] for site in sites)
        return torch.zeros(len(layers[sites[0]]), tokens, width, dtype=dtype, device=device)

    joint, parts = None, dict[str, torch.Tensor]()
    if set(JOINT) <= set(widths) and all(layers[site] == layers[JOINT[0]] for site in JOINT):
        joint = zeros(JOINT)
        parts = dict(zip(JOINT, joint.split([widths[site] for site in JOINT], dim=-1), strict=True))
    buffers = {site: parts[site] if site in parts else zeros([site]) for site in widths}
    return Staging(buffers, layers, joint), Scratch(scratch, device) if scratch else None
