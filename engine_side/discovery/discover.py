"""Sites of a model that no table knows: found in one recorded step by what defines them, or refused with the reason.

The stream is the tensor that each block returns and the next block gets. The final norm, called again with the stream
alone, returns what it returned in the step. The stream begins with the embeddings. The names of modules are not used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import nn

from engine_side.discovery.calls import Call, Claim, Recording, Value, rows_of
from engine_side.discovery.identities import (
    ROUNDINGS,
    Explained,
    Place,
    Stream,
    Term,
    Ways,
    adding,
    apart,
    close,
    explain,
    forms,
)
from engine_side.discovery.joined import FAILED, Modules, Part, refused
from engine_side.discovery.nudge import SUM_ROUNDINGS
from engine_side.discovery.parts import Inside, Parts, Roles
from engine_side.discovery.proofs import Begun, of_stream
from engine_side.tap import taps
from engine_side.tap.architectures import BY_STRUCTURE, ModulePath, TapPoint
from engine_side.tap.stages import Stage
from schemas.errors import StartError

__all__ = ["FAILED", "ROWS", "Contradicted", "Crossing", "Discovery", "Shape"]

ROWS: Final = 8  # of the recorded step: eight times the width is equations enough for three factors


_MEANING: Final = {
    "resid_pre": "residual stream as the block gets it",
    "resid_mid": "residual stream after attention",
    "resid_post": "residual stream as the next block gets it",
    "attn_out": "output of attention, or of what the layer has in its stead, as added to the residual stream",
    "mlp_out": "MLP output as added to the residual stream",
    "attn_out_raw": "attention output before its norm",
    "mlp_out_raw": "MLP output before its norm",
    "embed": "rows of the embedding table, before any scaling",
    "final_norm": "output of the final norm, after its weight",
}


class Contradicted(StartError):
    """A table's rows are not what the search has found."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The facts that a model's configuration states. ``factors``: numbers that what is added may be multiplied by.
    ``within``: the part of the model in which its blocks are, where it has blocks of others (a tower for images).
    ``stage``: the blocks that this process has, of a pipeline; None where it has all.
    """

    n_layers: int
    width: int
    dtype: torch.dtype
    factors: Sequence[float]
    within: nn.Module | None = None
    stage: Stage | None = None


@dataclass(frozen=True, slots=True)
class Crossing:
    """Tensors by name that a stage got from the one before, as they came, and that it hands on; none at the model's
    ends.
    """

    came: Mapping[str, torch.Tensor]
    left: Mapping[str, torch.Tensor]


WHOLE: Final = Crossing({}, {})


@dataclass(frozen=True, slots=True)
class Ends:
    """The beginning and end of the stream on a stage. ``norm`` is the final norm, None on a stage that is not the last;
    ``norm_off`` is how far it is off. ``came`` names the tensor, or sum of two, that the stage before handed on as the
    stream; ``came_off`` is how far that is off. ``left`` names what this stage hands on.
    """

    norm: Call | None
    norm_off: float
    came: str
    came_off: float
    left: str


class Discovery:
    """The search: fed with a recorded step as it runs, it has the sites at the end.

    ``claims`` are the sites as a table gives them. They are compared with what is found, and with each other. ``sums``:
    whether the stream is the sum of what attention and MLP add, so that claims are compared with the sum of their parts
    too.
    """

    def __init__(self, model: nn.Module, shape: Shape, ids: torch.Tensor, roles: Roles,
                 claims: Sequence[TapPoint] = (), sums: bool = False) -> None:
        self.model, self.width, self.ids, self.factors, self.roles = model, shape.width, ids, shape.factors, roles
        self._sums = sums
        self.dtype, self.tolerance = shape.dtype, ROUNDINGS[shape.dtype]
        self.stage = shape.stage or Stage(0, 1, 0, shape.n_layers)
        self.kernels = {id(module) for module in model.modules() if roles.is_kernel(module)}
        self.layers, self.blocks = self._find_blocks(shape.n_layers, shape.within or model)
        self.streams: list[Stream] | None = None
        self.refused: StartError | None = None
        self._claims: dict[int, list[Claim]] = {}
        for point in claims:
            if (rule := taps.rule_of(point.rule)).method == "forward":
                self._claims.setdefault(id(point.module), []).append(((point.site, point.layer), rule))
        self._wrong: list[str] = []  # what is claimed and cannot be
        self._came: torch.Tensor | None = None  # what is claimed to enter the first block
        self._handed_on: torch.Tensor | None = None  # what is claimed to leave the last block
        self._first: Call | None = None
        self._last: Call | None = None  # of the blocks that ended; it is explained once the next says what a stream is
        self._inside: list[Call] = []  # the last
        self._count = 0

    def recorded(self, noise: Callable[[torch.Tensor], None]) -> Recording:
        """The recording, for the length of one step."""
        return Recording(self.model, len(self.ids), self.blocks, self.kernels, self._claims, noise, self._block_ended)

    def _find_blocks(self, n_layers: int, within: nn.Module) -> tuple[str, list[str]]:
        named = dict(self.model.named_modules())  # each module once, by its first path
        inside = {id(module) for module in within.modules()}
        lists = [path for path, module in named.items()
                 if isinstance(module, nn.ModuleList) and len(module) == n_layers
                 and f"{path}.{self.stage.start}" in named
                 and id(module) in inside and self._attends(module)]
        outer = [path for path in lists if not any(path.startswith(f"{other}.") for other in lists)]
        if len(outer) != 1:
            raise refused(f"looked for one list of {n_layers} blocks with attention in them, found "
                           f"{', '.join(outer) or 'none'}")
        return outer[0], [f"{outer[0]}.{layer}" for layer in range(self.stage.start, self.stage.stop)]

    def _attends(self, module: nn.Module) -> bool:
        return any(id(part) in self.kernels for part in module.modules())

    def _block_ended(self, block: Call, inside: list[Call]) -> None:
        """Look at a block; what is wrong is said when the step is over: other ranks wait for this one in it."""
        self._hold_claims(block, inside)
        if self.refused is None:
            try:
                self._look_at(block, inside)
            except StartError as error:
                self.refused = error

    def _hold_claims(self, block: Call, inside: list[Call]) -> None:
        """Hold what a table claims of a block against itself: its layer, and what must add up."""
        claimed = {place: rows for call in (*inside, block) for place, rows in call.claimed.items()}
        if not claimed or block.path not in self.blocks:
            return
        number = self.stage.start + self.blocks.index(block.path)
        self._wrong += [f"{site}.{layer} is of block {number}" for site, layer in claimed if layer != number]
        rows = {site: found for (site, _), found in claimed.items()}
        pre, mid, post = (rows.get(site) for site in ("resid_pre", "resid_mid", "resid_post"))
        attention, mlp = rows.get("attn_out"), rows.get("mlp_out")
        ways: list[tuple[str, tuple[torch.Tensor | None, ...]]] = [("resid_pre", (self._handed_on,))]
        if self._sums:
            ways += [("resid_mid", (pre, attention)),
                     ("resid_post", (pre, attention, mlp) if mid is None else (mid, mlp))]
        for site, terms in ways:
            total = rows.get(site)
            there = [term for term in terms if term is not None and total is not None and term.shape == total.shape]
            if total is not None and len(there) == len(terms) and \
                    (off := apart(total, torch.stack(there).sum(0))) > SUM_ROUNDINGS * self.tolerance:
                self._wrong.append(f"{site}.{number} differs by {off:.1e} from the sum of its parts")
        self._handed_on = post
        if number == self.stage.start:
            self._came = pre

    def _hold_crossing(self, crossing: Crossing) -> None:
        """Hold what a table claims of the stream against what the stage before hands on, and what this one does."""
        for tensors, rows, place in ((crossing.came, self._came, f"resid_pre.{self.stage.start} is not what the stage "
                                                                 "before hands on"),
                                     (crossing.left, self._handed_on, f"resid_post.{self.stage.stop - 1} is not what "
                                                                      "the stage hands on")):
            if tensors and rows is not None and not (off := self._handed(tensors, rows)[1]) <= self.tolerance:
                self._wrong.append(f"{place}: the nearest differs by {off:.1e}")

    def _look_at(self, block: Call, inside: list[Call]) -> None:
        if self._count >= len(self.blocks) or block.path != self.blocks[self._count]:
            raise refused(f"{block.path} ran in the place of {self.blocks[min(self._count, len(self.blocks) - 1)]}: "
                           "blocks run in another order, or more than once")
        self._count += 1
        if self._last is None:
            self._first, self._last, self._inside = block, block, inside
            return
        into, out = forms(block.given, "argument", self.width), forms(self._last.made, "result", self.width)
        if self.streams is None:
            self.streams = [Stream(a, b) for a, given in into.items() for b, made in out.items()
                            if close(given, made, self.tolerance / 10)]
        else:
            self.streams = [stream for stream in self.streams if stream.into in into and stream.out in out
                            and close(into[stream.into], out[stream.out], self.tolerance / 10)]
        if not self.streams:
            if several := _several(block, self._last, len(self.ids), self.width):
                raise refused(f"several streams: {self._last.path} returns {several} rows of {self.width} numbers a "
                               f"token, and {block.path} is given as many; no definition says which is the stream")
            raise refused(f"{block.path} does not receive any tensor that {self._last.path} returns, nor a sum of two"
                           f"{_nearest(into, out, self.width)}")
        for stream in self.streams:
            stream.handed.append(apart(into[stream.into], out[stream.out]))
        self._explain()
        self._last, self._inside = block, inside

    def _explain(self) -> None:
        """Explain the last block, in each way in which it may carry the stream."""
        assert self._last is not None and self.streams is not None
        last = self._last
        given, made = forms(last.given, "argument", self.width), forms(last.made, "result", self.width)
        claimed = {site: rows for call in (*self._inside, last) for (site, _), rows in call.claimed.items()}
        for stream in self.streams:
            post = made.get(stream.out)
            pre = given.get(stream.into) if stream.explained else _entered(given, stream)
            total = pre if " + " in stream.into else None
            stream.adding.append("" if total is None else adding(self._inside, total, self.tolerance))
            stream.explained.append(
                "it does not receive the stream as other blocks do" if pre is None or post is None
                else explain(pre, post, self._inside, last.path, self.tolerance, Ways(
                    lambda call: self._attends(call.module), self._parts, self._factor), claimed))

    def _parts(self, attention: Call | None, mlp: Call | None) -> Parts:
        assert self._last is not None
        return Inside(self._inside, self._last.path, self.roles, self.tolerance).parts(attention, mlp)

    def found(self, outside: Sequence[Call], crossing: Crossing = WHOLE) -> Part:
        """The sites of the blocks here; StartError says why they are not told, Contradicted which claims are wrong."""
        self._hold_crossing(crossing)
        try:
            part, differs = self._told(outside, crossing)
        except StartError:
            self._contradict(self._wrong)
            raise
        self._contradict([*differs, *self._wrong])
        return part

    def _told(self, outside: Sequence[Call], crossing: Crossing) -> tuple[Part, list[str]]:
        """The sites, and what a table claims of them that is not so."""
        if self.refused is not None:
            raise self.refused
        if self._count != len(self.blocks):
            raise refused(f"{self._count} of {len(self.blocks)} blocks ran")
        assert self._last is not None
        if self.streams is None:
            if self.stage.first:
                raise refused("with a single block, the tensor between blocks is unknown" + (
                    "" if self.stage.count == 1 else
                    ": set VLLM_PP_LAYER_PARTITION so that the first stage has two blocks at least"))
            self.streams = [Stream(into, out) for into in forms(self._last.given, "argument", self.width)
                            for out in forms(self._last.made, "result", self.width)]
        self._explain()
        begins = self._begins(outside) if self.stage.first else None
        stream, ends = self._admitted(outside, crossing)
        return self._sites(stream, ends, begins), self._differs(stream, ends.norm, begins, outside)

    def _admitted(self, outside: Sequence[Call], crossing: Crossing) -> tuple[Stream, Ends]:
        """The one way in which blocks may carry the stream, and where it begins and ends."""
        assert self.streams is not None
        reasons, admitted = [], []
        for stream in self.streams:
            wrong = next((f"block {self.stage.start + number}: {one}" for number, one in enumerate(stream.explained)
                          if isinstance(one, str)), None)
            ends = wrong or self._ends(stream, outside, crossing)
            if isinstance(ends, str):
                reasons.append(f"{stream.into}: {ends}")
            else:
                admitted.append((stream, ends))
        if len(admitted) != 1:
            raise refused("; ".join(dict.fromkeys(reasons)) if not admitted else
                          f"the stream could be any of {', '.join(stream.into for stream, _ in admitted)}")
        return admitted[0]

    def _ends(self, stream: Stream, outside: Sequence[Call], crossing: Crossing) -> Ends | str:
        """The beginning and end of the stream on this stage; a text says why there is none."""
        assert self._first is not None and self._last is not None
        came, left = ("", 0.0), ("", 0.0)
        if not self.stage.first:
            came = self._handed(crossing.came, forms(self._first.given, "argument", self.width)[stream.into])
        if not self.stage.last:
            left = self._handed(crossing.left, forms(self._last.made, "result", self.width)[stream.out])
        for (name, off), what in ((came, "is handed no tensor, nor sum of two, that its first block gets"),
                                  (left, "hands on no tensor, nor sum of two, that its last block returns")):
            if not off <= self.tolerance:
                return f"the stage {what}" + (f": the nearest, {name}, differs by {off:.1e}" if name else "")
        if not self.stage.last:
            if not self.stage.first and came[0] != left[0]:
                return f"the stage gets it as {came[0]} and hands it on as {left[0]}"
            return Ends(None, 0.0, *came, left[0])
        off, norm = self._final_norm(stream, outside)
        if norm is None or not off <= self.tolerance:
            return "no norm after the last block has it as its only input" + (
                "" if norm is None else f": the nearest, {norm.path}, differs by {off:.1e}; rounding is at most "
                                        f"{self.tolerance:.0e}")
        return Ends(norm, off, *came, "")

    def _handed(self, tensors: Mapping[str, torch.Tensor], rows: torch.Tensor) -> tuple[str, float]:
        """Name of the tensor, or of the two whose sum is nearest to ``rows``, and how far they are apart."""
        values = [Value(f"tensor {name}", found) for name, tensor in tensors.items()
                  if (found := rows_of(tensor, len(self.ids))) is not None]
        off, name = min(((apart(form, rows), name) for name, form in forms(values, "tensor", self.width).items()),
                        default=(float("inf"), ""))
        return name, off

    def _differs(self, stream: Stream, norm: Call | None, begins: tuple[str, torch.Tensor] | None,
                 outside: Sequence[Call]) -> list[str]:
        """Rows that a table claims to be a site's and are others than those that were found."""
        wrong = [f"{site}.{layer} {rest}" for layer, block in enumerate(stream.explained, self.stage.start)
                 if isinstance(block, Explained) for site, rest in (one.split(" ", 1) for one in block.differs)]
        once = {**({"embed": begins[1]} if begins else {}),
                **({"final_norm": _wide(norm, self.width)[0].rows} if norm else {})}
        wrong += [f"{site} differs by {off:.1e} of its norm" for call in outside
                  for (site, _), rows in call.claimed.items()
                  if site in once and (off := apart(rows, once[site])) > self.tolerance]
        wrong += [f"{site}.{layer} lies outside of its block" for call in outside for site, layer in call.claimed
                  if site not in once]
        return wrong

    def _contradict(self, wrong: Sequence[str]) -> None:
        """Contradicted with the first of what is wrong, if anything is."""
        if wrong:
            more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise Contradicted(f"vllm-tap: rows of {type(self.model).__name__} do not match the table of "
                               f"architectures: {'; '.join(wrong[:3])}{more}. This model computes them differently "
                               "from others of its family; report it")

    def _factor(self, found: float) -> float | None:
        """The number that the model multiplies by: one, or a number of its configuration; None where it is neither."""
        return next((factor for factor in (1.0, *self.factors) if abs(found - factor) <= 10 * self.tolerance * factor),
                    None)

    def _begins(self, outside: Sequence[Call]) -> tuple[str, torch.Tensor]:
        """The embedding: the one module that was given the tokens alone."""
        assert self._first is not None
        made = {call.path: rows[0].rows for call in outside if (rows := _wide(call, self.width))}
        found = [call for call in outside if call.path in made and call.ids is not None
                 and call.began < self._first.began and call.ids.numel() == self.ids.numel()
                 and torch.equal(call.ids.flatten().cpu(), self.ids)
                 and not any(path.startswith(f"{call.path}." if call.path else "") for path in made
                             if path != call.path)]
        if len(found) != 1:
            raise refused("looked for one module that embeds the tokens, found "
                           f"{', '.join(call.path for call in found) or 'none'}")
        return found[0].path, made[found[0].path]

    def _final_norm(self, stream: Stream, outside: Sequence[Call]) -> tuple[float, Call | None]:
        """The module behind the last block that turns the stream alone into what it made in the step, and how far that
        is off. If there is none, the nearest.
        """
        assert self._last is not None
        rows = forms(self._last.made, "result", self.width)[stream.out]
        nearest: tuple[float, Call | None] = (float("inf"), None)
        for call in sorted(outside, key=lambda call: call.began):
            made = _wide(call, self.width)
            if call.began < self._last.ended or not made or next(call.module.children(), None) is not None:
                continue
            parameter = next(call.module.parameters(), None)
            if parameter is not None and parameter.dim() > 1:
                continue
            like = next(self.model.parameters())
            again = call.module(rows.to(like.device, self.dtype))
            again = again[0] if isinstance(again, tuple) else again
            off = apart(again.reshape(-1, self.width).to("cpu", torch.float64), made[0].rows)
            if off <= self.tolerance:
                return off, call
            nearest = min(nearest, (off, call), key=lambda one: one[0])
        return nearest

    def _sites(self, stream: Stream, ends: Ends, begins: tuple[str, torch.Tensor] | None) -> Part:
        assert self._first is not None
        explained = [one for one in stream.explained if isinstance(one, Explained)]
        absent, lacks = dict[str, str](), dict[str, str]()
        found: dict[str, dict[int, ModulePath]] = {site: {} for site in BY_STRUCTURE}
        modules = {layer: tuple((name, f"{type(module).__module__}.{type(module).__qualname__}")
                                for name, module in self.model.get_submodule(path).named_modules())
                   for layer, path in enumerate(self.blocks, self.stage.start)}
        explained = _agreed(explained, list(modules.values()))
        for layer, (path, block) in enumerate(zip(self.blocks, explained, strict=True), self.stage.start):
            places = {"resid_pre": Place("", stream.into), "resid_post": Place("", stream.out),
                      **self._inner(block, absent), **block.parts}
            lacks |= block.lacks
            for site, place in places.items():
                found[site][layer] = ModulePath(f"{path}.{place.path}".rstrip("."), place.rule,
                                                place.meaning or _MEANING[site], width=place.width or self.width)
        if ends.norm is not None:
            found["final_norm"][0] = ModulePath(ends.norm.path, _wide(ends.norm, self.width)[0].rule,
                                                _MEANING["final_norm"], width=self.width)
        entered = _entered(forms(self._first.given, "argument", self.width), stream)
        bare, embeds = False, False
        if begins is not None:
            found["embed"][0] = ModulePath(begins[0], "result 0", _MEANING["embed"], width=self.width)
            bare = entered is not None and torch.equal(entered, begins[1])
            embeds = entered is not None and _begins_with(entered, begins[1])
        proofs = of_stream(stream, explained, found, self.stage, Begun(bare, ends.came, ends.came_off), ends.norm_off)
        return Part(self.layers, found, (stream.into, stream.out), ends.came, ends.left, absent, lacks,
                    all(len(block.terms) <= 2 for block in explained), modules, proofs,
                    "" if begins is None else begins[0], bare, embeds, self._adding(stream, ends))

    def _adding(self, stream: Stream, ends: Ends) -> dict[int, str]:
        """Paths of the norms that make the sum of what a block hands on, by the layer of the next."""
        assert self._last is not None
        handed = forms(self._last.made, "result", self.width)[stream.out]
        last = "" if ends.norm is None else adding([ends.norm], handed, self.tolerance)
        return {layer: path for layer, path in enumerate([*stream.adding, last], self.stage.start) if path}

    def _inner(self, block: Explained, absent: dict[str, str]) -> dict[str, Place]:
        """Places of the sites inside a block; why there is none is put into ``absent``."""
        places = {"resid_mid": block.mid[0]} if block.mid else {}
        for site, terms in (("attn_out", [term for term in block.terms if term.mixes]),
                            ("mlp_out", [term for term in block.terms if not term.mixes])):
            if len(terms) == 1 and (factor := self._factor(terms[0].factor)) is not None:
                place = terms[0].places[0]
                places[site] = place if factor == 1 else Place(place.path, f"{place.rule} × {factor!r}")
                if terms[0].raw:
                    places[f"{site}_raw"] = terms[0].raw[0]
            elif terms:
                absent.setdefault(site, _why_not(terms))
        return places


def _wide(call: Call, width: int) -> list[Value]:
    """The values of that width that a call has made."""
    return [value for value in call.made if value.rows.shape[1] == width]


def _begins_with(entered: torch.Tensor, embedded: torch.Tensor) -> bool:
    """Whether a stream begins with embeddings that are not multiplied by a number. Factors of 0.5 to 1.5 count as none,
    since positions that are added can look like that.
    """
    return 0.5 < float((entered * embedded).sum() / (embedded * embedded).sum()) < 1.5


def _entered(given: Mapping[str, torch.Tensor], stream: Stream) -> torch.Tensor | None:
    """The stream that the first block is given: ``a`` of ``arguments a + b`` where there is no residual yet."""
    return given.get(stream.into, given.get("argument " + stream.into.partition(" ")[2].partition(" + ")[0]))


def _several(given: Call, made: Call, tokens: int, width: int) -> int:
    """The number of rows of the stream's width that a token has in what a block hands on; 0 where it has one."""
    takes, hands = ({shape.numel() // (tokens * width) for shape in shapes
                     if tokens in shape and shape[-1] % width == 0} for shapes in (given.takes, made.hands))
    return max((count for count in takes & hands if count > 1), default=0)


def _nearest(given: Mapping[str, torch.Tensor], made: Mapping[str, torch.Tensor], width: int) -> str:
    """Remark behind a refusal: the two that come nearest."""
    off, into, out = min(((apart(a, b), into, out) for into, a in given.items() for out, b in made.items()),
                         default=(0.0, "", ""))
    return (f" (the nearest: {out} and {into}, {off:.1e} apart)" if into else
            f" (no rows of {width} numbers on both sides)")


def _agreed(blocks: Sequence[Explained], kinds: Sequence[Modules]) -> list[Explained]:
    """The blocks with the places between their terms in another order: first those that most blocks have of the same
    modules, then of any. In a single block other rows may be the same: a norm's, of rows that have its length already.
    """
    had = Counter((kind, place.path, place.rule) for block, kind in zip(blocks, kinds, strict=True)
                  for place in block.mid)
    of_any = Counter((place.path, place.rule) for block in blocks for place in block.mid)

    def agreed(kind: Modules, mid: Sequence[Place]) -> list[Place]:
        return sorted(mid, reverse=True, key=lambda place: (had[kind, place.path, place.rule],
                                                             of_any[place.path, place.rule]))

    return [replace(block, mid=tuple(agreed(kind, block.mid))) for block, kind in zip(blocks, kinds, strict=True)]


def _why_not(terms: Sequence[Term]) -> str:
    if len(terms) > 1:
        return f"{len(terms)} tensors are added in its place: {', '.join(term.places[0].path for term in terms)}"
    return f"it is added times {terms[0].factor:.4g}, which the configuration does not name"

