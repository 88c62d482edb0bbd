"""A plain Hugging Face forward over the same tokens: the numbers that a capture must agree with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Reference"]

F32 = npt.NDArray[np.float32]


class Reference:
    """The model in transformers, float32, eager attention; hooks on every block."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        torch.set_num_threads(1)
        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self._seen: dict[tuple[str, int], Any] = {}
        for layer, block in enumerate(self._model.model.layers):
            block.register_forward_hook(self._keep("resid_post", layer))
            block.self_attn.register_forward_hook(self._keep("attn_out", layer))
            block.mlp.register_forward_hook(self._keep("mlp_out", layer))

    def _keep(self, site: str, layer: int) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            self._seen[site, layer] = output[0] if isinstance(output, tuple) else output

        return hook

    def rows(self, token_ids: list[int]) -> dict[tuple[str, int], F32]:
        """``{(site, layer): float32 [len(token_ids), hidden]}`` of one forward over the whole sequence."""
        self._seen.clear()
        with self._torch.inference_mode():
            self._model(self._torch.tensor([token_ids]))
        return {key: value.reshape(-1, value.shape[-1]).float().numpy() for key, value in self._seen.items()}
