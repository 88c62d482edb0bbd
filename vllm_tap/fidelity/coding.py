"""Rows through codecs: encoded as the engine encodes them, decoded as readers decode them; and rows that are wrong on
purpose, which a measurement must notice.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from engine_side.codecs import encode
from schemas.codecs import Codec, decode, parse_codec
from schemas.errors import ArgumentError
from schemas.sites import has_heads
from vllm_tap.verify.laboratory import F32, Place

__all__ = ["DEFAULT_CODECS", "bits_counted", "codecs_for", "in_dtype", "late", "noise_like", "one_wrong", "round_trip",
           "row_bytes", "seed_of", "shuffled"]

DEFAULT_CODECS: Final = ("raw16", "int8b64", "fp8row", "full8", "nf4b64", "topk:density=0.25", "topk8")
_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def codecs_for(site: str, names: tuple[str, ...], head: int) -> list[str]:
    """Identities of the named codecs, as far as they are for this site; ArgumentError for one that decodes to something
    else than a row, which cannot be patched back.
    """
    found = []
    for name in names:
        codec: Codec = parse_codec(name, "--codecs")
        family = codec.family
        if family.projected:
            raise ArgumentError("--codecs", name, "decodes to a projection, which no model goes on with; leave it out "
                                                  "(docs/reference/codecs.md has its error in cosines)")
        if family.sites:
            if site not in family.sites or not has_heads(site):
                continue
            codec = parse_codec(f"{family.name}:head={head}", "--codecs") if not codec.complete else codec
        found.append(codec.identity)
    return list(dict.fromkeys(found))


def round_trip(identity: str, rows: F32, dtype: str) -> F32:
    """Rows [rows, width] of a model of ``dtype`` encoded and decoded: float32."""
    return decode(identity, _pieces(identity, rows, dtype), rows.shape[-1], dtype)


def _pieces(identity: str, rows: F32, dtype: str) -> dict[str, npt.NDArray[Any]]:
    """The bytes that the engine makes of rows, by stream."""
    given = torch.from_numpy(rows).to(_DTYPES[dtype])
    return {name: piece.numpy() for name, piece in encode(identity, given).items()}


def row_bytes(identity: str, width: int, dtype: str) -> int:
    """Bytes of a stored row, as declared."""
    return sum(stream.nbytes for stream in parse_codec(identity).streams(width, dtype))


def bits_counted(identity: str, rows: F32, dtype: str) -> int:
    """Bytes of a stored row, counted on what the encoder made of ``rows``."""
    return int(sum(piece.nbytes for piece in _pieces(identity, rows, dtype).values())) // len(rows)


def check_honest(identity: str, rows: F32, dtype: str) -> None:
    """ArgumentError for a codec whose encoder makes other bytes than it declares."""
    declared, made = row_bytes(identity, rows.shape[-1], dtype), bits_counted(identity, rows, dtype)
    if declared != made:
        raise ArgumentError("--codecs", identity, f"declares {declared} bytes a row of {rows.shape[-1]} numbers and "
                                                  f"its encoder makes {made}: it would be judged at the wrong size")


def seed_of(place: Place, prompt: int) -> tuple[int, int, int]:
    """The seed of what is drawn for a prompt, counted over all batches, at a place."""
    return zlib.crc32(place[0].encode()), place[1], prompt


def in_dtype(rows: F32, dtype: str) -> F32:
    """Rows as a model of ``dtype`` takes them, in float32."""
    found: F32 = torch.from_numpy(rows).to(_DTYPES[dtype]).float().numpy()
    return found


def shuffled(rows: F32, seed: int | Sequence[int] = 0) -> F32:
    """Each position's row is another's: a permutation without a fixed point, [positions, width]."""
    order = np.random.default_rng(seed).permutation(len(rows))
    moved = np.empty_like(rows)
    moved[order] = rows[np.roll(order, 1)]
    return moved


def late(rows: F32) -> F32:
    """Each position's row is the one's before: off by one."""
    return np.concatenate([rows[:1], rows[:-1]])


def one_wrong(rows: F32, at: int) -> F32:
    """One position's row is that of the position before."""
    wrong = rows.copy()
    wrong[at] = rows[at - 1]
    return wrong


def noise_like(rows: F32, decoded: F32, seed: int | Sequence[int] = 0) -> F32:
    """Rows with Gaussian noise of the decoded rows' own error, row by row: the same SQNR without its structure."""
    drawn = np.random.default_rng(seed).standard_normal(rows.shape)
    error = np.linalg.norm(decoded.astype(np.float64) - rows, axis=-1, keepdims=True)
    drawn *= error / np.linalg.norm(drawn, axis=-1, keepdims=True)
    return (rows + drawn).astype(np.float32)


