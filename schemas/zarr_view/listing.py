"""The keys of a hierarchy, from the consolidated metadata of its root: no key is asked for to find out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

__all__ = ["children_of", "keys_of"]

Document = Mapping[str, Any]


def keys_of(root: Document) -> Iterator[str]:
    """Every key, metadata after what it describes and the root's last."""
    nodes = _nodes(root)
    for path, node in nodes.items():
        if node["node_type"] == "array":
            for at in np.ndindex(*_chunks(node)):  # counts lazily: there may be billions
                yield f"{path}/c/{'/'.join(map(str, at))}"
            yield f"{path}/zarr.json"
    yield from (f"{path}/zarr.json" for path, node in nodes.items() if node["node_type"] == "group")
    yield "zarr.json"


def children_of(root: Document, prefix: str) -> Iterator[str]:
    """The names directly below a prefix, as a file system would list the folder; none where there is no such folder."""
    place, nodes = prefix.strip("/"), _nodes(root)
    path, inner, numbers = f"{place}/".partition("/c/")
    if not inner:
        path = place
    node = nodes.get(path)
    if node is None or node["node_type"] == "group":
        if not inner and (node is not None or not place):
            start = f"{place}/" if place else ""
            yield from (rest for other in nodes if other.startswith(start) and "/" not in (rest := other[len(start):]))
            yield "zarr.json"
        return
    chunks = _chunks(node)
    if not inner:
        yield from ["zarr.json", *(["c"] if all(chunks) else [])]
        return
    above = [number for number in numbers.split("/") if number]
    if all(chunks) and len(above) < len(chunks) and all(
            number.isdecimal() and int(number) < count for number, count in zip(above, chunks, strict=False)):
        yield from map(str, range(chunks[len(above)]))


def _nodes(root: Document) -> dict[str, Document]:
    found: dict[str, Document] = root["consolidated_metadata"]["metadata"]
    return found


def _chunks(node: Document) -> list[int]:
    steps = node["chunk_grid"]["configuration"]["chunk_shape"]
    return [-(-size // step) for size, step in zip(node["shape"], steps, strict=True)]
