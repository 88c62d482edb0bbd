"""Staging: one static buffer a site, [layers, tokens, width], that the compiled graph writes and we read."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from schemas.errors import StartError

logger = logging.getLogger("vllm.tap")

# No model writes a row of this one number. NaN would not do: a dummy step's attention leaves memory unwritten, and
# what follows from it may be NaN although every tap is live.
_POISON = -0.0123456789


@dataclass(frozen=True, slots=True)
class Staging:
    """The buffers by site; row r of layer l of the current step is ``buffers[site][l, r]``."""

    buffers: dict[str, torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers.values())

    def poison(self) -> None:
        """Fill with one odd number, so that what no tap writes is seen."""
        for buffer in self.buffers.values():
            buffer.fill_(_POISON)

    def unwritten(self, rows: int) -> list[str]:
        """``site.layer`` of every tap that left some of the first ``rows`` rows as ``poison`` made them."""
        return [
            f"{site}.{layer}"
            for site, buffer in self.buffers.items()
            for layer in range(buffer.shape[0])
            if bool((buffer[layer, :rows] == buffer.new_tensor(_POISON)).all(dim=-1).any())
        ]


def allocate(widths: dict[str, int], n_layers: int, tokens: int, dtype: torch.dtype, device: torch.device,
             bytes_max: int) -> Staging:
    """Buffers for every armed site; refuses above ``bytes_max`` before taking memory."""
    row = torch.empty((), dtype=dtype).element_size()
    need = sum(n_layers * tokens * width * row for width in widths.values())
    shown = " + ".join(f"{site} {n_layers}×{tokens}×{width}" for site, width in widths.items())
    if need > bytes_max:
        raise StartError(f"vllm-tap: staging needs {need / 2**30:.2f} GiB ({shown}, {dtype}), the budget is "
                         f"{bytes_max / 2**30:.2f} GiB: arm fewer sites (VLLM_TAP_ARM), lower max_num_batched_tokens, "
                         "or raise VLLM_TAP_STAGING_BYTES_MAX")
    logger.info("vllm-tap: staging %.1f MiB (%s, %s)", need / 2**20, shown, dtype)
    return Staging({
        site: torch.zeros(n_layers, tokens, width, dtype=dtype, device=device) for site, width in widths.items()
    })
