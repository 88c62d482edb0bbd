"""What ends vLLM's fusion of an all-reduce and a norm: what is named at the start, held against vLLM's own patterns."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
from torch import nn
from vllm.model_executor.layers.layernorm import RMSNorm

from engine_side.seams.compiled import fusions
from engine_side.tap.architectures import ARCHITECTURES, TapPoint
from tests.support.pages.readme import ROOT

PROGRAM = ROOT / "tests" / "programs" / "all_reduce_fusions.py"
LLAMA, GEMMA = "LlamaForCausalLM", "Gemma2ForCausalLM"
# A table's blocks have the norm's sum read (``residuals.at_norms``); others are read by the sum that they carry.
RULES = {"resid_pre": "arguments hidden_states + residual", "resid_mid": "second", "resid_post": "results 0 + 1"}
CASES = {  # of the program: the architecture, whether it is edited, and the sites (and layers) that are such a reader
    "what was made, read": (LLAMA, False, (("attn_out", 1), ("mlp_out", 1))),
    "its sum with the stream, read": (LLAMA, False, (("resid_pre", 1), ("resid_post", 0))),
    "the norm's sum, read": (LLAMA, False, (("resid_mid", 0), ("resid_mid", 1))),
    "what was made, edited": (LLAMA, True, (("attn_out", 1), ("mlp_out", 0), ("resid_pre", 1), ("resid_mid", 1),
                                            ("resid_post", 1))),
    "first: read": (LLAMA, False, (("embed", 0), ("resid_pre", 0))),
    "first: edited": (LLAMA, True, (("embed", 0), ("resid_pre", 0))),
    "normed: read": (GEMMA, False, (("attn_out_raw", 1), ("mlp_out_raw", 1))),
    "normed: edited": (GEMMA, True, (("attn_out_raw", 1), ("mlp_out_raw", 1))),
}


@pytest.mark.soak
@pytest.mark.skipif(find_spec("vllm.compilation.passes") is None, reason="the patterns of this vLLM lie elsewhere")
def test_what_is_named_is_what_vllms_patterns_do_not_match_any_more() -> None:
    done = subprocess.run([sys.executable, str(PROGRAM)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    fused = json.loads(done.stdout.splitlines()[-1])
    assert fused.keys() - CASES.keys() == {"nothing", "first: nothing", "normed: nothing"}
    assert all(fused[case] for case in fused.keys() - CASES.keys())
    model = nn.ModuleList([RMSNorm.__new__(RMSNorm)])
    compilation = SimpleNamespace(mode=3, pass_config=SimpleNamespace(fuse_allreduce_rms=True))
    for case, (architecture, edited, places) in CASES.items():
        reduced = fusions.reduced(model, ARCHITECTURES[architecture].block, 2)
        for site, layer in places:
            point = TapPoint(site, layer, nn.Module(), RULES.get(site, "result"), 8, "")
            named = fusions.computed_apart([] if edited else [point], compilation, reduced, [point] if edited else [])
            assert named == ([] if fused[case] else [site]), (case, site, layer)
            at_norm = replace(point, rule="second")
            if case == "its sum with the stream, read":
                assert fusions.computed_apart([at_norm], compilation, reduced) == []


def test_compressed_queries_end_the_fusion_of_their_norm_with_what_quantizes_them() -> None:
    quantized, plain = nn.Module(), nn.Linear(8, 8)
    quantized.quant_method = SimpleNamespace()
    compilation = SimpleNamespace(mode=3, pass_config=SimpleNamespace(fuse_norm_quant=True))
    for projection, named in ((quantized, ["q_latent"]), (plain, [])):
        point = TapPoint("q_latent", 0, projection, "operand", 8, "")
        assert fusions.computed_apart([point], compilation) == named
