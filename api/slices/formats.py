"""Slices as bytes: safetensors, npy, npz, arrow, json. Arrays are named ``{site}.{layer}``, rows run along axis 0.

``dtype=codes`` hands out the stored streams as they are, named ``{site}.{layer}.{stream}``.
"""

from __future__ import annotations

import importlib.util
import io
import json
import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final, Literal, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from schemas.native.loops import loops_for

__all__ = ["DTYPES", "FORMATS", "MEDIA_TYPES", "Arrays", "Dtype", "Format", "available_formats", "cast", "encode",
           "itemsize", "narrow"]

Array = npt.NDArray[Any]
Arrays = dict[str, Array]
Buffers = list[bytes | memoryview]

Dtype = Literal["float32", "float16", "bfloat16", "codes"]
Format = Literal["safetensors", "npy", "npz", "arrow", "json"]
DTYPES: Final[tuple[Dtype, ...]] = get_args(Dtype)
FORMATS: Final[tuple[Format, ...]] = get_args(Format)
MEDIA_TYPES: Final[dict[Format, tuple[str, ...]]] = {
    "safetensors": ("application/vnd.safetensors", "application/x-safetensors", "application/octet-stream"),
    "npy": ("application/x-npy", "application/vnd.numpy"),
    "npz": ("application/x-npz",),
    "arrow": ("application/vnd.apache.arrow.file",),
    "json": ("application/json",),
}
_NUMBERS_A_PIECE: Final = 128  # on so many, NumPy loses as much time to machine code as Python does on one hash
_SAFETENSORS: Final = {"float32": "F32", "float16": "F16", "int8": "I8", "uint8": "U8", "int16": "I16", "uint16": "U16",
                       "int32": "I32", "uint32": "U32", "int64": "I64", "uint64": "U64"}


@cache
def available_formats() -> tuple[Format, ...]:
    """The formats that this installation can write; arrow needs pyarrow."""
    return tuple(name for name in FORMATS if name != "arrow" or importlib.util.find_spec("pyarrow") is not None)


def itemsize(dtype: str) -> int:
    """Bytes of one number; codes are never wider than float32."""
    return 2 if dtype in ("float16", "bfloat16") else 4


def cast(values: npt.NDArray[np.float32], dtype: str) -> Array:
    """float32 ``[...]`` as float32, float16 (out of range: inf) or bfloat16 bits (uint16); nearest, ties to even."""
    if dtype == "float32":
        return values
    found = np.empty(values.shape, np.float16 if dtype == "float16" else np.uint16)
    narrow(np.ascontiguousarray(values), dtype, found)
    return found


def narrow(values: npt.NDArray[np.float32], dtype: str, found: Array) -> None:
    """``cast`` to float16 or bfloat16 into an array of that shape; both lie in one piece."""
    values, found = values.reshape(-1), found.reshape(-1)
    if (loops := loops_for(len(values) // _NUMBERS_A_PIECE)) is not None:
        loops.narrowed(values, dtype, found.view(np.uint16))
    elif dtype == "float16":
        with np.errstate(over="ignore"):
            found[:] = values
    else:
        bits = values.view(np.uint32)
        found[:] = (bits >> 16 & 1) + 0x7FFF + bits >> 16
        found[np.isnan(values)] = 0x7FC0


def encode(format_: str, arrays: Arrays, index: Arrays, dtype: str, meta: Mapping[str, str]) -> Buffers:
    """The buffers of an answer, one after the other.

    ``arrays`` are the rows, each ``[rows, …]``. ``index`` has the columns ``positions`` and ``token_ids``, ``[rows]``.
    ``dtype`` is the one asked for; bfloat16 arrays come as uint16. ``meta`` goes where the format has a place for it.
    """
    writers: dict[str, Callable[[], Buffers]] = {
        "safetensors": lambda: _safetensors(arrays, index, dtype, meta),
        "npy": lambda: _npy(next(iter(arrays.values()))),
        "npz": lambda: _npz({**arrays, **index}),
        "arrow": lambda: _arrow(arrays, index, meta),
        "json": lambda: _json(arrays, index, dtype, meta),
    }
    return writers[format_]()


def _safetensors(arrays: Arrays, index: Arrays, dtype: str, meta: Mapping[str, str]) -> Buffers:
    # Written here rather than by the library, whose NumPy side knows no bfloat16 and copies everything into one string.
    header: dict[str, Any] = {"__metadata__": dict(meta)}
    buffers: Buffers = []
    offset = 0
    for name, array in {**arrays, **index}.items():
        code = "BF16" if dtype == "bfloat16" and name in arrays else _SAFETENSORS[array.dtype.name]
        header[name] = {"dtype": code, "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        buffers.append(_view(array))
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start aligned
    return [len(text).to_bytes(8, "little") + text, *buffers]


def _npy(array: Array) -> Buffers:
    array = np.ascontiguousarray(array)
    head, lib = io.BytesIO(), np.lib.format
    lib.write_array_header_1_0(head, lib.header_data_from_array_1_0(array))  # type: ignore[no-untyped-call]
    return [head.getvalue(), _view(array)]


def _npz(arrays: Arrays) -> Buffers:
    out = io.BytesIO()
    np.savez(out, allow_pickle=False, **arrays)
    return [out.getbuffer()]


def _arrow(arrays: Arrays, index: Arrays, meta: Mapping[str, str]) -> Buffers:
    import pyarrow as pa

    columns = {name: pa.array(array) for name, array in index.items()}
    for name, array in arrays.items():
        numbers = pa.array(np.ascontiguousarray(array).reshape(-1))
        columns[name] = pa.FixedSizeListArray.from_arrays(numbers, math.prod(array.shape[1:]))
    table = pa.table(columns).replace_schema_metadata(dict(meta))
    out = pa.BufferOutputStream()
    with pa.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table)
    return [memoryview(out.getvalue())]


def _json(arrays: Arrays, index: Arrays, dtype: str, meta: Mapping[str, str]) -> Buffers:
    # float16 and bfloat16 widen to float32 exactly; msgspec writes what is not finite as null.
    def numbers(array: Array) -> Any:
        if dtype == "bfloat16":
            array = (array.astype(np.uint32) << 16).view(np.float32)
        return array.tolist()

    return [msgspec.json.encode({
        **meta, **{name: array.tolist() for name, array in index.items()},
        "arrays": {name: numbers(array) for name, array in arrays.items()},
    })]


def _view(array: Array) -> memoryview:
    """The bytes of an array without a copy; little-endian, as all machines that run vLLM are."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
