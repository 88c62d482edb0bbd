"""One way of coding keys and values, measured: every codec in a mode, at a part, and the controls.

Positions from the context on are scored, in all modes alike, so that modes can be compared with each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from engine_side.seams.kept.keys_values import Heads
from schemas.errors import ArgumentError
from vllm_tap.fidelity.bench import Answer, Bench, Unpublished
from vllm_tap.fidelity.distributions import I64
from vllm_tap.fidelity.kv.codecs import IDENTITY, SHUFFLED, Coded, chosen
from vllm_tap.fidelity.kv.modes import Coding, Exact, Kept, Make, Window, noise_like, one_wrong, shuffled
from vllm_tap.fidelity.study import PlaceStudy, Reference, Variant, add, first_unlike, judge, name_of, unlike

__all__ = ["Batch", "Sizes", "Where", "batches", "measured_sizes", "study_kv", "width_of"]

_SAMPLED: Final = 256  # tokens whose codes are packed to be counted

Sizes = dict[tuple[str, int, str], int]  # bytes of a token by codec, layer and "k" or "v"


@dataclass(frozen=True, slots=True)
class Where:
    """The place of a codec: a mode, a part and layers.

    ``layer``: the only one, or −1. ``window``: of rolling. ``noisy``: whether noise of each codec's power is measured
    beside it.
    """

    mode: str
    part: str
    layers: tuple[int, ...]
    layer: int = -1
    window: Window | None = None
    noisy: bool = False

    @property
    def site(self) -> str:
        """The name of it in a report, without a layer."""
        return f"{self.mode}/{self.part}"

    @property
    def name(self) -> str:
        """The name of it in a report."""
        return name_of(self.site, self.layer)


def batches(tokens: I64, size: int) -> Iterator[I64]:
    """Prompts [prompts, positions] by batches of ``size``. None is alone, unless all are, because vLLM cuts a lone
    prompt otherwise.
    """
    starts = list(range(0, len(tokens), size))
    if size > 1 and len(starts) > 1 and len(tokens) - starts[-1] == 1:
        starts.pop()
    for start, stop in zip(starts, [*starts[1:], len(tokens)], strict=True):
        yield tokens[start:stop]


def measured_sizes(bench: Bench, chunk: I64, coders: Sequence[Coded], layers: Sequence[int]) -> Sizes:
    """Bytes that the codecs make of the model's own keys and values, packed; ArgumentError for a codec that is not what
    it says.
    """
    kept = Kept(chunk.shape[1], bench.number_of)
    bench.rewritten(chunk, kept)
    found: Sizes = {}
    by_shape: dict[tuple[int, int, int, str], int] = {}
    for (layer, number), rows in kept.exact.items():
        if number or layer not in layers:
            continue
        for what, each in zip("kv", rows, strict=True):
            for coder in coders:
                key = (id(coder.at(layer)), *each.shape[1:], what)
                if key not in by_shape:
                    by_shape[key] = coder.at(layer).check(each[:_SAMPLED], what)
                found[coder.name, layer, what] = by_shape[key]
    return found


def study_kv(bench: Bench, tokens: I64, where: Where, coders: Sequence[Coded], known: tuple[Sizes, Heads],
             setting: tuple[int, int], tell: Callable[[], None]) -> PlaceStudy:
    """All codecs and controls of a place, with the prompts ``tokens`` [prompts, positions].

    ``known``: bytes that codecs make of a token, and the model's heads. ``setting``: prompts of a batch, and the
    context. Unpublished where a control does not behave, ArgumentError where a codec fails.
    """
    size, context = setting
    variants: dict[tuple[str, str], Variant] = {}
    told: dict[str, str] = {}
    harness: list[float] = []
    for chunk in batches(tokens, size):
        run = Batch(bench, chunk, where, context)
        reference = Reference(bench, run.identity, chunk)
        harness += [float(one.kl[context:].mean()) for one in reference.against(run.clean)]
        tell()
        if not told:
            told = {"identity": "the same bits", "one wrong row": run.one_wrong()}
            tell()
        made: list[tuple[str, str, Make]] = [("codec", coder.name, coder.coded) for coder in coders]
        made += [("noise", coder.name, noise_like(coder)) for coder in coders if where.noisy]
        for kind, name, make in [*made, ("control", SHUFFLED, shuffled(len(harness)))]:
            variant = variants.setdefault((kind, name), Variant(kind, name))
            run.judge(variant, make, reference)
            tell()
    sizes, heads = known
    study = PlaceStudy(where.site, where.layer, width_of(where, heads), harness, told=told)
    add(study, list(variants.values()), {
        coder.name: _bytes(coder.name, where, (sizes, heads), tokens.shape[1]) for coder in coders}, context)
    return study


def width_of(where: Where, heads: Heads) -> int:
    """Numbers of a token's keys and values in all layers of a place."""
    return sum(2 * heads[layer][0] * heads[layer][1] for layer in where.layers)


def _bytes(name: str, where: Where, known: tuple[Sizes, Heads], tokens: int) -> int:
    """Bytes of a token's keys and values in all layers of a place. Rows that are not coded have 16 bits a number. With
    a window it is the mean over a prompt of so many ``tokens``, and the tokens that the window keeps exact have 16 bits
    as well.
    """
    sizes, heads = known
    plain = {layer: 2 * heads[layer][0] * heads[layer][1] for layer in where.layers}
    coded = sum(sizes[name, layer, what] if what in where.part else plain[layer]
                for layer in where.layers for what in "kv")
    if where.window is None:
        return coded
    exact = min(where.window.exact + where.window.first, tokens)
    return -(-(coded * (tokens - exact) + 2 * sum(plain.values()) * exact) // tokens)


class Batch:
    """A batch of prompts: its run without any change and that of the identity, which must be the same."""

    def __init__(self, bench: Bench, chunk: I64, where: Where, context: int) -> None:
        self._bench, self._chunk, self._where, self._context = bench, chunk, where, context
        self._exact: Exact = {}
        self._changed = 0  # rows, by what ran last
        if where.mode == "direct":
            kept = Kept(chunk.shape[1], bench.number_of)
            self.clean = bench.rewritten(chunk, kept)
            self._exact = kept.exact
            if any(len(keys) > chunk.shape[1] for keys, _ in self._exact.values()):
                raise self._preempted()
        else:
            self.clean = bench.unedited(chunk)
        coding, self.identity = self._run(chosen((IDENTITY,), {})[0].coded)
        self._check_none_twice(coding)
        if wrong := unlike(self.clean, self.identity):
            raise Unpublished(f"identity at {self._name}: keys and values written back as they were change {wrong}")
        if coding.changed:
            raise Unpublished(f"identity at {self._name}: {coding.changed} rows are others than they were")
        self._check_all_asked(coding)

    @property
    def _name(self) -> str:
        return self._where.name

    def answers(self, name: str, make: Make) -> tuple[list[Answer] | None, str]:
        """Run the batch with a codec or a control; None, and why, where it makes what is no number."""
        coding, answers = self._run(make)
        if coding.wrong is not None and not isinstance(coding.wrong, ArithmeticError):
            raise ArgumentError("--codec", name, f"fails at {self._name}: {type(coding.wrong).__name__}: "
                                                 f"{coding.wrong}")
        if coding.wrong is not None:
            return None, str(coding.wrong)
        self._check_all_asked(coding)
        self._changed = coding.changed
        return answers, ""

    def judge(self, variant: Variant, make: Make, reference: Reference) -> None:
        """Run the batch with a codec or a control, and hold it against the identity's."""
        answers, wrong = self.answers(variant.name, make)
        if answers is None:
            variant.wrong = variant.wrong or wrong
            variant.compared += [None] * len(self._chunk)
            return
        variant.differs += self._changed
        variant.seen = variant.seen or bool(unlike(self.identity, answers))
        judge(variant, self.identity, answers, reference)

    def one_wrong(self) -> str:
        """Put one wrong row into one prompt: nothing may differ before that row counts, and nothing in any other
        prompt.
        """
        prompt, window = len(self._chunk) // 2, self._where.window
        later = window is not None or self._where.mode == "snapshot"  # it is read long behind its own position
        at = self._wrong_at(prompt)
        coding, answers = self._run(one_wrong(prompt, at))
        if not coding.changed:
            raise Unpublished(f"one wrong row at {self._name}: rows of prompt {prompt} at {at - 1} and {at} are the "
                              "same, and nothing tells whose is whose")
        firsts = first_unlike(self.identity, answers)
        due = window.coded_at(at) if window is not None else self._context if later else at
        if list(firsts) != [prompt] or firsts[prompt] < due or (firsts[prompt] > due and not later):
            raise Unpublished(f"one wrong row at {self._name}: written at position {at} of prompt {prompt}, due at "
                              f"{due}, and {'nothing differs' if not firsts else f'by prompt differs first {firsts}'}")
        return f"written at position {at} of prompt {prompt}, first difference at {firsts[prompt]}, in no other prompt"

    def _wrong_at(self, prompt: int) -> int:
        """A position of ``prompt`` whose token is another than the one before; Unpublished where there is none.

        For a snapshot it is the last one before the context's end, which a short window reads as well. For rolling its
        row is changed in the same step as the row before, in the step nearest to the middle of what is scored. Else it
        is the one nearest to that middle.
        """
        tokens, length, context = self._chunk[prompt], self._chunk.shape[1], self._context
        window, middle = self._where.window, (context + length) // 2
        if window is not None:
            among = range(window.first + 1, window.stop(length))
            found = [at for at in among if tokens[at] != tokens[at - 1] and (at + window.exact) % window.step]
            where = {at: window.coded_at(at) for at in found}
        else:
            snapshot = self._where.mode == "snapshot"
            middle = context - 1 if snapshot else middle
            among = range(1, context) if snapshot else range(max(1, context), length)
            found = [at for at in among if tokens[at] != tokens[at - 1]]
            where = {at: at for at in found}
        if not found:
            raise Unpublished(f"one wrong row at {self._name}: from position {among.start} on each token of prompt "
                              f"{prompt} is the one before, and nothing tells whose row is whose; take another --text")
        return min(found, key=lambda at: abs(where[at] - middle))

    def _run(self, make: Make) -> tuple[Coding, list[Answer]]:
        coding = Coding(self._where.mode, self._where.part, frozenset(self._where.layers), self._context, make,
                        self._bench.number_of, self._exact, self._where.window)
        return coding, self._bench.rewritten(self._chunk, coding)

    def _check_all_asked(self, coding: Coding) -> None:
        """Check that each row that this mode is about came by, once for each layer and each of keys and values."""
        self._check_none_twice(coding)
        among, due = self._due
        if lost := [at for at in among if coding.asked[at] != due]:
            raise Unpublished(f"{self._name}: of position {lost[0]} {coding.asked[lost[0]]} rows came by, and {due} "
                              "are written: this engine writes keys and values in another way as well")

    def _check_none_twice(self, coding: Coding) -> None:
        _, due = self._due
        if any(coding.asked[at] > due for at in range(self._chunk.shape[1])):
            raise self._preempted()

    @property
    def _due(self) -> tuple[range, int]:
        """The positions of which rows are due, and how many at each."""
        length, window = self._chunk.shape[1], self._where.window
        among = (range(window.first, window.stop(length)) if window is not None else
                 range(self._context if self._where.mode == "snapshot" else length))
        return among, len(self._chunk) * len(self._where.layers) * len(self._where.part)

    def _preempted(self) -> Unpublished:
        return Unpublished(f"{self._name}: requests were preempted and computed twice, as the cache has no room for "
                           f"{len(self._chunk)} prompts of {self._chunk.shape[1]} tokens: give it more "
                           "(VLLM_CPU_KVCACHE_SPACE; on a GPU --gpu-memory-utilization or --num-gpu-blocks-override "
                           "after --), or take fewer --tokens")
