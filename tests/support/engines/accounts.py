"""What a capture must hold, worked out from what was asked and what the client got — by nothing of the product.

``check`` holds a capture's manifest and every row of it against that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from schemas.manifest import Manifest, SiteLayer
from schemas.read.reader import StoreReader
from tests.support.engines.engines import ON_GPU
from tests.support.models.coded_model import greedy, read

I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]
Rows = Callable[[tuple[int, ...], str, int, str, I64, F32], None]


@dataclass(frozen=True)
class Request:
    """A request of a test. ``spec`` says in the product's words what ``layers`` and ``codecs`` say plainly."""

    prompt: tuple[int, ...]
    params: dict[str, Any]  # of SamplingParams
    spec: dict[str, Any] | None = None
    layers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # by site
    codecs: Mapping[str, str] = field(default_factory=dict)  # by site
    arrival: int = 0  # the engine's step before which it is added
    abort: int | None = None  # how many steps later its client gives up
    priority: int = 0
    edits: list[dict[str, Any]] | None = None

    @property
    def n(self) -> int:
        """How many samples, each with a capture of its own."""
        return int(self.params.get("n", 1))

    @property
    def reads_cache(self) -> bool:
        """Whether its prompt may come from the prefix cache; a request without a capture always may."""
        if self.spec is None or not any(self.layers.values()) or self.spec.get("positions") == []:
            return True
        asked = self.spec.get("prefix_cache")
        return asked == "allow" or (asked is None and self.spec.get("positions") in ("generated", "last_prompt"))


@dataclass
class Seen:
    """One sample as its client saw it; no ``reason`` where the client gave up."""

    tokens: tuple[int, ...] = ()
    reason: str | None = None
    stop_reason: str | int | None = None
    cached: int | None = None  # prompt tokens from the cache


@dataclass(frozen=True)
class Circumstances:
    """What may happen to a capture on the engine that it ran on."""

    block_size: int
    caching: bool = True
    preemptions: bool = False
    drops: bool = False
    coded: bool = True  # what the coded model says next is what comes


def check(reader: StoreReader, capture: str, request: Request, seen: Seen, under: Circumstances, rows: Rows) -> int:
    """AssertionError where the capture is not what it must be; returns how many rows were held against ``rows``."""
    manifest = reader.manifest(capture)
    tokens = _check_tokens(manifest, request, seen, under)
    cached = _check_cached(manifest, request, seen, under)
    end = _check_end(manifest, request, seen, tokens)
    assert manifest.recomputed == 0 or under.preemptions, "recomputed, and nothing was preempted"
    wanted = positions(request.spec or {}, len(request.prompt), max(end, len(tokens) - 1))
    entries = {(entry.site, entry.layer): entry for entry in manifest.rows}
    assert sorted(entries) == sorted((site, layer) for site, layers in request.layers.items() for layer in layers)
    held = 0
    for (site, layer), entry in entries.items():
        assert entry.codec == request.codecs[site]
        missing = _check_missing(entry, wanted, cached, end, request, under)
        there = wanted[~np.isin(wanted, missing)]
        got = reader.slice(capture, site, [layer], 0, len(tokens) + 5)
        assert np.array_equal(got.positions, there), f"{site}.{layer}: rows {got.positions}, expected {there}"
        assert np.array_equal(got.token_ids, np.asarray(tokens)[there]), f"{site}.{layer}: token ids"
        rows(tokens, site, layer, entry.codec, there, got.values()[0])
        held += len(there)
    reasons = {missing.reason for entry in manifest.rows for missing in entry.missing}
    complete = reasons <= ({"prefix_cached"} if request.reads_cache else set())
    assert manifest.status == ("incomplete" if not complete else "complete" if manifest.expected else "empty")
    return held


def positions(spec: dict[str, Any], prompt_len: int, end: int) -> I64:
    """The positions below ``end`` that a spec asks for, counted out one by one."""
    asked = spec.get("positions", "all")
    if asked == "last_prompt":
        asked = [prompt_len - 1]
    named = {"all": lambda p: True, "prompt": lambda p: p < prompt_len, "generated": lambda p: p >= prompt_len}
    wants = named[asked] if isinstance(asked, str) else lambda p: any(
        p == item if isinstance(item, int) else item[0] <= p < item[1] for item in asked)
    return np.array([p for p in range(end) if wants(p)], np.int64)


def tell(tokens: tuple[int, ...], site: str, layer: int, codec: str, at: I64, values: F32) -> None:
    """Rows of the coded model prove their token, position, context and layer themselves."""
    of, last = np.asarray(tokens), np.maximum(at - 1, 0)
    told = read(site, values, 1e-3 if codec == "raw" and not ON_GPU else 0.25)  # bfloat16 rounds the larger codes
    assert np.array_equal(told.token, of[at]), f"{site}.{layer}: rows of tokens {told.token}, expected {of[at]}"
    for what, says, is_ in (("positions", told.position, at), ("previous tokens", told.previous, of[last]),
                            ("layers", told.layer, np.full(len(at), layer))):
        assert says is None or np.array_equal(says, is_), f"{site}.{layer}: rows of {what} {says}, expected {is_}"


def _check_tokens(manifest: Manifest, request: Request, seen: Seen, under: Circumstances) -> tuple[int, ...]:
    """The final sequence; an aborted request may have got further than its client saw."""
    assert manifest.prompt_token_ids == list(request.prompt) and manifest.prompt_len == len(request.prompt)
    produced = tuple(manifest.output_token_ids)
    if seen.reason is None:
        assert produced[: len(seen.tokens)] == seen.tokens
    else:
        assert produced == seen.tokens, f"output tokens {produced}, the client got {seen.tokens}"
    if under.coded:
        if request.params.get("temperature", 0) == 0:
            assert produced == tuple(islice(greedy(request.prompt), len(produced))), "not what the model says"
        assert {token >> 6 for token in produced} <= {request.prompt[-1] >> 6}, "tokens of another request"
    assert manifest.total_len == len(request.prompt) + len(produced)
    return (*request.prompt, *produced)


def _check_cached(manifest: Manifest, request: Request, seen: Seen, under: Circumstances) -> int:
    """How much of the prompt was never computed: whole blocks, never its last token."""
    cached = manifest.cached
    assert cached == 0 or (under.caching and request.reads_cache)
    assert cached % under.block_size == 0 and cached < len(request.prompt)
    if request.n == 1 and seen.reason is not None and not under.preemptions:
        assert cached == seen.cached
    return cached


def _check_end(manifest: Manifest, request: Request, seen: Seen, tokens: tuple[int, ...]) -> int:
    """Where rows end: the last token that is sampled is not computed, except where a request ends in mid-step."""
    assert manifest.client_finish_reason == seen.reason or seen.reason is None
    assert manifest.stop_reason == seen.stop_reason
    total = len(tokens)
    if seen.reason is None:
        assert manifest.finish_reason == "abort"
        least = len(request.prompt) + len(seen.tokens) - 1 if seen.tokens else 0
        assert least <= manifest.end <= total, f"end {manifest.end} of an abort: {least} to {total}"
    elif isinstance(seen.stop_reason, str):
        assert manifest.end in (total - 1, total)
    else:
        assert manifest.finish_reason == seen.reason
        assert manifest.end == total - 1
    return manifest.end


def _check_missing(entry: SiteLayer, wanted: I64, cached: int, end: int, request: Request, under: Circumstances
                   ) -> I64:
    """The positions that are not there, each of them wanted and missing for the one reason that it can have."""
    missing = {p: gap.reason for gap in entry.missing for p in range(gap.start, gap.stop)}
    name = f"{entry.site}.{entry.layer}"
    assert len(missing) == sum(gap.rows for gap in entry.missing), f"{name}: gaps overlap: {entry.missing}"
    assert (entry.expected, entry.captured) == (len(wanted), len(wanted) - len(missing)), f"{name}: {entry}"
    must = {int(p): "prefix_cached" if p < cached else "aborted" for p in wanted if p < cached or p >= end}
    may = {"dropped"} if under.drops else set()
    # After a preemption more of its prompt may be cached, by another request, than it had computed itself.
    later = {"prefix_cached"} if under.preemptions and under.caching and request.reads_cache else set()
    for p, reason in missing.items():
        legitimate = {must[p]} if p in must else may | later if p < len(request.prompt) - 1 else may
        assert reason in legitimate, f"{name}: position {p} is missing: {reason}, legitimate: {legitimate or 'nothing'}"
    assert set(must) <= set(missing), f"{name}: rows that cannot be: {sorted(set(must) - set(missing))}"
    assert set(missing) <= set(wanted.tolist())
    return np.array(sorted(missing), np.int64)
