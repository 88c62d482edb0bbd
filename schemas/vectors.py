"""Vectors that edits may name, as they come: safetensors with one tensor, ``vector`` [width], or JSON.

An engine is started with files of them; the service is sent the bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from schemas import limits
from schemas.bodies import check_values
from schemas.edits import floats_of, parse_edit_places
from schemas.errors import ArgumentError, LimitError, StartError, json_fault
from schemas.probes import Registered, numbers_of, opened, probes_text, refusal, shape_of

F32 = npt.NDArray[np.float32]
_DTYPES: Final = {"F16": "<f2", "F32": "<f4", "F64": "<f8"}
_HEAD_BYTES_MAX: Final = 64 * 1024  # of a safetensors file with one tensor in it
_VALID: Final = 'valid: a list of numbers, or {"base64": "…"} of float32, little-endian'


def load_vector(registered: Registered) -> F32:
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


def read_vector(data: bytes, content_type: str) -> F32:
    """The numbers of a body, float32 [width]: safetensors, or with the type application/json ``{"vector": …}``.

    ArgumentError naming the field, its value and what is valid; LimitError for a width over
    ``limits.vector_width_max``.
    """
    kind = content_type.partition(";")[0].strip().lower()
    if kind == "application/json":
        return _read_json(data)
    if kind in ("application/octet-stream", "application/vnd.safetensors"):
        return _read_safetensors(data)
    raise ArgumentError("Content-Type", content_type, "valid: application/json, or application/octet-stream of a "
                                                      "safetensors file")


def _read_json(data: bytes) -> F32:
    check_values(data)
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ArgumentError("body", "…", f"malformed JSON: {json_fault(error)}") from None
    if not isinstance(body, Mapping) or set(body) != {"vector"}:
        shown = sorted(body)[:8] if isinstance(body, Mapping) else body
        raise ArgumentError("body", shown, 'must be an object with the one field "vector"')
    given = body["vector"]
    if isinstance(given, Mapping) and set(given) == {"base64"} and isinstance(given["base64"], str):
        return _checked(floats_of("vector.base64", given["base64"], ArgumentError))
    if not isinstance(given, list):
        raise ArgumentError("vector", given, _VALID)
    _check_width(len(given))
    for number, each in enumerate(given):
        if type(each) not in (int, float):
            raise ArgumentError(f"vector[{number}]", each, _VALID)
    try:
        return _checked(np.array(given, np.float64))
    except OverflowError:  # a whole number of hundreds of digits
        raise ArgumentError("vector", "…", "valid: finite numbers that float32 holds") from None


def _read_safetensors(data: bytes) -> F32:
    from safetensors import SafetensorError, deserialize

    saved = "save it with safetensors.numpy.save_file({\"vector\": vector}, …)"
    if int.from_bytes(data[:8], "little") > _HEAD_BYTES_MAX:
        raise ArgumentError("body", data[:16], f"no safetensors file with one tensor in it; {saved}")
    try:
        tensors: list[tuple[str, Any]] = deserialize(data)  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise ArgumentError("body", data[:16], f"no safetensors file ({str(error)[:120]}); {saved}") from None
    if [name for name, _ in tensors] != ["vector"]:
        raise ArgumentError("tensors", sorted(name for name, _ in tensors)[:8], f"valid: vector, no others; {saved}")
    tensor = tensors[0][1]
    if tensor["dtype"] not in _DTYPES:
        raise ArgumentError("vector", tensor["dtype"], f"valid: one of {', '.join(_DTYPES)} (tensor.float() is F32)")
    if len(tensor["shape"]) != 1:
        raise ArgumentError("vector", tensor["shape"], "valid: [width]; tensor.reshape(-1) makes it so")
    _check_width(tensor["shape"][0])
    return _checked(np.frombuffer(tensor["data"], _DTYPES[tensor["dtype"]]))


def _check_width(width: int) -> None:
    if width == 0:
        raise ArgumentError("vector", "[]", "has no numbers; give as many as a row of the site has")
    if width > limits.vector_width_max:
        raise LimitError("numbers in vector", width, limits.vector_width_max)


def _checked(numbers: npt.NDArray[Any]) -> F32:
    _check_width(len(numbers))
    with np.errstate(over="ignore"):
        kept = numbers.astype(np.float32)
    if not (finite := np.isfinite(kept)).all():
        at = int(finite.argmin())
        raise ArgumentError(f"vector[{at}]", float(numbers[at]), "valid: a finite number that float32 holds")
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
