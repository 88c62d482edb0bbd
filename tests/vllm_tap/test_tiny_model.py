"""The tiny model: the same files from the same seed, a tokenizer that loses nothing, weights that a reader takes."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from tests.support.processes import PATIENCE_S
from vllm_tap.tiny_model import HIDDEN, LAYERS, tiny_model

ROOT = Path(__file__).parents[2]


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def make_elsewhere(cache: Path, *arguments: object) -> Path:
    """The model made by a fresh process with a cache of its own."""
    text = f"from vllm_tap.tiny_model import tiny_model; print(tiny_model(*{arguments!r}))"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True,
                          env={**os.environ, "XDG_CACHE_HOME": str(cache)})
    return Path(done.stdout.strip())


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_the_same_seed_makes_the_same_files(family: str, tmp_path: Path) -> None:
    made = make_elsewhere(tmp_path, family)
    assert made.is_relative_to(tmp_path)
    assert digests(made) == digests(tiny_model(family))
    assert not list(made.parent.glob(".building-*"))
    assert all(file.stat().st_mode & 0o444 == 0o444 for file in made.iterdir())  # a container reads it as another user


def test_another_seed_makes_another_model() -> None:
    one, two = tiny_model(seed=0), tiny_model(seed=1)
    assert digests(one)["model.safetensors"] != digests(two)["model.safetensors"]
    assert digests(one)["tokenizer.json"] == digests(two)["tokenizer.json"]


def test_two_processes_may_make_it_at_once(tmp_path: Path) -> None:
    text = "from vllm_tap.tiny_model import tiny_model; print(tiny_model('llama', 3))"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    both = [subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, env=environment) for _ in range(2)]
    paths = {process.communicate(timeout=PATIENCE_S)[0] for process in both}
    assert [process.returncode for process in both] == [0, 0] and len(paths) == 1
    folder = Path(paths.pop().decode().strip()).parent
    assert [path.name for path in folder.iterdir()] == ["llama-float32-seed3-v2"]


@pytest.mark.parametrize("text", ["Why is the sky blue?", "héllo wörld 你好 🙂\n\t x=1", "", " leading", "\x00\x7f"])
def test_any_text_round_trips(text: str) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_model() / "tokenizer.json"))
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert max(ids, default=0) < json.loads((tiny_model() / "config.json").read_text())["vocab_size"]


@pytest.mark.parametrize("family, dtype, stored", [
    ("qwen3", "float32", np.float32), ("llama", "float32", np.float32), ("qwen3", "float16", np.float16),
])
def test_the_weights_are_what_the_configuration_says(family: str, dtype: str, stored: type) -> None:
    folder = tiny_model(family, dtype=dtype)
    config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    assert all(value.dtype == stored and np.isfinite(value).all() for value in weights.values())
    assert weights["lm_head.weight"].shape == (config["vocab_size"], config["hidden_size"])
    assert len([name for name in weights if name.endswith("input_layernorm.weight")]) == LAYERS
    assert ("model.layers.0.self_attn.q_norm.weight" in weights) == (family == "qwen3")


def test_bfloat16_is_the_float32_model_rounded() -> None:
    exact = load_file(tiny_model() / "model.safetensors")["model.norm.weight"]
    file = (tiny_model(dtype="bfloat16") / "model.safetensors").read_bytes()
    header_len = int.from_bytes(file[:8], "little")
    entry = json.loads(file[8:8 + header_len])["model.norm.weight"]
    start, stop = (8 + header_len + offset for offset in entry["data_offsets"])
    rounded = (np.frombuffer(file[start:stop], "<u2").astype(np.uint32) << 16).view(np.float32)
    assert entry["dtype"] == "BF16" and rounded.shape == (HIDDEN,)
    assert 0 < np.abs(rounded / exact - 1).max() <= 2**-8


def test_it_writes_text_and_does_not_get_stuck() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    for family in ("qwen3", "llama"):
        model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model(family), dtype=torch.float32)
        tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model(family))
        text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False,
                                             add_generation_prompt=True)
        assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        ids = tokenizer(text, return_tensors="pt").input_ids
        out = model.generate(ids, max_new_tokens=48, do_sample=False)[0, ids.shape[1]:].tolist()
        assert len(out) == 48 and len(set(out)) > 24
        with torch.inference_mode():
            states = model(ids, output_hidden_states=True).hidden_states
        assert all(0.5 < float(state.std()) < 10 for state in states)


@pytest.mark.parametrize("arguments, names", [
    (("gpt5",), ["family", "gpt5", "qwen3"]),
    (("qwen3", -1), ["seed", "-1"]),
    (("qwen3", 0, "int4"), ["dtype", "int4"]),
])
def test_bad_arguments_are_named(arguments: tuple[object, ...], names: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        tiny_model(*arguments)  # type: ignore[arg-type]
    assert all(name in str(caught.value) for name in names)


def test_importing_it_loads_no_torch() -> None:
    text = "import sys, vllm_tap.tiny_model; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", text], check=True)
