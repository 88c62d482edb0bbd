"""One place of the model, patched back: every codec's rows in place of the model's own, and the controls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from vllm_tap.fidelity import coding
from vllm_tap.fidelity.bench import Answer, Bench, Unpublished
from vllm_tap.fidelity.distributions import F64, I64, Compared, compare, first_divergence, log_softmax
from vllm_tap.verify.laboratory import F32, Place

__all__ = ["Patched", "PlaceStudy", "Reference", "Unpublished", "Variant", "add", "engine_floor", "first_unlike",
           "judge", "name_of", "study_place", "tally", "unlike"]

_FIRST_SCORED: Final = 1  # position 0 stands apart: it holds most of the energy of many models
_TAIL_MIN: Final = 20_000  # positions from which on a p99.9 is not a handful of them
_PIECE: Final = 256  # positions whose logits are there at once
_HALF: Final = 0.5  # of a prompt's rows: of fewer a model in 16 bits may lose the difference
_ENGINE_EQUAL: Final = 0.99  # of rows
_CHOICE: Final = 0.1  # of a row's error: what another choice among equal magnitudes may change of it


@dataclass(slots=True)
class Patched:
    """A codec, or a control, at one place.

    ``kind``: codec, control or noise. ``prompts``: by name a number for each prompt. ``tail``: of all scored positions
    together, in nats; None where they are too few.
    """

    name: str
    kind: str
    row_bytes: int = 0
    prompts: dict[str, list[float]] = field(default_factory=dict)
    tail: dict[str, float | None] = field(default_factory=dict)


@dataclass(slots=True)
class PlaceStudy:
    """A place with all that was done there.

    ``layer``: −1 for all of them at once. ``harness``: by prompt, KL of the control, which edits nothing, to the
    unedited run. ``told``: how each control was seen, and what is wrong with a codec. ``broken``: by codec whose
    numbers mean nothing here, the reason (``why``), its KL by prompt (``kl``; null where it is no number) and its bytes
    (``row_bytes``).
    """

    site: str
    layer: int
    width: int
    harness: list[float]
    patched: list[Patched] = field(default_factory=list)
    told: dict[str, str] = field(default_factory=dict)
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)  # by codec, what needs no model
    broken: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """``site.layer``, or the site alone."""
        return name_of(self.site, self.layer)


def name_of(site: str, layer: int) -> str:
    """A place by its name; that of all layers at once is the site's."""
    return site if layer < 0 else f"{site}.{layer}"


class Reference:
    """Log-probabilities of a batch's control run by pieces of positions, kept where they are few."""

    def __init__(self, bench: Bench, answers: Sequence[Answer], tokens: I64) -> None:
        self._bench, self._answers, self._tokens = bench, answers, tokens
        self._kept: dict[tuple[int, int], F64] = {}

    def against(self, answers: Sequence[Answer]) -> list[Compared]:
        return [self._compared(at, answer) for at, answer in enumerate(answers)]

    def _compared(self, at: int, answer: Answer) -> Compared:
        tokens, found = self._tokens[at], []
        for start in range(0, len(tokens), _PIECE):
            # One position more than is kept: the loss of a piece's last one is about the token behind it.
            span = slice(start, start + _PIECE + 1)
            one = compare(self._of(at, span), self._chances(answer, span), tokens[span])
            found.append((one.kl[:_PIECE], one.same_top[:_PIECE], one.clear[:_PIECE], one.nll, one.nll_other))
        return Compared(*(np.concatenate(parts) for parts in zip(*found, strict=True)))

    def _of(self, at: int, span: slice) -> F64:
        if (key := (at, span.start)) in self._kept:
            return self._kept[key]
        found = self._chances(self._answers[at], span)
        if np.isnan(found).any():
            raise Unpublished(f"the model's own logits of prompt {at} of the batch are no numbers, without any codec")
        if found.shape[-1] * found.itemsize * self._tokens.size <= 1 << 30:
            self._kept[key] = found
        return found

    def _chances(self, answer: Answer, span: slice) -> F64:
        return log_softmax(self._bench.logits(answer.norm[span]))


@dataclass(slots=True)
class Variant:
    """A codec, noise or control, over all batches. ``wrong``: why its numbers mean nothing; "": they do."""

    kind: str
    name: str
    compared: list[Compared | None] = field(default_factory=list)  # by prompt; None: not measured
    lengths: list[float] = field(default_factory=list)
    wrong: str = ""
    differs: int = 0  # rows that were set to others than they were
    seen: bool = False  # whether anything came of it


def study_place(bench: Bench, tokens: I64, place: Place, codecs: Sequence[str], batch: int, thorough: bool,
                tell: Callable[[], None]) -> tuple[PlaceStudy, F32]:
    """Patch every codec back at a place, with the prompts ``tokens`` [prompts, positions] in batches; ``thorough``:
    with all controls, and noise of each codec's power. Returns the rows too, [prompts, positions, width].

    Unpublished where a control does not behave.
    """
    variants: dict[tuple[str, str], Variant] = {}
    told: dict[str, str] = {}
    harness: list[float] = []
    kept: list[F32] = []
    for start in range(0, len(tokens), batch):
        chunk = tokens[start:start + batch]
        control = bench.control(chunk, place)
        rows = [_rows(answer) for answer in control]
        if not all(np.isfinite(each).all() for each in rows):
            raise Unpublished(f"{_named(place)}: the model's own rows are no numbers, without any codec")
        reference = Reference(bench, control, chunk)
        harness += [float(one.kl[_FIRST_SCORED:].mean()) for one in reference.against(bench.unedited(chunk))]
        if not np.isfinite(harness).all():
            raise Unpublished(f"{_named(place)}: KL of the control to the unedited run is no number")
        if wrong := unlike(control, bench.patched(chunk, place, rows)):
            raise Unpublished(f"identity at {_named(place)}: rows put back as they were change {wrong}; vllm-tap "
                              "verify tells more")
        tell()
        found = _one_wrong(bench, chunk, place, control, rows)
        told = {"identity": "the same bits", "one wrong row": found, **told} if start == 0 else told
        tell()
        for kind, name, made in _variants(codecs, rows, place, len(kept), bench.dtype, thorough):
            _patch(bench, chunk, place, variants.setdefault((kind, name), Variant(kind, name)), made,
                   (control, rows, reference))
            tell()
        if start == 0 and thorough:
            told["engine's codes"] = _engines_codes(bench, chunk, place, codecs, rows)
        kept += rows
    study = PlaceStudy(*place, kept[0].shape[-1], harness, told=told)
    add(study, list(variants.values()), {name: coding.row_bytes(name, study.width, bench.dtype) for name in codecs})
    return study, np.stack(kept)


def _named(place: Place) -> str:
    return f"{place[0]}.{place[1]}"


def _patch(bench: Bench, chunk: I64, place: Place, variant: Variant, made: list[F32],
           known: tuple[Sequence[Answer], list[F32], Reference]) -> None:
    """Run a batch with rows out of a codec or a control. A codec that makes what is no number is broken at this place
    alone: its prompts are then None.
    """
    control, rows, reference = known
    if not all(np.isfinite(each).all() for each in made):
        variant.wrong = variant.wrong or "it decodes to what is no number"
        variant.compared += [None] * len(chunk)
        return
    answers = bench.patched(chunk, place, made)
    for at, (one, other) in enumerate(zip(control, answers, strict=True)):
        differs = (_bits(coding.in_dtype(made[at], bench.dtype)) != _bits(coding.in_dtype(rows[at], bench.dtype))
                   ).any(-1)
        seen = bool(unlike([one], [other]))
        variant.differs, variant.seen = variant.differs + int(differs.sum()), variant.seen or seen
        if differs.mean() >= _HALF and not seen:
            raise Unpublished(f"{variant.name} at {_named(place)}: {int(differs.sum())} rows of prompt {at} were set "
                              "to others and not a bit of the last norm differs: the edit was not made")
    judge(variant, control, answers, reference)


def judge(variant: Variant, control: Sequence[Answer], answers: Sequence[Answer], reference: Reference) -> None:
    """Compare a batch's answers with those of the control, ``reference``. ``variant.wrong`` tells what makes KL no
    number.
    """
    try:
        compared = reference.against(answers)
    except ArithmeticError as error:
        variant.wrong = variant.wrong or str(error)
        variant.compared += [None] * len(answers)
        return
    if not all(np.isfinite(each).all() for one in compared for each in (one.kl, one.nll_other)):
        variant.wrong = variant.wrong or "KL of the model with its rows is no number"
    variant.compared += compared
    variant.lengths += [float(first_divergence(one.tokens, other.tokens))
                        for one, other in zip(control, answers, strict=True)]


def add(study: PlaceStudy, variants: Sequence[Variant], sizes: Mapping[str, int], first: int = _FIRST_SCORED) -> None:
    """Put the measurements into a study, of positions from ``first`` on. Codecs whose numbers mean nothing stand apart.
    ``sizes``: bytes by codec.
    """
    where = study.name
    for one in variants:
        if one.kind == "control" and one.wrong:
            raise Unpublished(f"{one.name} at {where}: {one.wrong}")
        if one.kind == "codec" and one.wrong:
            study.broken[one.name] = {"why": one.wrong, "kl": [
                None if each is None else float(each.kl[first:].mean()) for each in one.compared],
                                      "row_bytes": sizes[one.name]}
            study.told[one.name] = f"broken here: {one.wrong}"
        if one.kind == "noise" and one.wrong and one.name not in study.broken:
            study.told[f"noise like {one.name}'s"] = f"not measured: {one.wrong}"
        if one.differs and not one.seen and not one.wrong:
            raise Unpublished(f"{one.name} at {where}: {one.differs} rows were set to others and KL is 0 for all "
                              "prompts: the edits were not made")
        compared = [each for each in one.compared if each is not None]
        if not one.wrong and one.name not in study.broken:
            size = sizes[one.name] if one.kind == "codec" else 0
            study.patched.append(tally(one.name, one.kind, size, compared, one.lengths, first))


def _variants(codecs: Sequence[str], rows: list[F32], place: Place, first: int, dtype: str, thorough: bool
              ) -> list[tuple[str, str, list[F32]]]:
    """Kind, name and rows of all that is put back; ``first``: the number of the batch's first prompt."""
    found = []
    seeds = [coding.seed_of(place, first + at) for at in range(len(rows))]
    for name in codecs:
        coding.check_honest(name, rows[0], dtype)
        decoded = [coding.round_trip(name, each, dtype) for each in rows]
        found.append(("codec", name, decoded))
        if thorough:
            found.append(("noise", name, [coding.noise_like(each, other, seed) for each, other, seed in
                                          zip(rows, decoded, seeds, strict=True)]))
    if thorough:
        mixed = [coding.shuffled(each, seed) for each, seed in zip(rows, seeds, strict=True)]
        found += [("control", "shuffled", mixed),
                  ("control", "one late", [coding.late(each) for each in rows])]
    return found


def tally(name: str, kind: str, row_bytes: int, compared: Sequence[Compared], lengths: list[float],
          first: int = _FIRST_SCORED) -> Patched:
    """Numbers by prompt of what was compared, of positions from ``first`` on."""
    scored = slice(first, None)
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
    """The KL by prompt of a run in a batch to a run alone: the difference that the engine itself may make."""
    chunk = tokens[:batch]
    together = bench.unedited(chunk)
    alone = [bench.unedited(chunk[at:at + 1])[0] for at in range(len(chunk))]
    return [float(one.kl[_FIRST_SCORED:].mean()) for one in Reference(bench, together, chunk).against(alone)]


def _rows(answer: Answer) -> F32:
    assert answer.rows is not None
    return answer.rows


def _bits(rows: F32) -> Any:
    return np.ascontiguousarray(rows).view(np.uint32)


def unlike(one: Sequence[Answer], other: Sequence[Answer]) -> str:
    """The differences, bit for bit; empty where there are none."""
    for at, (a, b) in enumerate(zip(one, other, strict=True)):
        if a.tokens != b.tokens:
            return f"the answer to prompt {at}"
        if not np.array_equal(_bits(a.norm), _bits(b.norm)):
            return f"the last norm of prompt {at}"
    return ""


def first_unlike(one: Sequence[Answer], other: Sequence[Answer]) -> dict[int, int]:
    """The first position by prompt whose row of the last norm is not the same, bit for bit. Prompts without one are
    left out.
    """
    firsts = {}
    for number, (a, b) in enumerate(zip(one, other, strict=True)):
        differs = (_bits(a.norm) != _bits(b.norm)).any(axis=-1)
        if differs.any():
            firsts[number] = int(differs.argmax())
    return firsts


def _one_wrong(bench: Bench, chunk: I64, place: Place, control: Sequence[Answer], rows: list[F32]) -> str:
    """Put one wrong row into one prompt: nothing may differ before it, and nothing in any other prompt."""
    prompt, middle = len(chunk) // 2, chunk.shape[1] // 2
    unlike = (_bits(rows[prompt][1:]) != _bits(rows[prompt][:-1])).any(-1).nonzero()[0] + 1
    if not len(unlike):
        raise Unpublished(f"one wrong row at {_named(place)}: all rows of prompt {prompt} are the same, and nothing "
                          "tells whose is whose")
    at = int(unlike[np.abs(unlike - middle).argmin()])
    wrong = [coding.one_wrong(each, at) if number == prompt else each for number, each in enumerate(rows)]
    answers = bench.patched(chunk, place, wrong)
    firsts = first_unlike(control, answers)
    if firsts != {prompt: at}:
        raise Unpublished(f"one wrong row at {_named(place)}: set at position {at} of prompt {prompt}, and "
                          f"{'nothing differs' if not firsts else f'what differs first is, by prompt, {firsts}'}")
    return f"first difference at position {at} of prompt {prompt}, in no other prompt"


def _engines_codes(bench: Bench, chunk: I64, place: Place, codecs: Sequence[str], rows: list[F32]) -> str:
    """A text on how many rows that the engine encoded itself decode to the rows that were judged here; Unpublished
    where they are too few.
    """
    least = least_bits = 1.0
    for name in codecs:
        judged = [coding.round_trip(name, each, bench.dtype) for each in rows]
        if not all(np.isfinite(each).all() for each in judged):
            continue  # told as broken
        made = [_rows(answer) for answer in bench.control(chunk, place, name)]
        bits, alike = same_rows(np.concatenate(made), np.concatenate(judged), np.concatenate(rows))
        least, least_bits = min(least, alike), min(least_bits, bits)
        if alike < _ENGINE_EQUAL:
            raise Unpublished(f"{name} at {_named(place)}: the engine's own encoder makes the same rows as here "
                              f"in {100 * alike:.1f} % of them only")
    return (f"{100 * least:.4g} % of rows, at least, as the engine's own encoders store them"
            + ("" if least_bits == least else f" ({100 * least_bits:.4g} % bit for bit, the others with another choice "
                                              "among equal magnitudes)"))


def same_rows(made: F32, judged: F32, rows: F32) -> tuple[float, float]:
    """Two shares of rows [rows, width] that an encoder ``made`` as they were ``judged``.

    The first has the rows that are the same bit for bit. The second has also those that are as far from ``rows``. A
    kernel may keep others of equal magnitudes, which 16 bits have many of.
    """
    bits = (_bits(made) == _bits(judged)).all(axis=-1)
    far, judged_far = (np.linalg.norm((each - rows).astype(np.float64), axis=-1) for each in (made, judged))
    alike = np.abs(far - judged_far) <= _CHOICE * judged_far
    return float(bits.mean()), float((bits | alike).mean())
