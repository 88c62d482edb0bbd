"""A request that runs with a LoRA adapter: its rows are those of the changed model, and its manifest names it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from schemas.ids import new_ulid
from schemas.reader import StoreReader
from tests.engine.engines import ALL_ROWS, Engine, model, prompt, start
from tests.engine.reference import Reference

pytestmark = [pytest.mark.timeout(300), pytest.mark.soak]

RANK, ALPHA = 8, 16


def adapt(reference: Reference, folder: Path) -> Path:
    """A random adapter of the queries and the MLPs' results, written as PEFT does; ``reference`` gets it as well."""
    torch.manual_seed(3)
    tensors = {}
    for name, module in reference.model.named_modules():
        if name.endswith(("q_proj", "down_proj")):
            a, b = torch.randn(RANK, module.in_features) / 16, torch.randn(module.out_features, RANK) / 8
            tensors |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
            module.weight.data += ALPHA / RANK * b @ a
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "bias": "none",
        "target_modules": ["q_proj", "down_proj"]}))
    return folder


@pytest.fixture(scope="module")
def engine(reader: StoreReader) -> Iterator[Engine]:
    engine = start(reader, Reference(model("llama")), "llama", enable_lora=True, max_lora_rank=RANK)
    yield engine
    engine.close()


def test_rows_and_manifest_of_an_adapted_request(engine: Engine, tmp_path: Path) -> None:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    (plain,) = engine.run([prompt(20, seed=1)], [{"max_tokens": 4, "ignore_eos": True}], [{"codec": "raw"}])
    assert plain.manifest.adapter == "" and engine.check(plain) == ALL_ROWS * 23

    engine.reference = Reference(model("llama"))
    adapter = LoRARequest("songs-of-the-sea", 1, str(adapt(engine.reference, tmp_path)))
    ulid = new_ulid()
    (output,) = engine.llm.generate(
        [{"prompt_token_ids": prompt(20, seed=1)}], use_tqdm=False, lora_request=adapter,
        sampling_params=SamplingParams(temperature=0, max_tokens=4, ignore_eos=True,
                                       extra_args={"capture": {"codec": "raw", "id": ulid}}))
    adapted = engine.captured(ulid, output)
    assert adapted.manifest.adapter == "songs-of-the-sea" and engine.check(adapted) == ALL_ROWS * 23
