"""Attention out of coded queries and keys, compared with that of exact ones: which keys a head looks at, how much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from schemas.attended import KEYS, MADE, QUERIES, VALUES, Attention, AttentionAsked, LayerRows, attend
from schemas.manifest import Manifest
from vllm_tap.fidelity import coding
from vllm_tap.fidelity.bench import Bench, Unpublished
from vllm_tap.fidelity.distributions import I64
from vllm_tap.verify.laboratory import F32

__all__ = ["CHECKED", "FIRST", "SHUFFLED", "SITES", "TOP", "Attended", "held_against", "study_attention"]

SITES: Final = (QUERIES, KEYS)
CHECKED: Final = (VALUES, MADE)  # by which the kernel's own outputs are looked at, where they are there
SHUFFLED: Final = "shuffled"
TOP: Final = 8  # keys of a query that are looked at
FIRST: Final = 2 * TOP  # a query of fewer keys has most of them among its eight, whatever is done
_QUERIES: Final = 128  # of a prompt, spread over it
_LOST_MIN: Final = 0.05  # of the mass
_OFF_MAX: Final = 0.05  # of a head's output: a cache and a kernel in 16 bits are off by about 0.01

Rows = dict[str, F32]  # by site


@dataclass(slots=True)
class Attended:
    """Attention of a layer out of the rows of each codec.

    ``sizes``: by codec, bytes of a query's and a key's row. ``prompts``: by codec, and for shuffled rows, four numbers
    for each prompt, means over heads and queries. ``overlap`` is the share of the exact eight keys with the largest
    weights that the codec's eight have; ``all`` is how often they have all of them. ``mass`` is the weight of the
    codec's eight over that of the exact eight, both by exact weights. ``entropy`` is the magnitude of its difference,
    in nats. ``told``: what was seen of the kernel and of shuffled rows, and what is wrong with a codec.
    """

    layer: int
    sizes: dict[str, tuple[int, int]]
    prompts: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    told: dict[str, str] = field(default_factory=dict)


def study_attention(bench: Bench, tokens: I64, layer: int, codecs: Sequence[str], sites: Sequence[str],
                    batch: int) -> Attended:
    """Attention of a layer over the prompts ``tokens`` [prompts, positions], of queries from position 16 on.

    ``sites``: those of queries and keys, and v and z where they can be captured. With v and z, the kernel's own outputs
    are compared with what follows from exact rows. Unpublished where the two differ too much, where shuffled rows are
    as good as exact ones, or where the prompts are too short. Another error of vllm-tap where the layer has what no
    rule says.
    """
    length = tokens.shape[1]
    if length <= FIRST:
        raise Unpublished(f"prompts of {length} tokens have no query of more than {FIRST} keys")
    checked = set(CHECKED) <= set(sites)
    found, off = Attended(layer, {}), 0.0
    for start in range(0, len(tokens), batch):
        for number, (manifest, rows) in enumerate(bench.captured(tokens[start:start + batch], sites, layer), start):
            exact = _attention(manifest, rows, layer, length, checked)
            off = max(off, exact.z_error or 0.0)
            found.sizes = found.sizes or {name: tuple(coding.row_bytes(name, rows[site].shape[1], bench.dtype)
                                                      for site in SITES) for name in codecs}  # type: ignore[misc]
            for name in (*codecs, SHUFFLED):
                coded = {site: _through(name, rows[site], bench.dtype, (layer, number, at))
                         for at, site in enumerate(SITES)}
                if not all(np.isfinite(each).all() for each in coded.values()):
                    found.told[name] = "broken here: it decodes to what is no number"
                elif name not in found.told:
                    _add(found, name, held_against(exact, _attention(manifest, coded, layer, TOP)))
    found.prompts = {name: numbers for name, numbers in found.prompts.items() if name not in found.told}
    if off > _OFF_MAX:
        raise Unpublished(f"what follows from queries and keys is {off:.3g} of a head's output off what the kernel "
                          "made")
    found.told["kernel"] = (f"its outputs are at most {off:.1g} of their length off what follows from exact queries "
                            "and keys" if checked else "not looked at: v and z of this model are not captured")
    _check_shuffled(found, codecs)
    return found


def held_against(exact: Attention, coded: Attention) -> dict[str, float]:
    """Attention out of coded rows compared with the exact one, the mean over heads and queries. ``coded`` has the
    ``TOP`` keys, ``exact`` has all of them.
    """
    best, kept = exact.keys[..., :TOP], coded.keys[..., :TOP]
    weights = np.zeros((*exact.keys.shape[:2], int(exact.keys.max()) + 2), np.float64)
    np.put_along_axis(weights, exact.keys, exact.weights.astype(np.float64), -1)  # of no key, −1, the last column's
    common = (best[..., None] == kept[..., None, :]).any(-1)
    mass = [np.take_along_axis(weights, each, -1).sum(-1) for each in (kept, best)]
    return {"overlap": float(common.mean()), "all": float(common.all(-1).mean()), "mass": float(
        (mass[0] / mass[1]).mean()), "entropy": float(np.abs(exact.entropy - coded.entropy.astype(np.float64)).mean())}


def _attention(manifest: Manifest, rows: Rows, layer: int, top: int, check: bool = False) -> Attention:
    """The attention of queries spread over the prompt, with ``top`` keys each."""
    length = len(rows[KEYS])
    at = np.unique(np.linspace(FIRST, length - 1, min(_QUERIES, length - FIRST)).astype(np.int64))
    ids = np.zeros(length, np.uint32)

    def read(site: str, start: int, stop: int | None) -> LayerRows:
        span = slice(start, length if stop is None else stop)
        positions = np.arange(length, dtype=np.uint32)[span]
        return LayerRows(start, start + len(positions), positions, ids[span], rows[site][span], [])

    return attend(manifest, AttentionAsked(layer=layer, top=top, check=check, spans=[
        (int(each), int(each) + 1) for each in at]), read)


def _through(name: str, rows: F32, dtype: str, seed: tuple[int, int, int]) -> F32:
    return coding.shuffled(rows, seed) if name == SHUFFLED else coding.round_trip(name, rows, dtype)


def _add(found: Attended, name: str, numbers: dict[str, float]) -> None:
    of_codec = found.prompts.setdefault(name, {})
    for each, value in numbers.items():
        of_codec.setdefault(each, []).append(value)


def _check_shuffled(found: Attended, codecs: Sequence[str]) -> None:
    """Check that rows of other positions lose mass: otherwise no number tells whose rows are whose."""
    lost = {name: 1 - float(np.mean(of_codec["mass"])) for name, of_codec in found.prompts.items()}
    cost = lost[SHUFFLED]
    if cost <= _LOST_MIN:
        raise Unpublished(f"out of shuffled rows heads regain {100 - 100 * cost:.3g} % of the mass: nothing tells "
                          "whose rows are whose")
    as_bad = [name for name in codecs if lost.get(name, 0.0) >= cost]
    found.told[SHUFFLED] = f"{100 * cost:.3g} % of the mass is lost, " + (
        f"no more than with {', '.join(as_bad)}" if as_bad else "more than with every codec")
