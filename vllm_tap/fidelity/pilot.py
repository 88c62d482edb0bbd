"""The pilot: a small model trained on this machine, on text that every machine has, in about a minute.

It has learnt enough for its numbers to mean something: perplexity, probes, which rows are close to which. It can copy
what stands 32 tokens before. It is the same wherever the same Python runs, but for the order of sums. Qwen3's comes in
two forms that compute the same function bit for bit. One is as trained. The other has *planted massive columns*, as
large models have them, which are harder to encode.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from schemas.errors import ArgumentError
from vllm_tap.fidelity.texts import RUN, Corpus, commonest, copying, standard_library
from vllm_tap.progress import ProgressReport, reporting
from vllm_tap.tiny_model import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KV_HEADS,
    LAYERS,
    VOCABULARY,
    cache_dir,
    made_once,
)

if TYPE_CHECKING:
    import torch

__all__ = ["FAMILIES", "PLANTED_BY", "STEPS", "pilot_model", "plant"]

RECIPE: Final = 3  # part of the cache key: raise it whenever the same arguments would give another model
STEPS: Final = 400
# Configurations, by vLLM's and Hugging Face's name: queries and keys with norms of their own; soft caps, windows in
# every other layer and a tied head; a mixture of experts.
FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "qwen3": {"intermediate_size": INTERMEDIATE, "tie_word_embeddings": False},
    "gemma2": {"intermediate_size": INTERMEDIATE, "tie_word_embeddings": True, "sliding_window": 48,
               "query_pre_attn_scalar": HEAD_DIM, "attn_implementation": "eager"},
    "mixtral": {"intermediate_size": INTERMEDIATE // 2, "tie_word_embeddings": False, "num_local_experts": 4,
                "num_experts_per_tok": 2, "sliding_window": None}}
_RATES: Final = {"mixtral": 1.5e-3}  # with more its experts do not learn to copy
PLANTED_BY: Final = 1024.0  # times; a power of two, so that no product is rounded otherwise
_PLANTED_NEURONS: Final = 6
_PLANTED_HEADS: Final = 16.0  # of a column of keys and one of values
_SEQUENCES: Final = 3  # of text, a step
_COPIES: Final = 2  # sequences that copy: with one alone, half of the seeds do not learn it in so many steps
_LENGTH: Final = 96
_RATE: Final = 6e-3
_POSITIONS: Final = 4096
_END: Final = "<|endoftext|>"


def pilot_model(planted: bool = False, steps: int = STEPS, progress: ProgressReport = False, family: str = "qwen3"
                ) -> Path:
    """The folder of the pilot, trained now or taken from the user's cache: 4 layers, hidden size 256, float32.

    ``planted``: Qwen3's with massive columns. ``family``: one of FAMILIES. ArgumentError where an argument is none of
    these, or Python has no sources here.
    """
    if steps < 1:
        raise ArgumentError("steps", steps, "at least 1")
    if family not in FAMILIES or (planted and family != "qwen3"):
        raise ArgumentError("family", family, f"valid: {'qwen3, with planted columns' if planted else list(FAMILIES)}")
    corpus = standard_library()
    folder = made_once(cache_dir() / "pilots" / f"{family}-{corpus.digest[:12]}-{steps}-v{RECIPE}",
                       lambda building: _train(building, corpus, steps, progress, family))
    if not planted:
        return folder
    return made_once(folder.with_name(folder.name + "-planted"), lambda building: _write_planted(folder, building))


def _train(folder: Path, corpus: Corpus, steps: int, progress: ProgressReport, family: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = _write_tokenizer(folder, corpus)
    tokens = _tokens(tokenizer, corpus, 2 * steps * _SEQUENCES * _LENGTH)
    common = commonest(corpus, tokenizer)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = AutoModelForCausalLM.from_config(AutoConfig.for_model(
            family, vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, max_position_embeddings=_POSITIONS, bos_token_id=0,
            eos_token_id=0, pad_token_id=None, **FAMILIES[family]))
    net.train()
    matrices = [each for each in net.parameters() if each.ndim == 2]
    others = [each for each in net.parameters() if each.ndim < 2]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
                                  lr=_RATES.get(family, _RATE), betas=(0.9, 0.95))
    # By steps, not by the clock: a busy machine trains the same model.
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / max(1, steps // 20)) * (1 - step / steps))
    rng = np.random.default_rng(0)
    with reporting(progress, "training the pilot") as tell:
        for step in range(steps):
            starts = rng.integers(0, len(tokens) - _LENGTH, _SEQUENCES)
            batch = torch.from_numpy(np.concatenate([[tokens[at:at + _LENGTH] for at in starts],
                                                     copying(common, _COPIES, _LENGTH, rng)]))
            labels = batch.clone()
            labels[-_COPIES:, :RUN + 2] = -100  # what nobody can know: -100 is left out of the loss
            loss = net(input_ids=batch, labels=labels).loss
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            tell(step + 1, steps)
    net.eval().save_pretrained(folder)


def _write_tokenizer(folder: Path, corpus: Corpus) -> Any:
    """A byte-level BPE of the corpus: any text comes back as it was."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(corpus.fitted[::4], trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[_END], initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False))
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_END, pad_token=_END, bos_token=_END,
                                   model_max_length=_POSITIONS, clean_up_tokenization_spaces=False)
    made.save_pretrained(folder)
    return made


def _tokens(tokenizer: Any, corpus: Corpus, most: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Tokens, at least ``most``, of the documents that are not held out, in an order of chance, each led by 0."""
    found: list[int] = []
    for number in np.random.default_rng(1).permutation(len(corpus.fitted)).tolist():
        found += [0, *tokenizer(corpus.fitted[number], add_special_tokens=False, verbose=False)["input_ids"]]
        if len(found) >= most:
            break
    return np.array(found, np.int64)


def _write_planted(source: Path, folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    for path in source.iterdir():
        if path.name != "model.safetensors":
            shutil.copyfile(path, folder / path.name)
    weights = load_file(source / "model.safetensors")
    plant(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def plant(weights: dict[str, torch.Tensor]) -> None:
    """Make columns massive, in place, by powers of two: each product stays the number that it was.

    In each layer six neurons become 1,024 times as large. A column of each head's values and a rotated pair of its keys
    become 16 times as large. The weights that read them become as much smaller.

    ``weights``: a Qwen3 model's by Hugging Face's names, float32.
    """
    rng = np.random.default_rng(3)
    queries = HEADS // KV_HEADS
    for layer in range(LAYERS):
        block = f"model.layers.{layer}."
        neurons = rng.choice(INTERMEDIATE, _PLANTED_NEURONS, replace=False).tolist()
        weights[block + "mlp.up_proj.weight"][neurons] *= PLANTED_BY
        weights[block + "mlp.down_proj.weight"][:, neurons] /= PLANTED_BY
        pair = [3, 3 + HEAD_DIM // 2]
        weights[block + "self_attn.k_norm.weight"][pair] *= _PLANTED_HEADS
        weights[block + "self_attn.q_norm.weight"][pair] /= _PLANTED_HEADS
        values = [head * HEAD_DIM + 5 for head in range(KV_HEADS)]
        weights[block + "self_attn.v_proj.weight"][values] *= _PLANTED_HEADS
        read = [(head * queries + query) * HEAD_DIM + 5 for head in range(KV_HEADS) for query in range(queries)]
        weights[block + "self_attn.o_proj.weight"][:, read] /= _PLANTED_HEADS
