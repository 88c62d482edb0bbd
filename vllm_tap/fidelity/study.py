"""One place of the model, patched back: every codec's rows in place of the model's own, and the controls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from schemas.errors import TapError
from vllm_tap.fidelity import coding
from vllm_tap.fidelity.bench import Answer, Bench
from vllm_tap.fidelity.distributions import F64, I64, Compared, compare, first_divergence, log_softmax
from vllm_tap.verify.laboratory import F32, Place

__all__ = ["Patched", "PlaceStudy", "Unpublished", "engine_floor", "study_place", "tally"]

_FIRST_SCORED: Final = 1  # position 0 stands apart: it holds most of the energy of many models
_TAIL_MIN: Final = 20_000  # positions from which on a p99.9 is not a handful of them
_ENGINE_EQUAL: Final = 0.99  # of rows: on a GPU equal magnitudes may be kept otherwise


class Unpublished(TapError):
    """A control did not behave, so that no number of this run means anything."""


@dataclass(slots=True)
class Patched:
    """A codec, or a control, at one place. ``kind``: codec, control or noise; ``prompts``: by name a number for each
    prompt; ``tail``: of all scored positions together, in nats; None where they are too few.
    """

    name: str
    kind: str
    row_bytes: int = 0
    prompts: dict[str, list[float]] = field(default_factory=dict)
    tail: dict[str, float | None] = field(default_factory=dict)


@dataclass(slots=True)
class PlaceStudy:
    """A place with all that was done there; ``harness``: KL of the control, which edits nothing, to the unedited run,
    by prompt; ``told``: what each control was seen by.
    """

    site: str
    layer: int
    width: int
    harness: list[float]
    patched: list[Patched] = field(default_factory=list)
    told: dict[str, str] = field(default_factory=dict)
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)  # by codec, what needs no model
    broken: dict[str, dict[str, Any]] = field(default_factory=dict)


class _Reference:
    """Log-probabilities of a batch's control run, kept where they are few."""

    def __init__(self, bench: Bench, answers: Sequence[Answer], tokens: I64) -> None:
        self._bench, self._answers, self._tokens = bench, answers, tokens
        self._kept: dict[int, F64] = {}

    def against(self, answers: Sequence[Answer]) -> list[Compared]:
        return [compare(self._of(at), self._chances(answer), self._tokens[at]) for at, answer in enumerate(answers)]

    def _of(self, at: int) -> F64:
        if at in self._kept:
            return self._kept[at]
        found = self._chances(self._answers[at])
        if found.nbytes * len(self._answers) <= 1 << 30:
            self._kept[at] = found
        return found

    def _chances(self, answer: Answer) -> F64:
        return log_softmax(self._bench.logits(answer.norm))


def study_place(bench: Bench, tokens: I64, place: Place, codecs: Sequence[str], batch: int, thorough: bool,
                tell: Callable[[], None]) -> tuple[PlaceStudy, F32]:
    """Patch every codec back at a place, with the prompts ``tokens`` [prompts, positions] in batches; ``thorough``:
    with all controls, and noise of each codec's power. Returns the rows too, [prompts, positions, width].

    Unpublished where a control does not behave.
    """
    variants: dict[str, tuple[str, list[list[Compared]], list[float]]] = {}
    told: dict[str, str] = {}
    harness: list[float] = []
    kept: list[F32] = []
    for start in range(0, len(tokens), batch):
        chunk = tokens[start:start + batch]
        control = bench.control(chunk, place)
        rows = [_rows(answer) for answer in control]
        kept += rows
        reference = _Reference(bench, control, chunk)
        harness += [float(one.kl[_FIRST_SCORED:].mean()) for one in reference.against(bench.unedited(chunk))]
        if wrong := _unlike(control, bench.patched(chunk, place, rows)):
            raise Unpublished(f"identity at {place[0]}.{place[1]}: rows put back as they were change {wrong}; vllm-tap "
                              "verify tells more")
        tell()
        for kind, name, made in _variants(codecs, rows, bench.dtype, thorough):
            answers = bench.patched(chunk, place, made)
            _, compared, lengths = variants.setdefault(f"{kind} {name}", (kind, [], []))
            compared.append(reference.against(answers))
            lengths += [float(first_divergence(one.tokens, other.tokens))
                        for one, other in zip(control, answers, strict=True)]
            tell()
        if start == 0:
            told["identity"] = "the same bits"
            if thorough:
                told["one wrong row"] = _one_wrong(bench, chunk, place, control, rows)
                told["engine's codes"] = _engines_codes(bench, chunk, place, codecs, rows)
    found = PlaceStudy(*place, kept[0].shape[-1], harness, told=told)
    for key, (kind, compared, lengths) in variants.items():
        name = key.partition(" ")[2]
        size = coding.row_bytes(name, found.width, bench.dtype) if kind == "codec" else 0
        found.patched.append(tally(name, kind, size, [one for each in compared for one in each], lengths))
    return found, np.stack(kept)


def _variants(codecs: Sequence[str], rows: list[F32], dtype: str, thorough: bool) -> list[tuple[str, str, list[F32]]]:
    found = []
    for name in codecs:
        coding.check_honest(name, rows[0], dtype)
        decoded = [coding.round_trip(name, each, dtype) for each in rows]
        found.append(("codec", name, decoded))
        if thorough:
            found.append(("noise", name, [coding.noise_like(each, other, at) for at, (each, other) in
                                          enumerate(zip(rows, decoded, strict=True))]))
    if thorough:
        found += [("control", "shuffled", [coding.shuffled(each, at) for at, each in enumerate(rows)]),
                  ("control", "one late", [coding.late(each) for each in rows])]
    return found


def tally(name: str, kind: str, row_bytes: int, compared: Sequence[Compared], lengths: list[float]) -> Patched:
    """Numbers by prompt of what was compared."""
    scored = slice(_FIRST_SCORED, None)
    every = np.concatenate([one.kl[scored] for one in compared])
    prompts = {
        "kl": [float(one.kl[scored].mean()) for one in compared],
        "kl_first": [float(one.kl[0]) for one in compared],
        "top1": [float(one.same_top[scored].mean()) for one in compared],
        "clear": [float(one.clear[scored].sum()) for one in compared],
        "clear_same": [float((one.clear & one.same_top)[scored].sum()) for one in compared],
        "nll": [float(one.nll[scored].mean()) for one in compared],
        "nll_other": [float(one.nll_other[scored].mean()) for one in compared],
        "same_tokens": lengths,
    }
    tail = {"median": float(np.median(every)), "p99": float(np.quantile(every, 0.99)), "p99.9":
            float(np.quantile(every, 0.999)) if len(every) >= _TAIL_MIN else None, "max": float(every.max())}
    return Patched(name, kind, row_bytes, prompts, tail)


def engine_floor(bench: Bench, tokens: I64, batch: int) -> list[float]:
    """By prompt the KL of a run in a batch to a run alone: what the engine itself does not promise."""
    chunk = tokens[:batch]
    together = bench.unedited(chunk)
    alone = [bench.unedited(chunk[at:at + 1])[0] for at in range(len(chunk))]
    return [float(one.kl[_FIRST_SCORED:].mean()) for one in _Reference(bench, together, chunk).against(alone)]


def _rows(answer: Answer) -> F32:
    assert answer.rows is not None
    return answer.rows


def _bits(rows: F32) -> Any:
    return np.ascontiguousarray(rows).view(np.uint32)


def _unlike(one: Sequence[Answer], other: Sequence[Answer]) -> str:
    """What is not the same, bit for bit; empty where nothing is."""
    for at, (a, b) in enumerate(zip(one, other, strict=True)):
        if a.tokens != b.tokens:
            return f"the answer to prompt {at}"
        if not np.array_equal(_bits(a.norm), _bits(b.norm)):
            return f"the last norm of prompt {at}"
    return ""


def _one_wrong(bench: Bench, chunk: I64, place: Place, control: Sequence[Answer], rows: list[F32]) -> str:
    """One row of one prompt is another's: nothing may differ before it, and nothing in any other prompt."""
    prompt, at = len(chunk) // 2, chunk.shape[1] // 2
    wrong = [coding.one_wrong(each, at) if number == prompt else each for number, each in enumerate(rows)]
    answers = bench.patched(chunk, place, wrong)
    firsts = {}
    for number, (one, other) in enumerate(zip(control, answers, strict=True)):
        differs = (_bits(one.norm) != _bits(other.norm)).any(axis=-1)
        if differs.any():
            firsts[number] = int(differs.argmax())
    if firsts != {prompt: at}:
        raise Unpublished(f"one wrong row at {place[0]}.{place[1]}: set at position {at} of prompt {prompt}, and "
                          f"{'nothing differs' if not firsts else f'what differs first is, by prompt, {firsts}'}")
    return f"first difference at position {at} of prompt {prompt}, in no other prompt"


def _engines_codes(bench: Bench, chunk: I64, place: Place, codecs: Sequence[str], rows: list[F32]) -> str:
    """Whether rows that the engine encoded itself decode to what was judged here."""
    least = 1.0
    for name in codecs:
        made = [_rows(answer) for answer in bench.control(chunk, place, name)]
        same = np.concatenate([(_bits(one) == _bits(coding.round_trip(name, each, bench.dtype))).all(axis=-1)
                               for one, each in zip(made, rows, strict=True)]).mean()
        least = min(least, float(same))
        if same < _ENGINE_EQUAL:
            raise Unpublished(f"{name} at {place[0]}.{place[1]}: the engine's own encoder makes the same rows as here "
                              f"in {100 * same:.1f} % of them only")
    return f"{100 * least:g} % of rows, at least, as the engine's own encoders store them"
