"""``vllm-tap sites --prove`` on real vLLM: a family of the table, one in none, and one whose blocks are no sums."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from engine_side.tap.architectures import BY_STRUCTURE
from tests.support.models.families import family_model

EVERY = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "embed", "final_norm")

OFF_MAX = 1e-6  # float32; a tensor that is not the site's is off by a tenth and more


def prove(model: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """The command to its end, with nobody to send rows to."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_TAP_")}
    return subprocess.run([sys.executable, "-m", "vllm_tap", "sites", str(model), "--prove", *more],
                          capture_output=True, text=True, timeout=500, check=False,
                          env={**environment, "VLLM_CPU_KVCACHE_SPACE": "1"})


@pytest.mark.soak
def test_a_mixture_with_mixers_is_proved() -> None:
    """Where a site is of a part that is no module (a router), and where layers have other sites than their neighbours.
    """
    done = prove(family_model("granitemoehybrid", "float32"), "--json", "--", "--dtype", "float32")
    assert done.returncode == 0, done
    found = json.loads(done.stdout)
    places = {site: {place["layer"]: place["path"] for place in about["places"]}
              for site, about in found["proof"]["sites"].items()}
    router = "model.layers.{}.block_sparse_moe.experts.router"
    assert places["experts"] == {layer: router.format(layer) for layer in range(3)}
    assert places["mix_in"] == {layer: f"model.layers.{layer}.mamba.in_proj" for layer in range(2)}
    assert places["mix_post"] == {layer: f"model.layers.{layer}.mamba.out_proj" for layer in range(2)}
    assert places["q"].keys() == {2} and found["refused"]["mix_steps"].startswith("one projection makes all that")
    assert {entry["width"] for entry in found["sites"] if entry["site"] == "mix_post"} == {256}


@pytest.mark.soak
def test_a_family_in_no_table_is_proved() -> None:
    done = prove(family_model("gpt2", "float32"), "--json", "--", "--dtype", "float32")
    assert done.returncode == 0, done
    found = json.loads(done.stdout)
    assert not found["known"] and found["proof"]["failed"] == "" and found["proof"]["dtype"] == "float32"
    entries = {entry["site"]: entry for entry in found["sites"]}
    assert set(entries) >= set(EVERY) and {entry["source"] for entry in entries.values()} == {"structure"}
    assert entries["attn_out"]["layers"] == [0, 1, 2] and entries["attn_out"]["width"] == 128
    places = {site: found["proof"]["sites"][site]["places"] for site in EVERY}
    assert [place["path"] for place in places["mlp_out"]] == [f"transformer.h.{layer}.mlp" for layer in range(3)]
    assert {place["identity"] for place in places["resid_post"]} == {"resid_post = resid_pre + attn_out + mlp_out"}
    for site in set(EVERY) - {"embed"}:
        assert all(0 <= place["off"] < OFF_MAX for place in places[site]), site


@pytest.mark.soak
def test_a_family_of_the_table_is_proved_as_far_as_the_search_goes() -> None:
    done = prove(family_model("gemma2", "float32"), "--", "--dtype", "float32")
    assert done.returncode == 0, done
    proofs = done.stdout.partition("Proved in float32")[2]
    assert "block is model.layers.{l}:" in " ".join(proofs.split())
    assert re.search(r"^attn_out_raw +all +block.self_attn: result 0 +attn_out = norm\(attn_out_raw\)", proofs, re.M)
    lines = [line for line in proofs.splitlines() if line.startswith(BY_STRUCTURE)]
    numbers = [line.split()[-1] for line in lines if not line.startswith("embed")]
    assert len(numbers) >= 8 and all(float(number) < OFF_MAX for number in numbers)
    assert re.search(r"^q_rot +all +block.self_attn.attn: argument +what attention gets as ", proofs, re.M)


def test_what_cannot_be_proved_says_which_identity_failed_and_by_how_much(tmp_path: Path) -> None:
    """OPT with its norms after the additions, as opt-350m: what a block hands on is no sum of what is made in it."""
    own = family_model("opt", "float32")
    said = json.loads((own / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**said, "do_layer_norm_before": False}))
    weights = {name: value for name, value in load_file(own / "model.safetensors").items()
               if "decoder.final_layer_norm" not in name}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    done = prove(tmp_path, "--", "--dtype", "float32")
    assert done.returncode == 1 and done.stdout == "", done
    assert done.stderr.startswith("vllm-tap: ") and "OPTForCausalLM is not proved: " in done.stderr
    assert re.search(r"no sum of up to 3 of the \d+ tensors made in it: the nearest, .* differs by \d\.\de-\d\d of the "
                     r"stream", done.stderr)


@pytest.mark.soak
def test_weights_of_chance_prove_nothing() -> None:
    done = prove(family_model("gpt2", "float32"), "--", "--load-format", "dummy")
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert "--load-format = 'dummy' after --: weights of chance" in done.stderr
