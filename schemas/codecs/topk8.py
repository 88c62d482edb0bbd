"""``topk8``: as ``topk``, the kept values as uint8 with a scale and a zero point a row (full8). A legacy codec."""

from __future__ import annotations

from typing import Final

from schemas.codecs import full8
from schemas.codecs.declare import F32, CodecFamily, Pieces, Stream
from schemas.codecs.topk import PARAMETERS, entries, in_place, index_and_kept


def streams(width: int, dtype: str, k: int | None = None, density: float | None = None) -> tuple[Stream, ...]:
    """``index``, the codes ``q`` of the values, their ``scale`` and ``zero``, and ``kept``."""
    kept = entries(width, k, density)
    index, energy = index_and_kept(width, kept)
    return index, *full8.coded(kept), energy


def decode(pieces: Pieces, width: int, dtype: str, k: int | None = None, density: float | None = None) -> F32:
    """Rows of float32 ``[..., width]``, zero where nothing was kept."""
    return in_place(pieces["index"], full8.numbers(pieces), width)


FAMILY: Final = CodecFamily(
    "topk8", streams, decode, "the entries of largest magnitude as uint8, the others 0",
    "kept entries: at most 0.51 of the row's scale; the share of energy that they hold is in the stream kept",
    f"x = 0; then x[index] = {full8.FORMULA}", PARAMETERS, either=("k", "density"), legacy=True,
    selects=True)
