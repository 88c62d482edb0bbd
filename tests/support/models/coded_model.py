"""A model whose every row says whose it is: a plain OPT checkpoint with weights chosen so that all numbers are codes.

A hidden row is ``[c, -c]``: its mean is 0 and its length depends on the layer alone, so a layer norm with the right
weight gives c back. c holds, in bits of ±1:

=========  =======  =================================================================================================
token      11 bits  the token's id; the upper 5 bits say which request's word it is (0: shared), the lower 6 which word
position   9 bits   as the model got it
before     9 bits   the position before (0 has itself), which attention looks for
previous   11 bits  the token there: each block's attention adds it once, out of the KV cache
own        20 bits  token and position again: attention adds them once, out of the KV cache, the MLP twice
layer      4        block k's attention adds 1 to number k, its MLP 2
=========  =======  =================================================================================================

So a row of ``resid_post`` or ``attn_out`` proves its token, its position, the token before, and its layer; a row of
``mlp_out`` or ``mlp_post`` (bits as 0 and 1) all but the token before; ``embed`` its token. ``read`` turns rows back,
and refuses a row that is no code. The next word follows from the last two (``next_token``) and stays with the request;
greedy decoding runs into a circle of twelve words, in which some words have two successors. Sampled at temperature 1,
each bit of the next word is wrong one time in four.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vllm_tap.tiny_model import cache_dir

I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]

LAYERS = 4
WORDS = 64  # words of a request
REQUESTS = 32  # vocabularies; the words of 0 are shared
VOCABULARY = WORDS * REQUESTS
POSITIONS = 512
EOS = WORDS + 21  # a word of request 1: the others never end by themselves

_TOKEN_BITS, _POSITION_BITS, _WORD_BITS, _HEAD = 11, 9, 6, 64
_TOKEN, _POSITION, _BEFORE, _PREVIOUS = slice(0, 11), slice(11, 20), slice(20, 29), slice(29, 40)
_OWN, _LAYER, _CODE = slice(40, 60), slice(60, 64), 64
_MLP = 32  # 20 bits, 4 layers, 8 unused
# Bit i of the next word: (read from the previous word instead of this one, which bit, flipped).
_NEXT = ((False, 1, True), (True, 5, False), (True, 5, True), (True, 5, False), (True, 4, True), (False, 2, False))
_RECIPE = 1  # part of the cache key: raise it whenever other files would be made

WIDTHS = {"embed": 2 * _CODE, "resid_post": 2 * _CODE, "attn_out": 2 * _CODE, "mlp_out": 2 * _CODE, "mlp_post": _MLP}


@dataclass(frozen=True)
class Told:
    """What rows say of themselves: int64 ``[rows]``, None where a site does not tell."""

    token: I64
    position: I64 | None
    previous: I64 | None
    layer: I64 | None


def words(request: int) -> range:
    """The tokens of a request."""
    return range(request * WORDS, (request + 1) * WORDS)


def text(token: int) -> str:
    """How the tokenizer spells a token."""
    return f"r{token // WORDS}w{token % WORDS}"


def next_token(previous: int, token: int) -> int:
    """The token that greedy decoding says after these two; at position 0 a token is its own previous one."""
    bits = [((previous if back else token) >> bit & 1) ^ flip for back, bit, flip in _NEXT]
    return token // WORDS * WORDS + sum(bit << number for number, bit in enumerate(bits))


def greedy(tokens: tuple[int, ...]) -> Iterator[int]:
    """What is generated after these tokens, without end."""
    token, previous = tokens[-1], tokens[-2] if len(tokens) > 1 else tokens[-1]
    while True:
        previous, token = token, next_token(previous, token)
        yield token


# ── rows ────────────────────────────────────────────────────────────────────────────────────────────────────────


def write(site: str, layer: int, token: I64, position: I64, previous: I64) -> F32:
    """The rows that the model makes of these tokens: float32 ``[rows, WIDTHS[site]]``."""
    code = np.zeros((len(token), _CODE), np.float32)
    tokens, positions = _bits(token, _TOKEN_BITS), _bits(position, _POSITION_BITS)
    own, now = np.hstack([tokens, positions]), np.eye(LAYERS, dtype=np.float32)[layer]
    if site == "mlp_post":
        rows = np.zeros((len(token), _MLP), np.float32)
        rows[:, : own.shape[1]], rows[:, own.shape[1] : own.shape[1] + LAYERS] = own > 0, now
        return rows
    if site in ("embed", "resid_post"):
        code[:, _TOKEN] = tokens
    if site == "resid_post":
        code[:, _POSITION], code[:, _BEFORE] = positions, _bits(np.maximum(position - 1, 0), _POSITION_BITS)
        code[:, _PREVIOUS], code[:, _OWN] = (layer + 1) * _bits(previous, _TOKEN_BITS), 3 * (layer + 1) * own
        code[:, _LAYER] = 3 * (np.arange(LAYERS) <= layer)
    elif site == "attn_out":
        code[:, _PREVIOUS], code[:, _OWN], code[:, _LAYER] = _bits(previous, _TOKEN_BITS), own, now
    elif site == "mlp_out":
        code[:, _OWN], code[:, _LAYER] = 2 * own, 2 * now
    return np.hstack([code, -code])


def read(site: str, rows: F32, tolerance: float = 0.25) -> Told:
    """What rows say; AssertionError where a number is further than ``tolerance`` from the code that the row says."""
    if site == "mlp_post":
        own, layers = rows[:, :20] - 0.5, rows[:, 20 : 20 + LAYERS]
        token, previous = _number(own[:, _TOKEN]), None
    else:
        code = rows[:, :_CODE]
        own, layers = code[:, _OWN], code[:, _LAYER]
        token = _number(code[:, _TOKEN] if site == "embed" else own[:, _TOKEN])
        previous = _number(code[:, _PREVIOUS]) if site in ("resid_post", "attn_out") else None
    position = None if site == "embed" else _number(own[:, _POSITION])
    layer = None if site == "embed" else LAYERS - 1 - layers[:, ::-1].argmax(axis=1)
    zeros = np.zeros(len(rows), np.int64)
    for one in [0] if layer is None else np.unique(layer):
        these = slice(None) if layer is None else layer == one
        again = write(site, int(one), token[these], (zeros if position is None else position)[these],
                      (zeros if previous is None else previous)[these])
        off = np.abs(rows[these] - again).max(initial=0)
        assert off <= tolerance, f"{site}: a row is no code, a number is off by {off:.3g}"
    return Told(token, position, previous, layer)


def _bits(numbers: I64, count: int) -> F32:
    return ((numbers[:, None] >> np.arange(count) & 1) * 2 - 1).astype(np.float32)


def _number(bits: F32) -> I64:
    return ((bits > 0).astype(np.int64) << np.arange(bits.shape[1])).sum(axis=1)


# ── the checkpoint ──────────────────────────────────────────────────────────────────────────────────────────────


@cache
def coded_model(dtype: str = "float32") -> Path:
    """The folder of the model, made now or taken from the user's cache."""
    from transformers import OPTConfig, OPTForCausalLM

    folder = cache_dir() / "tiny-models" / f"coded-{dtype}-v{_RECIPE}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    config = OPTConfig(
        vocab_size=VOCABULARY, hidden_size=2 * _CODE, word_embed_proj_dim=2 * _CODE, ffn_dim=_MLP,
        num_hidden_layers=LAYERS, num_attention_heads=2 * _CODE // _HEAD, max_position_embeddings=POSITIONS,
        activation_function="relu", bos_token_id=0, eos_token_id=EOS, pad_token_id=0, tie_word_embeddings=False)
    model = OPTForCausalLM(config)
    weights = model.state_dict()
    for name, value in _weights().items():
        weights.pop(name).copy_(value)
    assert not weights, f"no weights for {', '.join(weights)}"
    building = Path(tempfile.mkdtemp(prefix=".building-", dir=folder.parent))
    model.to(getattr(torch, dtype)).save_pretrained(building)
    _write_tokenizer(building)
    building.chmod(0o755)
    building.rename(folder)
    return folder


def _weights() -> dict[str, torch.Tensor]:
    tokens, positions = np.arange(VOCABULARY), np.arange(POSITIONS)
    embedded, placed = np.zeros((VOCABULARY, _CODE)), np.zeros((POSITIONS + 2, _CODE))  # OPT leaves 2 positions out
    embedded[:, _TOKEN] = _bits(tokens, _TOKEN_BITS)
    placed[2:, _POSITION] = _bits(positions, _POSITION_BITS)
    placed[2:, _BEFORE] = _bits(np.maximum(positions - 1, 0), _POSITION_BITS)
    weights: dict[str, Any] = {
        "model.decoder.embed_tokens.weight": np.hstack([embedded, -embedded]),
        "model.decoder.embed_positions.weight": np.hstack([placed, -placed]),
        "lm_head.weight": _head(),
        **_norm("model.decoder.final_layer_norm", LAYERS, LAYERS, LAYERS),
    }
    for layer in range(LAYERS):
        block = f"model.decoder.layers.{layer}."
        now = np.zeros(_CODE)
        now[_LAYER][layer] = 1
        weights |= _norm(block + "self_attn_layer_norm", layer, layer, layer)
        weights |= _norm(block + "final_layer_norm", layer + 1, layer + 1 / 3, layer, now=1)
        weights |= _attention(block + "self_attn.", now)
        first, second, bias = np.zeros((_MLP, 2 * _CODE)), np.zeros((_CODE, _MLP)), np.zeros(_MLP)
        first[:20, :20] = np.eye(20)  # token and position
        bias[20 + layer] = 1
        second[_OWN, :20] = 4 * np.eye(20)
        weights |= {block + "fc1.weight": first, block + "fc1.bias": bias,
                    block + "fc2.weight": np.vstack([second, -second])}
        given = 2 * now
        given[_OWN] = -2
        weights[block + "fc2.bias"] = np.hstack([given, -given])
    return {name: torch.tensor(value, dtype=torch.float32) for name, value in weights.items()}


def _norm(name: str, previous: float, own: float, layers: int, now: int = 0) -> dict[str, Any]:
    """The layer norm that gives c back, where the row holds so many times each of its parts."""
    squares = 11 + 9 + 9 + 11 * previous**2 + 20 * (3 * own) ** 2 + 9 * layers + now
    return {f"{name}.weight": np.full(2 * _CODE, (squares / _CODE + 1e-5) ** 0.5), f"{name}.bias": np.zeros(2 * _CODE)}


def _attention(name: str, now: npt.NDArray[np.float64]) -> dict[str, Any]:
    """Head 0 looks at the position before and takes its token; head 1 looks at itself, takes token and position."""
    size = 2 * _CODE
    q, k, v, out = (np.zeros((size, size)) for _ in range(4))
    sharp = 512.0  # of two positions the wrong one has at most exp(-128) of the right one's weight: none
    q[:9, _BEFORE], q[_HEAD : _HEAD + 9, _POSITION] = sharp * np.eye(9), sharp * np.eye(9)
    k[:9, _POSITION], k[_HEAD : _HEAD + 9, _POSITION] = np.eye(9), np.eye(9)
    v[:11, _TOKEN], v[_HEAD : _HEAD + 20, :20] = np.eye(11), np.eye(20)
    out[_PREVIOUS, :11], out[_OWN, _HEAD : _HEAD + 20] = np.eye(11), np.eye(20)
    out[_CODE:] = -out[:_CODE]
    weights = {"q": q, "k": k, "v": v, "out": out}
    biases = {"out": np.hstack([now, -now])}
    return {f"{name}{part}_proj.weight": value for part, value in weights.items()} | {
        f"{name}{part}_proj.bias": biases.get(part, np.zeros(size)) for part in weights}


def _head() -> npt.NDArray[np.float64]:
    """Logits: 12 a bit of the request that agrees, 1/2 a bit of the next word."""
    head, bits = np.zeros((VOCABULARY, 2 * _CODE)), _bits(np.arange(VOCABULARY), _TOKEN_BITS)
    head[:, _TOKEN][:, _WORD_BITS:] = 12 * bits[:, _WORD_BITS:]
    for number, (back, bit, flip) in enumerate(_NEXT):
        source = head[:, _PREVIOUS] if back else head[:, _TOKEN]
        source[:, bit] += (-0.5 if flip else 0.5) / (LAYERS if back else 1) * bits[:, number]
    return head


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({text(token): token for token in range(VOCABULARY)}, unk_token=text(0)))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(
        {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": POSITIONS, "eos_token": text(EOS)}))
