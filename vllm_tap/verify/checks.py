"""Rows put back where they came from: the results must be the same, bit for bit, and wrong rows must be seen."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from schemas import limits
from schemas.errors import StartError
from vllm_tap.verify.faults import SALT, Material, injected
from vllm_tap.verify.laboratory import Laboratory, Place, Run, Seen, control, differences, patched

__all__ = ["Outcome", "PlaceOutcome", "SiteFaults", "verify"]

_GENERATED: Final = 6
_ROWS_MIN: Final = 32
_SALTED: Final = 8  # rows that the edit of the prefix cache's check sets
_LOSSY: Final = "int8b64"

Tell = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class PlaceOutcome:
    """The outcome at a place. ``differs`` names what is not the same when its rows are put back.

    ``unedited`` names what the control run has otherwise than a run without an edit; zeros of either sign count as
    equal there.
    """

    site: str
    layer: int
    rows: int
    differs: list[str]
    unedited: list[str]
    must_equal_unedited: bool

    @property
    def ok(self) -> bool:
        """Whether all that has to be equal is."""
        return not self.differs and not (self.must_equal_unedited and self.unedited)


@dataclass(frozen=True, slots=True)
class SiteFaults:
    """Findings by fault at a site and layer; [] for a fault that nothing told of."""

    site: str
    layer: int
    told: dict[str, list[str]]
    left_out: dict[str, str]  # faults that this model cannot have, and why

    @property
    def missed(self) -> list[str]:
        """Faults that were not found."""
        return [name for name, told in self.told.items() if not told]


@dataclass(slots=True)
class Outcome:
    """The findings; ``failed``: what is wrong with all of it."""

    dtype: str
    vllm_version: str
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cache: str = ""  # how K/V was compared
    places: list[PlaceOutcome] = field(default_factory=list)
    faults: list[SiteFaults] = field(default_factory=list)
    salt: str = ""
    failed: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)  # sites that cannot be edited in this model

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong, and everything that was done wrong was found."""
        return bool(self.places and self.faults) and not self.failed and all(
            place.ok for place in self.places) and not any(site.missed for site in self.faults)


def verify(lab: Laboratory, places: Sequence[Place] | None = None, tell: Tell = lambda done, total: None) -> Outcome:
    """Put back every row of every place that is armed for edits (or of ``places``), one place at a time."""
    from vllm import __version__

    chosen = list(lab.places if places is None else places)
    sites = list(dict.fromkeys(site for site, _ in chosen))
    found = Outcome(lab.dtype, __version__)
    bench = _Bench(lab, _block_size(lab))
    found.prompt_tokens, found.generated_tokens = bench.rows - _GENERATED + 1, _GENERATED
    total, done = len(chosen) + len(sites) + 2, 0

    def step() -> None:
        nonlocal done
        done += 1
        tell(done, total)

    found.failed += bench.repeats(chosen[0])
    step()
    for place in chosen:
        found.places.append(bench.put_back(place))
        step()
    for site in sites:
        layers = [layer for name, layer in chosen if name == site]
        found.faults.append(bench.faults((site, layers[len(layers) // 2])))
        step()
    found.salt, wrong = bench.salt(chosen[0])
    found.failed += wrong
    step()
    found.cache = (f"not read ({lab.unread}): rows of {', '.join(site for site, _ in lab.downstream())} in its stead"
                   if lab.unread else "every block of the request, in every layer")
    return found


def _block_size(lab: Laboratory) -> int:
    return int(lab.engine.vllm_config.cache_config.block_size)


class _Bench:
    """Runs of two prompts of chance, so long that prompt and answer fill blocks of the K/V cache."""

    def __init__(self, lab: Laboratory, block: int) -> None:
        self.lab, self.block = lab, block
        self.rows = block * -(-_ROWS_MIN // block)
        arms, most = lab.arms, 3 * limits.edit_json_bytes_max // 16  # numbers that a request's base64 may hold
        need = self.rows + block + _GENERATED
        if arms.max_len < need:
            raise StartError(f"max_model_len = {arms.max_len}: prompt and answer that fill blocks of {block} tokens "
                             f"take {need}; give more (-- --max-model-len {need})")
        if arms.rows < self.rows:
            raise StartError(f"VLLM_TAP_EDIT_ROWS = {arms.rows}: this takes {self.rows}")
        for site, width in arms.widths.items():
            if self.rows * width > most:
                raise StartError(f"{site}: {self.rows} rows of {width} numbers are more than a request may hand in; "
                                 "take smaller blocks (-- --block-size 16), or leave the site out of --edit")
        self._plain: tuple[str, Seen] | None = None
        self.prompts = [self._prompt(seed) for seed in (1, 2)]

    def _prompt(self, seed: int, more: int = 0) -> tuple[int, ...]:
        size = self.lab.engine.model_config.get_vocab_size()
        count = self.rows - _GENERATED + 1 + more
        return tuple(np.random.default_rng(seed).integers(min(10, size - 1), size, count).tolist())

    def _run(self, place: Place, edits: Sequence[dict[str, Any]], prompt: int = 0, codec: str = "raw",
             more: Sequence[Place] = ()) -> Seen:
        watched = (place, *more, *self.lab.downstream())
        return self.lab.run(Run(self.prompts[prompt], _GENERATED, tuple(edits), watched, codec))

    def _control(self, place: Place, **how: Any) -> Seen:
        return self._run(place, [control(place, self.rows)], **how)

    def repeats(self, place: Place) -> list[str]:
        """Fault lines where two equal runs differ: nothing can then be told from two runs that are not equal."""
        if not (wrong := differences(self._control(place), self._control(place))):
            return []
        return [f"two equal runs differ ({'; '.join(wrong)}), so that nothing here can be told: the engine's own "
                "kernels do not repeat themselves"]

    def put_back(self, place: Place) -> PlaceOutcome:
        """The outcome of a place: rows from a run that sets nothing, put back in a second one."""
        right = self._control(place)
        plain = self._unedited(place[0])
        rows = right.rows[place]
        if len(rows) != self.rows:
            return PlaceOutcome(*place, len(rows), [f"{len(rows)} of {self.rows} rows were captured"], [], False)
        again = self._run(place, [patched(place, rows)])
        return PlaceOutcome(*place, len(rows), differences(right, again), differences(right, plain, signs=False),
                            self.lab.dtype == "float32")

    def _unedited(self, site: str) -> Seen:
        """A run without an edit, with the rows of a site in every layer: one for all places of the site."""
        if self._plain is None or self._plain[0] != site:
            first, *others = ((site, layer) for layer in self.lab.armed[site])
            self._plain = site, self._run(first, [], more=others)
        return self._plain[1]

    def faults(self, place: Place) -> SiteFaults:
        """Findings for wrong rows set at a place: each must be seen."""
        site, layer = place
        others = [other for other in self.lab.armed.get(site, ()) if other != layer]
        other = (site, min(others, key=lambda one: abs(one - layer))) if others else None
        right = self._control(place, more=[other] if other else [])
        decoded = self._control(place, codec=_LOSSY).rows[place]
        before = self._control(place, prompt=1).rows[place]
        material = Material(right.rows[place], right.rows[other] if other else None, before, decoded, self.lab.dtype)
        found = SiteFaults(site, layer, {}, {})
        for name, rows in injected(material):
            if rows is None:
                found.left_out[name] = f"no other layer has {site}"
            else:
                found.told[name] = differences(right, self._run(place, [patched(place, rows)]))
        return found

    def salt(self, place: Place) -> tuple[str, list[str]]:
        """Check that an edited prompt leaves nothing in the prefix cache for the same prompt unedited. Returns what was
        seen, and what was wrong with it.
        """
        if not self.lab.engine.vllm_config.cache_config.enable_prefix_caching:
            return "prefix caching is off: there is nothing to read", []
        prompt = self._prompt(time.time_ns(), self.block)  # of which nothing is cached, whatever this engine was asked
        rows = self._control(place, prompt=1).rows[place][:_SALTED]
        edit = (patched(place, rows),)
        edited, again = (self.lab.run(Run(prompt, _GENERATED, edit, cached=True)) for _ in range(2))
        unedited = self.lab.run(Run(prompt, _GENERATED, cached=True))
        alone = self.lab.run(Run(prompt, _GENERATED))
        wrong = []
        if unedited.cached:
            wrong.append(f"{SALT}: a request without an edit read {unedited.cached} tokens that an edited one had left "
                         "in the prefix cache")
        if unlike := differences(unedited, alone):
            wrong.append(f"{SALT}: behind an edited request the same prompt without an edit has another answer "
                         f"({'; '.join(unlike)})")
        if not again.cached:
            wrong.append(f"{SALT}: not told: an edited request asked again read nothing of the prefix cache, so that "
                         "reading it would not have been seen")
        if not differences(edited, alone):
            wrong.append(f"{SALT}: not told: the edited request has the answer of the one without an edit")
        return (f"the edited prompt asked again read {again.cached} tokens of its own; without an edit "
                f"{unedited.cached}"), wrong

