"""Attention out of stored queries and keys: of every head and query the keys with the largest weights, and the entropy.

The whole matrix of weights is never there: it is computed a few queries of one head at a time, in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from schemas import limits
from schemas.errors import ArgumentError, LimitError, Missing

__all__ = ["AttentionRule", "Summary", "answerable", "summarize"]

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
Positions = npt.NDArray[np.integer[Any]]

_GEMMAS: Final = ("gemma2", "gemma3_text")
_BY_WIDTH: Final = ("llama", "mistral", "mixtral", "phi3", "qwen2")  # a head's size follows where it is not told
_CONFIGURED: Final = (*_BY_WIDTH, "qwen3", "qwen3_moe", *_GEMMAS)
FEW_KEYS: Final = 64  # a query of fewer costs no less
_SCORE_BYTES: Final = 48  # of one query and key: scores, what is made of them, and their order


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRule:
    """The rule by which a layer makes weights of queries and keys; no field has a default.

    The weights are ``softmax(soft_cap · tanh(scale · q·k / soft_cap))``; ``soft_cap`` None: without the cap. A query
    sees the keys at its own position and before it. With a sliding ``window`` it sees only the last ``window`` of them,
    its own among these. ``head_size`` is the columns of a head. Query head ``h`` of H reads key head ``h // (H / key
    heads)``.

    Raises:
        ArgumentError: a number that no model has; it names the field.
    """

    head_size: int
    scale: float
    window: int | None
    soft_cap: float | None

    def __post_init__(self) -> None:
        for name, least in (("head_size", 1), ("window", 1)):
            value = getattr(self, name)
            if value is None and name == "window":
                continue
            if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < least:
                raise ArgumentError(name, value, "valid: a whole number from 1" + (
                    ", or None for a layer without a window" if name == "window" else ""))
        for name in ("scale", "soft_cap"):
            value = getattr(self, name)
            if value is None and name == "soft_cap":
                continue
            if (not isinstance(value, int | float | np.number) or isinstance(value, bool)
                    or not math.isfinite(value) or value <= 0):
                raise ArgumentError(name, value, "valid: a number above 0" + (
                    ", or None for a layer without a cap" if name == "soft_cap" else ""))

    @classmethod
    def of_config(cls, config: Mapping[str, Any], layer: int) -> AttentionRule:
        """The rule of a layer, from config.json of a llama, mistral, mixtral, phi3, qwen2, qwen3, qwen3_moe, gemma2 or
        gemma3_text model. ArgumentError names a key that is missing, or that may mean something else.
        """
        kind = config.get("model_type")
        if kind not in _CONFIGURED:
            raise ArgumentError("config.model_type", kind, f"valid: {', '.join(_CONFIGURED)}; of another give the "
                                "fields of AttentionRule, and check=True")
        if isinstance(layer, bool) or layer not in range(_told(config, "num_hidden_layers")):
            raise ArgumentError("layer", layer, f"the model has {config['num_hidden_layers']}, counted from 0")
        if kind in _BY_WIDTH and config.get("head_dim") is None:
            size = _told(config, "hidden_size") // _told(config, "num_attention_heads")
        else:
            size = _told(config, "head_dim")
        scale = float(_told(config, "query_pre_attn_scalar") if kind in _GEMMAS else size) ** -0.5
        soft_cap = _told(config, "attn_logit_softcapping", none=True) if kind == "gemma2" else None
        if kind == "gemma3_text" and config.get("attn_logit_softcapping") is not None:
            raise ArgumentError("config.attn_logit_softcapping", config["attn_logit_softcapping"], "no Gemma 3 has one")
        return cls(head_size=size, scale=scale, window=_window(config, kind, layer), soft_cap=soft_cap)

    def heads(self, query_width: int, key_width: int) -> tuple[int, int]:
        """The number of query heads and of key heads in rows that wide; ArgumentError where they do not divide."""
        size = self.head_size
        if query_width % size or key_width % size or not key_width:
            raise ArgumentError("head_size", size, f"does not divide rows of {query_width} and {key_width} columns")
        queries, keys = query_width // size, key_width // size
        if queries % keys:
            raise ArgumentError("head_size", size, f"{queries} query heads do not share {keys} key heads evenly")
        return queries, keys

    def first_seen(self, positions: Positions) -> I64:
        """The first position whose key each query sees, int64 ``[queries]``."""
        at = positions.astype(np.int64)
        return np.zeros_like(at) if self.window is None else np.maximum(at - self.window + 1, 0)


def _told(config: Mapping[str, Any], key: str, none: bool = False, kind: type | UnionType = int | float) -> Any:
    """A key's value, of numbers one above 0; ArgumentError where it is missing or something else."""
    value: Any = config.get(key, Missing)
    if value is Missing or (value is None and not none):
        raise ArgumentError(f"config.{key}", value, "its default is the library's, which no file tells: "
                            "AutoConfig.from_pretrained(MODEL).to_dict() has it")
    right = value is None or isinstance(value, kind)
    if not right or (kind == int | float and value is not None and not value > 0):
        raise ArgumentError(f"config.{key}", value, "not what such a configuration has there")
    return value


def _window(config: Mapping[str, Any], kind: str, layer: int) -> int | None:
    """The sliding window of a layer; ArgumentError where vLLM may take it for another."""
    if kind in _GEMMAS:
        types = _told(config, "layer_types", kind=list)
        here = types[layer] if len(types) == config["num_hidden_layers"] else types
        if here not in ("sliding_attention", "full_attention"):
            raise ArgumentError("config.layer_types", here, "valid: sliding_attention or full_attention, of each layer")
        return int(_told(config, "sliding_window")) if here == "sliding_attention" else None
    if (types := config.get("layer_types")) is not None and any(each != "full_attention" for each in types):
        raise ArgumentError("config.layer_types", types, f"windows of some layers of a {kind}: give the window to "
                            "AttentionRule, and check=True")
    if kind.startswith("qwen"):
        if _told(config, "use_sliding_window", kind=bool):
            raise ArgumentError("config.use_sliding_window", True, "give the window to AttentionRule, and check=True")
        return None
    if kind == "llama":
        if config.get("sliding_window") is not None:
            raise ArgumentError("config.sliding_window", config["sliding_window"], "no llama has one: give the window "
                                "to AttentionRule, and check=True")
        return None
    window: int | None = _told(config, "sliding_window", none=True)
    return window


@dataclass(frozen=True, slots=True)
class Summary:
    """The ``top`` keys of each head and query, with their weights and the entropy.

    ``keys`` int32 and ``weights`` float32 are ``[heads, queries, top]``: the positions of keys and their weights, by
    falling weight. Of keys with equal weights the earlier comes first. If more keys with equal weights compete for the
    last places, it is undefined which of them get one. Where a query sees fewer than ``top`` keys, the rest have key −1
    and weight 0. ``entropy`` is float32 ``[heads, queries]``, in nats. ``outputs`` are the values summed with all
    weights, float32 ``[queries, heads · value size]``; None where no values were given.
    """

    keys: I32
    weights: F32
    entropy: F32
    outputs: F32 | None


def answerable(query_positions: Positions, key_positions: Positions, rule: AttentionRule) -> npt.NDArray[np.bool_]:
    """Whether every key that a query sees is there, bool ``[queries]``; ``key_positions`` ascend."""
    at = query_positions.astype(np.int64)
    first, keys = rule.first_seen(at), key_positions.astype(np.int64)
    there = np.searchsorted(keys, at, "right") - np.searchsorted(keys, first, "left")
    return np.asarray(there == at - first + 1)


def summarize(queries: F32, keys: F32, query_positions: Positions, key_positions: Positions, rule: AttentionRule,
              top: int, values: F32 | None = None, chosen: Sequence[int] | None = None) -> Summary:
    """The ``top`` keys of every head and query, with their weights, and the entropy; of ``values`` float32
    ``[keys, key heads · value size]`` what the weights make of them. ``chosen`` names the heads (default: all), in the
    order of the result.

    ``queries`` are float32 ``[queries, heads · head size]`` as the attention kernel gets them, ``keys`` float32
    ``[keys, key heads · head size]``; positions ascend. Memory beside these and the result: at most
    ``limits.attention_bytes_max`` for weights, and the keys of one head in float64.

    Raises:
        ArgumentError: widths that are no heads, positions that do not ascend, a query of which a key is not there, a
            row with numbers that are not finite.
        LimitError: the result is larger than ``limits.slice_bytes_max``, or a query sees too many keys.
    """
    heads, key_heads = rule.heads(queries.shape[1], keys.shape[1])
    numbers = range(heads) if chosen is None else chosen
    _check(query_positions, key_positions, rule)
    check_size(len(numbers), len(queries), top)
    value_size = 0 if values is None else _value_size(values, len(keys), key_heads)
    shape = (len(numbers), len(queries))
    made = Summary(np.full((*shape, top), -1, np.int32), np.zeros((*shape, top), np.float32),
                   np.zeros(shape, np.float32),
                   None if values is None else np.zeros((len(queries), len(numbers) * value_size), np.float32))
    at, places = query_positions.astype(np.int64), key_positions.astype(np.int64)
    blocks = list(_blocks(at, places, rule))
    for key_head in range(key_heads):
        if not (mine := [i for i, head in enumerate(numbers) if head // (heads // key_heads) == key_head]):
            continue
        of_keys = _columns(keys, key_head, rule.head_size, "key", places)
        of_values = None if values is None else _columns(values, key_head, value_size, "value", places)
        for i in mine:
            of_queries = _columns(queries, numbers[i], rule.head_size, "query", at)
            for rows, seen in blocks:
                scores = _scores(of_queries[rows], of_keys[seen], at[rows], places[seen], rule)
                weights, made.entropy[i, rows] = _softmax(scores)
                order = _largest(scores, top)
                found = np.take_along_axis(weights, order, 1)
                visible = np.take_along_axis(scores, order, 1) > -np.inf
                made.keys[i, rows, : order.shape[1]] = np.where(visible, places[seen][order], -1)
                made.weights[i, rows, : order.shape[1]] = found
                if made.outputs is not None and of_values is not None:
                    made.outputs[rows, i * value_size : (i + 1) * value_size] = weights @ of_values[seen]
    return made


def check_size(heads: int, queries: int, top: int) -> None:
    """ArgumentError where ``top`` is no number of keys; LimitError where the result would be too large."""
    if not isinstance(top, int | np.integer) or isinstance(top, bool) or top < 1:
        raise ArgumentError("top", top, "valid: a whole number of keys from 1")
    nbytes = heads * queries * (8 * int(top) + 4)
    if nbytes > limits.slice_bytes_max:
        raise LimitError("bytes of attention summaries", nbytes, limits.slice_bytes_max,
                         "ask for fewer positions, or a smaller top")


def _value_size(values: F32, keys: int, key_heads: int) -> int:
    """The columns of a head of values; ArgumentError where there are none."""
    if len(values) != keys or not values.shape[1] or values.shape[1] % key_heads:
        raise ArgumentError("values", values.shape, f"valid: a row for each of {keys} keys, whose columns are those of "
                            f"{key_heads} key heads")
    return int(values.shape[1] // key_heads)


def _check(query_positions: Positions, key_positions: Positions, rule: AttentionRule) -> None:
    for name, positions in (("query_positions", query_positions), ("key_positions", key_positions)):
        if (np.diff(positions.astype(np.int64)) <= 0).any():
            raise ArgumentError(name, positions, "valid: positions that ascend")
    lacking = query_positions[~answerable(query_positions, key_positions, rule)]
    if len(lacking):
        raise ArgumentError("query_positions", int(lacking[0]), "a key that this query sees is not among the keys")


def _blocks(at: I64, places: I64, rule: AttentionRule) -> Iterator[tuple[slice, slice]]:
    """Queries that fit the memory together, and the keys that any of them sees, as slices."""
    begins = np.searchsorted(places, rule.first_seen(at), "left")
    ends = np.searchsorted(places, at, "right")
    most, start = limits.attention_bytes_max // _SCORE_BYTES, 0
    while start < len(at):
        low = int(begins[start])
        if (seen := int(ends[start]) - low) > most:
            raise LimitError("keys of a query", seen, most, "no attention is computed over more")
        # By this many queries at most; of a window no more than make it twice as wide, since nobody sees the rest.
        reached = ends[start : start + min(most // seen, max(seen, FEW_KEYS))] - low
        sizes = np.arange(1, len(reached) + 1) * reached  # grow with every further query
        count = int(np.searchsorted(sizes, most, "right"))
        yield slice(start, start + count), slice(low, int(ends[start + count - 1]))
        start += count


def _columns(rows: F32, head: int, size: int, what: str, positions: I64) -> F64:
    """A head's columns as float64 ``[rows, head size]``; ArgumentError where numbers are not finite."""
    found = rows[:, head * size : (head + 1) * size].astype(np.float64)
    if not (finite := np.isfinite(found).all(axis=1)).all():
        raise ArgumentError(what, int(positions[~finite][0]), f"the {what} at this position has numbers, in head "
                            f"{head}, that are not finite: no weights follow from them")
    return found


def _scores(queries: F64, keys: F64, at: I64, places: I64, rule: AttentionRule) -> F64:
    """``[queries, keys]``, −inf where a query does not see a key."""
    scores: F64 = queries @ keys.T
    scores *= rule.scale
    if rule.soft_cap is not None:
        scores /= rule.soft_cap
        np.tanh(scores, out=scores)
        scores *= rule.soft_cap
    scores[(places > at[:, None]) | (places < rule.first_seen(at)[:, None])] = -np.inf
    return scores


def _softmax(scores: F64) -> tuple[F64, F64]:
    """Weights ``[queries, keys]`` and their entropy ``[queries]`` in nats."""
    lower = scores - scores.max(axis=1, keepdims=True)
    weights = np.exp(lower)
    total = weights.sum(axis=1)
    lower[weights == 0] = 0.0  # 0 · −inf
    np.multiply(lower, weights, out=lower)
    entropy = np.maximum(np.log(total) - lower.sum(axis=1) / total, 0.0)
    weights /= total[:, None]
    return weights, entropy


def _largest(scores: F64, top: int) -> I64:
    """Columns of the ``top`` largest of each row, by falling score; of equal ones the earlier first."""
    count = min(top, scores.shape[1])
    chosen = np.argpartition(scores, scores.shape[1] - count, axis=1)[:, scores.shape[1] - count :]
    order = np.lexsort((chosen, -np.take_along_axis(scores, chosen, 1)), axis=1)
    return np.asarray(np.take_along_axis(chosen, order, 1), np.int64)
