"""What lies in staging anyway is written once: the same numbers as with copies, and no tensor beside staging.

The block is built as vLLM builds one, of its own norm, and compiled by Inductor as vLLM compiles.
"""

from __future__ import annotations

import itertools
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._inductor.ir
from torch import nn
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from engine_side.seams import projections
from engine_side.seams.compiled import fusions, residuals
from engine_side.tap import taps
from engine_side.tap.architectures import ARCHITECTURES, TapPoint, family_of, find_adding, find_carried
from engine_side.tap.staging import Staging, allocate
from engine_side.tap.taps import install
from tests.engine_side.seams.test_projections import Method

HIDDEN, INNER, TOKENS, HEAD = 32, 96, 16, 8
QKV = {"q": 32, "k": 16, "v": 16}
WIDTHS = {"resid_post": HIDDEN, "attn_out": HIDDEN, "mlp_out": HIDDEN, "mlp_post": INNER, **QKV}


class Norm(nn.Module):
    """What vLLM's RMSNorm does to (hidden, residual), without its registry."""

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        summed = hidden.float() if residual is None else hidden.float() + residual.float()
        normed = (summed * torch.rsqrt(summed.pow(2).mean(-1, keepdim=True) + 1e-6)).to(hidden.dtype)
        return normed if residual is None else (normed, summed.to(hidden.dtype))


class Projection(nn.Linear):
    num_heads, num_kv_heads, head_size = 4, 2, HEAD

    def __init__(self, width: int, out: int) -> None:
        super().__init__(width, out, bias=False, dtype=torch.bfloat16)
        self.quant_method = Method()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.quant_method.apply(self, x)


@torch.library.custom_op("vllm_tap_test::attend", mutates_args=())
def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """As opaque to the compiler as attention is."""
    return torch.cat([q, k, v], dim=-1)


@attend.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.cat([q, k, v], dim=-1)


class Attention(nn.Module):
    """q and k are normed, as Qwen3 does it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj, self.o_proj = Projection(HIDDEN, sum(QKV.values())), Projection(sum(QKV.values()), HIDDEN)
        self.q_norm, self.k_norm = Norm(), Norm()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv_proj(x).split(list(QKV.values()), dim=-1)
        return self.o_proj(attend(self.q_norm(q), self.k_norm(k), v))


class QuantizedMethod(Method):
    """Codes of fp8 and a scale a row, as vLLM's dynamic quantization writes them for the compiler to fuse."""

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        fp8 = torch.finfo(torch.float8_e4m3fn)
        scale = (x.abs().max(dim=-1, keepdim=True).values.float() / fp8.max).clamp(min=1e-6)
        codes = (x.float() / scale).clamp(fp8.min, fp8.max).to(torch.float8_e4m3fn)
        return super().apply(layer, decoded(codes, scale), bias)


@torch.library.custom_op("vllm_tap_test::decode", mutates_args=())
def decoded(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """As opaque to the compiler as a product of codes is."""
    return (codes.float() * scale).to(torch.bfloat16)


@decoded.register_fake
def _(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return codes.new_empty(codes.shape, dtype=torch.bfloat16)


def plain_method() -> UnquantizedLinearMethod:
    """vLLM's own, which multiplies as a GPU's does."""
    method = UnquantizedLinearMethod()
    method._gemm_impl = lambda _layer, x, weight, bias: nn.functional.linear(x, weight, bias)
    return method


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = Projection(HIDDEN, 2 * INNER), Projection(INNER, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.up_proj(x).chunk(2, dim=-1)
        return self.down_proj(nn.functional.silu(gate) * up)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(), Norm()
        self.self_attn, self.mlp = Attention(), Mlp()

    def forward(self, hidden_states: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            residual, hidden = hidden_states, self.input_layernorm(hidden_states)
        else:
            hidden, residual = self.input_layernorm(hidden_states, residual)
        hidden = self.self_attn(hidden)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.layers, self.model.norm = nn.ModuleList(Block() for _ in range(3)), Norm()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        residual = None
        for block in self.model.layers:
            hidden, residual = block(hidden, residual)
        return self.model.norm(hidden, residual)[0]


def tapped(model: Model, in_place: bool, monkeypatch: pytest.MonkeyPatch, layers: tuple[int, ...] = (0, 1, 2),
           sites: tuple[str, ...] = tuple(WIDTHS)) -> Staging:
    """``in_place``: as a start does it where everything can be; otherwise every row is copied."""
    parts = {"resid_post": ("", "stream_out"), "attn_out": ("self_attn", "result"), "mlp_out": ("mlp", "result"),
             "mlp_post": ("mlp.down_proj", "operand" if in_place else "argument"),
             **{site: ("self_attn.qkv_proj", site) for site in QKV}}
    points = [TapPoint(site, layer, block.get_submodule(path), rule, WIDTHS[site], site)
              for site, (path, rule) in parts.items() if site in sites
              for layer, block in enumerate(model.model.layers) if layer in layers]
    staging, _ = allocate({site: WIDTHS[site] for site in sites}, {site: list(layers) for site in sites}, TOKENS,
                          torch.bfloat16, torch.device("cpu"), 64 << 20)
    writers = {id(block.self_attn.qkv_proj): projections.write_into for block in model.model.layers}
    family = family_of(["LlamaForCausalLM"], {})
    if in_place:
        monkeypatch.setattr(residuals, "_adds", lambda norm: isinstance(norm, Norm))
        adding = find_adding(model, family)
        points = residuals.at_norms(points, adding)
        assert all((point.rule == "second") is (point.site == "resid_post") for point in points)
    install(points, staging, writers if in_place else None)
    if in_place:
        carried = find_carried(model, family, adding, points)
        assert residuals.read_back(carried, staging, configured()) == 2, "all but the first, which gets no residual"
    return staging


def configured(adding: str = "native", ranks: int = 1, splitting: tuple[str, ...] = ("vllm::unified_attention",),
               partition: bool = False, mode: int = 3, backend: str = "inductor", **passes: Any) -> Any:
    """The parts of vLLM's configuration that decide."""
    return SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
        compilation_config=SimpleNamespace(
            pass_config=SimpleNamespace(**passes), mode=mode, backend=backend, splitting_ops=list(splitting),
            splitting_ops_contain_attention=lambda: "vllm::unified_attention" in splitting,
            use_inductor_graph_partition=partition),
        kernel_config=SimpleNamespace(ir_op_priority=SimpleNamespace(fused_add_rms_norm=[adding, "native"])))


@pytest.mark.soak
@torch.inference_mode()
def test_what_lies_in_staging_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code

    torch.manual_seed(0)
    models = {way: Model().eval() for way in ("plain", "copied", "in_place")}
    for model in models.values():
        model.load_state_dict(models["plain"].state_dict())
    staged = {way: tapped(models[way], way == "in_place", monkeypatch) for way in ("copied", "in_place")}
    hidden = torch.randn(11, HIDDEN, dtype=torch.bfloat16)
    results, made = {}, {}
    for way, model in models.items():
        torch._dynamo.reset()
        # vLLM functionalizes so, and rounds sums where it cuts its graph.
        with config.patch(enable_auto_functionalized_v2=False, emulate_precision_casts=True):
            results[way], code = run_and_get_code(torch.compile(model, dynamic=True, fullgraph=True), hidden)
        made[way] = [int(width) for one in code
                     for width in re.findall(r"= empty_strided_cpu\(\(s\d+, (\d+)\)", one)]
    assert torch.equal(results["copied"], results["in_place"])
    for site, buffer in staged["copied"].buffers.items():
        assert torch.equal(buffer[:, :11], staged["in_place"].buffers[site][:, :11]), site
    # No other tensor has the width of a joint projection or of an activation.
    assert [made["copied"].count(width) for width in (sum(QKV.values()), INNER)] == [3, 3]
    assert [made["in_place"].count(width) for width in (sum(QKV.values()), INNER)] == [0, 0]
    assert made["in_place"].count(HIDDEN) < made["copied"].count(HIDDEN), "the stream has a tensor of its own"


@pytest.mark.parametrize("quantized", [False, True])
@torch.inference_mode()
def test_a_gpus_activation_is_quantized_as_without_a_tap(monkeypatch: pytest.MonkeyPatch, quantized: bool) -> None:
    """Plain code quantizes numbers that were never rounded to a row; reading the row back would change the codes."""
    monkeypatch.setattr(sys.modules[__name__], "INNER", 3072)
    monkeypatch.setitem(WIDTHS, "mlp_post", 3072)
    seen = {}
    for way in ("plain", "tapped"):
        model = Model().eval()
        for block in model.model.layers:
            block.mlp.down_proj.quant_method = QuantizedMethod() if quantized else plain_method()
        if way == "tapped":
            points = [TapPoint("mlp_post", layer, block.mlp.down_proj, "operand", 3072, "")
                      for layer, block in enumerate(model.model.layers)]
            staging, _ = allocate({"mlp_post": 3072}, {"mlp_post": [0, 1, 2]}, TOKENS, torch.bfloat16,
                                  torch.device("cpu"), 64 << 20)
            install(projections.copied_where_quantized(points), staging)
            assert model.model.layers[0].mlp.down_proj.requires_unquantized_input
        made = kernels(model, torch.randn(11, HIDDEN, dtype=torch.bfloat16), monkeypatch)
        seen[way] = [(kernel.count("tl.load("), kernel.count("tl.load(out_ptr"), kernel.count("tl.store("))
                     for kernel in made if "sigmoid" in kernel or "libdevice.exp" in kernel or "tl_math.exp" in kernel]
    assert len(seen["plain"]) == len(seen["tapped"]) > 0
    for plain, tapped_ in zip(seen["plain"], seen["tapped"], strict=True):
        assert tapped_[:2] == (plain[0], 0)
        assert tapped_[2] == plain[2] + quantized


class Written(Exception):
    """The code of a GPU's kernels, before anything is made of it."""


def kernels(model: Model, hidden: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the compiler writes for a GPU, which it needs not to have: the text of every kernel.

    The graph is cut at attention and the number of tokens is a symbol, as in vLLM.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.graph import GraphLowering
    from torch._subclasses import FakeTensor
    from torch.fx.passes.split_module import split_module
    from torch.utils import _triton

    write, found = GraphLowering.codegen, list[str]()

    def written(graph: GraphLowering) -> Any:
        raise Written(write(graph)[0].value)

    class Pieces(torch.fx.Interpreter):
        def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
            piece: Any = self.fetch_attr(target)
            if all(node.target is not attending for node in piece.graph.nodes):
                with pytest.raises(Exception) as raised:
                    compile_fx(piece, list(args))
                reason = getattr(raised.value, "inner_exception", raised.value)
                assert isinstance(reason, Written), reason
                found.extend(re.findall(r"\ndef (triton_.*?)\n\'\'\'", str(reason), re.DOTALL))
            return piece(*args)

    def cut(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        parts = itertools.accumulate(int(node.target is attending) for node in graph.graph.nodes)
        part = {node: 2 * behind - (node.target is attending)
                for node, behind in zip(graph.graph.nodes, parts, strict=True)}
        given = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
        mode = next(value.fake_mode for value in given if isinstance(value, FakeTensor))
        with mode, tracing(TracingContext(mode)):
            Pieces(split_module(graph, graph, part.__getitem__)).run(*given)
        return graph.forward

    attending = torch.ops.vllm_tap_test.attend.default
    monkeypatch.setattr(torch._inductor.ir, "is_cpu", lambda *_: False)  # it has rules of its own for a CPU
    torch._dynamo.reset()
    torch._dynamo.mark_dynamic(hidden, 0)
    monkeypatch.setattr(GraphLowering, "codegen", written)
    monkeypatch.setattr(_triton, "triton_hash_with_backend", lambda: "no device")
    with config.patch(cpu_backend="triton", enable_auto_functionalized_v2=False, fx_graph_cache=False):
        torch.compile(model, backend=cut, fullgraph=True)(hidden)
    return found


@torch.inference_mode()
def test_a_gpus_kernels_write_the_stream_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows as wide as a model's: a kernel goes over a row twice, for its norm, and could keep a sum between."""
    here = sys.modules[__name__]
    monkeypatch.setattr(here, "HIDDEN", 2048)
    for site in ("resid_post", "attn_out", "mlp_out"):
        monkeypatch.setitem(WIDTHS, site, 2048)
    found = {}
    for way in ("plain", "stream", "copied"):
        model = Model().eval()
        if way != "plain":
            tapped(model, way == "stream", monkeypatch, (0, 1), ("resid_post",))
        made = kernels(model, torch.randn(11, 2048, dtype=torch.bfloat16), monkeypatch)
        assert not any("assert" in kernel for kernel in made), "places in staging are checked on the device"
        found[way] = [(kernel.count("tl.store("), kernel.count("tl.load(out_ptr")) for kernel in made]
    # The fullest kernel of a block: the norm writes normed rows and the stream, and reads neither again.
    assert max(found["plain"]) == (2, 0)
    assert found["stream"] == found["plain"], "the stream is written elsewhere, too, or read again on its way"
    assert max(found["copied"]) == (3, 0)


@pytest.mark.parametrize(("site", "path", "rule", "stores"), [
    ("resid_pre", "", "stream_in", 3),  # the norm writes the stream behind attention, too
    ("resid_mid", "post_attention_layernorm", "second", 2),
    ("attn_out", "self_attn", "result", 2),
])
@torch.inference_mode()
def test_a_gpus_kernels_write_rows_to_staging_alone(monkeypatch: pytest.MonkeyPatch, site: str, path: str, rule: str,
                                                    stores: int) -> None:
    monkeypatch.setattr(sys.modules[__name__], "HIDDEN", 2048)
    model = Model().eval()
    blocks = list(model.model.layers)[:2]
    staging, _ = allocate({site: 2048}, {site: [0, 1]}, TOKENS, torch.bfloat16, torch.device("cpu"), 64 << 20)
    install([TapPoint(site, layer, block.get_submodule(path), rule, 2048, site) for layer, block in enumerate(blocks)],
            staging)
    made = kernels(model, torch.randn(11, 2048, dtype=torch.bfloat16), monkeypatch)
    assert max((kernel.count("tl.store("), kernel.count("tl.load(out_ptr")) for kernel in made) == (stores, 0)
    assert not any("assert" in kernel for kernel in made)


@torch.inference_mode()
def test_a_layer_is_one_tensor_and_no_view() -> None:
    """The compiler could read one of two tensors over the same memory before it writes the other."""
    layers = {site: [0, 1] for site in WIDTHS}
    staging, _ = allocate(WIDTHS, layers, TOKENS, torch.bfloat16, torch.device("cpu"), 1 << 20)
    for site in (*WIDTHS, "qkv"):
        one = staging.of_layer(site, 1)
        assert one is staging.of_layer(site, 1)
        assert one._base is None and one.storage_offset() == 0 and one.untyped_storage() is not staging.buffers["q"]
    staging.of_layer("qkv", 1)[3].fill_(7)
    for site in QKV:
        assert staging.buffers[site][1, 3].eq(7).all() and staging.buffers[site][0].eq(0).all()
    staging.of_layer("mlp_out", 0)[2].fill_(5)
    assert staging.buffers["mlp_out"][0, 2].eq(5).all() and staging.buffers["mlp_out"][1].eq(0).all()


@pytest.mark.parametrize(("vllm_config", "expected"), [
    (configured(), True),
    (configured(fuse_norm_quant=False, fuse_act_quant=True), True),
    (configured(fuse_norm_quant=True), False),
    (configured(fuse_allreduce_rms=True), False),
    (configured(ranks=2), True),
    (configured("vllm_c"), False),  # updates the residual in place
    (configured(splitting=()), False),  # one graph, which may keep more bits than a row
    (configured(splitting=("vllm::moe_forward",)), False),  # as good as none
    (configured(mode=2), False),  # splitting was asked for where nothing is split, as on a CPU
    (configured(partition=True), False),
    (configured(splitting=(), mode=0), True),
    (configured(splitting=(), mode=2, backend="eager"), True),
    (SimpleNamespace(), False),  # a vLLM that says nothing of it
])
def test_a_residual_is_read_only_where_norms_leave_it_as_it_is(vllm_config: Any, expected: bool) -> None:
    assert residuals.functional(vllm_config) is expected


def test_vllm_still_says_how_norms_are_made() -> None:
    from vllm.config import CompilationConfig
    from vllm.config.kernel import IrOpPriorityConfig

    assert {"fuse_norm_quant", "fuse_allreduce_rms"} <= set(vars(CompilationConfig().pass_config))
    assert {"mode", "backend", "use_inductor_graph_partition"} <= set(vars(CompilationConfig()))
    assert callable(CompilationConfig.splitting_ops_contain_attention)
    assert hasattr(IrOpPriorityConfig(), "fused_add_rms_norm")


def test_an_operand_of_another_dtype_goes_on_as_it_is() -> None:
    linear = nn.Linear(INNER, HIDDEN, dtype=torch.float64)
    staging, _ = allocate({"mlp_post": INNER}, {"mlp_post": [0]}, TOKENS, torch.float32, torch.device("cpu"), 1 << 20)
    install([TapPoint("mlp_post", 0, linear, "operand", INNER, "")], staging)
    x = torch.randn(3, INNER, dtype=torch.float64)
    assert torch.equal(linear(x), nn.functional.linear(x, linear.weight, linear.bias))
    assert torch.equal(staging.buffers["mlp_post"][0, :3], x.float())


def test_an_operand_is_not_quantized_before_it_is_captured() -> None:
    """In an fp8 model, vLLM's activation hands a layer that takes them quantized numbers, which are no rows."""
    from vllm.model_executor.layers.fusion.quant_activation import get_input_quant_key

    linear = nn.Linear(INNER, HIDDEN)
    linear._input_quant_key = "fp8"  # as vLLM's kernels say that they take them
    assert get_input_quant_key(linear) is not None
    staging, _ = allocate({"mlp_post": INNER}, {"mlp_post": [0]}, TOKENS, torch.float32, torch.device("cpu"), 1 << 20)
    install([TapPoint("mlp_post", 0, linear, "operand", INNER, "")], staging)
    assert get_input_quant_key(linear) is None


def test_an_operand_may_be_given_by_name_and_have_more_dimensions() -> None:
    linear = nn.Linear(INNER, HIDDEN)
    staging, _ = allocate({"mlp_post": INNER}, {"mlp_post": [0]}, TOKENS, torch.float32, torch.device("cpu"), 1 << 20)
    install([TapPoint("mlp_post", 0, linear, "operand", INNER, "")], staging)
    x = torch.randn(2, 3, INNER)
    assert torch.equal(linear(input=x), nn.functional.linear(x, linear.weight, linear.bias))
    assert torch.equal(staging.buffers["mlp_post"][0, :6], x.reshape(6, INNER))
    assert taps.RULES["operand"].instead


@pytest.mark.parametrize(("passes", "sites", "apart"), [
    ({}, ("resid_post", "mlp_post", "z", "q"), []),
    ({"fuse_act_quant": True}, ("resid_post", "mlp_post", "z"), ["mlp_post"]),
    ({"fuse_attn_quant": True, "fuse_norm_quant": True}, ("resid_mid", "z", "k"), ["z"]),
    ({"enable_qk_norm_rope_fusion": True}, ("q", "k", "v"), ["q", "k"]),
    ({"fuse_allreduce_rms": True}, ("attn_out", "resid_post"), []),  # on one rank
])
def test_the_start_names_a_site_that_is_computed_apart(passes: dict[str, bool], sites: tuple[str, ...],
                                                       apart: list[str]) -> None:
    module = Projection(HIDDEN, HIDDEN)
    points = [TapPoint(site, layer, module, "result", HIDDEN, "") for site in sites for layer in (0, 1)]
    found = {mode: fusions.computed_apart(points, SimpleNamespace(mode=mode, pass_config=SimpleNamespace(**passes)))
             for mode in (0, 3)}
    assert found == {0: [], 3: apart}, "vLLM's passes run where vLLM compiles"
    module.quant_method = UnquantizedLinearMethod()
    assert fusions.computed_apart(points, SimpleNamespace(mode=3, pass_config=SimpleNamespace(**passes))) == [
        site for site in apart if site not in ("mlp_post", "z")]


TWO_NORMS, FOUR_NORMS = ARCHITECTURES["LlamaForCausalLM"], ARCHITECTURES["Gemma2ForCausalLM"]
RULES = {"resid_pre": "arguments a + b", "resid_mid": "second", "resid_post": "results 0 + 1", "attn_out": "result"}


@pytest.mark.parametrize(("sites", "read", "edited"), [
    (("embed", "resid_mid", "final_norm", "q", "v", "z", "mlp_post"), [], ["embed", "resid_mid"]),
    (("resid_post",), ["resid_post"], ["resid_post"]),
    (("resid_mid", "attn_out", "mlp_out"), ["attn_out", "mlp_out"], ["resid_mid", "attn_out", "mlp_out"]),
])
def test_what_an_all_reduce_made_before_a_norm_adds_it_is_named(sites: tuple[str, ...], read: list[str],
                                                                edited: list[str]) -> None:
    """vLLM fuses both, and gives the sum alone."""
    model = nn.ModuleList([RMSNorm.__new__(RMSNorm)])
    points = [TapPoint(site, layer, Projection(HIDDEN, HIDDEN), RULES.get(site, "result"), HIDDEN, "")
              for site in sites for layer in (0, 1)]

    def apart(which: str, ranks: int = 2, model: nn.Module = model, **passes: bool) -> list[str]:
        places = fusions.reduced(model, TWO_NORMS.block, ranks)
        compilation = SimpleNamespace(mode=3, pass_config=SimpleNamespace(**(passes or {"fuse_allreduce_rms": True})))
        return fusions.computed_apart(points if which == "read" else (), compilation, places,
                                      points if which == "edited" else ())

    assert (apart("read"), apart("edited")) == (read, edited)
    for other in ({"ranks": 1}, {"fuse_allreduce_rms": False}, {"model": nn.ModuleList([nn.LayerNorm(HIDDEN)])}):
        assert apart("read", **other) == apart("edited", **other) == []  # type: ignore[arg-type]


def test_the_stream_that_a_block_is_given_is_named_where_another_block_made_it() -> None:
    """What the first is given is the embedding's, which comes out of its fusion."""
    places = fusions.reduced(nn.ModuleList([RMSNorm.__new__(RMSNorm)]), TWO_NORMS.block, 2)
    compilation = SimpleNamespace(mode=3, pass_config=SimpleNamespace(fuse_allreduce_rms=True))
    first, second = (TapPoint("resid_pre", layer, nn.Module(), "arguments a + b", HIDDEN, "") for layer in (0, 1))
    assert fusions.computed_apart([first], compilation, places) == []
    assert fusions.computed_apart([second], compilation, places) == ["resid_pre"]
    assert fusions.computed_apart([], compilation, places, [first]) == ["resid_pre"]
    for rule, named in (("results 0 + 1", ["resid_post"]),  # what reads the sum again
                        ("result", []), ("second", []), ("stream_out", [])):  # the sum itself, or no norm behind it
        point = TapPoint("resid_post", 1, nn.Module(), rule, HIDDEN, "")
        assert fusions.computed_apart([point], compilation, places) == named


def test_what_a_norm_makes_of_an_all_reduce_before_it_is_added_may_be_read() -> None:
    """As in Gemma: the norm gives both, and who adds its rows is not in the fusion. What it is given is not to change.
    """
    places = fusions.reduced(nn.ModuleList([RMSNorm.__new__(RMSNorm)]), FOUR_NORMS.block, 2)
    compilation = SimpleNamespace(mode=3, pass_config=SimpleNamespace(fuse_allreduce_rms=True))
    points = [TapPoint(site, 1, nn.Module(), RULES.get(site, "result"), HIDDEN, "") for site in (
        "resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "attn_out_raw", "mlp_out_raw")]
    assert fusions.computed_apart(points, compilation, places) == []
    assert fusions.computed_apart([], compilation, places, points) == ["attn_out_raw", "mlp_out_raw"]


def test_a_projection_that_takes_codes_from_the_activation_before_it_is_computed_apart() -> None:
    projection = Projection(INNER, HIDDEN)
    points, compilation = [TapPoint("mlp_post", 0, projection, "operand", INNER, "")], SimpleNamespace(mode=0)
    assert fusions.computed_apart(points, compilation) == []
    projection._input_quant_key = object()  # as vLLM's quantized kernels tell it
    assert fusions.computed_apart(points, compilation) == ["mlp_post"]
