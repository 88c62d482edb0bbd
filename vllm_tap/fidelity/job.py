"""``vllm-tap fidelity``: arguments held against the model before anything starts, an engine, place after place."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from schemas import limits
from schemas.edits.arms import EDITABLE
from schemas.errors import ArgumentError
from schemas.sites import has_heads
from schemas.store.small_files import write_durable
from vllm_tap.fidelity import coding
from vllm_tap.fidelity.bench import Bench, numbers_max
from vllm_tap.fidelity.distributions import I64
from vllm_tap.fidelity.floors import arithmetic_floor
from vllm_tap.fidelity.kept import Kept, config_digest, weights_digest
from vllm_tap.fidelity.reports.page import page_of
from vllm_tap.fidelity.reports.report import Report
from vllm_tap.fidelity.study import PlaceStudy, Unpublished, engine_floor, study_place
from vllm_tap.fidelity.texts import Corpus, Prompts, commonest, prompts_of, read_text, standard_library
from vllm_tap.fidelity.unpatched import attention
from vllm_tap.fidelity.unpatched.drafting import study_drafter
from vllm_tap.fidelity.unpatched.features import Autoencoder, digest_of, load_autoencoder
from vllm_tap.fidelity.unpatched.science import Science
from vllm_tap.offline.engine import started
from vllm_tap.offline.recording import known_engine, recording
from vllm_tap.progress import ProgressReport, counting
from vllm_tap.serve.model_config import check_arguments, without_tokenizer
from vllm_tap.sites.description import SiteEntry, describe, load_config

__all__ = ["SIZES", "FidelityJob", "Made", "few_prompts", "floors", "laboratory", "model_of", "prepared", "publish",
           "refuse", "run", "study"]

SIZES: Final = {"quick": (16, 128, 16), "standard": (200, 512, 64), "full": (400, 2048, 64)}  # prompts, tokens, answer
_SITES: Final = ("resid_post", "mlp_post")
_PROMPTS_MIN: Final = 16
_PROMPTS_FEW: Final = 32
_TOKENS_MIN: Final = 16
_BATCH_ROWS: Final = 8192
_SHUTDOWN_S: Final = 20.0
_REFUSED: Final = ("--speculative-config", "-sc", "--data-parallel-size", "-dp", "--max-model-len")


@dataclass(frozen=True, slots=True)
class FidelityJob:
    """The arguments; ArgumentError where they cannot be met. ``sites`` and ``codecs`` empty: the usual ones; ``bar``:
    KL in nats that a codec may cost (default: what bfloat16 costs); ``layers`` empty: all.
    """

    model: str
    out: Path
    sites: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()
    codecs: tuple[str, ...] = ()
    text: Path | None = None
    size: str = "quick"
    prompts: int | None = None
    tokens: int | None = None
    bar: float | None = None
    sae: dict[str, Path] = field(default_factory=dict)  # by place, such as resid_post.12
    engine_args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.size not in SIZES:
            raise ArgumentError("--size", self.size, f"valid: {', '.join(SIZES)}")
        if self.prompts is not None and self.prompts < _PROMPTS_MIN:
            raise ArgumentError("--prompts", self.prompts, f"at least {_PROMPTS_MIN}: the bounds drawn from fewer are "
                                                           "too low, and codecs would seem to hold that do not")
        if self.tokens is not None and self.tokens < _TOKENS_MIN:
            raise ArgumentError("--tokens", self.tokens, f"at least {_TOKENS_MIN}")
        if self.bar is not None and not 0 < self.bar < 100:
            raise ArgumentError("--bar", self.bar, "valid: nats, more than 0")
        for site in self.sites:
            if site not in EDITABLE:
                raise ArgumentError("--sites", site, f"cannot be set; valid: {', '.join(EDITABLE)}")
        for name in self.codecs:
            coding.codecs_for("resid_post", (name,), 64)
        check_arguments(self.model, self.engine_args)
        refuse(self.engine_args, _REFUSED, "is set by this command")


def refuse(engine_args: Sequence[str], names: Sequence[str], why: str) -> None:
    """ArgumentError where one of vLLM's arguments is among ``names``, with underscores, cut short, or with a key after
    a dot too, as vLLM takes them.
    """
    for word in engine_args:
        flag = word.partition("=")[0]
        plain = flag.partition(".")[0].replace("_", "-")
        if plain.startswith("-") and plain.strip("-") and any(name.startswith(plain) for name in names):
            raise ArgumentError(flag, word, f"after --: {why}; leave it out")


@dataclass(frozen=True, slots=True)
class Made:
    """The plan of a job on its model."""

    sites: tuple[str, ...]
    tokens: int
    judged: Prompts
    fitted: Prompts
    corpus: Corpus
    common: I64  # tokens that runs are made of, where copying is measured
    coders: dict[str, Autoencoder] = field(default_factory=dict)  # by place
    attended: tuple[str, ...] = ()  # sites that attention is computed from, and those that it is checked by
    attended_in: int | None = None  # the layer, in the middle of those that are measured; None: every one

    @property
    def batch(self) -> int:
        """Prompts that are measured at once."""
        return max(1, min(len(self.judged.tokens), _BATCH_ROWS // self.tokens))


def run(job: FidelityJob, progress: ProgressReport = False) -> Report:
    """Measure, and write ``report.json`` and ``report.html`` into ``job.out``; a run that was ended goes on where it
    was. Unpublished where a control does not behave, and then nothing is written as a report.
    """
    made = prepared(job)
    job.out.mkdir(parents=True, exist_ok=True)
    with _engine(job, made) as (bench, info):
        report = study(job, made, bench, info, progress)
    publish(job.out, report)
    return report


def publish(out: Path, report: Report) -> None:
    """Write the page, then the report, each whole or not at all; only then what was kept on the way is let go."""
    write_durable(out / "report.html", page_of(report).encode())
    write_durable(out / "report.json", report.to_json().encode())
    (out / "progress.jsonl").unlink(missing_ok=True)


def prepared(job: FidelityJob) -> Made:
    """The plan of what is measured, held against the model before any engine; ArgumentError."""
    from transformers import AutoTokenizer

    listed = describe(job.model, load_config(job.model))
    there = {entry.site for entry in listed.sites}
    sites = job.sites or tuple(site for site in _SITES if site in there)
    if absent := [site for site in sites if site not in there]:
        raise ArgumentError("--sites", absent[0], f"the model has none; it has: {', '.join(sorted(there))}")
    if listed.n_layers is not None and (beyond := [layer for layer in job.layers if not 0 <= layer < listed.n_layers]):
        raise ArgumentError("--layers", beyond[0], f"the model has {listed.n_layers} layers, counted from 0")
    coders = _coders(job, {entry.site: entry for entry in listed.sites if entry.site in sites})
    count, length, _ = SIZES[job.size]
    count, length = job.prompts or count, job.tokens or length
    corpus = standard_library() if job.text is None else read_text(job.text)
    try:
        tokenizer = AutoTokenizer.from_pretrained(job.model)
    except Exception as error:
        raise ArgumentError("MODEL", job.model, f"its tokenizer: {type(error).__name__}: {error}") from None
    entries = {entry.site: entry for entry in listed.sites if entry.source == "table"}
    attended = _attended(set(entries))
    layers = [layer for layer in (entries[attended[0]].layers or () if attended else ())
              if not job.layers or layer in job.layers]
    return Made(sites, length, prompts_of(corpus, tokenizer, count, length),
                 prompts_of(corpus, tokenizer, count, length, held=False), corpus, commonest(corpus, tokenizer), coders,
                 attended, layers[len(layers) // 2] if layers else None)


def _attended(there: set[str]) -> tuple[str, ...]:
    """The sites among these that attention takes; none where it lacks queries or keys."""
    if not there.issuperset(attention.SITES):
        return ()
    return (*attention.SITES, *(attention.CHECKED if there.issuperset(attention.CHECKED) else ()))


def _coders(job: FidelityJob, sites: dict[str, SiteEntry]) -> dict[str, Autoencoder]:
    """The autoencoders by place, held against the width of the rows there; ArgumentError."""
    found = {}
    for place, folder in job.sae.items():
        site, _, layer = place.rpartition(".")
        layers = list(job.layers) or (sites[site].layers if site in sites else None)
        if site not in sites or not layer.isdecimal() or (layers is not None and int(layer) not in layers):
            raise ArgumentError("--sae", place, f"is no place that is measured; sites are {', '.join(sites)}"
                                + (f", layers {layers}" if layers else ""))
        found[place] = load_autoencoder(folder, sites[site].width)
    return found


@contextmanager
def _engine(job: FidelityJob, made: Made) -> Iterator[tuple[Bench, Any]]:
    sites, batch = ",".join(made.sites), made.batch
    os.environ["VLLM_TAP_EDIT_ROWS"] = str(min(limits.edit_rows_max, 4 * batch * made.tokens))
    words = ("--max-num-seqs", str(max(2, batch)))
    arm = (*made.sites, "final_norm", *(site if made.attended_in is None else f"{site}.{made.attended_in}"
                                        for site in made.attended if site not in made.sites))
    with laboratory(job, made.tokens, words, ",".join(arm), sites) as found:
        yield found


@contextmanager
def laboratory(job: FidelityJob, tokens: int, words: tuple[str, ...], arm: str, edit: str = ""
               ) -> Iterator[tuple[Bench, Any]]:
    """An engine in this process for prompts of so many tokens, and what it told of itself; ``words``: vLLM's arguments
    beside those that were asked for.
    """
    continued = SIZES[job.size][2]
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1",
                   "VLLM_LOGGING_STREAM": "ext://sys.stderr"}
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    if "PYTHONWARNINGS" not in os.environ:
        warnings.simplefilter("ignore")
    words = (*without_tokenizer(job.model), "--max-model-len", str(tokens + continued + 1), *words, *job.engine_args)
    with tempfile.TemporaryDirectory(prefix="vllm-tap-") as folder, recording(
            Path(folder) / "captures", arm=arm, edit=edit, durability="os") as tape:
        engine = started(job.model, words)
        try:
            yield Bench(engine, tape.store, continued), known_engine(tape)
        finally:
            engine.engine_core.shutdown(timeout=_SHUTDOWN_S)


def study(job: FidelityJob, made: Made, bench: Bench, info: Any, progress: ProgressReport = False) -> Report:
    """All places of a job on an engine that is there; StartError where a request cannot hold the rows."""
    for site in made.sites:
        width = bench.arms.widths[site]
        if made.tokens * width > numbers_max():
            raise ArgumentError("--tokens", made.tokens, f"rows of {site} have {width} numbers, and a request may hand "
                                                         f"in {numbers_max():,}: at most {numbers_max() // width}")
    places = [(site, layer) for site in made.sites for layer in bench.arms.layers[site]
              if not job.layers or layer in job.layers]
    if not places:
        raise ArgumentError("--layers", list(job.layers), f"none of them has {', '.join(made.sites)}")
    if lost := sorted(job.sae.keys() - {f"{site}.{layer}" for site, layer in places}):
        raise ArgumentError("--sae", lost[0], "is no place that is measured; these are: "
                            + ", ".join(f"{site}.{layer}" for site, layer in places))
    for name, coder in made.coders.items():
        if (given := coder.encoder.shape[0]) != (width := bench.arms.widths[name.rpartition(".")[0]]):
            raise ArgumentError("--sae", str(job.sae[name]), f"is for rows of {given} numbers, not of {width}")
    thorough = {(site, layers[len(layers) // 2]) for site in made.sites
                if (layers := [layer for name, layer in places if name == site])}
    batch = made.batch
    codecs = {site: _codecs(job, info, site) for site in made.sites}
    if lost := [site for site in made.sites if not codecs[site]]:
        raise ArgumentError("--codecs", ",".join(job.codecs), f"none of them is for rows of {lost[0]}")
    batches = -(-len(made.judged.tokens) // batch)
    steps = sum(batches * (2 + len(codecs[site]) * (2 if (site, layer) in thorough else 1)
                           + (2 if (site, layer) in thorough else 0)) for site, layer in places) + 2
    report = Report(model_of(bench, job), _settings(job, made, batch, bench.dtype), {"name": made.corpus.name, "digest":
                    made.corpus.digest, "documents": len(made.corpus.held)}, {})
    kept = Kept(job.out / "progress.jsonl", report)
    with counting(progress, "measuring", steps) as step:
        report.floors = kept.floors(lambda: floors(job, made, bench, batch, report.settings))
        science = Science(bench, made.judged, made.fitted, batch, made.coders)
        for place in places:
            found = kept.place(place, lambda place=place: _place(  # type: ignore[misc]
                bench, science, made, place, codecs[place[0]], batch, place in thorough, step))
            report.places.append(found)
        report.attention = kept.part("attention", lambda: _attention(job, made, bench, info))
        step()
        report.drafter = kept.part("drafter", lambda: study_drafter(
            bench, made.fitted.tokens, made.judged.tokens, _codecs(job, info, "final_norm"), batch))
        step()
    _check_controls(report)
    return report


def _codecs(job: FidelityJob, info: Any, site: str) -> list[str]:
    return coding.codecs_for(site, job.codecs or (*coding.DEFAULT_CODECS, *_for_heads(site)),
                             info.armed.heads.get(site, 0))


def _attention(job: FidelityJob, made: Made, bench: Bench, info: Any) -> attention.Attended:
    """The attention of the layer in the middle of those that are measured; Unpublished where there is none."""
    if not made.attended:
        raise Unpublished(f"{' and '.join(attention.SITES)} of this model are not in the table of architectures")
    layers = [layer for layer in info.armed.sites[attention.SITES[0]] if not job.layers or layer in job.layers]
    queries, keys = (_codecs(job, info, site) for site in attention.SITES)
    codecs = [name for name in keys if name in queries]
    if not layers or not codecs:
        raise Unpublished("none of the layers has it" if codecs else "none of the codecs is for queries and keys")
    return attention.study_attention(bench, made.judged.tokens, layers[len(layers) // 2], codecs, made.attended,
                                     made.batch)


def _for_heads(site: str) -> tuple[str, ...]:
    return (*(("kv8",) if site in ("k", "k_rot", "v") else ()), *(("qk8",) if site in attention.SITES else ())
            ) if has_heads(site) else ()


def _place(bench: Bench, science: Science, made: Made, place: tuple[str, int], codecs: list[str], batch: int,
           thorough: bool, step: Callable[[], None]) -> PlaceStudy:
    found, rows = study_place(bench, made.judged.tokens, place, codecs, batch, thorough, step)
    found.rows, lacking = science.tables(place, rows, [name for name in codecs if name not in found.broken], thorough)
    found.told |= lacking
    return found


def floors(job: FidelityJob, made: Made, bench: Bench, batch: int, settings: dict[str, Any]) -> dict[str, list[float]]:
    """Both floors, KL by prompt; ``settings`` is told how the arithmetic's was measured."""
    found = {"engine": engine_floor(bench, made.judged.tokens, batch)}
    arithmetic, why = arithmetic_floor(job.model, made.judged.tokens)
    settings["arithmetic"] = why
    if arithmetic and not np.isfinite(arithmetic).all():
        settings["arithmetic"] = "not measured: what bfloat16 makes of this model is no number"
    elif arithmetic:
        found["arithmetic"] = arithmetic
    return found


def _check_controls(report: Report) -> None:
    """Check that every fault put in on purpose was told: else no number of this run means anything."""
    for place in report.places:
        controls = {one.name: float(np.mean(one.prompts["kl"])) for one in place.patched if one.kind == "control"}
        if not controls:
            continue
        floor = max(report.free, float(np.mean(place.harness)))
        if controls["shuffled"] <= floor:
            raise Unpublished(f"shuffled rows at {place.site}.{place.layer} cost {controls['shuffled']:.3g} nats, no "
                              f"more than none at all with {floor:.3g}: nothing here tells whose rows are whose")
        if controls["one late"] <= report.bar:
            raise Unpublished(f"rows one position late at {place.site}.{place.layer} cost {controls['one late']:.3g} "
                              f"nats, within the bar of {report.bar:.3g}: it is too wide to tell anything")
        as_bad = [one.name for one in place.patched
                  if one.kind == "codec" and float(np.mean(one.prompts["kl"])) >= controls["shuffled"]]
        place.told["shuffled"] = f"{controls['shuffled']:.3g} nats, " + (
            f"no more than {', '.join(as_bad)}" if as_bad else "worse than every codec")
        place.told["one late"] = f"{controls['one late']:.3g} nats"


def model_of(bench: Bench, job: FidelityJob) -> dict[str, Any]:
    """The description of the model in a report."""
    import torch
    import vllm

    config = bench.engine.model_config.hf_config
    return {"name": Path(job.model).name, "dtype": bench.dtype, "vllm": vllm.__version__, "torch": torch.__version__,
            "device": str(bench.engine.vllm_config.device_config.device_type),
            "config": config_digest(config.to_json_string(use_diff=False)),
            "weights": weights_digest(job.model, getattr(config, "_commit_hash", None))}


def _settings(job: FidelityJob, made: Made, batch: int, dtype: str) -> dict[str, Any]:
    asked = {name: value for name, value in asdict(job).items() if name in ("size", "bar", "codecs", "engine_args")}
    return {**asked, "sites": list(made.sites), "layers": list(job.layers), "dtype": dtype,
            "prompts": len(made.judged.tokens), "tokens": made.tokens, "batch": batch,
            "sae": {place: digest_of(folder) for place, folder in job.sae.items()}, "continued": SIZES[job.size][2],
            **few_prompts(len(made.judged.tokens))}


def few_prompts(count: int) -> dict[str, str]:
    """The note of a report whose intervals are too narrow."""
    return {} if count >= _PROMPTS_FEW else {
        "intervals": f"of fewer than {_PROMPTS_FEW} prompts they are too narrow: take more before much hangs on them"}
