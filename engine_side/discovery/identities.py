"""Sites of a decoder block by what defines them: sums that the stream fulfils, and no names.

    resid_post = resid_pre + α · attn_out + α · mlp_out,    resid_mid = resid_pre + α · attn_out
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import torch

from engine_side.discovery.calls import Call, Value

if TYPE_CHECKING:
    from engine_side.discovery.parts import Parts

TERMS_MAX: Final = 3
# How far apart equal tensors may be, of their length, and a sum, of the stream's numbers: roundings of a model's dtype.
ROUNDINGS: Final = {torch.float32: 2e-5, torch.float16: 1.5e-3, torch.bfloat16: 1e-2}
SHARE_MIN: Final = 3  # of that: a term of less proves nothing


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a tap, with rows of ``width`` numbers: ``rule`` of the module at ``path`` below the block.

    ``meaning`` says what they are where the site alone does not; "" where it does. ``off`` is how far those are apart
    from the rows that define the site, of their length.
    """

    path: str
    rule: str
    width: int = 0
    meaning: str = ""
    off: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class Term:
    """A term that a block adds to the stream: ``factor`` times the rows at any of ``places``, the outermost first.

    ``mixes``: it comes from attention, or from what a layer has in its stead. ``raw``: the places of what was normed
    to make it, none where it is added as it is.
    """

    factor: float
    places: tuple[Place, ...]
    mixes: bool
    raw: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class Explained:
    """A block as a sum: its terms, and the places of the stream between them.

    ``parts``: sites inside attention and the MLP; ``lacks``: why there is none of others. ``differs``: what a table
    claims to be a site of this block and is not. ``off``: how far the sum is off, of the stream.
    """

    terms: tuple[Term, ...]
    mid: tuple[Place, ...]
    parts: Mapping[str, Place] = field(default_factory=dict)
    lacks: Mapping[str, str] = field(default_factory=dict)
    differs: tuple[str, ...] = ()
    off: float = 0.0


@dataclass(slots=True)
class Stream:
    """One way in which a block may carry the stream: the rules of what it gets and of what it returns.

    ``handed``: by layer but the first, the distance between what the block is given and what the block before returned.
    ``adding``: by layer, the path of the module that makes the sum of two that the block is given; "" if none does.
    """

    into: str
    out: str
    explained: list[Explained | str] = field(default_factory=list)  # by layer; a text says why not
    handed: list[float] = field(default_factory=list)
    adding: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Ways:
    """The means to explain a block. ``mixes(call)``: whether attention, or what a layer has in its stead, made it.
    ``parts(attention, mlp)``: the sites inside what made those terms. ``stated``: the number by which a tap would
    multiply for a factor that was found, None where there is none.
    """

    mixes: Callable[[Call], bool]
    parts: Callable[[Call | None, Call | None], Parts]
    stated: Callable[[float], float | None]


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    """Whether rows are equal but for rounding: ``tolerance`` of their length."""
    return a.shape == b.shape and bool((a - b).norm() <= tolerance * b.norm())


def apart(claimed: torch.Tensor | None, rows: torch.Tensor) -> float:
    """The distance of rows that are claimed to be these, as a share of their length."""
    if claimed is None or claimed.shape != rows.shape:
        return float("inf")
    return float((claimed - rows).norm() / rows.norm()) if bool(rows.any()) else float(bool(claimed.any()))


def forms(values: Sequence[Value], sign: str, width: int) -> dict[str, torch.Tensor]:
    """Tensors of ``width`` and the sums of two of them, by rule: ``"argument a"``, ``"arguments a + b"``."""
    single = {value.rule: value.rows for value in values
              if value.rule.startswith(sign) and value.rows.shape[1] == width}
    pairs = {f"{sign}s {a.removeprefix(sign + ' ')} + {b.removeprefix(sign + ' ')}": single[a] + single[b]
             for a, b in itertools.combinations(single, 2)}
    return single | pairs


def adding(calls: Sequence[Call], total: torch.Tensor, tolerance: float) -> str:
    """Path of the first call that is given two tensors of this very ``total`` and returns it second; "" if none is."""
    width = total.shape[1]
    return next((call.path for call in sorted(calls, key=lambda call: call.began)
                 if any(" + " in rule and torch.equal(rows, total)
                        for rule, rows in forms(call.given, "argument", width).items())
                 and any(value.rule == "result 1" and close(value.rows, total, tolerance) for value in call.made)), "")


def explain(pre: torch.Tensor, post: torch.Tensor, inside: Sequence[Call], block: str, tolerance: float,
            ways: Ways, claimed: Mapping[str, torch.Tensor | None]) -> Explained | str:
    """The terms ``inside`` a block that add up to ``post - pre``; a text says why there are none.

    Each number is weighted by the size of the stream in its place, because it is rounded at that size. In many models a
    few channels, and the first token, are a thousand times larger than all others. ``claimed``: by site, the rows that
    a table takes for it.
    """
    candidates = _distinct(inside, block, (pre, post), tolerance)
    if not bool(post.isfinite().all() & pre.isfinite().all()):
        return "the stream is not finite"
    size = pre.abs() + post.abs()
    weight = 1 / (size + 1e-2 * size.square().mean(dim=-1, keepdim=True).sqrt())
    step = post - pre
    weighted = [weight * rows for rows, _ in candidates]
    found, nearest = _solve(weight * step, weighted, tolerance)
    if not found:
        return (f"what it adds to the stream is no sum of up to {TERMS_MAX} of the {len(candidates)} tensors made in it"
                f"{_nearest_text(nearest, candidates, tolerance)}")
    if len(found) > 1:  # before and behind a norm, where rows are of nearly one length
        stated = [one for one in found if _holds_as_stated(one, weight * step, weighted, tolerance, ways.stated)]
        if len(stated) != 1:
            return f"its addition to the stream can be explained in {len(found)} ways"
        found = stated
    numbers, factors = found[0]
    for number, factor in zip(numbers, factors, strict=True):
        share = abs(factor) * _rms(weight * candidates[number][0])
        if share < SHARE_MIN * tolerance:
            return f"{candidates[number][1][0][1].path} is {share:.1e} of the stream: too little to prove"
    terms, sources = list[Term](), dict[str, Call]()
    rows = {"resid_pre": pre, "resid_post": post}
    for number, factor in zip(numbers, factors, strict=True):
        term, source, raw = _term(factor, candidates[number], inside, block, tolerance, ways.mixes)
        site = "attn_out" if term.mixes else "mlp_out"
        if site in rows:
            for known in (site, f"{site}_raw"):
                rows.pop(known, None)
            sources.pop(site)
        elif site not in {_site(one) for one in terms}:
            rows[site], sources[site] = factor * candidates[number][0], source
            if raw is not None:
                rows[f"{site}_raw"] = raw
        terms.append(term)
    mid: tuple[Place, ...] = ()
    if len(terms) > 1 and "attn_out" in rows:
        rows["resid_mid"] = pre + rows["attn_out"]
        mid = _places_of(rows["resid_mid"], inside, block, tolerance)
    inner = ways.parts(sources.get("attn_out"), sources.get("mlp_out"))
    rows |= {site: made for site, (_, made) in inner.places.items() if made is not None}
    differs = tuple(f"{site} differs by {off_by:.1e} of its norm" for site in rows
                    if site in claimed and (off_by := apart(claimed[site], rows[site])) > tolerance)
    made = [(ways.stated(factor) or factor) * candidates[number][0]
            for number, factor in zip(numbers, factors, strict=True)]
    return Explained(tuple(terms), mid, {site: place for site, (place, _) in inner.places.items()}, inner.lacks,
                     differs, _rms(weight * (step - torch.stack(made).sum(dim=0))))


def _site(term: Term) -> str:
    return "attn_out" if term.mixes else "mlp_out"


def _nearest_text(nearest: Nearest | None, candidates: Sequence[Candidate], off_max: float) -> str:
    """Remark behind a refusal: the sum that comes nearest, and how far it is off."""
    if nearest is None:
        return ""
    off, numbers = nearest
    paths = " + ".join(candidates[number][1][0][1].path or "the block" for number in numbers)
    return f": the nearest, {paths}, differs by {off:.1e} of the stream's norm; rounding is at most {off_max:.0e}"


Candidate = tuple[torch.Tensor, list[tuple[Call, Place]]]  # rows, and the calls that made them
Solution = tuple[tuple[int, ...], list[float]]  # numbers of candidates, and the factor of each
Nearest = tuple[float, tuple[int, ...]]  # how far a sum is off, and the numbers of its candidates


def _distinct(inside: Sequence[Call], block: str, streams: Sequence[torch.Tensor], tolerance: float
              ) -> list[Candidate]:
    """Tensors made in a block, those with equal rows together. Tensors of zeros and the stream itself are left out."""
    found: list[Candidate] = []
    for call in sorted(inside, key=lambda call: call.began):
        for value in call.made:
            rows = value.rows
            if rows.shape != streams[0].shape or not bool(rows.isfinite().all()) or not bool(rows.any()) or any(
                    close(rows, stream, tolerance) for stream in streams):
                continue
            maker = call, Place(below(call.path, block), value.rule)
            same = next((makers for other, makers in found if close(rows, other, tolerance / 10)), None)
            if same is None:
                found.append((rows, [maker]))
            else:
                same.append(maker)
    return found


def _rms(numbers: torch.Tensor) -> float:
    return float(numbers.square().mean().sqrt())


def _holds_as_stated(found: Solution, step: torch.Tensor, candidates: Sequence[torch.Tensor], off_max: float,
                     stated: Callable[[float], float | None]) -> bool:
    """Whether a sum is ``step`` with the factors that the model states, in the place of those that were found."""
    made = [factor * candidates[number] for number, factor in zip(found[0], map(stated, found[1]), strict=True)
            if factor is not None]
    return len(made) == len(found[0]) and _rms(step - torch.stack(made).sum(dim=0)) <= off_max


def _solve(step: torch.Tensor, candidates: Sequence[torch.Tensor], off_max: float
           ) -> tuple[list[Solution], Nearest | None]:
    """The fewest candidates whose multiples add up to ``step``, but for ``off_max``: their numbers and factors; and
    what comes nearest.
    """
    if not candidates or _rms(step) <= off_max:
        return [], None
    share = off_max / _rms(step)
    every = torch.stack([*candidates, step]).flatten(1)
    lengths = every.norm(dim=1, keepdim=True)
    gram = (every / lengths) @ (every / lengths).T
    found: list[Solution] = []
    nearest: Nearest | None = None
    for count in range(1, TERMS_MAX + 1):
        for numbers in itertools.combinations(range(len(candidates)), count):
            part = gram[list(numbers)][:, list(numbers)]
            if float(torch.linalg.det(part)) < 1e-8:
                continue  # nearly the same tensors
            along = torch.linalg.solve(part, gram[list(numbers), -1])
            left = 1 - float(along @ gram[list(numbers), -1])  # of the squares
            off = max(left, 0.0) ** 0.5 * _rms(step)
            nearest = min(nearest, (off, numbers)) if nearest else (off, numbers)
            if left > max(4 * share**2, 1e-12):
                continue
            factors = along / lengths[list(numbers), 0] * lengths[-1, 0]
            if _rms(factors @ every[list(numbers)] - every[-1]) <= off_max:
                found.append((numbers, factors.tolist()))
        if found:
            break
    return found, nearest


def _term(factor: float, candidate: Candidate, inside: Sequence[Call], block: str, tolerance: float,
          mixes: Callable[[Call], bool]) -> tuple[Term, Call, torch.Tensor | None]:
    """A term, the call that made what was added or, where that is normed, what was normed; the latter's rows."""
    rows, makers = candidate
    places = tuple(place for _, place in makers)
    innermost = makers[-1][0]
    weight = getattr(innermost.module, "weight", None)
    raw, normed = list[tuple[Call, Value]](), rows
    if isinstance(weight, torch.Tensor) and weight.dim() == 1 and weight.numel() == rows.shape[-1] and \
            innermost.given:  # a norm: what was it given?
        normed = innermost.given[0].rows
        raw = sorted(((call, value) for call in inside for value in call.made if call is not innermost and
                      close(value.rows, normed, tolerance / 10)), key=lambda one: one[0].began)
    came = any(mixes(call) for call, _ in (*makers, *raw))
    term = Term(factor, places, came, tuple(Place(below(call.path, block), value.rule, off=apart(value.rows, normed))
                                             for call, value in raw))
    return (term, raw[-1][0], raw[-1][1].rows) if raw else (term, innermost, None)


def _places_of(rows: torch.Tensor, inside: Sequence[Call], block: str, tolerance: float) -> tuple[Place, ...]:
    """The places at which a call in a block is given ``rows`` (as they are, or as a sum of two tensors), or makes them.
    """
    found = []
    for call in sorted(inside, key=lambda call: call.began):
        sums = forms(call.given, "argument", rows.shape[1])
        for made in ({value.rule: value.rows for value in call.given}, {v.rule: v.rows for v in call.made},
                     {rule: total for rule, total in sums.items() if "+" in rule}):
            found += [Place(below(call.path, block), rule, off=apart(other, rows)) for rule, other in made.items()
                      if close(other, rows, tolerance)]
    return tuple(found)


def below(path: str, block: str) -> str:
    """A module's path below its block."""
    return path.removeprefix(block).removeprefix(".")
