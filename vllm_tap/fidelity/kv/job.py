"""``vllm-tap fidelity kv``: what a codec of keys and values costs a model that computes with its results."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import xxhash

from engine_side.seams.kept.keys_values import Heads, heads_of
from engine_side.seams.kept.rotary import Rotary, rotaries_of
from schemas.errors import ArgumentError
from vllm_tap.fidelity.bench import Bench, Unpublished
from vllm_tap.fidelity.job import (
    SIZES,
    FidelityJob,
    Made,
    few_prompts,
    floors,
    laboratory,
    model_of,
    prepared,
    publish,
    refuse,
)
from vllm_tap.fidelity.kept import Kept
from vllm_tap.fidelity.kv.codecs import SHUFFLED, Coded, Coder, KVCodec, chosen, fitting
from vllm_tap.fidelity.kv.modes import MODES, PARTS, ROLLING, Window, window_of
from vllm_tap.fidelity.kv.modes import Kept as KeptRows
from vllm_tap.fidelity.kv.own_cache import SITE, OwnCache, check_dtypes, run_own, study_own
from vllm_tap.fidelity.kv.principal import PRINCIPAL, by_layer
from vllm_tap.fidelity.kv.retrieval import study_retrieval
from vllm_tap.fidelity.kv.study import Where, batches, measured_sizes, study_kv
from vllm_tap.fidelity.reports.report import Report
from vllm_tap.fidelity.study import PlaceStudy
from vllm_tap.progress import ProgressReport, counting

__all__ = ["KVJob", "run", "study"]

_REFUSED: Final = ("--kv-cache-dtype", "--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp",
                   "--max-num-batched-tokens", "--long-prefill-token-threshold",
                   "--long-prefill-token-threshold-adaptive", "--max-num-seqs", "--no-enable-chunked-prefill",
                   "--no-enforce-eager", "--enable-prefix-caching", "--kv-transfer-config")


@dataclass(frozen=True, slots=True)
class KVJob:
    """The arguments; ArgumentError where they cannot be met.

    ``common``: those of any measurement, without sites and codecs; each of its ``layers`` is measured alone (none: all
    at once). ``own``: the user's codecs, by name. ``window``: positions that rolling keeps exact before a step (None:
    half of the context, at most 128). ``engine_dtypes``: vLLM's own dtypes of the cache, each in an engine of its own.
    """

    common: FidelityJob
    modes: tuple[str, ...] = MODES
    parts: tuple[str, ...] = PARTS
    codecs: tuple[str, ...] = ()
    own: Mapping[str, Callable[[], KVCodec]] = field(default_factory=dict)
    window: int | None = None
    engine_dtypes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.window is not None and ROLLING not in self.modes:
            raise ArgumentError("--window", self.window, f"goes with --modes {ROLLING}")
        if self.window is not None and self.window < 1:
            raise ArgumentError("--window", self.window, "valid: positions, at least 1")
        for flag, given, valid in (("--modes", self.modes, (*MODES, ROLLING)), ("--parts", self.parts, PARTS)):
            if wrong := [one for one in given if one not in valid] or ([""] if not given else []):
                raise ArgumentError(flag, wrong[0], f"valid: {', '.join(valid)}")
            if len(set(given)) < len(given):
                raise ArgumentError(flag, ",".join(given), "names one twice")
        if len(set(self.common.layers)) < len(self.common.layers):
            raise ArgumentError("--layers", ",".join(map(str, self.common.layers)), "names one twice")
        if both := [name for name in self.own if name in PRINCIPAL]:
            raise ArgumentError("--codec", both[0], "is the name of a codec that is shipped; take another")
        self.plain()
        if self.engine_dtypes:
            check_dtypes(self.engine_dtypes)
        refuse(self.common.engine_args, _REFUSED, "is set by this command, or changes how keys and values are kept")


    def plain(self) -> list[Coder]:
        """The codecs that are the same in each layer; ArgumentError for one that there is not."""
        if twice := [name for name in self.codecs if self.codecs.count(name) > 1]:
            raise ArgumentError("--codecs", ",".join(self.codecs), f"names {twice[0]} twice")
        names = tuple(name for name in self.codecs if name not in PRINCIPAL)
        return chosen(names, self.own) if names or self.own or not self.codecs else []

    @property
    def principal(self) -> tuple[str, ...]:
        """The codecs that are fitted on rows."""
        return tuple(PRINCIPAL) if not self.codecs and not self.own else tuple(
            name for name in self.codecs if name in PRINCIPAL)


def run(job: KVJob, progress: ProgressReport = False) -> Report:
    """Measure, and write ``report.json`` and ``report.html``; a run that was ended goes on where it was. Unpublished
    where a control does not behave, and then nothing is written as a report.
    """
    made = prepared(job.common)
    job.common.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="engines-", dir=job.common.out) as folder:
        own = run_own(job.common, made.judged.tokens, made.batch, _words(job, made), job.engine_dtypes, Path(folder)
                      ) if job.engine_dtypes else {}
        with laboratory(job.common, made.tokens, _words(job, made), "final_norm") as (bench, _):
            report = study(job, made, bench, progress, own)
    publish(job.common.out, report)
    return report


def _words(job: KVJob, made: Made) -> tuple[str, ...]:
    """vLLM's arguments: steps cut each prompt where its context ends, and where a window moves on. vLLM gives a lone
    prompt the whole step.
    """
    window, seats = _window(job, made), made.batch + (made.batch > 1)
    step = _context(made) if window is None else window.step
    return ("--enforce-eager", "--no-enable-prefix-caching", "--max-num-seqs", str(seats),
            "--long-prefill-token-threshold", str(step), "--max-num-batched-tokens", str(seats * step))


def _context(made: Made) -> int:
    """Positions that are coded in a snapshot; the others are scored."""
    return made.tokens - made.tokens // 2


def _window(job: KVJob, made: Made) -> Window | None:
    """The window of rolling, None where that is not measured."""
    return window_of(made.tokens, _context(made), job.window) if ROLLING in job.modes else None


def study(job: KVJob, made: Made, bench: Bench, progress: ProgressReport = False,
          own: Mapping[str, OwnCache] | None = None) -> Report:
    """All places of a job on a running engine, which cuts prompts where their context ends. ``own``: what engines with
    other dtypes of the cache made of the same prompts.
    """
    heads = heads_of(bench.engine)
    if lost := [layer for layer in job.common.layers if layer not in heads]:
        raise ArgumentError("--layers", lost[0], f"has no keys and values; these have: {', '.join(map(str, heads))}")
    measured = {layer: heads[layer] for layer in job.common.layers or sorted(heads)}
    coders, left_out = _coders(job, made, bench, measured)
    window = _window(job, made)
    noisy = "in-forward" if "in-forward" in job.modes else job.modes[-1]
    places = [Where(mode, part, layers, layer, window if mode == ROLLING else None,
                    mode == noisy and part == job.parts[0])
              for layers, layer in _layers(job, heads) for mode in job.modes for part in job.parts]
    copied = [where for where in places if where.part == job.parts[0] and where.mode != ROLLING]
    count = len(list(batches(made.judged.tokens, made.batch)))
    steps = len(places) * (count * (2 + len(coders)) + 1) + count * (len(coders) + 1) * len(copied) + count * len(
        coders) * sum(where.noisy for where in places) + (count if own else 0)
    sizes = measured_sizes(bench, next(batches(made.judged.tokens, made.batch)), coders, sorted(measured))
    settings = _settings(job, made, coders, bench.dtype) | ({"left_out": left_out} if left_out else {})
    if own:
        settings["engine_dtypes"] = list(job.engine_dtypes)
    if window is not None:
        settings["window"] = asdict(window)
    settings["digests"] = _digests(coders, measured, bench.dtype)
    report = Report(model_of(bench, job.common), settings, {
        "name": made.corpus.name, "digest": made.corpus.digest, "documents": len(made.corpus.held)}, {})
    kept = Kept(job.common.out / "progress.jsonl", report)
    with counting(progress, "measuring", steps) as step:
        report.floors = kept.floors(lambda: floors(job.common, made, bench, made.batch, report.settings))
        for where in places:
            report.places.append(kept.place((where.site, where.layer), lambda where=where: study_kv(  # type: ignore[misc]
                bench, made.judged.tokens, where, coders, (sizes, heads), (made.batch, _context(made)), step)))
        if own:
            report.places.append(kept.place((f"{SITE}/kv", -1), lambda: study_own(
                bench, made.judged.tokens, own, heads, (made.batch, _context(made)), step)))
        report.retrieval = kept.part("retrieval", lambda: study_retrieval(
            bench, made.judged.tokens, made.common, copied, coders, (made.batch, _context(made)), step))
    for place in report.places:
        _check_shuffled(report, place)
    return report


def _coders(job: KVJob, made: Made, bench: Bench, heads: Heads) -> tuple[list[Coded], str]:
    """The codecs that the model's heads can have, and a text about the rest; ArgumentError for one of the rest that was
    named.
    """
    plain, left_out = fitting(job.plain(), heads, bool(job.codecs))
    found, names, turns = list[Coded](plain), job.principal, rotaries_of(bench.engine) if job.principal else {}
    lacking = next((f"before the rotary embedding, layer {layer}: {turn}" for layer in heads
                    if isinstance(turn := turns.get(layer), str)), "")
    if not lacking and (odd := next((layer for layer, (_, head) in heads.items() if head % 4), None)) is not None:
        lacking = f"before the rotary embedding, layer {odd} has heads of {heads[odd][1]} numbers, no multiple of 4"
    if not lacking and (few := len(made.fitted.tokens[:made.batch]) * (made.tokens - 1)) <= (most := max(
            head for _, head in heads.values())):
        lacking = (f"{few} rows of {made.batch} prompts of {made.tokens} tokens are too few to fit components of heads "
                   f"of {most} numbers on (--prompts, --tokens)")
    if names and lacking:
        if job.codecs:
            raise ArgumentError("--codecs", names[0], f"{lacking}: leave it out")
        return found, f"{left_out}{'; ' if left_out else ''}{', '.join(names)}: {lacking}"
    if names:
        rows = KeptRows(made.tokens, bench.number_of)
        bench.rewritten(next(batches(made.fitted.tokens, made.batch)), rows)
        found += by_layer(names, rows.exact, sorted(heads), {
            layer: turn for layer, turn in turns.items() if isinstance(turn, Rotary)})
    return found, left_out


def _layers(job: KVJob, heads: Heads) -> list[tuple[tuple[int, ...], int]]:
    return [((layer,), layer) for layer in job.common.layers] or [(tuple(sorted(heads)), -1)]


def _check_shuffled(report: Report, place: PlaceStudy) -> None:
    """Check that rows of other positions cost more than nothing, and more than is allowed: otherwise no number means
    anything.
    """
    mean = {(one.kind, one.name): float(np.mean(one.prompts["kl"])) for one in place.patched if one.kind != "noise"}
    cost = mean.pop(("control", SHUFFLED))
    if cost <= max(report.free, report.bar, float(np.mean(place.harness))):
        raise Unpublished(f"shuffled rows at {place.name} cost {cost:.3g} nats, within the bar of {report.bar:.3g}: "
                          "nothing here tells whose rows are whose")
    as_bad = [name for (_, name), its in mean.items() if its >= cost]
    place.told["shuffled"] = f"{cost:.3g} nats, " + (
        f"no more than {', '.join(as_bad)}" if as_bad else "worse than every codec")


def _settings(job: KVJob, made: Made, coders: list[Coded], dtype: str) -> dict[str, Any]:
    count = len(made.judged.tokens)
    return {"lab": "kv", "vllm_tap": version("vllm-tap"), "size": job.common.size, "bar": job.common.bar,
            "engine_args": list(job.common.engine_args),
            "codecs": [coder.name for coder in coders], "own": {name: _known(make) for name, make in job.own.items()},
            "modes": list(job.modes), "parts": list(job.parts), "layers": list(job.common.layers),
            "context": _context(made), "dtype": dtype, "prompts": count, "tokens": made.tokens, "batch": made.batch,
            "continued": SIZES[job.common.size][2], **few_prompts(count)}


def _digests(coders: list[Coded], heads: Heads, dtype: str) -> dict[str, str]:
    """Digests of what each codec makes of rows of the model's heads: a run with other digests is not continued."""
    return {coder.name: " ".join(coder.digest(*shape, getattr(torch, dtype)) for shape in sorted(set(heads.values())))
            for coder in coders}


def _known(make: Any) -> str:
    """The identity of a user's codec: its class, and the XXH3 of the file that it is in."""
    try:
        source = xxhash.xxh3_64_hexdigest(Path(inspect.getfile(make)).read_bytes())
    except (OSError, TypeError):  # made where there is no file
        source = "unknown"
    return f"{getattr(make, '__module__', '')}:{getattr(make, '__qualname__', '')} {source}"
