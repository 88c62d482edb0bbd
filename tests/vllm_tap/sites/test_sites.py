"""``vllm-tap sites``: what a config.json alone says of the sites of a model, told without torch or vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from schemas.errors import ArgumentError, StartError
from tests.support.processes import PATIENCE_S
from vllm_tap.sites.description import SiteEntry, SiteList, describe, load_config

ROOT = Path(__file__).parents[3]
COMMON = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
          "intermediate_size": 96}
# By what a case shows: what its config.json says beside the above.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"]},
    "gemma2": {"architectures": ["Gemma2ForCausalLM"], "head_dim": 32},
    "mixtral": {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {"architectures": ["Qwen3MoeForCausalLM"], "head_dim": 32, "num_experts": 8,
                  "num_experts_per_tok": 2, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    "opt": {"architectures": ["OPTForCausalLM"], "do_layer_norm_before": False, "ffn_dim": 80,
            "word_embed_proj_dim": 32},
    "gpt2": {"architectures": ["GPT2LMHeadModel"]},
    "deepseek_v3": {"architectures": ["DeepseekV3ForCausalLM"], "head_dim": 16, "qk_rope_head_dim": 16,
                    "kv_lora_rank": 128, "v_head_dim": 16},
    "mimo_v2": {"architectures": ["MiMoV2FlashForCausalLM"], "head_dim": 32, "v_head_dim": 16},
}
STREAM = {"resid_pre", "resid_post"}
NEW = {"resid_mid", *STREAM, "attn_out", "mlp_out", "embed", "final_norm"}
HEADS = {"q", "k", "v", "q_rot", "k_rot", "z"}


def listed(folder: Path, kind: str) -> tuple[SiteList, dict[str, SiteEntry]]:
    (folder / "config.json").write_text(json.dumps({**COMMON, **CONFIGS[kind]}))
    found = describe(str(folder), load_config(str(folder)))
    return found, {entry.site: entry for entry in found.sites}


@pytest.mark.parametrize(("kind", "sites"), [
    ("llama", {*NEW, *HEADS, "mlp_post"}),
    ("gemma2", {*NEW, *HEADS, "mlp_post", "attn_out_raw", "mlp_out_raw"}),
    ("mixtral", {*NEW, *HEADS, "router_logits", "experts"}),
    ("qwen3_moe", {*NEW, *HEADS, "router_logits", "experts", "mlp_post"}),
    ("opt", {*NEW, *HEADS, "mlp_post"} - {"resid_mid", "final_norm", "q_rot", "k_rot"}),
])
def test_sites_of_the_table(kind: str, sites: set[str], tmp_path: Path) -> None:
    found, by_site = listed(tmp_path, kind)
    assert found.known and found.n_layers == 4 and set(by_site) == sites
    assert not set(found.refused) & sites
    for site, entry in by_site.items():
        assert entry.source == "table" and entry.meaning and entry.width
        if site not in ("router_logits", "experts", "mlp_post"):
            assert entry.layers == ([0] if site in ("embed", "final_norm") else [0, 1, 2, 3])


def test_widths_layers_and_names(tmp_path: Path) -> None:
    _, llama = listed(tmp_path, "llama")
    assert [llama[site].width for site in ("resid_post", "q", "k", "z", "mlp_post")] == [64, 64, 32, 64, 96]
    assert llama["resid_post"].transformer_lens == ("blocks.{l}.hook_resid_post", "blocks.{l}.hook_out")
    assert llama["attn_out"].transformer_lens == ("blocks.{l}.hook_attn_out", "blocks.{l}.attn.hook_out")
    _, gemma = listed(tmp_path, "gemma2")
    assert (gemma["q"].width, gemma["k"].width) == (128, 64)
    assert gemma["attn_out_raw"].transformer_lens == ("blocks.{l}.attn.hook_out",)
    assert gemma["attn_out"].transformer_lens == ("blocks.{l}.hook_attn_out",)
    assert "after its norm" in gemma["mlp_out"].meaning
    _, mixtral = listed(tmp_path, "mixtral")
    assert (mixtral["router_logits"].width, mixtral["experts"].width) == (8, 2)
    _, sparse = listed(tmp_path, "qwen3_moe")
    assert sparse["experts"].layers == [1] and sparse["mlp_post"].layers == [0, 2, 3]
    _, opt = listed(tmp_path, "opt")  # its heads share the hidden size, and it has keys as many as queries
    assert [opt[site].width for site in ("k", "mlp_post", "embed", "resid_pre")] == [64, 80, 32, 64]
    _, qwen3 = listed(tmp_path, "qwen3")  # a size of its own for heads, which is not said
    assert qwen3["q"].width is None and qwen3["resid_pre"].width == 64
    for kind in ("deepseek_v3", "mimo_v2"):  # keys are compressed, or heads of values are of another size
        _, other = listed(tmp_path, kind)
        assert {other[site].width for site in HEADS} == {None} and other["resid_pre"].width == 64


def test_what_is_refused_has_its_reason(tmp_path: Path) -> None:
    assert listed(tmp_path, "opt")[0].refused["resid_mid"].startswith("do_layer_norm_before = false: norms follow")
    assert listed(tmp_path, "mixtral")[0].refused["mlp_post"] == "no layer of this model has it"
    assert listed(tmp_path, "llama")[0].refused["experts"] == "this architecture has no such site"


def test_an_architecture_in_no_table_is_told_apart(tmp_path: Path) -> None:
    found, by_site = listed(tmp_path, "gpt2")
    assert not found.known and set(by_site) >= NEW and not set(by_site) & set(found.refused)
    assert by_site["resid_post"].source == "structure" and by_site["resid_post"].layers is None
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"], "n_embd": 48, "n_layer": 2}')
    found = describe("it", load_config(str(tmp_path)))
    assert found.n_layers == 2 and {entry.width for entry in found.sites if entry.site in STREAM} == {48}


@pytest.mark.parametrize(("text", "says"), [
    ("{", "config.json: is not JSON"),
    ("[]", "architectures = null: must name"),
    ('{"architectures": []}', r"architectures = \[\]: must name"),
    ('{"architectures": "x"}', 'architectures = "x": must name'),
    ('{"architectures": ["LlamaForCausalLM"], "text_config": 3}', "text_config must be an object"),
    (None, "has no config.json"),
])
def test_a_config_that_is_none_is_named(text: str | None, says: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ArgumentError, match=f"MODEL = .*{says}"):
        load_config(str(tmp_path))


@pytest.mark.parametrize("said", [{"layers_block_type": ["mamba", "mlp", "attention"]},
                                  {"hybrid_override_pattern": "M-*"}])
def test_a_hybrid_may_say_the_kind_of_each_layer_alone(said: dict[str, Any], tmp_path: Path) -> None:
    whole = {"architectures": ["NemotronHForCausalLM"], "hidden_size": 64} | said
    (tmp_path / "config.json").write_text(json.dumps(whole))
    assert describe("it", load_config(str(tmp_path))).n_layers == 3


@pytest.mark.parametrize("name", ["Gemma3ForConditionalGeneration", "Phi3VForCausalLM"])
def test_a_model_of_more_than_text_is_known_as_one(name: str, tmp_path: Path) -> None:
    """By its name, and where that does not tell by the table of the vLLM that is installed."""
    pytest.importorskip("vllm")
    described = tmp_path / "config.json"
    described.write_text(json.dumps({"architectures": [name], "text_config": {"num_hidden_layers": 3}}))
    found = describe("it", load_config(str(tmp_path)))
    assert found.n_layers == 3 and "resid_post" in {entry.site for entry in found.sites}
    assert "embed" not in {entry.site for entry in found.sites} and "resid_pre.0" in found.refused["embed"]
    described.write_text(json.dumps({"architectures": [name], "is_encoder_decoder": True}))
    with pytest.raises(StartError, match=f"architectures = {name}: its decoder reads an encoder's output"):
        describe("it", load_config(str(tmp_path)))


def tap(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, which fails where it imports what takes seconds."""
    script = ("import sys\nfrom vllm_tap.cli.main import main\ntry:\n    main()\nfinally:\n"
              "    assert not {'torch', 'vllm', 'transformers'} & set(sys.modules)\n")
    return subprocess.run([sys.executable, "-c", script, "sites", *map(str, arguments)], capture_output=True, text=True,
                          timeout=PATIENCE_S, check=False, env={**os.environ, **environment})


def test_the_command_prints_a_table_of_a_hundred_columns(tmp_path: Path) -> None:
    for kind in CONFIGS:
        found, by_site = listed(tmp_path, kind)
        done = tap(tmp_path)
        assert done.returncode == 0 and done.stderr == "", done
        assert max(map(len, done.stdout.splitlines())) <= 100
        assert set(by_site) <= {line.split(" ")[0] for line in done.stdout.splitlines()}
        assert ("in no table" in done.stdout and "--prove" in done.stdout) is not found.known
        assert all(site in done.stdout for site in found.refused)


def test_the_command_prints_json(tmp_path: Path) -> None:
    listed(tmp_path, "mixtral")
    found = json.loads(tap(tmp_path, "--json").stdout)
    assert found["proof"] is None and found["known"] and found["architectures"] == ["MixtralForCausalLM"]
    assert {"site": "v", "transformer_lens": ["blocks.{l}.attn.hook_v"], "width": 32, "layers": [0, 1, 2, 3],
            "meaning": "value projection", "source": "table"} in found["sites"]


def test_a_wrong_model_is_one_line(tmp_path: Path) -> None:
    for model, says in ((tmp_path / "none", "no such folder"), (tmp_path, "no config.json"),
                        ("no-such/model", "hub did not give it")):
        done = tap(model, HF_HUB_OFFLINE="1", HF_HUB_CACHE=str(tmp_path / "hub"))
        assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
        assert f"MODEL = '{model}'" in done.stderr and says in done.stderr
    listed(tmp_path, "llama")
    assert "only --prove starts" in tap(tmp_path, "--", "--dtype", "float32").stderr
