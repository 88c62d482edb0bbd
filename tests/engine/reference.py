"""The reference: a Hugging Face forward of the same tokens in float32, every site × layer, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM

F32 = npt.NDArray[np.float32]


class Reference:
    """Rows of a model by (site, layer) for a token sequence."""

    def __init__(self, model: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
        self.model.eval()
        self._rows: dict[tuple[str, int], torch.Tensor] = {}
        for index, layer in enumerate(self.model.model.layers):
            layer.register_forward_hook(self._keep("resid_post", index))
            layer.self_attn.register_forward_hook(self._keep("attn_out", index))
            layer.mlp.register_forward_hook(self._keep("mlp_out", index))

    def _keep(self, site: str, layer: int) -> Callable[..., None]:
        def hook(_module: Any, _args: Any, output: Any) -> None:
            self._rows[site, layer] = (output[0] if isinstance(output, tuple) else output).detach()

        return hook

    @lru_cache(maxsize=256)  # noqa: B019 (one reference a session)
    def rows(self, tokens: tuple[int, ...]) -> dict[tuple[str, int], F32]:
        """``{(site, layer): [tokens, width]}``."""
        with torch.inference_mode():
            self.model(torch.tensor([tokens]))
        return {key: value.reshape(len(tokens), -1).numpy().copy() for key, value in self._rows.items()}
