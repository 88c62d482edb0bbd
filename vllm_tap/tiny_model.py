"""A small model made on the spot: real files, real tokenizer, random weights, in a few seconds and without a download.

The weights are drawn from a seed, so two machines make the same model. It writes word salad, but everything else
about it is what a big model has: attention over grouped heads, rotary positions, gated MLPs, a chat template.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = ["made_once", "tiny_model"]

RECIPE: Final = 2  # part of the cache key: raise it whenever the same arguments would give other files

FAMILIES: Final = ("qwen3", "llama")
DTYPES: Final = ("float32", "float16", "bfloat16")
HIDDEN: Final = 256
LAYERS: Final = 4
HEADS: Final = 4
KV_HEADS: Final = 2
HEAD_DIM: Final = 64
INTERMEDIATE: Final = 512
VOCABULARY: Final = 2048
POSITIONS_MAX: Final = 4096

_SPECIAL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHAT_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_model(family: str = "qwen3", seed: int = 0, dtype: str = "float32") -> Path:
    """The folder of a small ``family`` ("qwen3" or "llama") model, made now or taken from the user's cache.

    4 layers, hidden size 256, 4 query and 2 key-value heads, about 2,000 tokens, 4,096 positions; ``dtype`` is that
    of the weights: "float32", "float16" or "bfloat16". Raises ValueError on other names.
    """
    if family not in FAMILIES:
        raise ValueError(f"family = {family!r}: valid are {', '.join(FAMILIES)}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype = {dtype!r}: valid are {', '.join(DTYPES)}")
    if seed < 0:
        raise ValueError(f"seed = {seed}: must not be negative")
    root = cache_dir() / "tiny-models"
    folder = root / f"{family}-{dtype}-seed{seed}-v{RECIPE}"

    def make(building: Path) -> None:
        vocabulary = _write_tokenizer(building)
        _write_config(building, family, dtype, len(vocabulary))
        _write_weights(building / "model.safetensors", family, dtype, seed, vocabulary)

    return made_once(folder, make)


def made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """A folder that is there, or that ``make`` fills under another name first: it is whole or not at all."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=".building-", dir=folder.parent))
    try:
        make(building)
        building.chmod(0o755)  # a container reads it as another user, and safetensors' files are the owner's alone
        for file in building.iterdir():
            file.chmod(file.stat().st_mode | 0o444)
        try:
            building.rename(folder)
        except OSError:  # another process was faster: its files are the same
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return folder


def cache_dir() -> Path:
    """This project's folder below the user's cache (``XDG_CACHE_HOME``, default ``~/.cache``)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "vllm-tap"


# ── tokenizer ───────────────────────────────────────────────────────────────────────────────────────────────────


def _write_tokenizer(folder: Path) -> list[str]:
    """A byte-level BPE trained on made-up text: any text round-trips. Returns the vocabulary in id order."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(_SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sentences(), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": POSITIONS_MAX,
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "additional_special_tokens": list(_SPECIAL[1:]),
            "clean_up_tokenization_spaces": False,
            "chat_template": _CHAT_TEMPLATE,
        },
    )
    ids: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    return sorted(ids, key=ids.__getitem__)


_STEMS: Final = (
    "act add answer ask attend bank begin bend bind blend block boat bridge bring build call carry catch cause "
    "chain change charge chart check city clear climb cloud code cold collect colour compute count cover cross "
    "current dark day deep depth direct double draw dream drift drive earth edge effect engine enter even event "
    "fact fall far field figure fill final find fire first float flow fold follow forest form forward garden gate "
    "gather gentle glass gold grain grand great green ground group grow guess hand harbour head hear heart heat "
    "heavy hidden high hold home hour house human idea image island join journal keep kind king lake land "
    "language large layer lead leaf learn letter level light limit line listen little long look lower machine "
    "make map mark matter mean measure meet memory metal middle mind minute mirror model month moon morning "
    "mountain move music name narrow near need neuron night north note number ocean offer open order outer paint "
    "paper part pass path pattern people pick picture place plain plan plant play point power press print probe "
    "prompt proof pull pure question quick quiet rain range reach read reason record red repeat report rest "
    "result return river road rock room root round row run sand say scale school sea search season second see "
    "seed sentence serve shadow shape share sharp ship short show side sign silver simple sing site size slice "
    "slow small smooth snow soft song sound south space speak speed spring stage stand star start state stay "
    "steel step still stone stop store storm story stream street strong study sudden summer sun surface table "
    "take talk tall tap teach tell thin thing think thread time token tone tool touch tower trace track train "
    "travel tree true turn under unit vector view village voice wait walk wall warm watch water wave weather "
    "weight west wheel white wide wind window winter wire wonder wood word work world write year yellow young"
)
_SUFFIXES: Final = ("", "", "", "s", "er", "ing", "ed", "ly", "less", "ness", "able", "ful", "ward", "like")
_SMALL: Final = (
    "the a an of to in on at by for with from into over under and or but if then that this these those is was are were "
    "be been has have had will would can could may might must not no yes it its he she they we you I who what when "
    "where why how all any each both few more most some such only own same so than too very just about again"
)


def _sentences(count: int = 6000) -> Iterator[str]:
    """Text with the statistics a tokenizer needs: frequent small words, inflected stems, numbers, punctuation."""
    rng = np.random.Generator(np.random.PCG64(7))
    stems, small = _STEMS.split(), _SMALL.split()
    for _ in range(count):
        words = []
        for pick in rng.random(int(rng.integers(4, 16))):
            if pick < 0.45:
                words.append(small[rng.integers(len(small))])
            elif pick < 0.96:
                words.append(stems[rng.integers(len(stems))] + _SUFFIXES[rng.integers(len(_SUFFIXES))])
            else:
                words.append(str(rng.integers(2000)))
        text = " ".join(words) + ".?!,:"[rng.integers(5)]
        yield text[0].upper() + text[1:] + " \n"[rng.integers(2)]


# ── configuration and weights ───────────────────────────────────────────────────────────────────────────────────


def _write_config(folder: Path, family: str, dtype: str, vocabulary: int) -> None:
    eos = _SPECIAL.index("<|im_end|>")
    config: dict[str, Any] = {
        "architectures": [{"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}[family]],
        "model_type": family,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": INTERMEDIATE,
        "vocab_size": vocabulary,
        "max_position_embeddings": POSITIONS_MAX,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "initializer_range": 0.02,
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": 0,
        "torch_dtype": dtype,
    }
    config |= {"mlp_bias": False, "pretraining_tp": 1} if family == "llama" else {"use_sliding_window": False}
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"eos_token_id": eos, "pad_token_id": 0, "do_sample": False})


def _write_weights(path: Path, family: str, dtype: str, seed: int, vocabulary: list[str]) -> None:
    """Random weights whose scales keep the residual stream near 1 to 3 and let attention matter.

    Each projection maps unit variance to about unit variance. So attention and the MLP add about as much as is already
    there. The next token then depends on the whole context, and greedy decoding does not get stuck.
    """
    import torch
    from safetensors.torch import save_file

    rng = np.random.Generator(np.random.PCG64(seed))

    def matrix(rows: int, columns: int, gain: float = 1.0) -> npt.NDArray[np.float32]:
        return rng.standard_normal((rows, columns), np.float32) * np.float32(gain / columns**0.5)

    def norm(width: int, gain: float = 1.0) -> npt.NDArray[np.float32]:
        return (gain * (1 + 0.1 * rng.standard_normal(width, np.float32))).astype(np.float32)

    tensors = {"model.embed_tokens.weight": rng.standard_normal((len(vocabulary), HIDDEN), np.float32)}
    for layer in range(LAYERS):
        block = f"model.layers.{layer}."
        tensors[block + "input_layernorm.weight"] = norm(HIDDEN)
        tensors[block + "self_attn.q_proj.weight"] = matrix(HEADS * HEAD_DIM, HIDDEN, 1.5)
        tensors[block + "self_attn.k_proj.weight"] = matrix(KV_HEADS * HEAD_DIM, HIDDEN, 1.5)
        tensors[block + "self_attn.v_proj.weight"] = matrix(KV_HEADS * HEAD_DIM, HIDDEN)
        tensors[block + "self_attn.o_proj.weight"] = matrix(HIDDEN, HEADS * HEAD_DIM)
        if family == "qwen3":
            tensors[block + "self_attn.q_norm.weight"] = norm(HEAD_DIM, 1.5)
            tensors[block + "self_attn.k_norm.weight"] = norm(HEAD_DIM, 1.5)
        tensors[block + "post_attention_layernorm.weight"] = norm(HIDDEN)
        tensors[block + "mlp.gate_proj.weight"] = matrix(INTERMEDIATE, HIDDEN, 1.5)
        tensors[block + "mlp.up_proj.weight"] = matrix(INTERMEDIATE, HIDDEN, 1.5)
        tensors[block + "mlp.down_proj.weight"] = matrix(HIDDEN, INTERMEDIATE)
    tensors["model.norm.weight"] = norm(HIDDEN)
    head = matrix(len(vocabulary), HIDDEN, 3.0)
    # Special tokens and half characters stay all but unsayable, so that the output is text and runs to its length.
    head[[not _is_sayable(token) for token in vocabulary]] *= np.float32(0.05)
    tensors["lm_head.weight"] = head
    kind = getattr(torch, dtype)
    save_file({name: torch.from_numpy(value).to(kind) for name, value in tensors.items()}, path, {"format": "pt"})


def _is_sayable(token: str) -> bool:
    return token not in _SPECIAL and all(char == "Ġ" or char.isascii() for char in token)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
