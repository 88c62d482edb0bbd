"""The logits that a model makes of rows of its last norm, by its own head: for captured rows, between two steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

F32 = npt.NDArray[np.float32]


def logits_of(engine: Any, rows: F32) -> F32:
    """The logits [rows, vocabulary] of ``rows`` [rows, width] of ``final_norm``, with all that the model does to them
    (scales, soft caps), before any of the sampler's. Rows of the same bits have logits of the same bits.
    """
    found = engine.collective_rpc(_logits, args=(np.ascontiguousarray(rows),))
    of_first: F32 = next(each for each in found if each is not None)
    return of_first


def _logits(worker: Any, rows: F32) -> F32 | None:
    """The logits of a worker; None of one that has no part of the vocabulary to answer with."""
    runner = worker.model_runner
    with torch.inference_mode():
        given = torch.from_numpy(rows).to(runner.device, runner.model_config.dtype)
        logits = runner.model.compute_logits(given)
    return None if logits is None else logits.float().cpu().numpy()
