"""Matrices of the reference encoders that project rows: ``rp8`` and ``sketch``.

NumPy makes them, which takes up to a second. The thread that takes requests in therefore makes them, before the request
comes to the steps. When its capture begins, they are put on the device of the rows. They stay there while a capture
uses them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from typing import Final

import torch

from schemas import codecs
from schemas.codecs import projection
from schemas.lru import Lru

KEPT_BYTES_MAX: Final = 256 << 20  # of matrices on a device; and of those that were made and not put there yet

Key = tuple[str, int, int, int, torch.device]
_kept: OrderedDict[Key, torch.Tensor] = OrderedDict()  # float32 [width, k], what was used last at the end
_made = Lru[Key, projection.Matrix](KEPT_BYTES_MAX, lambda matrix: matrix.nbytes)


def key_of(identity: str, width: int, device: torch.device) -> Key | None:
    """The key of a codec's matrix: all that it follows from, and where it lies; None for codecs that project nothing.

    SpecError where the matrix would be too large.
    """
    codec = codecs.identified(identity)
    if not codec.family.projected:
        return None
    k = projection.columns(width, int(codec.parameters["k"]), codec.family.name)
    return codec.family.name, width, k, int(codec.parameters["seed"]), device


def make(key: Key) -> None:
    """Make a matrix that is not kept yet, for ``ensure``; any thread may."""
    if key in _kept or key in _made:
        return
    _made.put(key, _matrix(key))


def has(key: Key) -> bool:
    """Whether rows can be encoded at once."""
    return key in _kept


def ensure(key: Key, in_use: Collection[Key]) -> None:
    """Have the matrix on its device. MemoryError where there is no room for it beside those ``in_use``."""
    made = _made.pop(key)
    if key in _kept:
        _kept.move_to_end(key)
        return
    name, width, k, seed, device = key
    others = [other for other in _kept if other[-1] == device]
    while others and sum(map(_nbytes, others)) + _nbytes(key) > KEPT_BYTES_MAX:
        unused = next((other for other in others if other not in in_use), None)
        if unused is None:
            raise MemoryError(f"{name}:k={k},seed={seed} at width {width}: no room for its matrix of "
                              f"{_nbytes(key) / 2**20:.1f} MiB beside those in use; the limit is "
                              f"{KEPT_BYTES_MAX >> 20} MiB in all")
        del _kept[unused]
        others.remove(unused)
    _kept[key] = torch.tensor(_matrix(key) if made is None else made, device=device)


def forget() -> None:
    """Give the memory back; nothing is encoded any more."""
    _kept.clear()
    _made.clear()


def _matrix(key: Key) -> projection.Matrix:
    name, width, k, seed, _ = key
    make = codecs.CODECS[name].matrix
    assert make is not None  # as key_of says
    return make(width, k, seed)


def _nbytes(key: Key) -> int:
    _, width, k, *_ = key
    return 4 * width * k


def times(rows: torch.Tensor, name: str, k: int, seed: int) -> torch.Tensor:
    """The projection of rows ``[..., width]`` of any float dtype, in float32; fast where the matrix is kept."""
    width = rows.shape[-1]
    key = name, width, projection.columns(width, k, name), seed, rows.device
    matrix = _kept.get(key)
    return rows.to(torch.float32) @ (torch.tensor(_matrix(key), device=rows.device) if matrix is None else matrix)
