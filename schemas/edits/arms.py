"""Places that an engine may edit: those asked for at its start, and those that it then holds edits against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from schemas import limits
from schemas.checks import parse_arm
from schemas.edits.vectors import F32, load_vector
from schemas.errors import StartError
from schemas.probes import Registered, probes_text

__all__ = ["EDITABLE", "VALID_SITE", "Arms", "EditArms", "parse_edit_places"]

EDITABLE: Final = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "mlp_post", "q", "k", "v", "q_rot",
                   "k_rot", "z")
VALID_SITE: Final = f"one of {', '.join(EDITABLE)}, with a layer (resid_post.12) or without"


class Arms(msgspec.Struct, frozen=True):
    """The places that an engine is armed to edit: layers and width by site. ``depth``: edits of one row, at most.
    ``rows``: rows of edits that it keeps at once for all its requests, at most.

    ``vectors``: numbers of its own vectors by name. ``heads``: columns of a head, by site that has heads. ``probes``:
    names of a probe's scores, that conditions may be about. ``without_when``: the reason why this engine has no
    conditions; "" where it has them.
    """

    layers: dict[str, list[int]]
    widths: dict[str, int]
    n_layers: int
    depth: int
    vectors: dict[str, F32]
    names: dict[str, str]  # Armed.names
    rows: int
    max_len: int  # tokens of a request, at most
    heads: dict[str, int] = {}
    probes: dict[str, list[str]] = {}
    without_when: str = ""


@dataclass(frozen=True, slots=True)
class EditArms:
    """Settings of an engine's start for edits: ``places`` are sites, or ``site.layer``, comma-separated."""

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


def parse_edit_places(name: str, text: str) -> tuple[str, ...]:
    """Parse a comma-separated list of what may be edited: sites, or ``site.layer``; StartError, beginning with
    ``name``, where one cannot be. Empty: nothing.
    """
    places = parse_arm(name, text) if text.strip(", ") else ()
    for place in places:
        if place.partition(".")[0] not in EDITABLE:
            raise StartError(f"{name} = {text!r}: {place!r} cannot be edited; valid: {', '.join(EDITABLE)}, each with "
                             "a layer or without")
    return places
