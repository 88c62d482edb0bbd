"""Codecs by name: what each is called, its parameters, and what is said of it in manifests, blocks and help."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from schemas.codecs import fp8row, full8, head8, int8b64, nf4b64, raw, raw16, rp8, sketch, topk, topk8
from schemas.codecs.declare import Parameter, Stream

OWN: Final = "the row's own coordinates"
_BFLOAT16: Final = "rounding to bfloat16 (relative 2^-9)"
_ROW8: Final = "(q - zero) * scale"


@dataclass(frozen=True, slots=True)
class Family:
    """What a codec's name stands for; ``streams`` and ``decode`` are its module's and take its parameters by name.

    ``error`` is the bound that manifests carry; ``formula`` decodes a row without this project's code; ``decoded`` says
    what the decoded numbers are. ``either`` are parameters of which one is given; ``sites``, where not empty, the only
    ones with heads to encode. ``legacy`` codecs are offered for their earlier users. ``decode_as``, where there is one,
    decodes straight to a dtype, or gives None.
    """

    name: str
    streams: Callable[..., tuple[Stream, ...]]
    decode: Callable[..., Any]
    meaning: str
    error: str
    formula: str
    parameters: tuple[Parameter, ...] = ()
    either: tuple[str, ...] = ()
    sites: tuple[str, ...] = ()
    decoded: str = OWN
    legacy: bool = False
    decode_as: Callable[..., Any] | None = None

    @property
    def projected(self) -> bool:
        """Whether what decodes are other numbers than the row's own."""
        return self.decoded != OWN


_K: Final = Parameter("k", int, 1, 1 << 20, None, "entries kept of a row")
_DENSITY: Final = Parameter("density", float, 1e-6, 1, 0.04, "share of a row's entries that is kept")
_NUMBERS: Final = Parameter("k", int, 1, 1 << 14, 512, "numbers that a row becomes")
_SEED: Final = Parameter("seed", int, 0, (1 << 32) - 1, 0, "key of the projection's generator")
_HEAD: Final = Parameter("head", int, 1, 1 << 14, None, "columns of a head; the engine fills it in")

FAMILIES: Final[tuple[Family, ...]] = (
    Family("raw", raw.streams, raw.decode, "the model's own dtype, bit for bit", "exact", "x",
           decode_as=raw.decode_as),
    Family("raw16", raw16.streams, raw16.decode,
           "16-bit rows: bit for bit on 16-bit models, float32 rounded to bfloat16",
           f"exact on 16-bit models; else {_BFLOAT16}", "x", decode_as=raw16.decode_as),
    Family("int8b64", int8b64.streams, int8b64.decode,
           "int8 in blocks of 64 columns with a bfloat16 scale, 8 largest entries kept apart",
           f"at most 0.51 of a block's scale a column, outliers {_BFLOAT16}",
           "x[c] = q[c] * scale[c // 64]; then x[outlier_index] = outlier_value", decode_as=int8b64.decode_as),
    Family("fp8row", fp8row.streams, fp8row.decode, "8-bit floats (e4m3) with a bfloat16 scale a row",
           "at most 2^-4 of a number's size, or 2^-10 of the row's scale where that is more",
           "x = float8_e4m3fn(q) * scale"),
    Family("nf4b64", nf4b64.streams, nf4b64.decode,
           "4-bit normal-floats in blocks of 64 columns with a bfloat16 scale, 8 largest entries kept apart",
           f"at most 0.153 of a block's scale a column, outliers {_BFLOAT16}",
           "x[c] = level[(q[c // 2] >> 4 * (c % 2)) & 15] * scale[c // 64]; then x[outlier_index] = outlier_value; "
           f"level = {[round(float(level), 7) for level in nf4b64.LEVELS]}"),
    Family("topk", topk.streams, topk.decode, "the entries of largest magnitude, the others 0",
           f"kept entries: {_BFLOAT16}; the share of the row's energy that they hold is in the stream kept",
           "x = 0; then x[index] = value", (_K, _DENSITY), ("k", "density")),
    Family("topk8", topk8.streams, topk8.decode, "the entries of largest magnitude as uint8, the others 0",
           "kept entries: at most 0.51 of the row's scale; the share of energy that they hold is in the stream kept",
           f"x = 0; then x[index] = {_ROW8}", (_K, _DENSITY), ("k", "density"), legacy=True),
    Family("sketch", sketch.streams, sketch.decode, "k numbers of a randomised Hadamard transform at 1 or 2 bits",
           "cosines between rows, by schemas.codecs.sketch.cosine: ±1.15·√((1 − k/width)/k) at 2 bits "
           "and k up to width / 4",
           "code j = bits (counted from the lowest, 7 a byte of q) j * bits up to (j + 1) * bits; y[j] = level[code] * "
           f"scale; level = {[list(levels) for levels in sketch.LEVELS.values()]} at 1 and 2 bits",
           (_NUMBERS, Parameter("bits", int, 1, 2, 2, "bits of a number"), _SEED),
           decoded="x @ projection.hadamard(width, k, seed), quantised: it cannot be undone"),
    Family("kv8", head8.streams, head8.decode, "int8 with a bfloat16 scale a head, for keys and values",
           "at most 0.51 of a head's scale a column", "x[c] = q[c] * scale[c // head]", (_HEAD,),
           sites=("k", "k_rot", "v")),
    Family("qk8", head8.streams, head8.decode,
           "int8 with a bfloat16 scale a head, for queries and keys, to compute attention from",
           "at most 0.51 of a head's scale a column", "x[c] = q[c] * scale[c // head]", (_HEAD,),
           sites=("q", "k", "q_rot", "k_rot")),
    Family("full8", full8.streams, full8.decode, "uint8 with a scale and a zero point a row",
           "at most 0.51 of the row's scale (its range / 253): one massive column hides the others", f"x = {_ROW8}",
           legacy=True),
    Family("rp8", rp8.streams, rp8.decode, "a Gaussian projection to k numbers, as uint8 with scale and zero point",
           "cosines between rows: ±1/√k (0.044 at k = 512); the k numbers: at most 0.51 of the row's scale",
           f"y = {_ROW8}", (_NUMBERS, _SEED), legacy=True,
           decoded="x @ projection.gaussian(width, k, seed): it cannot be undone"),
)
