"""Scores of probes as they are told: what each list is of, its numbers in an answer, and what of it is missing."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from api.errors import BROKEN, body_of
from api.generate.generation import Plan
from api.service import ApiService
from schemas import limits
from schemas.bucket.reader import AnyReader
from schemas.probes import Probe
from schemas.sites import PROBE

__all__ = ["about", "answer_scores", "missing_scores", "rows_of", "url_of"]


def about(index: int, capture: str, name: str, probe: Probe | None) -> dict[str, Any]:
    """Head of a list of scores; ``probe`` is what the capture's own engine has under the name, if it is known."""
    head = {"capture": capture, "index": index, "probe": name}
    return head if probe is None else {**head, "layer": probe.layer, "names": probe.names,
                                       "fingerprint": probe.fingerprint}


def rows_of(positions: npt.NDArray[np.uint32], token_ids: npt.NDArray[np.uint32], flags: npt.NDArray[np.uint32],
            values: npt.NDArray[np.float32]) -> dict[str, Any]:
    """The columns of a list; ``values`` are [n, k], and what is not finite is None: JSON has no name for it."""
    numbers = values.astype(object)
    numbers[~np.isfinite(values)] = None
    return {"positions": positions.tolist(), "token_ids": token_ids.tolist(), "flags": flags.tolist(),
            "values": numbers.tolist()}


def url_of(capture: str, name: str) -> str:
    """Address of the scores as a slice."""
    return f"/v1/captures/{capture}/activations?site={PROBE}{name}"


async def answer_scores(service: ApiService, planned: Plan, owner: str) -> list[dict[str, Any]]:
    """The field ``scores`` of an answer: by capture and probe its scores, or where they can be read.

    From the first list on with which they were more than ``limits.answer_scores_max`` numbers together, lists have a
    ``url`` in the place of their numbers.
    """
    def read(reader: AnyReader) -> list[dict[str, Any]]:
        room, found = limits.answer_scores_max, []
        for index, capture in enumerate(planned.ids):
            registered = reader.probes(capture, owner)
            rows = {row.site: row.captured for row in reader.manifest(capture, owner).rows} if room >= 0 else {}
            for name in planned.probes:
                probe = registered.get(name)
                room -= 0 if probe is None else rows.get(f"{PROBE}{name}", 0) * len(probe.names)
                if room < 0:
                    found.append({**about(index, capture, name, probe), "url": url_of(capture, name)})
                    continue
                part = reader.slice(capture, f"{PROBE}{name}", [] if probe is None else [probe.layer], owner=owner)
                found.append({**about(index, capture, name, probe),
                              **rows_of(part.positions, part.token_ids, part.flags, part.values()[0]),
                              "missing": msgspec.to_builtins(part.missing)})
        return found

    try:
        return await service.read(read)
    except BROKEN as error:  # the generation is answered all the same; its scores can be read as slices
        return [body_of(error)]


async def missing_scores(service: ApiService, planned: Plan, owner: str) -> list[dict[str, Any]]:
    """The field ``scores`` of a stream's capture event: by capture and probe which positions have no score, and why.

    Of those beyond ``limits.score_lists_streamed_max``, which did not come with the tokens, where they can be read.
    """
    def read(reader: AnyReader) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for index, capture in enumerate(planned.ids):
            streamed = len(found) < limits.score_lists_streamed_max
            registered = reader.probes(capture, owner) if streamed else {}
            rows = {row.site: row.missing for row in reader.manifest(capture, owner).rows} if streamed else {}
            for name in planned.probes:
                told = {"missing": msgspec.to_builtins(rows.get(f"{PROBE}{name}", []))} if (
                    len(found) < limits.score_lists_streamed_max) else {"url": url_of(capture, name)}
                found.append({**about(index, capture, name, registered.get(name)), **told})
        return found

    try:
        return await service.read(read)
    except BROKEN as error:
        return [body_of(error)]
