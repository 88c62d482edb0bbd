"""Readings of rows: linear probes, and the features of a sparse autoencoder, on decoded rows against exact."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from schemas.errors import ArgumentError
from vllm_tap.fidelity.statistics import Interval

__all__ = ["Autoencoder", "Probed", "Probing", "Survival", "digest_of", "load_autoencoder",
           "survival"]

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

ALIVE: Final = 20  # tokens on which a feature is active before it is judged
SURVIVES: Final = (0.5, 0.9, 0.99)
_FALSE_POSITIVES: Final = 0.01
_RULES: Final = ("standard", "jumprelu", "topk")


@dataclass(frozen=True, slots=True)
class Probed:
    """Scores of a probe on decoded rows.

    ``exact`` is the AUROC on exact rows. ``frozen`` is that of a probe fitted on exact rows, ``refitted`` of one fitted
    on decoded rows. ``lost`` and ``lost_refitted`` are what each loses against exact, with an interval over prompts.
    ``spearman`` correlates the scores. ``recall`` and ``false_positives`` count at a threshold, ``_exact`` on exact
    rows. The threshold has 1 % false positives on the exact rows that the probe was fitted on.
    """

    exact: float
    frozen: float
    lost: Interval
    refitted: float
    lost_refitted: Interval
    spearman: float
    recall: float
    recall_exact: float
    false_positives: float
    false_positives_exact: float


class Probing:
    """A probe fitted on exact rows of other documents; rows are [prompts, positions, width], labels a bool each."""

    def __init__(self, fitted: F32, fitted_labels: Bools, judged: F32, labels: Bools) -> None:
        self._fitted_labels, self._labels = fitted_labels[:, 1:], labels[:, 1:]  # position 0 is like no other
        self._frozen = self._fit(fitted)
        self._exact = self._scores(self._frozen, judged)
        # A threshold is set before there are decoded rows, and never on what is judged.
        self._bar = float(np.quantile(self._scores(self._frozen, fitted)[~self._fitted_labels], 1 - _FALSE_POSITIVES))

    def _fit(self, rows: F32) -> Any:
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        model = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=200, tol=1e-3))
        return model.fit(rows[:, 1:].reshape(-1, rows.shape[-1]), self._fitted_labels.ravel())

    def _scores(self, model: Any, rows: F32) -> F64:
        found: F64 = model.decision_function(rows[:, 1:].reshape(-1, rows.shape[-1])).reshape(
            rows.shape[0], rows.shape[1] - 1)
        return found

    def judge(self, fitted: F32, judged: F32) -> Probed:
        """The codec's rows of the documents that are fitted on, and of those that are judged."""
        from scipy import stats

        frozen = self._scores(self._frozen, judged)
        again = self._scores(self._fit(fitted), judged)
        areas = [_wins(each, self._labels) for each in (self._exact, frozen, again)]
        exact, of_frozen, of_again = (_area(wins, self._labels) for wins in areas)
        return Probed(exact, of_frozen, self._lost(areas[0], areas[1]), of_again, self._lost(areas[0], areas[2]),
                      float(stats.spearmanr(self._exact.ravel(), frozen.ravel()).statistic),
                      *(self._beyond(scores, truth) for truth in (self._labels, ~self._labels)
                        for scores in (frozen, self._exact)))

    def _lost(self, exact: F64, other: F64) -> Interval:
        """AUROC lost, of all rows together, with prompts drawn anew."""
        from vllm_tap.fidelity.statistics import interval

        difference = exact - other
        positive, negative = self._labels.sum(1), (~self._labels).sum(1)

        def statistic(drawn: F64, axis: int = -1) -> Any:
            at = np.asarray(drawn).astype(np.int64)
            won = difference[at[..., :, None], at[..., None, :]].sum((-2, -1))
            return won / np.maximum(positive[at].sum(-1) * negative[at].sum(-1), 1)

        return interval(np.arange(len(exact), dtype=np.float64), statistic, draws=2000)

    def _beyond(self, scores: F64, which: Bools) -> float:
        return float((scores[which] > self._bar).mean())


def _wins(scores: F64, labels: Bools) -> F64:
    """Pairs [prompts, prompts] of a true row of one and a false row of the other in which the true one scores higher,
    ties for half.
    """
    below = [np.sort(row[~truth]) for row, truth in zip(scores, labels, strict=True)]
    found = np.zeros((len(scores), len(scores)))
    for one, (row, truth) in enumerate(zip(scores, labels, strict=True)):
        for other, sorted_ in enumerate(below):
            found[one, other] = (np.searchsorted(sorted_, row[truth], "left") + np.searchsorted(
                sorted_, row[truth], "right")).sum() / 2
    return found


def _area(wins: F64, labels: Bools) -> float:
    return float(wins.sum() / (labels.sum() * (~labels).sum()))


# ── sparse autoencoders ─────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Autoencoder:
    """One in SAELens's format: ``rule`` standard (ReLU), jumprelu or topk."""

    rule: str
    encoder: F32  # [width, features]
    encoder_bias: F32
    decoder: F32  # [features, width]
    decoder_bias: F32
    threshold: F32 | None
    k: int
    subtracts: bool  # whether the decoder's bias is taken off before encoding

    def features(self, rows: F32) -> F32:
        """Activations [rows, features]."""
        before = (rows - self.decoder_bias if self.subtracts else rows) @ self.encoder + self.encoder_bias
        if self.rule == "jumprelu" and self.threshold is not None:
            return np.where(before > self.threshold, before, 0).astype(np.float32)
        active: F32 = np.maximum(before, 0).astype(np.float32)
        if self.rule == "topk":
            bar = -np.partition(-active, self.k - 1, axis=-1)[:, self.k - 1:self.k]
            active[active < bar] = 0
        return active

    def unexplained(self, rows: F32, exact: F32) -> float:
        """The share of the exact rows' variance that the reconstruction of ``rows`` does not explain."""
        back = self.features(rows) @ self.decoder + self.decoder_bias
        return float(np.square(exact - back).sum() / np.square(exact - exact.mean(0)).sum())


@dataclass(frozen=True, slots=True)
class Survival:
    """Features of an autoencoder that are active on 20 tokens or more, and how many survive.

    ``shares``: the share whose activations correlate with those on exact rows by at least 0.5, 0.9 and 0.99.
    ``jaccard``: how much of the active sets is common. ``unexplained``: the variance that is not explained, ``_exact``
    by exact rows.
    """

    alive: int
    shares: dict[str, float]
    jaccard: float
    unexplained: float
    unexplained_exact: float


def load_autoencoder(folder: Path, width: int | None) -> Autoencoder:
    """The autoencoder of a folder with ``cfg.json`` and ``sae_weights.safetensors``. ArgumentError where it is none,
    where it is for rows of another ``width`` (None: not known yet), or where its tensors do not fit each other.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        settings = json.loads((folder / "cfg.json").read_text())
        tensors = load_file(folder / "sae_weights.safetensors")
        weights = {name: value.astype(np.float32) for name, value in tensors.items()}
        rule = str(settings.get("architecture", "standard"))
    except (OSError, ValueError, AttributeError, SafetensorError) as error:
        raise ArgumentError("--sae", str(folder), "is no autoencoder in SAELens's format (a folder with cfg.json and "
                                                  f"sae_weights.safetensors): {error}") from None
    needed = ["W_enc", "b_enc", "W_dec", "b_dec", *(["threshold"] if rule == "jumprelu" else [])]
    if rule not in _RULES or (lacking := [name for name in needed if name not in weights]):
        what = f"architecture = {rule!r}: valid are {', '.join(_RULES)}" if rule not in _RULES else \
            f"sae_weights.safetensors has no {', '.join(lacking)}"
        raise ArgumentError("--sae", str(folder), what)
    _check_shapes(folder, {name: weights[name] for name in needed}, width)
    if settings.get("normalize_activations", "none") not in ("none", None):
        raise ArgumentError("--sae", str(folder), f"normalize_activations = {settings['normalize_activations']!r}: "
                                                  "fold the scale into the weights first (SAELens does), then none")
    k = int(settings.get("k") or settings.get("activation_fn_kwargs", {}).get("k", 0))
    if rule == "topk" and not 0 < k <= weights["W_enc"].shape[1]:
        raise ArgumentError("--sae", str(folder), f"k = {k}: of topk cfg.json has to name how many features are kept")
    return Autoencoder(rule, weights["W_enc"], weights["b_enc"], weights["W_dec"], weights["b_dec"],
                       weights.get("threshold"), k, bool(settings.get("apply_b_dec_to_input", True)))


def _check_shapes(folder: Path, weights: dict[str, F32], width: int | None) -> None:
    """ArgumentError for a tensor that does not fit the others, or the rows, or has what is no number."""
    encoder = weights["W_enc"].shape
    if len(encoder) != 2:
        raise ArgumentError("--sae", str(folder), f"W_enc of sae_weights.safetensors has the shape {list(encoder)}: "
                                                  "valid: [width, features]")
    if width is not None and encoder[0] != width:
        raise ArgumentError("--sae", str(folder), f"is for rows of {encoder[0]} numbers, not of {width} "
                                                  f"(W_enc of sae_weights.safetensors is {list(encoder)})")
    width, features = encoder
    right = {"W_enc": (width, features), "W_dec": (features, width), "b_enc": (features,), "b_dec": (width,),
             "threshold": (features,)}
    for name, value in weights.items():
        if value.shape != right[name]:
            raise ArgumentError("--sae", str(folder), f"{name} of sae_weights.safetensors has the shape "
                                f"{list(value.shape)}; W_enc with {list(encoder)} takes {list(right[name])}")
        if not np.isfinite(value).all():
            raise ArgumentError("--sae", str(folder), f"{name} of sae_weights.safetensors holds what is no number")


def digest_of(folder: Path) -> str:
    """XXH3 of the two files of an autoencoder's folder; its name is no part of it."""
    digest = xxhash.xxh3_128()
    for name in ("cfg.json", "sae_weights.safetensors"):
        with (folder / name).open("rb") as file:
            while piece := file.read(1 << 24):
                digest.update(piece)
        digest.update(b"\0")
    return digest.hexdigest()


def survival(coder: Autoencoder, exact: F32, decoded: F32) -> Survival | None:
    """Survival of features on rows [rows, width], position 0 left out by the caller; None where no feature is active on
    20 tokens.
    """
    one, other = coder.features(exact), coder.features(decoded)
    alive = (one > 0).sum(0) >= ALIVE
    if not alive.any():
        return None
    both, either = ((one > 0) & (other > 0)).sum(), ((one > 0) | (other > 0)).sum()
    a, b = (each[:, alive] - each[:, alive].mean(0, dtype=np.float64) for each in (one, other))
    scale = np.linalg.norm(a, axis=0) * np.linalg.norm(b, axis=0)
    related = np.where(scale > 0, (a * b).sum(0) / np.maximum(scale, 1e-300), 0.0)
    return Survival(int(alive.sum()), {f"{bar:g}": float((related >= bar).mean()) for bar in SURVIVES},
                    float(both / max(either, 1)), coder.unexplained(decoded, exact), coder.unexplained(exact, exact))
