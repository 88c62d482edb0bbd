"""Vectors that an engine is started with, for edits to name: safetensors files with one tensor, ``vector`` [width]."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from schemas import limits
from schemas.edits import parse_edit_places
from schemas.errors import StartError
from schemas.probes import Registered, numbers_of, opened, probes_text, refusal, shape_of


def load_vector(registered: Registered) -> npt.NDArray[np.float32]:
    """The numbers of a file's vector, float32 [width]; StartError naming the file, the field and what is valid.

    Sizes are held against ``schemas.limits`` before memory is taken.
    """
    with opened(registered) as file:
        if (names := sorted(file.keys())) != ["vector"]:
            raise refusal(registered, "tensors", names, "vector, and no others")
        shape = shape_of(registered, "vector", file)
        if len(shape) != 1 or not 0 < shape[0] <= limits.width_max:
            raise refusal(registered, "vector", list(shape), f"[width], at most {limits.width_max}")
        numbers = numbers_of(registered, "vector", file)
    with np.errstate(over="ignore"):
        kept = numbers.astype(np.float32)
    if not np.isfinite(kept).all():
        raise refusal(registered, "vector", "…", "numbers that float32 can hold")
    return kept


@dataclass(frozen=True, slots=True)
class EditArms:
    """What an engine is to be started with for edits: ``places`` are sites, or ``site.layer``, comma-separated."""

    places: str = ""
    depth: int | None = None  # edits of one row, site and layer; None: the engine's default
    rows: int | None = None  # that edits of requests at once may set rows to; None: the engine's default
    vectors: tuple[Registered, ...] = ()

    def check(self, places: str, depth: str, vectors: str, rows: str = "") -> tuple[str, ...]:
        """The places in canonical names; StartError, naming the argument (as these say), where it cannot be had."""
        found = parse_edit_places(places, self.places)
        if self.depth is not None and not 1 <= self.depth <= limits.edit_depth_max:
            raise StartError(f"{depth} = {self.depth}: must be 1 to {limits.edit_depth_max}")
        if self.rows is not None and not 0 <= self.rows <= limits.edit_rows_max:
            raise StartError(f"{rows} = {self.rows}: must be 0 to {limits.edit_rows_max}")
        for name, given in ((depth, self.depth), (rows, self.rows), (vectors, ", ".join(map(str, self.vectors)))):
            if given and not found:
                raise StartError(f"{name} = {given}: nothing is armed for edits; name sites with {places}")
        for vector in self.vectors:
            load_vector(vector)
        return found

    def environment(self) -> dict[str, str]:
        """The variables that tell an engine."""
        places = ",".join(parse_edit_places("VLLM_TAP_EDIT", self.places))
        return {"VLLM_TAP_EDIT": places, "VLLM_TAP_VECTORS": probes_text(self.vectors),
                **({} if self.depth is None else {"VLLM_TAP_EDIT_DEPTH": str(self.depth)}),
                **({} if self.rows is None else {"VLLM_TAP_EDIT_ROWS": str(self.rows)})}
