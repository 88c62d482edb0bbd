"""What configurations of small models have in common: three blocks, 128 numbers wide."""

from __future__ import annotations

from typing import Any, Final

COMMON: Final[dict[str, Any]] = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.1, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
}
HEADS: Final[dict[str, Any]] = {"head_dim": 32}
TIED: Final[dict[str, Any]] = {"tie_word_embeddings": True}
