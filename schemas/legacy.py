"""The ``VLLM_ACT_*`` names of earlier designs, and the flags that mean the same: what they ask for in today's words."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Final

from schemas.checks import Setting
from schemas.codecs import DEFAULT_CODEC, Codec, parse_codec
from schemas.errors import SpecError, StartError

__all__ = ["FLAGS", "MODES", "SETTINGS", "SITE", "act_codec", "capture_all", "error_text"]

MODES: Final = ("rp8", "full8", "topk8")
SITE: Final = "resid_post"  # what capturing every request captures, of all layers at all positions
_PARAMETERS: Final[dict[str, dict[str, str]]] = {  # of each mode: our parameter and the variable that gives it
    "rp8": {"k": "VLLM_ACT_RP_K", "seed": "VLLM_ACT_RP_SEED"},
    "topk8": {"k": "VLLM_ACT_TOPK_K"},
    "full8": {},
}
_REFUSED: Final[dict[str, tuple[tuple[str, ...], str]]] = {  # what each may say, and why no more
    "VLLM_ACT_BITS": (("", "8"), "valid: 8; the legacy codecs store 8 bits (nf4b64 has 4, sketch 1 or 2)"),
    "VLLM_ACT_PER_DIM": (("", "0"), "valid: 0; a scale for each dimension cannot be known while rows stream past"),
    "VLLM_ACT_ATTNM": (("", "0"), "valid: unset; capture q_rot and k_rot as qk8, and compute attention when reading"),
    "VLLM_ACT_RETURN": (("", "sharded"), "valid: sharded; what several ranks wrote is gathered when it is read"),
}
SETTINGS: Final[dict[str, Setting]] = {
    "VLLM_ACT_CAPTURE": Setting(
        "0", "0 or 1", "1: capture `resid_post` of every request that brings no spec, in all armed layers, at all "
        "positions.", "--activation-capture"),
    "VLLM_ACT_MODE": Setting(
        "int8b64", "`rp8`, `full8` or `topk8`", "The codec of these captures. All of them lose data.", "--act-mode"),
    "VLLM_ACT_RP_K": Setting("512", "numbers", "Of `rp8`: numbers that a row becomes.", "--rp-k"),
    "VLLM_ACT_RP_SEED": Setting("0", "seed", "Of `rp8`: seed of the projection.", "--rp-seed"),
    "VLLM_ACT_TOPK_K": Setting("4 % of the width", "entries", "Of `topk8`: entries kept of a row.", "--topk-k"),
    "VLLM_ACT_BITS": Setting("8", "bits", "Bits of a stored number. No other value is accepted.", "--act-bits"),
    "VLLM_ACT_OUTDIR": Setting("./captures", "folder", "The store, of every command.", "--act-outdir"),
    "VLLM_ACT_PER_DIM": Setting(
        "0", "0", "1 is refused: a scale for each dimension cannot be known while rows stream past."),
    "VLLM_ACT_ATTNM": Setting(
        "", "unset", "Refused: capture `q_rot` and `k_rot` as `qk8`, and compute attention when you read."),
    "VLLM_ACT_RETURN": Setting(
        "", "`sharded`", "Anything else is refused: what several ranks wrote is put together when it is read."),
}
FLAGS: Final = {name: of.flag for name, of in SETTINGS.items() if of.flag and name != "VLLM_ACT_OUTDIR"}


def capture_all(environment: Mapping[str, str]) -> str | None:
    """The spec, as JSON, of requests that bring none of their own; None where VLLM_ACT_CAPTURE does not ask for it.

    StartError naming the variable, its value and what would be valid.
    """
    asked = environment.get("VLLM_ACT_CAPTURE", "")
    if asked not in ("", "0", "1"):
        raise StartError(f"{_named('VLLM_ACT_CAPTURE')}={asked!r}: valid: 0, 1")
    if asked != "1":
        return None
    return json.dumps({"sites": [SITE], "codec": act_codec(environment)})


def error_text(codec: Codec) -> str:
    """The bound of a codec; where its family shows a figure for the default k, the figure for this codec's k."""
    k = codec.parameters.get("k", 0)
    return re.sub(r"[0-9.]+ at k = [0-9]+", lambda _: f"{k**-0.5:.3f} at k = {k}", codec.family.error)


def act_codec(environment: Mapping[str, str]) -> str:
    """The identity of the codec that the variables ask for: the default one where VLLM_ACT_MODE names none."""
    for name, (valid, reason) in _REFUSED.items():
        if environment.get(name, "") not in valid:
            raise StartError(f"{_named(name)}={environment[name]!r}: {reason}")
    mode = environment.get("VLLM_ACT_MODE", "")
    if not mode:
        return DEFAULT_CODEC
    if mode not in MODES:
        raise StartError(f"{_named('VLLM_ACT_MODE')}={mode!r}: valid: {', '.join(MODES)}; every other codec is asked "
                         "for by a request's spec")
    given = {key: environment[name] for key, name in _PARAMETERS[mode].items() if environment.get(name)}
    for key, value in given.items():
        try:
            parse_codec(f"{mode}:{key}={value}")
        except SpecError as error:
            raise StartError(f"{_named(_PARAMETERS[mode][key])}={value!r}: {error.reason}") from None
    text = ",".join(f"{key}={value}" for key, value in given.items())
    return parse_codec(f"{mode}:{text}" if text else mode).identity


def _named(variable: str) -> str:
    return f"{variable} ({FLAGS[variable]})" if variable in FLAGS else variable
