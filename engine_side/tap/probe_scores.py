"""A probe on the model's device: the scores of staged rows, by one product of matrices."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from schemas.probes import LoadedProbe, Probe


@dataclass(frozen=True, slots=True)
class Scorer:
    """``directions`` float32 [k, width], ``bias`` float32 [k]; both on the device of the rows."""

    about: Probe
    directions: torch.Tensor
    bias: torch.Tensor

    @property
    def count(self) -> int:
        """Number of a row's scores."""
        return int(self.bias.shape[0])

    @property
    def sigmoid(self) -> bool:
        """Whether scores are probabilities."""
        return self.about.activation == "sigmoid"

    def encode(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """The stream ``x`` float32 [layers, n, k] of rows [layers, n, width]; waits for nothing."""
        scores = torch.addmm(self.bias, rows.flatten(0, 1).float(), self.directions.t())
        if self.sigmoid:
            scores.sigmoid_()
        return {"x": scores.unflatten(0, rows.shape[:2])}


def scorer(probe: LoadedProbe, device: torch.device) -> Scorer:
    """Move a probe to the device, and make one score there: a first product makes what later ones need."""
    made = Scorer(probe.about, torch.from_numpy(probe.directions).to(device), torch.from_numpy(probe.bias).to(device))
    made.encode(torch.zeros(1, 1, probe.directions.shape[1], device=device))
    return made
