"""The reference for models that take images: a Hugging Face forward in float32 with the same images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tests.support.models.blocks_reference import BlocksReference
from tests.support.models.imaged import IMAGED, PART, processor
from tests.support.models.unlisted import UNLISTED


class ImagesReference(BlocksReference):
    """Rows of a model by (site, layer) for a token sequence in which ``images`` stand, none at first."""

    def __init__(self, model: Path, family: str) -> None:
        super().__init__(model, UNLISTED[family])
        self.kinds, self.processor = IMAGED[family].kinds, processor(family)
        self.images: Sequence[Any] = ()

    def _seen(self, ids: torch.Tensor) -> dict[str, Any]:
        """What a forward is given beside the tokens."""
        if not self.images:
            return {}
        given = dict(self.processor.image_processor(images=list(self.images), return_tensors="pt"))
        given.pop("num_crops", None)  # of a kind of cutting that is off
        return given | ({self.kinds: (ids == PART).long()} if self.kinds else {})

    def rows(self, tokens: tuple[int, ...]) -> dict[tuple[str, int], npt.NDArray[np.float32]]:
        """``{(site, layer): [tokens, width]}``."""
        if not self.images:
            return super().rows(tokens)
        ids = torch.tensor(tokens)[None]
        self._rows = {}
        with torch.inference_mode():
            self._keep("final_norm", 0, self.model.model(input_ids=ids, **self._seen(ids)).last_hidden_state)
        return self._read()
