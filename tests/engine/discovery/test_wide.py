"""Models as wide and as freshly made as a benchmark's, in bfloat16: rows there have nearly one length before a norm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.engine.discovery.test_prove import EVERY, prove
from tests.support.models.families import FAMILIES
from tests.support.models.imaged import IMAGED, NO_VISION
from tests.support.models.unlisted import UNLISTED

TIMES: Final = 8  # 1,024 numbers and 32 heads
LAYERS: Final = 10
WIDER: Final = {
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "moe_intermediate_size", "n_embd",
    "n_head", "n_inner", "ffn_dim", "word_embed_proj_dim", "ffn_hidden_size", "shared_expert_intermediate_size",
    "mamba_d_ssm", "mamba_n_heads", "n_heads", "d_model", "q_lora_rank", "kv_lora_rank", "shared_intermediate_size",
    "mamba_num_heads", "embed_dim"}
LACKS: Final = {"gpt_neox": {"resid_mid"}}
NARROW: Final = {"hy_v3", "lfm2", "mamba2", "mimo_v2_flash"}  # their configurations say a width several times


def wide_model(family: str, folder: Path) -> Path:
    """A family's model of that width, its weights as its class begins with, its norms' ones."""
    unlisted = UNLISTED.get(family)
    says: dict[str, Any] = {name: value * TIMES if name in WIDER and isinstance(value, int) else value
                            for name, value in (unlisted.says if unlisted else FAMILIES[family]).items()}
    says |= {name: 0.02 for name in ("initializer_range", "init_std") if name in says}
    if "num_hidden_layers" in says and not any(isinstance(value, list) for value in says.values()):
        says["num_hidden_layers"] = LAYERS
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **says), dtype=torch.bfloat16).save_pretrained(folder)
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **(unlisted.written if unlisted else {})}))
    return folder


@pytest.mark.soak
@pytest.mark.parametrize("family", [
    *FAMILIES, *(name for name, one in UNLISTED.items()
                 if name not in {*NARROW, *IMAGED} and not (one.vision and NO_VISION))])
def test_a_wide_model_is_proved(family: str, tmp_path: Path) -> None:
    done = prove(wide_model(family, tmp_path), "--json", "--", "--dtype", "bfloat16", "--max-model-len", "256",
                 "--gpu-memory-utilization", "0.25")
    assert done.returncode == 0, done
    found = json.loads(done.stdout)["proof"]
    known = UNLISTED[family].sites if family in UNLISTED else set(EVERY) - LACKS.get(family, set())
    assert found["failed"] == "" and set(found["sites"]) >= {*EVERY} & {*known}
