"""``vllm-tap sizes``: the bytes that it tells are those that taps allocate and that rows have."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from engine_side.tap.staging import allocate
from schemas.errors import ArgumentError, StartError
from schemas.spec import parse_spec
from tests.support.processes import PATIENCE_S
from vllm_tap.cli.main import app
from vllm_tap.sites.description import load_config
from vllm_tap.sites.sizes import Sizes, size

ROOT = Path(__file__).parents[3]
QWEN = {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 28, "hidden_size": 1024, "head_dim": 128,
        "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 3072}


def sizes(folder: Path, config: dict[str, Any] = QWEN, arm: tuple[str, ...] = (), tokens: int = 8192, **spec: Any
          ) -> Sizes:
    (folder / "config.json").write_text(json.dumps(config))
    return size(load_config(str(folder)), parse_spec(spec), arm, step_tokens=tokens)


@pytest.mark.parametrize(("codec", "row"), [
    ("raw", 2 * 1024), ("raw16", 2 * 1024), ("int8b64", 1024 + 4 * 1024 // 64), ("nf4b64", 512 + 4 * 1024 // 64),
])
def test_bytes_of_a_token(codec: str, row: int, tmp_path: Path) -> None:
    found = sizes(tmp_path, codec=codec)
    assert found.token_bytes == 28 * row and found.day_bytes == 28 * row * 1000 * 86_400


def test_sites_layers_and_names(tmp_path: Path) -> None:
    names = ["blocks.14.hook_resid_post", "mlp_post", "q", "k", "embed"]
    found = sizes(tmp_path, sites=names, layers="::14", codec="raw")
    assert {each.site: (each.layers, each.width) for each in found.sites} == {
        "resid_post": ([14], 1024), "mlp_post": ([0, 14], 3072), "q": ([0, 14], 2048), "k": ([0, 14], 1024),
        "embed": ([0], 1024)}
    assert found.token_bytes == 2 * (1024 + 2 * (3072 + 2048 + 1024) + 1024)


def test_staging_is_what_taps_allocate(tmp_path: Path) -> None:
    armed = ("resid_post", "q", "k", "v", "mlp_post.3")
    found = sizes(tmp_path, arm=armed, tokens=16, sites=["resid_post"], layers=[1])
    assert found.armed == {"resid_post": 28, "q": 28, "k": 28, "v": 28, "mlp_post": 1} and len(found.sites) == 1
    widths = {"resid_post": 1024, "q": 2048, "k": 1024, "v": 1024, "mlp_post": 3072}
    layers = {site: list(range(count)) for site, count in found.armed.items()}
    staging, _ = allocate(widths, layers, 16, torch.bfloat16, torch.device("cpu"), found.staging_bytes)
    assert sum(buffer.nbytes for buffer in staging.buffers.values()) == found.staging_bytes
    with pytest.raises(StartError, match="staging needs"):
        allocate(widths, layers, 16, torch.bfloat16, torch.device("cpu"), found.staging_bytes - 1)


@pytest.mark.parametrize(("spec", "arm", "words"), [
    ({"sites": ["router_logits"]}, (), "has no such site"),
    ({"sites": ["resid_post"], "layers": [28]}, (), "0 to 27"),
    ({"sites": ["mlp_out"]}, ("resid_post",), "not armed"),
    ({"sites": ["resid_post"], "codec": "qk8"}, (), "qk8"),
])
def test_what_cannot_be_captured_is_refused(spec: dict[str, Any], arm: tuple[str, ...], words: str, tmp_path: Path
                                            ) -> None:
    with pytest.raises((ArgumentError, StartError), match=words):
        sizes(tmp_path, arm=arm, **spec)


@pytest.mark.parametrize("rate", ["inf", "nan", "-1"])
def test_a_rate_is_a_number(rate: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    done = CliRunner().invoke(app, ["sizes", str(tmp_path), "--rate", rate])
    assert done.exit_code != 0 and "--rate" in done.output + str(done.exception)


@pytest.mark.parametrize(("missing", "words"), [("num_hidden_layers", "how many layers"), ("hidden_size", "width")])
def test_what_the_configuration_does_not_say_is_not_guessed(missing: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=words):
        sizes(tmp_path, {key: value for key, value in QWEN.items() if key != missing})


def test_the_command_says_whether_an_engine_would_start(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**QWEN, "hidden_size": 8192, "num_hidden_layers": 80}))
    done = CliRunner().invoke(app, ["sizes", str(tmp_path), "--json"])
    found = json.loads(done.stdout)
    assert done.exit_code == 1 and found["refused"] and found["staging_bytes"] == 80 * 8192 * 8192 * 2
    assert "refused at start: staging and scratch take 10,240.0 MiB + 4,096.0 MiB" in done.stderr
    fewer = CliRunner().invoke(app, ["sizes", str(tmp_path), "--layers", "::4"])
    assert fewer.exit_code == 0 and "20 layers (0, 4, 8, 12" in fewer.stdout and not fewer.stderr


def test_it_loads_neither_torch_nor_vllm(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    code = (f"import sys; sys.argv = ['vllm-tap', 'sizes', {str(tmp_path)!r}]; from vllm_tap.cli.main import app\n"
            "try:\n    app()\nfinally:\n    assert not {'torch', 'vllm', 'transformers'} & set(sys.modules)\n")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0 and "30,464 bytes a token" in done.stdout, done.stderr
