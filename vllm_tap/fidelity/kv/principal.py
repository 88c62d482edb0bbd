"""Keys and values in their principal components, layer by layer and head by head, keys before the rotary embedding.

Means, components and the bits of each component come from other documents than those that are scored. They are kept
once for a model, not by token. A token has its codes, and in bfloat16 how long it is for a row of its kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
import xxhash

from engine_side.codecs.scales import divided, nan_unless_finite
from engine_side.seams.kept.rotary import Rotary
from schemas.errors import ArgumentError
from vllm_tap.fidelity.kv.codecs import Coder, Pieces, Stand, lloyd_max
from vllm_tap.fidelity.kv.modes import Exact

__all__ = ["PRINCIPAL", "ByLayer", "Principal", "by_layer", "fit"]

PRINCIPAL: Final = {"pca4": 4, "pca2": 2}  # bits a number, on average
_BITS_MAX: Final = 8  # of a component


@dataclass(frozen=True, slots=True)
class Components:
    """Principal components of keys or of values of one layer.

    ``mean`` is [heads, head]. ``turn`` is [heads, head, head]; its columns are the components. ``size`` (their standard
    deviation) and ``bits``, int64, are [heads, head]. Of each bit of a head's codes, ``component`` says whose it is and
    ``place`` which of its bits: int64 [heads, bits].
    """

    mean: torch.Tensor
    turn: torch.Tensor
    size: torch.Tensor
    bits: torch.Tensor
    component: torch.Tensor
    place: torch.Tensor

    @property
    def by_bits(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Each number of bits that a component has, and a mask of those that have it: bool [heads, head]."""
        for bits in self.bits.unique().tolist():
            if bits:
                yield bits, self.bits == bits


def fit(rows: torch.Tensor, bits: int) -> Components:
    """The components of rows [rows, heads, head], with ``bits`` a number on average. Bits are given out one by one,
    each to the component with the largest error left. ArgumentError where there are fewer rows than numbers in a head.
    """
    count, _, head = rows.shape
    if count <= head:
        raise ArgumentError("--prompts", count, f"rows of heads of {head} numbers are too few for components: more "
                                                f"than {head} are needed")
    each = rows.double().transpose(0, 1)
    mean = each.mean(1)
    values, turn = torch.linalg.eigh((each - mean[:, None]).transpose(1, 2) @ (each - mean[:, None]) / count)
    values = values.clamp_min(1e-30)
    given = torch.zeros(values.shape, dtype=torch.int64)
    for _ in range(bits * head):
        left = torch.where(given < _BITS_MAX, values.cpu() / 4.0 ** given, torch.tensor(-1.0, dtype=torch.double))
        given.scatter_add_(1, left.argmax(1, keepdim=True), torch.ones(len(given), 1, dtype=torch.int64))
    component = torch.stack([torch.repeat_interleave(torch.arange(head), each) for each in given])
    place = torch.stack([torch.cat([torch.arange(count) for count in each]) for each in given.tolist()])
    return Components(mean.float(), turn.float(), values.sqrt().float(), given, component, place)


@dataclass(frozen=True, slots=True)
class Principal:
    """A layer's codec, fitted on its keys before the rotary embedding, and on its values: a KVCodec."""

    fitted: Mapping[str, Components]

    def encode(self, rows: torch.Tensor, what: str) -> Pieces:
        one = self.fitted[what]
        turned = torch.einsum("nhi,hij->nhj", rows.float().cpu() - one.mean, one.turn) / one.size
        # Of the energy: small components of a row that is like no other would make the large ones small.
        length = ((turned * one.size).square().sum(-1) / one.size.square().sum(-1)).sqrt()
        shape = divided(turned, length.unsqueeze(-1))
        codes = torch.zeros(shape.shape, dtype=torch.int64)
        for bits, its in one.by_bits:
            codes[:, its] = torch.bucketize(shape[:, its], lloyd_max(bits)[1])
        ones = codes.gather(-1, one.component.expand(len(codes), -1, -1)) >> one.place & 1
        packed = (ones.flatten(1).unflatten(-1, (-1, 8)) << torch.arange(8)).sum(-1)
        return {"q": packed.to(torch.uint8), "length": nan_unless_finite(length.to(torch.bfloat16))}

    def decode(self, pieces: Pieces, heads: int, head: int, what: str) -> torch.Tensor:
        one = self.fitted[what]
        ones = (pieces["q"].cpu().long().unsqueeze(-1) >> torch.arange(8) & 1).flatten(1).unflatten(-1, (heads, -1))
        codes = torch.zeros(len(ones), heads, head, dtype=torch.int64).scatter_add_(
            -1, one.component.expand(len(ones), -1, -1), ones << one.place)
        shape = torch.zeros(codes.shape)
        for bits, its in one.by_bits:
            shape[:, its] = lloyd_max(bits)[0][codes[:, its]]
        turned = shape * pieces["length"].cpu().float().unsqueeze(-1) * one.size
        return torch.einsum("nhj,hij->nhi", turned, one.turn) + one.mean

    def token_bytes(self, heads: int, head: int, what: str) -> int:
        return heads * (int(self.fitted[what].bits[0].sum()) // 8 + 2)


@dataclass(frozen=True, slots=True)
class ByLayer:
    """A codec that differs from layer to layer (``coders``). It gets keys as they were before their ``rotary``."""

    name: str
    coders: Mapping[int, Coder]
    rotary: Mapping[int, Rotary]

    def at(self, layer: int) -> Coder:
        """The layer's."""
        return self.coders[layer]

    def coded(self, rows: torch.Tensor, stand: Stand) -> torch.Tensor:
        """Rows [rows, heads, head] through the layer's codec."""
        if stand.what == "v":
            return self.coders[stand.layer].coded(rows, stand)
        turn = self.rotary[stand.layer]
        made = self.coders[stand.layer].coded(turn.turned(rows, stand.positions, back=True), stand)
        return turn.turned(made, stand.positions).to(rows.dtype)

    def digest(self, heads: int, head: int, dtype: torch.dtype) -> str:
        """XXH3 of what was fitted, of all layers, and of the levels."""
        found = xxhash.xxh3_64(np.ascontiguousarray(lloyd_max(_BITS_MAX)[0].numpy()).tobytes())
        for layer in sorted(self.coders):
            for one in self.coders[layer].make().fitted.values():  # type: ignore[attr-defined]
                for part in (one.mean, one.turn, one.size, one.bits):
                    found.update(np.ascontiguousarray(part.numpy()).tobytes())
        return found.hexdigest()


def by_layer(names: Sequence[str], exact: Exact, layers: Sequence[int], rotary: Mapping[int, Rotary]) -> list[ByLayer]:
    """The codecs of these names, fitted on a run's keys and values, which begin at position 0 of each prompt."""
    found = []
    for name in names:
        coders = {}
        for layer in layers:
            of_layer = [rows for (number, _), rows in exact.items() if number == layer]
            keys = torch.cat([rotary[layer].turned(one, torch.arange(len(one)), back=True)[1:] for one, _ in of_layer])
            values = torch.cat([one[1:] for _, one in of_layer])  # position 0 is like no other
            codec = Principal({"k": fit(keys, PRINCIPAL[name]), "v": fit(values, PRINCIPAL[name])})
            coders[layer] = Coder.of(name, lambda codec=codec: codec)  # type: ignore[misc]
        found.append(ByLayer(name, coders, rotary))
    return found
