"""The form and the numbers of an edit: of the vector or the rows that a caller sent, what an engine computes with."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from schemas.edits.arms import Arms
from schemas.edits.resolved import IDENTITY, REPLACED, Form
from schemas.edits.spec import Base64, EditSpec, each_position
from schemas.edits.vectors import F32, LARGEST, check_float32, digest_of, floats_of
from schemas.errors import EditError

__all__ = ["form_of", "no_vector"]


def form_of(at: str, spec: EditSpec, site: str, heads: list[int], arms: Arms) -> tuple[Form, F32 | None]:
    """The form of an edit with its vector [width] or its rows [positions, width], these in ascending order of their
    positions; None where it has neither. EditError, naming the field below ``at``, where the numbers do not fit.
    """
    if spec.op == "scale":
        assert spec.by is not None  # it was checked
        return (float(spec.by), *IDENTITY[1:]), None
    width = arms.widths[site]
    size = arms.heads[site] if heads else width  # of what is edited by itself
    if spec.rows is not None:
        assert not isinstance(spec.positions, str)  # it was checked
        rows = _rows(f"{at}.rows", spec.rows, each_position(spec.positions), dict.fromkeys((width, size)))
        return REPLACED, _laid(rows, heads, width, size)
    field = f"{at}.vector"
    vector = _vector(field, spec.vector, arms)
    if len(vector) not in (width, size):
        raise EditError(field, f"{len(vector)} numbers", f"rows of {site} have {width}" + (
            f", heads {size}" if heads else ""))
    vector = _laid(vector[None], heads, width, size)[0]
    if spec.op == "add":
        return (1.0, float(spec.scale), *IDENTITY[2:]), vector
    if spec.op == "set":
        return REPLACED, vector
    direction = _direction(field, spec.op, vector, heads, size)
    if spec.op == "ablate":
        return (1.0, 0.0, 0.0, 0.0), direction
    return (1.0, 0.0, -LARGEST if spec.low is None else float(spec.low),
            LARGEST if spec.high is None else float(spec.high)), direction


def _direction(field: str, op: str, vector: F32, heads: list[int], size: int) -> F32:
    """A vector whose parts of this size have length 1 each; EditError where one that is needed has none."""
    parts = vector.astype(np.float64).reshape(-1, size)
    lengths = np.linalg.norm(parts, axis=1, keepdims=True)
    for part in heads or [0]:
        if lengths[part] == 0:
            raise EditError(field, f"zeros for head {part}" if heads else "zeros", f"{op} needs a direction")
    found: F32 = (parts / np.where(lengths == 0, 1, lengths)).reshape(-1).astype(np.float32)
    return found


def _laid(given: F32, heads: list[int], width: int, size: int) -> F32:
    """Rows [n, width] of rows, or of what each of the heads gets; zeros where no head is edited."""
    if not heads:
        return given
    parts = (given if given.shape[1] == width else np.tile(given, width // size)).reshape(len(given), -1, size)
    found = np.zeros_like(parts)
    found[:, heads] = parts[:, heads]
    return found.reshape(len(given), width)


def _vector(field: str, given: str | list[int | float] | Base64 | None, arms: Arms) -> F32:
    """The numbers of a vector, float32 [n]: registered under its name, or as they were sent."""
    assert given is not None  # it was checked
    if isinstance(given, str):
        if given not in arms.vectors:
            raise no_vector(field, given, arms.vectors)
        return arms.vectors[given]
    if isinstance(given, Base64):
        numbers = floats_of(f"{field}.base64", given.base64)
        if given.name in arms.vectors and digest_of(arms.vectors[given.name]) != digest_of(numbers):
            raise EditError(f"{field}.name", given.name, "the engine was started with other numbers under this name")
        return numbers
    return _listed(field, given)


def _rows(field: str, given: Base64 | list[list[int | float]], positions: Sequence[int], sizes: Collection[int]) -> F32:
    """Rows float32 [positions, one of ``sizes``], in the order of positions."""
    said = " or ".join(map(str, sizes))
    if isinstance(given, Base64):
        flat = floats_of(f"{field}.base64", given.base64)
        if flat.size not in (len(positions) * size for size in sizes):
            raise EditError(field, f"{flat.size} numbers", f"{len(positions)} positions of {said} numbers each")
        found = flat.reshape(len(positions), -1)
    else:
        if len(given) != len(positions):
            raise EditError(field, f"{len(given)} rows", f"positions lists {len(positions)}")
        for number, row in enumerate(given):
            if len(row) not in sizes or len(row) != len(given[0]):
                raise EditError(f"{field}[{number}]", f"{len(row)} numbers", f"rows of the site have {said}")
        found = np.stack([_listed(f"{field}[{number}]", row) for number, row in enumerate(given)])
    return found[np.argsort(positions)]


def _listed(field: str, given: Sequence[int | float]) -> F32:
    """Numbers of a list, float32 [n]; EditError where float32 does not hold one."""
    for number, each in enumerate(given):
        check_float32(f"{field}[{number}]", each)
    return np.array(given, np.float32)


def no_vector(field: str, name: str, registered: Iterable[str]) -> EditError:
    """The refusal of a name that no vector has."""
    return EditError(field, name, f"no such vector; registered: {', '.join(registered) or 'none'} (start the engine "
                                  "with --vector NAME=FILE to add one, or store one: PUT /v1/vectors/NAME)")
