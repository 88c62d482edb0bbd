"""A joint projection that writes into staging: the same numbers, no copy, in eager and in compiled code."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from engine_side.seams import projections
from engine_side.tap.architectures import TapPoint
from engine_side.tap.staging import Staging, allocate
from engine_side.tap.taps import install

HIDDEN, HEADS, KV_HEADS, HEAD, TOKENS = 32, 4, 2, 8, 16
WIDTHS = {"q": HEADS * HEAD, "k": KV_HEADS * HEAD, "v": KV_HEADS * HEAD}


class Method:
    """What vLLM calls a quantization method."""

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return nn.functional.linear(x, layer.weight, bias)


class Projection(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(sum(WIDTHS.values()), HIDDEN))
        self.quant_method = Method()
        self.num_heads, self.num_kv_heads, self.head_size = HEADS, KV_HEADS, HEAD

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self.quant_method.apply(self, x), None


class Attention(nn.Module):
    """Norms of q and k as Qwen3 has them; v goes on as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj, self.q_norm, self.k_norm = Projection(), nn.RMSNorm(HEAD), nn.RMSNorm(HEAD)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = self.qkv_proj(x)[0].split(list(WIDTHS.values()), dim=-1)
        return self.q_norm(q.view(-1, HEADS, HEAD)), self.k_norm(k.view(-1, KV_HEADS, HEAD)), v


def tapped(attention: Attention, in_place: bool) -> Staging:
    staging, _ = allocate(WIDTHS, {site: [0] for site in WIDTHS}, TOKENS, torch.float32, torch.device("cpu"), 1 << 20)
    points = [TapPoint(site, 0, attention.qkv_proj, site, WIDTHS[site], site) for site in WIDTHS]
    install(points, staging, {id(attention.qkv_proj): projections.write_into} if in_place else None)
    return staging


@pytest.mark.parametrize("compiled", [False, True])
@torch.inference_mode()
def test_a_projection_writes_into_staging_what_a_copy_would_put_there(compiled: bool) -> None:
    torch.manual_seed(0)
    copying, in_place = Attention(), Attention()
    in_place.load_state_dict(copying.state_dict())
    staged = {name: tapped(attention, name == "in_place") for name, attention in
              (("copying", copying), ("in_place", in_place))}
    run = [torch.compile(attention, backend="aot_eager", dynamic=True, fullgraph=True) if compiled else attention
           for attention in (copying, in_place)]
    for rows in (5, TOKENS, 1):
        x = torch.randn(rows, HIDDEN)
        for mine, other in zip(run[1](x), run[0](x), strict=True):
            assert torch.equal(mine, other)
        for site in WIDTHS:
            assert torch.equal(staged["in_place"].buffers[site][0, :rows], staged["copying"].buffers[site][0, :rows])
    v = run[1](x)[2]
    assert v.data_ptr() == staged["in_place"].buffers["v"][0].data_ptr(), "v was copied"


def test_what_is_not_a_plain_product_on_a_gpu_is_copied() -> None:
    assert projections.find_writers(Attention(), SimpleNamespace()) == {}  # on a CPU, and not vLLM's own method


def test_where_adapters_run_inside_an_operation_of_their_own_q_and_k_are_copied(monkeypatch: pytest.MonkeyPatch
                                                                                 ) -> None:
    """That operation tells the compiler that it writes nothing and returns what is new: staging would be neither."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.utils import default_unquantized_gemm

    method = UnquantizedLinearMethod()
    method._gemm_impl = default_unquantized_gemm
    projection = SimpleNamespace(quant_method=method, bias=None, weight=SimpleNamespace(is_cuda=True))
    assert projections._plain(projection)
    monkeypatch.setenv("VLLM_LORA_ENABLE_DUAL_STREAM", "1")
    assert not projections._plain(projection)


@pytest.mark.parametrize("flag", ["enable_qk_norm_rope_fusion", "fuse_qk_norm_rope_kvcache"])
def test_where_norm_and_rotation_work_in_place_q_and_k_are_copied(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projections, "_plain", lambda _projection: True)
    assert len(projections.find_writers(Attention(), SimpleNamespace(**{flag: False}))) == 1
    assert projections.find_writers(Attention(), SimpleNamespace(**{flag: True})) == {}


def test_vllm_still_calls_such_a_pass_so() -> None:
    from vllm.config import CompilationConfig

    assert any("qk_norm_rope" in name for name in vars(CompilationConfig().pass_config))
