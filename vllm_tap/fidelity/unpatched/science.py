"""The tables that need no model: rows of one place, exact and through each codec, as scientists read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

import numpy as np

from vllm_tap.fidelity import coding
from vllm_tap.fidelity.bench import Bench
from vllm_tap.fidelity.texts import Prompts
from vllm_tap.fidelity.unpatched.features import ALIVE, Autoencoder, Probing, survival
from vllm_tap.fidelity.unpatched.rows import geometry, neurons, noise
from vllm_tap.verify.laboratory import F32, Place

__all__ = ["Science"]

_NEURONS: Final = "mlp_post"


class Science:
    """Judges rows; probes are fitted on ``fitted``, prompts of documents that are not judged."""

    def __init__(self, bench: Bench, judged: Prompts, fitted: Prompts, batch: int, coders: dict[str, Autoencoder]
                 ) -> None:
        self._bench, self._judged, self._fitted, self._batch, self._coders = bench, judged, fitted, batch, coders

    def tables(self, place: Place, rows: F32, codecs: Sequence[str], thorough: bool
               ) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
        """Tables by codec, and for shuffled rows where ``thorough``: noise, geometry, neurons (of ``mlp_post``), probe
        (where there are labels) and features (where an autoencoder was given). ``rows`` [prompts, positions, width].
        And what could not be measured, by name, with why.
        """
        labels = self._judged.labels
        probing = fitted = None
        coder = self._coders.get(f"{place[0]}.{place[1]}")
        if labels is not None and self._fitted.labels is not None and thorough:
            fitted = self._rows_of(self._fitted, place)
            probing = Probing(fitted, self._fitted.labels, rows, labels)
        found, lacking = {}, dict[str, str]()
        for name in (*codecs, *(("shuffled",) if thorough else ())):
            decoded = self._through(name, rows, place)
            body, coded = _body(rows), _body(decoded)
            one: dict[str, Any] = {"noise": asdict(noise(rows, decoded)), "geometry": asdict(geometry(body, coded))}
            if place[0] == _NEURONS:
                of_body = None if labels is None else labels[:, 1:].ravel()
                one["neurons"] = asdict(neurons(body, coded, of_body))
            if probing is not None and fitted is not None:
                again = self._through(name, fitted, place)
                if np.isfinite(again).all():
                    one["probe"] = asdict(probing.judge(again, decoded))
                else:
                    lacking[f"probe on {name}"] = "not fitted: rows of the other documents decode to what is no number"
            if coder is not None:
                if kept := survival(coder, body, coded):
                    one["features"] = asdict(kept)
                else:
                    lacking["features"] = (f"not measured: none of the autoencoder's {coder.encoder.shape[1]:,} is "
                                           f"active on {ALIVE} of {len(body):,} tokens; is it this place's?")
            found[name] = one
        return found, lacking

    def _rows_of(self, prompts: Prompts, place: Place) -> F32:
        found = [answer.rows for start in range(0, len(prompts.tokens), self._batch)
                 for answer in self._bench.control(prompts.tokens[start:start + self._batch], place)]
        return np.stack([each for each in found if each is not None])

    def _through(self, name: str, rows: F32, place: Place) -> F32:
        if name == "shuffled":
            return np.stack([coding.shuffled(each, coding.seed_of(place, at)) for at, each in enumerate(rows)])
        flat = rows.reshape(-1, rows.shape[-1])
        return coding.round_trip(name, flat, self._bench.dtype).reshape(rows.shape)


def _body(rows: F32) -> F32:
    """Rows [rows, width] of all prompts but for position 0."""
    return rows[:, 1:].reshape(-1, rows.shape[-1])
