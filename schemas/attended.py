"""Attention of a capture: the rows that it takes, the queries that can be answered with them, and their summary.

The same wherever it is computed: in a program over a store, or in the service, so that summaries alone travel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from schemas import codecs
from schemas.attention import FEW_KEYS, AttentionRule, answerable, check_size, summarize
from schemas.errors import ArgumentError, LimitError, NotFoundError, TapError
from schemas.errors import Missing as NoValue
from schemas.manifest import Manifest, Missing, SiteInfo

if TYPE_CHECKING:
    from schemas.read.slices import Slice

__all__ = ["Attention", "AttentionAsked", "LackingRows", "LayerRows", "Needs", "Unattended", "attend", "lack_of",
           "needs_of", "reading", "told_rule"]

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]
QUERIES, KEYS, VALUES, MADE = "q_rot", "k_rot", "v", "z"
NOT_ASKED: Final = "not_asked"  # why a row is not there that the capture's positions left out
_TOLD_ALIKE: Final = 1e-6  # relative: config.json's numbers may be rounded


@dataclass(frozen=True, slots=True)
class LayerRows:
    """Rows of one site and layer at positions ``[start, stop)``: ``positions`` and ``token_ids`` uint32 ``[rows]``,
    ``values`` float32 ``[rows, width]``; what is missing of the range that the capture asked for.
    """

    start: int
    stop: int
    positions: U32
    token_ids: U32
    values: F32
    missing: list[Missing]


class HasSlices(Protocol):
    """A reader of a store's rows."""

    def slice(self, ref: str, site: str, layers: Sequence[int], start: int = 0, stop: int | None = None,
              owner: str | None = None) -> Slice: ...


Read = Callable[[str, int, int | None], LayerRows]  # of a site, at positions [start, stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionAsked:
    """A question about a layer's attention: the ``top`` keys of ``heads`` (None: all) for queries at the positions of
    ``spans``, ``[start, stop)`` each, ascending. ``rule`` None: what the engine told. ``check`` compares with ``z``.
    Where a query lacks a row it is left out with ``allow_missing``. At most ``weights_max`` are computed (None: any).
    """

    layer: int
    rule: AttentionRule | None = None
    top: int = 8
    spans: Sequence[tuple[int, int | None]] = ((0, None),)
    heads: Sequence[int] | None = None
    allow_missing: bool = False
    check: bool = False
    weights_max: int | None = None


@dataclass(frozen=True, slots=True)
class Unattended:
    """Queries ``[start, stop)`` that were left out: the rows ``missing`` of ``site`` are not there.

    Of the rows that a query lacks the first are named, with their reason: one of a manifest's, or ``not_asked`` where
    the capture's positions left them out.
    """

    start: int
    stop: int
    site: str
    missing: Missing


@dataclass(frozen=True, slots=True)
class Attention:
    """The keys that the ``heads`` of a layer attend to, for queries at ``positions``, uint32 ``[queries]``.
    ``token_ids`` are those of the queries.

    ``keys`` int32 and ``weights`` float32 are ``[heads, queries, top]``: the positions of keys and their weights, by
    falling weight. Of keys with equal weights the earlier comes first. Where a query sees fewer than ``top`` keys, the
    rest have key −1 and weight 0. ``entropy`` float32 ``[heads, queries]`` is over all weights, in nats.

    ``codecs`` are those of the stored queries and keys. ``raw`` rows are the computed ones; with any other codec the
    error follows from that codec's. ``cache`` names the dtype that the engine's cache rounded keys to before the kernel
    read them ("fp8"), "" for none. ``unattended`` names the queries that were left out.

    ``z_error`` is the result of the check, None where none was asked for. It compares the values of a head, summed with
    all weights, to the ``z`` that the kernel made of them. It is the largest distance between the two, divided by the
    length of that ``z``.
    """

    capture: str
    layer: int
    rule: AttentionRule
    codecs: tuple[str, str]
    positions: U32
    token_ids: U32
    keys: I32
    weights: F32
    entropy: F32
    unattended: list[Unattended]
    z_error: float | None = None
    heads: list[int] = field(default_factory=list)
    cache: str = ""


class LackingRows(TapError):
    """A query lacks rows: ``what`` of the capture does, at the ranges ``missing``."""

    def __init__(self, what: str, missing: list[Missing]) -> None:
        ranges = ", ".join(f"[{gap.start}, {gap.stop}) {gap.reason}" for gap in missing[:8])
        super().__init__(f"{what} lacks positions {ranges}{', …' if len(missing) > 8 else ''}")
        self.what, self.missing = what, missing


@dataclass(frozen=True, slots=True)
class Needs:
    """The data that an answer is computed from: the ``sites`` (queries, keys; to check, values and z), the rule, and
    heads.
    """

    sites: list[SiteInfo]
    rule: AttentionRule
    heads: list[int]


def needs_of(manifest: Manifest, asked: AttentionAsked) -> Needs:
    """The data that is needed of a capture, from its manifest alone; raises what ``attend`` raises but for rows."""
    layer = asked.layer
    if isinstance(layer, bool) or not isinstance(layer, int | np.integer) or layer < 0:
        raise ArgumentError("layer", layer, "valid: one layer's number, counted from 0")
    names = (QUERIES, KEYS, VALUES, MADE) if asked.check else (QUERIES, KEYS)
    sites = [_site(manifest, site, int(layer)) for site in names]
    rule = _ruled(asked.rule, told_rule(manifest.engine, int(layer)), sites)
    count, _ = rule.heads(*(site.width for site in sites[:2]))
    heads = list(range(count)) if asked.heads is None else [int(head) for head in asked.heads]
    if not heads or min(heads) < 0 or max(heads) >= count or len(set(heads)) < len(heads):
        raise ArgumentError("heads", asked.heads, f"valid: numbers of query heads, each once; the layer has {count}, "
                            "counted from 0")
    check_size(len(heads), 0, asked.top)
    return Needs(sites, rule, heads)


def told_rule(engine: Mapping[str, Any], layer: int) -> AttentionRule | None:
    """The rule by which a layer weighs keys, as the engine of a capture told it; None where it did not.

    ArgumentError where it said that the layer has what no rule says, such as attention sinks.
    """
    for told in engine.get("attention", ()):
        if layer not in told["layers"]:
            continue
        if told["beyond"]:
            raise ArgumentError("layer", layer, f"its attention has {told['beyond']}, which no rule says: weights of "
                                "queries and keys alone would be wrong")
        return AttentionRule(head_size=told["head_size"], scale=told["scale"], window=told["window"],
                             soft_cap=told["soft_cap"])
    return None


def attend(manifest: Manifest, asked: AttentionAsked, read: Read) -> Attention:
    """The attention of a capture, from the rows that ``read`` gives.

    Raises:
        LackingRows: a row that a query needs is not there, unless ``allow_missing``.
        NotFoundError: ``q_rot`` or ``k_rot`` of the layer (to check, ``v`` or ``z``) was not captured.
        ArgumentError: no rule, or one that is not the layer's; no such heads; rows that are no columns of heads.
        LimitError: more than ``schemas.limits``, or ``weights_max``, allows.
    """
    needs = needs_of(manifest, asked)
    layer, rule = int(asked.layer), needs.rule
    queries = _joined([read(QUERIES, *span) for span in asked.spans])
    at = queries.positions
    check_size(len(needs.heads), len(at), asked.top)
    first = int(rule.first_seen(at[:1])[0]) if len(at) else 0
    seen = (first, int(at[-1]) + 1 if len(at) else 1)  # no empty ranges
    keys = read(KEYS, *seen)
    whole = answerable(at, keys.positions, rule)
    left_out = [Unattended(gap.start, gap.stop, QUERIES, gap) for gap in queries.missing]
    left_out += _unattended(at[~whole], keys, KEYS, rule)
    values = made = None
    if asked.check:
        values, made = read(VALUES, *seen), _joined([read(MADE, *span) for span in asked.spans])
        valued = answerable(at, values.positions, rule)
        left_out += _unattended(at[whole & ~valued], values, VALUES, rule)
        whole &= valued
        compared = np.isin(at, made.positions)
        left_out += _unmade(at[whole & ~compared], made)
        whole &= compared
        both = np.isin(keys.positions, values.positions)
        keys = replace(keys, positions=keys.positions[both], values=keys.values[both])
    if left_out and not asked.allow_missing:
        raise LackingRows(*lack_of(layer, left_out))
    _check_weights(at[whole], needs, asked.top, asked.weights_max)
    found = summarize(queries.values[whole], keys.values, at[whole], keys.positions, rule, asked.top,
                      None if values is None else values.values[np.isin(values.positions, keys.positions)], needs.heads)
    error = None
    if found.outputs is not None and made is not None:
        error = _distance(found.outputs, made.values[np.isin(made.positions, at[whole])], needs)
    return Attention(manifest.id, layer, rule, (needs.sites[0].codec, needs.sites[1].codec), at[whole],
                     queries.token_ids[whole], found.keys, found.weights, found.entropy, left_out, error, needs.heads,
                     next((told.get("cache", "") for told in manifest.engine.get("attention", ())
                           if layer in told["layers"]), ""))


def reading(reader: HasSlices, capture: str, layer: int, owner: str | None = None) -> Read:
    """The functions by which ``attend`` reads a capture that a store's reader has."""

    def read(site: str, start: int, stop: int | None) -> LayerRows:
        piece = reader.slice(capture, site, [layer], start, stop, owner)
        return LayerRows(piece.start, piece.stop, piece.positions, piece.token_ids, piece.values()[0], piece.missing)

    return read


def lack_of(layer: int, left_out: Sequence[Unattended]) -> tuple[str, list[Missing]]:
    """The lack of the first query that was left out, in words, and the ranges of all that lack the same."""
    site = left_out[0].site
    what = f"attention of layer {layer}" if site in (QUERIES, KEYS) else f"the check of attention of layer {layer}"
    return f"{what} needs {site}, which", list(dict.fromkeys(each.missing for each in left_out if each.site == site))


def _site(manifest: Manifest, site: str, layer: int) -> SiteInfo:
    """A site of the capture, whose rows are the kernel's own columns."""
    layers: dict[str, Any] = manifest.resolved.get("layers", {})
    if layer not in layers.get(site, []):
        had = ", ".join(f"{name} {numbers}" for name, numbers in layers.items()) or "none"
        needs = (f"needs {QUERIES} and {KEYS} of it" if site in (QUERIES, KEYS) else
                 f"is checked by {VALUES} and {MADE} of it, unless check=False")
        raise NotFoundError(f"attention of layer {layer} {needs}: capture {manifest.id} has no {site}.{layer}; it has: "
                            f"{had}")
    found = next((info for info in manifest.sites if info.site == site), None)
    if found is None:
        raise NotFoundError(f"capture {manifest.id} has no rows of {site}")
    if codecs.identified(found.codec).family.projected:
        raise ArgumentError("layer", layer, f"{site} is stored as {found.codec}, whose numbers are not the columns of "
                            "heads: capture it with raw, raw16 or qk8")
    return found


def _ruled(rule: AttentionRule | None, told: AttentionRule | None, sites: Sequence[SiteInfo]) -> AttentionRule:
    """The rule to compute by. ArgumentError where there is none, where it differs from the one that the engine told, or
    where the codec was made for heads of another size.
    """
    encoded = next((int(site.parameters["head"]) for site in sites if "head" in site.parameters), None)
    if rule is None and told is not None:
        rule = told
    if not isinstance(rule, AttentionRule):
        size = "…" if encoded is None else encoded
        raise ArgumentError("rule", NoValue if rule is None else rule, "the engine of this capture did not tell how "
                            "its attention weighs keys: give AttentionRule.of_config(config, layer), of config.json, "
                            f"or AttentionRule(head_size={size}, scale=…, window=…, soft_cap=…), None where there is "
                            "no window or no soft cap")
    for name in ("head_size", "scale", "window", "soft_cap") if told is not None else ():
        mine, theirs = getattr(rule, name), getattr(told, name)
        if mine != theirs and (None in (mine, theirs) or not math.isclose(mine, theirs, rel_tol=_TOLD_ALIKE)):
            raise ArgumentError(f"rule.{name}", mine, f"the engine that made this capture told {theirs}: leave the "
                                "rule out")
    if encoded not in (None, rule.head_size):
        raise ArgumentError("rule.head_size", rule.head_size, f"the rows were encoded by heads of {encoded} columns")
    return rule


def _check_weights(at: U32, needs: Needs, top: int, most: int | None) -> None:
    """LimitError where these queries see more keys, over all heads, than ``most``.

    A query counts as at least 64 keys, because fewer cost as much. Where ``top`` is larger than 64 the count is
    tripled, because sorting then costs twice as much again.
    """
    seen = np.maximum(at.astype(np.int64) - needs.rule.first_seen(at) + 1, FEW_KEYS)
    count = len(needs.heads) * int(seen.sum()) * (1 if top <= FEW_KEYS else 3)
    if most is not None and count > most:
        raise LimitError("attention weights to compute", count, most, "ask for fewer heads or positions at a time")


def _joined(parts: Sequence[LayerRows]) -> LayerRows:
    """Rows of one site at ascending ranges as one."""
    if len(parts) == 1:
        return parts[0]
    return LayerRows(parts[0].start, parts[-1].stop, np.concatenate([part.positions for part in parts]),
                     np.concatenate([part.token_ids for part in parts]),
                     np.concatenate([part.values for part in parts]), [gap for part in parts for gap in part.missing])


def _distance(outputs: F32, made: F32, needs: Needs) -> float:
    """The largest distance of a head's outputs from what the kernel made, over the length of that."""
    count = needs.sites[0].width // needs.rule.head_size
    of_heads = made.reshape(len(made), count, -1)[:, needs.heads] if made.shape[1] % count == 0 else made
    if of_heads.size != outputs.size:
        raise ArgumentError("check", True, f"{VALUES} of {outputs.shape[1] // len(needs.heads)} columns a head do not "
                            f"add up to {MADE} of {made.shape[1]} columns")
    differences = outputs.reshape(of_heads.shape) - of_heads
    off, length = (np.linalg.norm(rows, axis=-1) for rows in (differences, of_heads))
    return float((off / np.maximum(length, np.finfo(np.float32).tiny)).max(initial=0.0))


def _unattended(at: U32, rows: LayerRows, site: str, rule: AttentionRule) -> list[Unattended]:
    """Queries that lack a row of a key, by position, neighbours with one cause together."""
    if not len(at):
        return []
    gaps = _absent(rows, int(at[-1]) + 1)
    stops = np.asarray([gap.stop for gap in gaps])
    return _runs(at, np.searchsorted(stops, rule.first_seen(at), "right"), gaps, site)  # the first that they reach


def _unmade(at: U32, made: LayerRows) -> list[Unattended]:
    """Queries whose own row is not there, with what is known of it."""
    if not len(at):
        return []
    gaps = _absent(made, int(at[-1]) + 1)
    stops = np.asarray([gap.stop for gap in gaps])
    return _runs(at, np.searchsorted(stops, at.astype(np.int64), "right"), gaps, MADE)


def _runs(at: U32, cause: npt.NDArray[np.intp], gaps: list[Missing], site: str) -> list[Unattended]:
    places = at.astype(np.int64)
    edges = np.flatnonzero((np.diff(places) != 1) | (np.diff(cause) != 0)) + 1
    return [Unattended(int(run[0]), int(run[-1]) + 1, site, gaps[int(of[0])])
            for run, of in zip(np.split(places, edges), np.split(cause, edges), strict=True)]


def _absent(rows: LayerRows, stop: int) -> list[Missing]:
    """All positions up to ``stop`` of the range asked for without a row, by their reason, in order."""
    if rows.stop < stop:  # the capture runs, and had come so far
        rows = replace(rows, stop=stop, missing=[*rows.missing, Missing(rows.stop, stop, "pending")])
    there = np.concatenate([[rows.start - 1], rows.positions.astype(np.int64), [rows.stop]])
    found: list[Missing] = []
    for at in np.flatnonzero(np.diff(there) > 1):
        start, stop = int(there[at]) + 1, int(there[at + 1])
        for gap in sorted(rows.missing, key=lambda gap: gap.start):
            low, high = max(gap.start, start), min(gap.stop, stop)
            if low >= high:
                continue
            if start < low:
                found.append(Missing(start, low, NOT_ASKED))
            found.append(Missing(low, high, gap.reason))
            start = high
        if start < stop:
            found.append(Missing(start, stop, NOT_ASKED))
    return found
