"""Rows for stores that are read: made once, sent again and again."""

from __future__ import annotations

import numpy as np

from schemas import codecs


def content(codec: str, width: int, dtype: str, pieces: int) -> list[bytes]:
    """So many pieces (rows × layers) that can be decoded, by stream."""
    rng = np.random.default_rng(0)
    made = []
    for stream in codecs.streams(codec, width, dtype):
        data = rng.integers(0, 60, pieces * stream.nbytes, np.uint8)
        if stream.name == "outlier_index":
            data = np.tile(np.arange(8, dtype="<u2"), pieces).view(np.uint8)
        made.append(data.tobytes())
    return made
