"""Codecs of keys and values: their codes of a token, and the bytes of these, counted on the packed codes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from itertools import pairwise
from statistics import NormalDist
from typing import Any, Final, Protocol

import numpy as np
import torch
import xxhash

from engine_side.codecs import encode
from engine_side.codecs.scales import divided, nan_unless_finite, rounded_up
from schemas.codecs import decode, parse_codec
from schemas.codecs.nf4b64 import BETWEEN, LEVELS
from schemas.errors import ArgumentError, TapError

__all__ = ["DEFAULT_CODECS", "IDENTITY", "SHUFFLED", "Coded", "Coder", "KVCodec", "Pieces", "Stand", "chosen",
           "fitting", "lloyd_max", "own_codec", "own_codecs"]

Pieces = Mapping[str, torch.Tensor]

DEFAULT_CODECS: Final = ("kv8", "kv8-pooled", "fp8", "k8v4", "kv4", "kv4-pooled", "nf4", "rot4", "rot2")
IDENTITY: Final = "identity"
SHUFFLED: Final = "shuffled"  # the control, whose name no codec may have
_NUMPY: Final = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)  # dtypes that NumPy has not
_E4M3_MAX: Final = 448.0
_ALIKE: Final = 2.0 ** -7  # of a token's length: other sums, and a rounding of bfloat16
_DIGESTED: Final = 32  # tokens that a codec is known by
_ROUNDS: Final = 300  # of Lloyd's algorithm
_OWN: Final = re.compile(r"([A-Za-z][A-Za-z0-9_.-]{0,63})=([A-Za-z_][\w.]*):([A-Za-z_]\w*)")


class KVCodec(Protocol):
    """The face of a codec. ``what``: "k" or "v"; rows are [tokens, heads, head] in the model's dtype, keys after the
    rotary embedding. Each token is coded by itself: any number of tokens may come at once, one as well.
    """

    def encode(self, rows: torch.Tensor, what: str) -> Pieces:
        """The tensors that are kept of rows, scales and what else it takes included: tensors [tokens, ...] by name."""

    def decode(self, pieces: Pieces, heads: int, head: int, what: str) -> torch.Tensor:
        """Rows [tokens, heads, head] of any float dtype, from the pieces alone."""

    def token_bytes(self, heads: int, head: int, what: str) -> int:
        """Bytes of a token's keys (or values) of one layer."""


@dataclass(frozen=True, slots=True)
class Stand:
    """The place of rows: the numbers of their ``prompts``, int64 [rows], those of each together; ``layer``;
    ``positions`` int64 [rows]; ``what``: "k" or "v".
    """

    prompts: torch.Tensor
    layer: int
    positions: torch.Tensor
    what: str

    def by_prompt(self) -> Iterator[tuple[int, slice]]:
        """The number of each prompt, and which of the rows are its."""
        stop = 0
        for number, count in zip(*map(torch.Tensor.tolist, self.prompts.unique_consecutive(return_counts=True)),
                                 strict=True):
            start, stop = stop, stop + count
            yield number, slice(start, stop)


class Coded(Protocol):
    """A codec by name that may be another in each layer, and may know positions."""

    @property
    def name(self) -> str: ...

    def at(self, layer: int) -> Coder:
        """The layer's own."""

    def coded(self, rows: torch.Tensor, stand: Stand) -> torch.Tensor:
        """Rows [rows, heads, head] through it, in their own dtype."""

    def digest(self, heads: int, head: int, dtype: torch.dtype) -> str:
        """A digest that tells the codec from another of its name."""


@dataclass(frozen=True, slots=True)
class Registered:
    """A codec of captures, by the identity that it has for heads of so many numbers; its decoder is NumPy's."""

    identity: Callable[[int, int], str]

    def encode(self, rows: torch.Tensor, what: str) -> Pieces:
        return encode(self.identity(*rows.shape[1:]), rows.flatten(1))

    def decode(self, pieces: Pieces, heads: int, head: int, what: str) -> torch.Tensor:
        arrays = {name: _array(piece) for name, piece in pieces.items()}
        made = decode(self.identity(heads, head), arrays, heads * head, "float32")
        return torch.from_numpy(made).unflatten(-1, (heads, head))

    def token_bytes(self, heads: int, head: int, what: str) -> int:
        streams = parse_codec(self.identity(heads, head)).streams(heads * head, "float32")
        return sum(stream.nbytes for stream in streams)


class Exact:
    """Rows as they are, in float32."""

    def encode(self, rows: torch.Tensor, what: str) -> Pieces:
        return {"x": rows.float()}

    def decode(self, pieces: Pieces, heads: int, head: int, what: str) -> torch.Tensor:
        return pieces["x"]

    def token_bytes(self, heads: int, head: int, what: str) -> int:
        return 4 * heads * head


class Float8:
    """8-bit floats, e4m3, as vLLM's own fp8 cache has them without calibration: scale 1, cut off at ±448."""

    def encode(self, rows: torch.Tensor, what: str) -> Pieces:
        return {"q": rows.float().clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn)}

    def decode(self, pieces: Pieces, heads: int, head: int, what: str) -> torch.Tensor:
        return pieces["q"].float()

    def token_bytes(self, heads: int, head: int, what: str) -> int:
        return heads * head


@dataclass(frozen=True, slots=True)
class Affine4:
    """Sixteen equal steps from the smallest number to the largest, of a head or, ``pooled``, of all heads together:
    two numbers a byte, step and smallest number in bfloat16.
    """

    pooled: bool = False

    def encode(self, rows: torch.Tensor, what: str) -> Pieces:
        groups = (rows.flatten(1).unsqueeze(1) if self.pooled else rows).float()
        least = groups.amin(-1).to(torch.bfloat16)
        step = rounded_up((groups.amax(-1) - least.float()).clamp_min(0) / 15)
        codes = divided(groups - least.float().unsqueeze(-1), step.unsqueeze(-1)).round_().clamp_(0, 15)
        return {"q": _packed(codes), "step": nan_unless_finite(step), "least": least}

    def decode(self, pieces: Pieces, heads: int, head: int, what: str) -> torch.Tensor:
        step, least = (pieces[name].float().unsqueeze(-1) for name in ("step", "least"))
        return (_unpacked(pieces["q"], least.shape[1]) * step + least).reshape(-1, heads, head)

    def token_bytes(self, heads: int, head: int, what: str) -> int:
        return heads * head // 2 + 4 * (1 if self.pooled else heads)


class NormalFloat4:
    """Fifteen quantiles of a normal distribution between minus and plus a head's largest magnitude, in bfloat16."""

    def encode(self, rows: torch.Tensor, what: str) -> Pieces:
        heads = rows.float()
        scale = nan_unless_finite(rounded_up(heads.abs().amax(-1)))
        codes = torch.bucketize(divided(heads, scale.unsqueeze(-1)), torch.from_numpy(BETWEEN).to(rows.device))
        return {"q": _packed(codes), "scale": scale}

    def decode(self, pieces: Pieces, heads: int, head: int, what: str) -> torch.Tensor:
        codes = _unpacked(pieces["q"], heads).long()
        return torch.from_numpy(LEVELS).to(codes.device)[codes] * pieces["scale"].float().unsqueeze(-1)

    def token_bytes(self, heads: int, head: int, what: str) -> int:
        return heads * head // 2 + 2 * heads


@dataclass(frozen=True, slots=True)
class Rotated:
    """A codec that turns a head by a Walsh–Hadamard matrix with signs. It codes the turned head at ``bits`` (2 or 4) by
    the levels of a normal distribution. It keeps the head's length in bfloat16, which the decoded row has again.
    """

    bits: int

    def encode(self, rows: torch.Tensor, what: str) -> Pieces:
        turned = rows.float() @ _rotation(rows.shape[-1]).to(rows.device)
        length = turned.norm(dim=-1)
        codes = torch.bucketize(divided(turned, length.unsqueeze(-1)) * math.sqrt(rows.shape[-1]),
                                lloyd_max(self.bits)[1].to(rows.device))
        return {"q": _packed(codes, self.bits), "length": nan_unless_finite(length.to(torch.bfloat16))}

    def decode(self, pieces: Pieces, heads: int, head: int, what: str) -> torch.Tensor:
        codes = _unpacked(pieces["q"], heads, self.bits).long()
        turned = lloyd_max(self.bits)[0].to(codes.device)[codes]
        turned = turned / turned.norm(dim=-1, keepdim=True) * pieces["length"].float().unsqueeze(-1)
        return turned @ _rotation(head).to(codes.device).T

    def token_bytes(self, heads: int, head: int, what: str) -> int:
        return heads * (head * self.bits // 8 + 2)


@dataclass(frozen=True, slots=True)
class Pair:
    """One codec for keys, another for values."""

    keys: KVCodec
    values: KVCodec

    def encode(self, rows: torch.Tensor, what: str) -> Pieces:
        return self._of(what).encode(rows, what)

    def decode(self, pieces: Pieces, heads: int, head: int, what: str) -> torch.Tensor:
        return self._of(what).decode(pieces, heads, head, what)

    def token_bytes(self, heads: int, head: int, what: str) -> int:
        return self._of(what).token_bytes(heads, head, what)

    def _of(self, what: str) -> KVCodec:
        return self.keys if what == "k" else self.values


def _packed(codes: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """Numbers of 2 or 4 bits [tokens, groups, n] in bytes: uint8 [tokens, groups · n · bits / 8]."""
    each = codes.to(torch.uint8).flatten(1).unflatten(-1, (-1, 8 // bits))
    found = each[..., 0].clone()
    for at in range(1, 8 // bits):
        found |= each[..., at] << at * bits
    return found


def _unpacked(codes: torch.Tensor, groups: int, bits: int = 4) -> torch.Tensor:
    """float32 [tokens, groups, n]."""
    each = torch.stack([codes >> at & (1 << bits) - 1 for at in range(0, 8, bits)], -1)
    return each.flatten(1).unflatten(-1, (groups, -1)).float()


@cache
def lloyd_max(bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Levels that a normal distribution is nearest to, and the bounds between them: float32."""
    normal = NormalDist()
    # As dense as the cube root of the density, nearly right for many levels: rounds alone would take thousands.
    levels = [math.sqrt(3) * normal.inv_cdf((at + 0.5) / (1 << bits)) for at in range(1 << bits)]
    for _ in range(_ROUNDS):
        bounds = [(one + other) / 2 for one, other in pairwise(levels)]
        edges = [-math.inf, *bounds, math.inf]
        levels = [(normal.pdf(low) - normal.pdf(high)) / (normal.cdf(high) - normal.cdf(low))
                  for low, high in pairwise(edges)]
    return torch.tensor(levels), torch.tensor(bounds)


@cache
def _rotation(head: int) -> torch.Tensor:
    """Walsh and Hadamard's matrix with signs of chance, orthogonal: float32 [head, head]; ValueError where the size is
    no power of two.
    """
    from scipy.linalg import hadamard

    signs = np.random.default_rng(0).choice([-1.0, 1.0], head)
    return torch.from_numpy(signs[:, None] * hadamard(head) / math.sqrt(head)).float()


_PER_HEAD = Registered(lambda heads, head: f"kv8:head={head}")
_SHIPPED: Final[dict[str, Callable[[], KVCodec]]] = {
    IDENTITY: Exact, "kv8": lambda: _PER_HEAD,
    "kv8-pooled": lambda: Registered(lambda heads, head: f"kv8:head={heads * head}"), "fp8": Float8,
    "k8v4": lambda: Pair(_PER_HEAD, Affine4()), "kv4": Affine4, "kv4-pooled": partial(Affine4, True),
    "nf4": NormalFloat4, "rot4": partial(Rotated, 4), "rot2": partial(Rotated, 2)}


@dataclass(frozen=True, slots=True)
class Coder:
    """A codec by name. ``make`` makes it; one instance encodes and another decodes, so that nothing but pieces goes
    from one to the other.
    """

    name: str
    make: Callable[[], KVCodec]
    encoder: KVCodec
    decoder: KVCodec

    @classmethod
    def of(cls, name: str, make: Callable[[], KVCodec]) -> Coder:
        """ArgumentError where what it makes is no codec."""
        try:
            found = cls(name, make, make(), make())
        except Exception as error:  # whatever a class of somebody else's raises
            raise ArgumentError("--codec", name, f"its class cannot be made, without arguments: {_told(error)}"
                                ) from None
        if lacking := [each for each in ("encode", "decode", "token_bytes")
                       if not callable(getattr(found.encoder, each, None))]:
            raise ArgumentError("--codec", name, f"its class has no {', '.join(lacking)}; a codec is what "
                                                 "vllm_tap.fidelity.kv.codecs.KVCodec says")
        return found

    def at(self, layer: int) -> Coder:
        """It is the same in each."""
        return self

    def coded(self, rows: torch.Tensor, stand: Stand) -> torch.Tensor:
        """Rows through it, wherever they stand."""
        return self.round_trip(rows, stand.what)

    def round_trip(self, rows: torch.Tensor, what: str) -> torch.Tensor:
        """Rows [tokens, heads, head] through the codec, in their own dtype; they stay as they are."""
        pieces = self.encoder.encode(rows.clone(), what)
        return self.decoder.decode(pieces, rows.shape[1], rows.shape[2], what).to(rows.device, rows.dtype)

    def check(self, rows: torch.Tensor, what: str) -> int:
        """Bytes of a token's keys or values, counted on the packed codes of ``rows`` [tokens, heads, head];
        ArgumentError for a codec that is not what it says.
        """
        tokens, heads, head = rows.shape
        try:
            pieces, packed = self._encoded(self.encoder, rows, what)
            declared = int(self.encoder.token_bytes(heads, head, what))
            counted = sum(map(len, packed.values())) / tokens
            if counted != declared:
                raise ArgumentError("--codec", self.name, f"declares {declared} bytes for {_WHAT[what]} of a token in "
                                    f"{heads} heads of {head}, and packed they are {counted:g}: it would be judged at "
                                    "the wrong size")
            # What is kept in a class, and not counted, is another's behind each of these.
            others = (rows.float().flip(0) * 8).clamp(*_finite(rows.dtype)).to(rows.dtype)
            self.encoder.encode(others.clone(), what)
            if self._encoded(self.encoder, rows, what)[1] != packed:
                raise ArgumentError("--codec", self.name, "packs the same tokens otherwise when others came before: "
                                                          "each token is to be coded by itself")
            self.encoder.encode(others, what)
            again = {name: torch.frombuffer(bytearray(packed[name]), dtype=piece.dtype).reshape(piece.shape)
                     for name, piece in pieces.items()}
            made = self.make().decode(again, heads, head, what).to(rows.dtype).cpu()
            first = self.make().decode({name: piece[:1] for name, piece in again.items()}, heads, head, what)
            whole = self.round_trip(rows, what).cpu()
            alone = [self._alike(self._alone(rows[at:at + 1], what), whole[at:at + 1])
                     for at in sorted({0, tokens // 2, tokens - 1})]
        except TapError:
            raise
        except Exception as error:  # whatever somebody else's codec raises
            raise ArgumentError("--codec", self.name, f"fails on {tokens} tokens: {_told(error)}") from None
        if made.shape != rows.shape:
            raise ArgumentError("--codec", self.name, f"decodes to {list(made.shape)}, not to {list(rows.shape)}")
        if not torch.equal(made.nan_to_num(), whole.nan_to_num()):
            raise ArgumentError("--codec", self.name, "decodes to something else from the packed codes alone: it keeps "
                                                      "what it does not count")
        if not self._alike(first, whole[:1]):
            raise ArgumentError("--codec", self.name, "decodes a token otherwise beside others than alone")
        if alone.count(False) > len(alone) // 2:  # one may lie between two codes, with other sums beside others
            raise ArgumentError("--codec", self.name, "encodes a token otherwise beside others than alone")
        return declared

    def digest(self, heads: int, head: int, dtype: torch.dtype) -> str:
        """XXH3 of what the codec makes of random keys and values [tokens, heads, head], packed and decoded. It is
        another where the codec was changed, a class that it is built on, or a file that it reads.
        """
        found = xxhash.xxh3_64()
        for what in "kv":
            rows = torch.randn(_DIGESTED, heads, head, generator=torch.Generator().manual_seed(ord(what))).to(dtype)
            for name, packed in sorted(self._encoded(self.make(), rows, what)[1].items()):
                found.update(f"{name} {len(packed)} ".encode() + packed)
            found.update(_array(self.round_trip(rows, what)).tobytes())
        return found.hexdigest()

    def _encoded(self, encoder: KVCodec, rows: torch.Tensor, what: str
                 ) -> tuple[dict[str, torch.Tensor], dict[str, bytes]]:
        """The pieces of rows, and their bytes."""
        pieces = dict(encoder.encode(rows.clone(), what))
        return pieces, {name: self._packed(name, piece, len(rows)) for name, piece in pieces.items()}

    def _alone(self, row: torch.Tensor, what: str) -> torch.Tensor:
        """A row [1, heads, head] through instances that have seen no other."""
        return self.make().decode(self.make().encode(row.clone(), what), row.shape[1], row.shape[2], what)

    @staticmethod
    def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
        return one.shape == other.shape and bool(
            (one.cpu().float() - other.float()).nan_to_num().norm() <= _ALIKE * other.float().nan_to_num().norm())

    def _packed(self, name: str, piece: Any, tokens: int) -> bytes:
        if not isinstance(piece, torch.Tensor) or piece.ndim < 1 or len(piece) != tokens:
            raise ArgumentError("--codec", self.name, f"its piece {name!r} of {tokens} tokens is no tensor [{tokens}, "
                                                      "...]: what is not kept by token cannot be counted by token")
        return _array(piece).tobytes()


_WHAT: Final = {"k": "keys", "v": "values"}


def _finite(dtype: torch.dtype) -> tuple[float, float]:
    found = torch.finfo(dtype)
    return found.min, found.max


def _array(piece: torch.Tensor) -> np.ndarray[Any, Any]:
    kept = piece.detach().cpu().contiguous()
    if kept.dtype in _NUMPY:
        kept = kept.view(torch.uint16 if kept.dtype == torch.bfloat16 else torch.uint8)
    found: np.ndarray[Any, Any] = kept.numpy()
    return found


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def chosen(names: tuple[str, ...], own: Mapping[str, Callable[[], KVCodec]]) -> list[Coder]:
    """The codecs of these names, those of captures too, and the user's own. ArgumentError for a name without a codec,
    or for a codec that decodes to something else than rows.
    """
    found = [_named(name) for name in names or (() if own else DEFAULT_CODECS)]
    if twice := [one.name for at, one in enumerate(found) if one.name in {other.name for other in found[:at]}]:
        raise ArgumentError("--codecs", ",".join(names), f"names {twice[0]} twice")
    if both := [name for name in own if name in {one.name for one in found}]:
        raise ArgumentError("--codec", both[0], "is the name of two codecs; take another")
    if made := [name for name, make in own.items() if not isinstance(make, type)]:
        raise ArgumentError("--codec", made[0], f"is a {type(own[made[0]]).__name__}, not a class, whose source it "
                                                "would be known by; write class Mine: …")
    return found + [Coder.of(name, make) for name, make in own.items()]


def fitting(coders: Sequence[Coder], heads: Mapping[int, tuple[int, int]], named: bool) -> tuple[list[Coder], str]:
    """The codecs that these heads can have, and a text about the rest; ArgumentError for one of the rest that was
    ``named``.

    ``heads``: by layer, how many heads and of how many numbers.
    """
    odd = next(((layer, head) for layer, (_, head) in heads.items() if head & (head - 1)), None)
    turned = [coder.name for coder in coders if coder.name in _SHIPPED and isinstance(coder.encoder, Rotated)]
    if odd is None or not turned:
        return list(coders), ""
    why = f"turns heads of a power of two of numbers, and layer {odd[0]} has heads of {odd[1]}"
    if named:
        raise ArgumentError("--codecs", turned[0], f"{why}: leave it out, or take kv4 or nf4")
    return [coder for coder in coders if coder.name not in turned], f"{', '.join(turned)}: {why}"


def _named(name: str) -> Coder:
    if name in _SHIPPED:
        return Coder.of(name, _SHIPPED[name])
    try:
        codec = parse_codec(name, "--codecs")
    except TapError as error:
        raise ArgumentError("--codecs", name, f"valid: {', '.join(each for each in _SHIPPED if each != IDENTITY)}, a "
                                              f"codec of captures, or your own by --codec ({error})") from None
    if codec.family.projected or not codec.complete or codec.family.name == "raw":
        raise ArgumentError("--codecs", name, "has no rows of keys and values to give back"
                            if codec.family.projected else f"valid for keys and values: {', '.join(DEFAULT_CODECS)}")
    return Coder.of(codec.identity, lambda: Registered(lambda heads, head: codec.identity))


def own_codecs(texts: Sequence[str]) -> dict[str, Callable[[], KVCodec]]:
    """The classes of several by name; ArgumentError as for one, and where two have one name."""
    found: dict[str, Callable[[], KVCodec]] = {}
    for text in texts:
        name, make = own_codec(text)
        if name in found:
            raise ArgumentError("--codec", text, f"{name} is named twice: take another name")
        found[name] = make
    return found


def own_codec(text: str) -> tuple[str, Callable[[], KVCodec]]:
    """The name and the class of ``NAME=PACKAGE.MODULE:CLASS``; ArgumentError where there is none."""
    if (found := _OWN.fullmatch(text)) is None:
        raise ArgumentError("--codec", text, "valid: NAME=PACKAGE.MODULE:CLASS, such as mine=package:Class")
    name, module, kind = found.groups()
    if name in (*_SHIPPED, SHUFFLED):
        whose = "control" if name in (IDENTITY, SHUFFLED) else "codec that is shipped"
        raise ArgumentError("--codec", text, f"{name} is the name of a {whose}; take another")
    try:
        return name, getattr(import_module(module), kind)
    except Exception as error:  # whatever a module of somebody else's raises
        raise ArgumentError("--codec", text, f"cannot be had: {_told(error)}") from None
