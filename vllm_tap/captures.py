"""One capture as its user sees it, the same over HTTP and from a store on disk.

>>> capture["resid_post", 12]                            # float32 [rows, width]                # doctest: +SKIP
>>> capture["blocks.12.hook_resid_post"]                 # the same                             # doctest: +SKIP
>>> capture.slice("resid_post", [0, 12], 5, 9).values    # float32 [layers, rows, width]        # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from schemas.errors import SpecError
from schemas.manifest import Manifest, Missing
from schemas.sites import parse_site
from vllm_tap.errors import MissingRows

__all__ = ["Capture", "Rows", "Source"]

F32 = npt.NDArray[np.float32]
U32 = npt.NDArray[np.uint32]
Key = str | tuple[str, int] | tuple[str, Sequence[int]]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows at positions ``[start, stop)`` of some layers of a site.

    ``values`` is float32 ``[layers, rows, width]``; ``positions`` and ``token_ids`` are uint32 ``[rows]``. Positions
    that are not there for every layer are in ``missing``; ``clipped`` says that the range reached past the end.
    """

    capture: str
    site: str
    layers: list[int]
    start: int
    stop: int
    positions: U32
    token_ids: U32
    values: F32
    missing: list[Missing]
    clipped: bool


class Source(Protocol):
    """Where captures are read from. ``wait_s`` is how many seconds a capture may take to become final."""

    def manifest(self, ref: str, wait_s: float | None = None) -> Manifest: ...

    def rows(self, ref: str, site: str, layers: Sequence[int], start: int, stop: int | None,
             wait_s: float | None, rejected: bool = False) -> Rows: ...


class Capture:
    """A capture by any of its names; nothing is read before it is asked for."""

    def __init__(self, source: Source, ref: str, wait_s: float = 30.0) -> None:
        self.id, self.wait_s, self._source = ref, wait_s, source

    def __repr__(self) -> str:
        return f"Capture({self.id!r})"

    def manifest(self) -> Manifest:
        """What was asked for, stored and missed; waits until the capture is final, at most ``wait_s`` seconds."""
        return self._source.manifest(self.id, self.wait_s)

    @property
    def status(self) -> str:
        """pending, running, complete, incomplete or failed, as of now."""
        return self._source.manifest(self.id).status

    @property
    def sites(self) -> dict[str, list[int]]:
        """The layers captured, by site."""
        layers: dict[str, list[int]] = self.manifest().resolved.get("layers", {})
        return layers

    def __getitem__(self, key: Key) -> F32:
        """All rows of a site and layer, float32 ``[rows, width]`` (with a list of layers ``[layers, rows, width]``).

        Waits until the capture is final. Raises MissingRows where rows are missing, NotComplete where it takes longer
        than ``wait_s`` seconds, NotFoundError for a site or layer that was not captured.
        """
        name, layer = key if isinstance(key, tuple) else (key, None)
        values = self.slice(name, layer).values
        return values if isinstance(layer, Sequence) else values[0]

    def slice(self, site: str, layer: int | Sequence[int] | None = None, start: int = 0, stop: int | None = None,
              allow_missing: bool = False) -> Rows:
        """Rows at positions ``[start, stop)``; ``layer`` may be left out where the site's name fixes it.

        With ``allow_missing`` it does not wait and does not raise MissingRows: it takes the rows that are there.
        """
        site, layers = self._place(site, layer)
        rows = self._source.rows(self.id, site, layers, start, stop, None if allow_missing else self.wait_s)
        if rows.missing and not allow_missing:
            raise MissingRows(self.id, f"{site}, layer {', '.join(map(str, layers))}", rows.missing)
        return rows

    def rejected(self, site: str, layer: int | Sequence[int] | None = None, start: int = 0, stop: int | None = None
                 ) -> Rows:
        """Rows of drafts (speculative decoding) that were not accepted; ``token_ids`` are what was guessed.

        By position and, where one was guessed at more than once, oldest first; they may reach past the end.
        """
        site, layers = self._place(site, layer)
        return self._source.rows(self.id, site, layers, start, stop, self.wait_s, rejected=True)

    def _place(self, name: str, layer: int | Sequence[int] | None) -> tuple[str, list[int]]:
        site, fixed = parse_site(name, "site")
        asked = [layer] if isinstance(layer, int) else None if layer is None else list(layer)
        if fixed is not None:
            if asked not in (None, [fixed]):
                raise SpecError("layer", layer, f"is not the layer that {name!r} fixes")
            return site, [fixed]
        if asked is None:
            have = self.sites.get(site, [])
            if len(have) != 1:
                raise SpecError("layer", None, f"name a layer of {site}; captured: {have}")
            asked = have
        return site, asked


def missing_of(value: list[dict[str, Any]]) -> list[Missing]:
    """Ranges as they travel in JSON."""
    return [Missing(int(gap["start"]), int(gap["stop"]), str(gap["reason"])) for gap in value]
