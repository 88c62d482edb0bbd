"""Vectors of edits as they come: numbers in base64, JSON, or safetensors with one tensor, ``vector`` [width].

An engine is started with files of them; the service is sent the bytes.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from schemas import limits
from schemas.bodies import check_values
from schemas.errors import ArgumentError, EditError, LimitError, SpecError, json_fault
from schemas.probes import Registered, numbers_of, opened, refusal, shape_of

__all__ = ["F32", "LARGEST", "check_float32", "digest_of", "floats_of", "load_vector", "read_vector"]

F32 = npt.NDArray[np.float32]
LARGEST: Final = float(np.finfo(np.float32).max)
_FINITE: Final = "valid: a finite number that float32 holds"
_DTYPES: Final = {"F16": "<f2", "F32": "<f4", "F64": "<f8"}
_HEAD_BYTES_MAX: Final = 64 * 1024  # of a safetensors file with one tensor in it
_VALID: Final = 'valid: a list of numbers, or {"base64": "…"} of float32, little-endian'


def digest_of(vector: F32) -> str:
    """The name of a vector by its numbers."""
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(vector, np.float32).tobytes())


def check_float32(field: str, number: float) -> None:
    """EditError where float32 does not hold a number."""
    try:
        held = math.isfinite(number) and abs(number) <= LARGEST
    except OverflowError:  # a whole number of hundreds of digits
        held = False
    if not held:
        raise EditError(field, number, _FINITE)


def floats_of(field: str, text: str, error: type[SpecError] = EditError) -> F32:
    """The numbers of base64, float32 [n]; ``error`` where it is none, holds none, or one that is not finite."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as fault:
        raise error(field, text, f"no base64 ({fault}); valid: base64.b64encode(array.astype('<f4').tobytes())"
                    ) from None
    if not data or len(data) % 4:
        raise error(field, f"{len(data)} bytes", "float32 takes 4 bytes a number, and at least one is needed")
    return _as_float32(field, np.frombuffer(data, "<f4"), error)


def _as_float32(field: str, numbers: npt.NDArray[Any], error: type[SpecError]) -> F32:
    """A copy in float32; ``error`` where that does not hold one of the numbers [n]."""
    with np.errstate(over="ignore"):
        kept = numbers.astype(np.float32)
    if not (finite := np.isfinite(kept)).all():
        at = int(finite.argmin())
        raise error(f"{field}[{at}]", float(numbers[at]), _FINITE)
    return kept


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
            raise ArgumentError(f"vector[{number}]", each, "valid: a number")
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
    return _as_float32("vector", numbers, ArgumentError)
