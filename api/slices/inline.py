"""Rows in the answer to a generation: for small requests, by callers who want nothing more than them."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from api.errors import BROKEN, body_of
from api.service import ApiService
from api.slices.query import SliceQuery
from api.slices.reading import SliceMemory, captured, read_slices, slice_bytes
from schemas import limits
from schemas.bucket.reader import AnyReader
from schemas.errors import LimitError
from schemas.manifest import Manifest

__all__ = ["inline"]

_ALL: Final = SliceQuery()  # every site and layer, as safetensors of float32
Chosen = list[tuple[Manifest, dict[str, list[int]]]]


async def inline(service: ApiService, ids: Sequence[str], owner: str) -> dict[str, Any]:
    """The field ``inline``: by capture id the rows of all its sites and layers, as safetensors in base64.

    An ``error`` in their place where they cannot be had: the generation is answered all the same, and its captures can
    be read as any other.
    """
    try:
        chosen, numbers = await service.read(lambda reader: _choose(service, reader, ids, owner))
        held = SliceMemory(service, owner, numbers)
        try:
            found = await service.read(lambda reader: {manifest.id: _read(reader, manifest, layers, owner)
                                                       for manifest, layers in chosen})
        finally:
            held.release()
    except BROKEN as error:
        return body_of(error)
    return {"format": _ALL.format, "dtype": _ALL.dtype, "captures": found}


def _choose(service: ApiService, reader: AnyReader, ids: Sequence[str], owner: str) -> tuple[Chosen, int]:
    """Layers to read of each capture, and the memory they take; LimitError where that is too much for an answer."""
    manifests = [reader.manifest(capture, owner) for capture in ids]
    chosen = [(each, _ALL.choose(captured(each), each.engine)) for each in manifests]
    nbytes = sum(info.decoded_width * 4 * row.captured
                 for each in manifests for info in each.sites for row in each.rows if row.site == info.site)
    if nbytes > limits.inline_bytes_max:
        raise LimitError("bytes of arrays in the answer (capture.return = inline)", nbytes, limits.inline_bytes_max,
                         "they are stored: read them as slices")
    return chosen, sum(slice_bytes(service.config, each, layers, _ALL) for each, layers in chosen)


def _read(reader: AnyReader, manifest: Manifest, layers: dict[str, list[int]], owner: str) -> dict[str, Any]:
    answer = read_slices(reader, manifest, layers, _ALL, owner)
    return {"rows": answer.rows, "start": answer.start, "stop": answer.stop, "missing": msgspec.to_builtins(
        answer.missing), "data": base64.b64encode(b"".join(answer.buffers)).decode()}
