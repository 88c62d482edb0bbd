"""Paths in a store, and the Zarr v3 metadata of a sealed block."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, ParamSpec

import msgspec

__all__ = ["KEYS_FILE", "NOT_A_FOLDER", "VECTORS_FOLDER", "WRITER", "array_document", "array_metadata", "block_name",
           "group_metadata", "main_chunk", "open_name", "segment_places", "url_of", "zarr_json"]

P = ParamSpec("P")

WRITER: Final = "w0"
KEYS_FILE: Final = "keys.json"  # the API's, where no other is named; the writer leaves it alone
VECTORS_FOLDER: Final = "vectors"  # the API's as well
NOT_A_FOLDER: Final = ("this is done with a folder, not with a bucket: vllm-tap push brings a store there; vllm-tap "
                       "ls, show, export and vllm_tap.open_store(URL) read it; vllm-tap fsck --bucket URL checks it")
BYTES: Final = {"name": "bytes", "configuration": {"endian": "little"}}


def url_of(path: Path) -> str | None:
    """The URL that a path was made of by mistake; None of any other."""
    match = re.match(r"([a-z][a-z0-9+.-]+):/+", str(path))
    return None if match is None else f"{match[1]}://{str(path)[match.end():]}"


def journal_folder() -> str:
    """Path below the store of everything that is appended to."""
    return f"writers/{WRITER}/journal"


def endpoint_name() -> str:
    """Path below the store of the file that says where its writer listens, while one has the lock."""
    return f"writers/{WRITER}/endpoint"


def pushed_name() -> str:
    """Path below the store of the file that says which heads of buckets it pushed."""
    return f"writers/{WRITER}/pushed.json"


def pushing_name() -> str:
    """Path below the store of the file that says how pushes to a bucket go that go on by themselves."""
    return f"writers/{WRITER}/pushing.json"


def evicted_name(number: int) -> str:
    """Path below the store of the record that says where an evicted block's rows lie."""
    return f"writers/{WRITER}/evicted/{number:08d}.json"


def open_name(number: int) -> str:
    """Path below the store of a segment that is still a journal file."""
    return f"writers/{WRITER}/journal/{number:08d}.open"


def block_name(number: int) -> str:
    """Path below the store of a sealed segment: a Zarr v3 group."""
    return f"blocks/{WRITER}-{number:08d}.zarr"


def redo_name(number: int) -> str:
    """Path below the store of the record of what is being erased in a block; there only while that happens."""
    return f"writers/{WRITER}/journal/erase-{number:08d}.redo"


def building_name(number: int) -> str:
    """Path below the store of a block that is being sealed."""
    return f"blocks/.building-{WRITER}-{number:08d}"


def compacting_name(number: int) -> str:
    """Path below the store of a cold block that is being made."""
    return f"blocks/.compacting-{WRITER}-{number:08d}"


def main_chunk(main: str) -> str:
    """Path below a block of the file that was the journal."""
    return f"{main}/c/0/0/0"


def segment_places(store: Path, number: int, main: str) -> tuple[Path, Path, Path]:
    """Everywhere the bytes of a segment can be: sealed, being renamed, still a journal file."""
    chunk = main_chunk(main)
    return store / block_name(number) / chunk, store / building_name(number) / chunk, store / open_name(number)


def array_document(
    shape: Sequence[int], dtype: str, fill: Any, inner: Sequence[int] | None = None,
    attributes: Mapping[str, Any] | None = None, names: Sequence[str] | None = None,
    chunk: Sequence[int] | None = None, compressor: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Metadata of an array of one chunk; with ``inner``, a shard of such chunks with its index at the end.

    ``chunk`` is the chunk's shape where it is not the array's. With ``inner`` a shard holds whole inner chunks, each
    through the codec ``compressor`` where one is given. Without it the array has as many chunks as it takes.
    """
    codecs: list[dict[str, Any]] = [BYTES]
    if inner is not None:
        codecs = [{
            "name": "sharding_indexed",
            "configuration": {
                "chunk_shape": list(inner),
                "codecs": [BYTES, *([] if compressor is None else [dict(compressor)])],
                "index_codecs": [BYTES, {"name": "crc32c"}],
                "index_location": "end",
            },
        }]
    document = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk or shape)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": fill,
        "codecs": codecs,
        "attributes": dict(attributes or {}),
    }
    if names is not None:
        document["dimension_names"] = list(names)
    return document


def group_metadata(attributes: Mapping[str, Any]) -> bytes:
    """``zarr.json`` of a group."""
    return zarr_json({"zarr_format": 3, "node_type": "group", "attributes": dict(attributes)})


def zarr_json(document: Mapping[str, Any]) -> bytes:
    """Metadata as ``zarr.json`` has it; a number that is none as null."""
    return msgspec.json.format(msgspec.json.encode(document), indent=1)  # json.dumps would indent in Python


def _encoded(document: Callable[P, Mapping[str, Any]]) -> Callable[P, bytes]:
    return lambda *args, **options: zarr_json(document(*args, **options))


array_metadata: Final = _encoded(array_document)
