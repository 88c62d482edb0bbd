"""``rp8`` and ``sketch``, the reference encoders (declarations in schemas.codecs.rp8 and sketch).

The matrices are NumPy's. They take up to a second to make, so that is done before the request comes to the steps, by
the thread that takes requests in; when its capture begins they are put where the rows are, and stay there while a
capture uses them.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Collection
from typing import Final

import torch

from engine_side.codecs import row8
from engine_side.codecs.scales import divided, nan_unless_finite
from schemas import codecs
from schemas.codecs import projection
from schemas.codecs.sketch import PACKED, THRESHOLDS

KEPT_BYTES_MAX: Final = 256 << 20  # of matrices on a device; and of those that were made and not put there yet

Key = tuple[str, int, int, int, torch.device]
_kept: OrderedDict[Key, torch.Tensor] = OrderedDict()  # float32 [width, k], what was used last at the end
_made: OrderedDict[Key, projection.Matrix] = OrderedDict()  # what was made last at the end


def key_of(identity: str, width: int, device: torch.device) -> Key | None:
    """What a codec's matrix follows from, and where it lies; None for codecs that project nothing.

    SpecError where the matrix would be too large.
    """
    codec = codecs.identified(identity)
    name = codec.family.name
    if name not in projection.MATRICES:
        return None
    k = projection.columns(width, int(codec.parameters["k"]), name)
    return name, width, k, int(codec.parameters["seed"]), device


def make(key: Key) -> None:
    """Make a matrix that is not kept yet, for ``keep``; any thread may."""
    if key in _kept or key in _made:
        return
    _made[key] = _matrix(key)
    with contextlib.suppress(KeyError):  # another thread has taken the last
        while sum(map(_nbytes, list(_made))) > KEPT_BYTES_MAX:
            _made.popitem(last=False)


def kept(key: Key) -> bool:
    """Whether rows can be encoded at once."""
    return key in _kept


def keep(key: Key, in_use: Collection[Key]) -> None:
    """Have the matrix on its device. MemoryError where there is no room for it beside those ``in_use``."""
    made = _made.pop(key, None)
    if key in _kept:
        _kept.move_to_end(key)
        return
    name, width, k, seed, device = key
    others = [other for other in _kept if other[-1] == device]
    while others and sum(map(_nbytes, others)) + _nbytes(key) > KEPT_BYTES_MAX:
        unused = next((other for other in others if other not in in_use), None)
        if unused is None:
            raise MemoryError(f"{name}:k={k},seed={seed} at width {width}: no room for its matrix of "
                              f"{_nbytes(key) / 2**20:.1f} MiB beside those in use, {KEPT_BYTES_MAX >> 20} MiB in all")
        del _kept[unused]
        others.remove(unused)
    _kept[key] = torch.tensor(_matrix(key) if made is None else made, device=device)


def forget() -> None:
    """Give the memory back; nothing is encoded any more."""
    _kept.clear()
    _made.clear()


def _matrix(key: Key) -> projection.Matrix:
    name, width, k, seed, _ = key
    return projection.MATRICES[name](width, k, seed)


def _nbytes(key: Key) -> int:
    _, width, k, *_ = key
    return 4 * width * k


def _times(rows: torch.Tensor, name: str, k: int, seed: int) -> torch.Tensor:
    """The projection of rows ``[..., width]`` of any float dtype, in float32; fast where the matrix is kept."""
    width = rows.shape[-1]
    key = name, width, projection.columns(width, k, name), seed, rows.device
    matrix = _kept.get(key)
    return rows.to(torch.float32) @ (torch.tensor(_matrix(key), device=rows.device) if matrix is None else matrix)


def encode_rp8(rows: torch.Tensor, k: int, seed: int) -> dict[str, torch.Tensor]:
    """Codes, scale and zero point of the projection of rows ``[..., width]`` of any float dtype."""
    return row8.encode(_times(rows, "rp8", k, seed))


def encode_sketch(rows: torch.Tensor, k: int, bits: int, seed: int) -> dict[str, torch.Tensor]:
    """Packed codes and scale of the transform of rows ``[..., width]`` of any float dtype."""
    y = _times(rows, "sketch", k, seed)
    top = y.abs().amax(dim=-1, keepdim=True)
    unit = torch.where(top == 0, torch.ones_like(top), top)  # squares of large numbers overflow
    scale = nan_unless_finite((unit * (y / unit).square().mean(dim=-1, keepdim=True).sqrt()).to(torch.bfloat16))
    y = divided(y, scale)
    codes = torch.zeros_like(y, dtype=torch.uint8)
    for threshold in THRESHOLDS[bits]:
        codes += y >= threshold
    single = codes if bits == 1 else torch.stack([codes & 1, codes >> 1], dim=-1).flatten(-2)
    single = torch.nn.functional.pad(single, (0, -single.shape[-1] % PACKED)).unflatten(-1, (-1, PACKED))
    shifts = torch.arange(PACKED, dtype=torch.uint8, device=rows.device)
    return {"q": (single << shifts).sum(dim=-1, dtype=torch.uint8), "scale": scale.view(torch.uint16)}
