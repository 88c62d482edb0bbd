"""Architectures: how a decoder block exposes its parts, found by structure and verified at start.

A *module path* leads to a module inside the block (or the model), and names the rule that makes rows of its call.
Adding an architecture is one entry here and one in the parity tests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from engine_side.tap.stages import Stage
from engine_side.tap.switches import turned
from schemas.errors import StartError
from schemas.sites import SITES

if TYPE_CHECKING:  # commands look up what an architecture has, and have no seconds for torch
    from torch import nn

    from engine_side.discovery.proofs import Proof


@dataclass(frozen=True, slots=True)
class ModulePath:
    """``path`` below the block ("" is the block itself); ``rule`` is a name in engine_side.tap.taps.RULES.

    ``width``: numbers a row, 0 where the module says.
    """

    path: str
    rule: str
    meaning: str
    width: int = 0


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of decoder: where its blocks are, and the place of every site that such a block has.

    ``embedded`` names the sites whose first rows are those of ``embedding``, bit for bit: not ``resid_pre`` where a
    model scales its embeddings or adds positions to them. ``names``: the sites of TransformerLens's names that are not
    the same everywhere (schemas.sites.BY_MODEL). ``refused``: why a model lacks sites. ``sums``: whether the stream
    after a block is what entered it, ``attn_out`` and ``mlp_out`` added. ``found``: by site and layer, the places of a
    model that is not in the table, below the model. ``proofs`` are what shows places to be right, and ``unproved`` why
    nothing does. ``adding``: of such a model, the paths that ``find_adding`` looks for.
    """

    layers: str
    block: Mapping[str, ModulePath]
    model: Mapping[str, ModulePath] = field(default_factory=dict)
    embedding: str = "model.embed_tokens"
    embedded: tuple[str, ...] = ("embed", "resid_pre")
    names: Mapping[str, str] = field(default_factory=lambda: {
        "attn.hook_out": "attn_out", "mlp.hook_out": "mlp_out", "hook_embed": "embed"})
    refused: Mapping[str, str] = field(default_factory=dict)
    sums: bool = True
    found: Mapping[str, Mapping[int, ModulePath]] = field(default_factory=dict)
    proofs: tuple[Proof, ...] = ()
    unproved: str = ""
    adding: Mapping[int, str] = field(default_factory=dict)


# Newer vLLM runs these by Transformers' classes, told to or not; of the others taps know vLLM's own code alone.
BY_TRANSFORMERS: Final = frozenset({"GPTNeoXForCausalLM"})
BY_STRUCTURE: Final = tuple(SITES)  # what is looked for where an architecture is not in the table
CHOSEN_INSIDE: Final = ("a kernel of this vLLM's chooses inside itself and does not say what; the largest "
                        "router_logits are its choice on some models only")
# Rows of these are a rank's share of the heads or of the MLP under tensor parallelism; the others are whole everywhere.
SHARED_OUT: Final = ("mlp_post", "q", "k", "v", "q_rot", "k_rot", "z", "mix_in", "mix_steps", "mix_post")


@dataclass(frozen=True, slots=True)
class TapPoint:
    """One place to tap in a loaded model."""

    site: str
    layer: int
    module: Any
    rule: str
    width: int
    meaning: str
    ids: int = 0  # how many different ids a row may hold, where the site is one of ids
    source: str = "table"  # or "structure", of a place that was found by it


@dataclass(frozen=True, slots=True)
class Sum:
    """Rows of one place that are the sum of those of others, each a site and a layer."""

    total: tuple[str, int]
    terms: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Embedding:
    """The embedding of a loaded model, and the armed sites whose first rows it makes."""

    path: str
    embedding: nn.Module
    sites: tuple[str, ...]


# Blocks that carry (hidden, residual) and add them in the next norm: the stream is their sum.
_LLAMA_BLOCK: Final = {
    "resid_pre": ModulePath("", "stream_in", "hidden + residual as the block gets them, before any norm"),
    "resid_mid": ModulePath("post_attention_layernorm", "second",
                            "residual stream after attention, before the MLP's norm"),
    "resid_post": ModulePath("", "stream_out", "hidden + residual as the block returns them, before any norm"),
    "attn_out": ModulePath("self_attn", "result", "attention output as added to the residual stream"),
    "mlp_out": ModulePath("mlp", "result", "MLP output as added to the residual stream"),
    "mlp_post": ModulePath("mlp.down_proj", "operand", "act(gate) · up, before the down projection"),
    "q": ModulePath("self_attn.qkv_proj", "q", "query projection, before a query norm and the rotary embedding"),
    "k": ModulePath("self_attn.qkv_proj", "k", "key projection, before a key norm and the rotary embedding"),
    "v": ModulePath("self_attn.qkv_proj", "v", "value projection"),
    "q_rot": ModulePath("self_attn.attn", "query", "queries as the attention kernel gets them"),
    "k_rot": ModulePath("self_attn.attn", "key", "keys as the attention kernel gets them"),
    "z": ModulePath("self_attn.o_proj", "operand", "attention result of all heads, before the output projection"),
}
_LLAMA_MODEL: Final = {
    "embed": ModulePath("model.embed_tokens", "result", "rows of the embedding table, before any scaling"),
    "final_norm": ModulePath("model.norm", "result", "output of the final norm, after its weight"),
}
_LLAMA: Final = Family("model.layers", _LLAMA_BLOCK, _LLAMA_MODEL)

# Gemma norms what attention and the MLP return before it adds them.
_GEMMA: Final = Family("model.layers", {
    **_LLAMA_BLOCK,
    "resid_mid": ModulePath("pre_feedforward_layernorm", "second",
                            "residual stream after attention, before the MLP's norm"),
    "attn_out": ModulePath("post_attention_layernorm", "result",
                           "attention output after its norm, as added to the stream"),
    "mlp_out": ModulePath("post_feedforward_layernorm", "result", "MLP output after its norm, as added to the stream"),
    "attn_out_raw": ModulePath("self_attn", "result", "attention output before its norm"),
    "mlp_out_raw": ModulePath("mlp", "result", "MLP output before its norm"),
}, _LLAMA_MODEL, embedded=("embed",), names={"attn.hook_out": "attn_out_raw", "mlp.hook_out": "mlp_out_raw"})


def _mixture(mlp: str) -> Family:
    """Sparse blocks: no one activation before a down projection, but a router."""
    return Family("model.layers", {
        **_LLAMA_BLOCK,
        "mlp_out": ModulePath(mlp, "result", "sum of the chosen experts' outputs as added to the residual stream"),
        "router_logits": ModulePath(f"{mlp}.gate", "result", "router logits, before softmax and choice"),
        "experts": ModulePath(f"{mlp}.experts.router", "choice",
                              "ids of the experts that vLLM's router chose, heaviest first"),
    }, _LLAMA_MODEL)


# Blocks that carry one tensor, norms before attention and MLP.
_OPT: Final = Family("model.decoder.layers", {
    "resid_pre": ModulePath("", "argument", "residual stream as the block gets it, before any norm"),
    "resid_mid": ModulePath("final_layer_norm", "argument", "residual stream after attention, before the MLP's norm"),
    "resid_post": ModulePath("", "result", "residual stream as the block returns it"),
    "attn_out": ModulePath("self_attn", "result", "attention output as added to the residual stream"),
    "mlp_out": ModulePath("fc2", "result", "MLP output as added to the residual stream"),
    "mlp_post": ModulePath("fc2", "operand", "activation before the second linear layer"),
    "q": ModulePath("self_attn.qkv_proj", "q", "query projection"),
    "k": ModulePath("self_attn.qkv_proj", "k", "key projection"),
    "v": ModulePath("self_attn.qkv_proj", "v", "value projection"),
    "z": ModulePath("self_attn.out_proj", "operand", "attention result of all heads, before the output projection"),
}, {
    "embed": ModulePath("model.decoder.embed_tokens", "result", "rows of the embedding table, without positions"),
    "final_norm": ModulePath("model.decoder.final_layer_norm", "result", "output of the final norm, after its weight"),
}, embedding="model.decoder.embed_tokens", embedded=("embed",))

# Run by vLLM through the Hugging Face modules; a parallel block has no residual between attention and MLP (switches).
_GPT_NEOX: Final = Family("model.layers", {
    "resid_pre": ModulePath("", "argument", "residual stream as the block gets it, before any norm"),
    "resid_mid": ModulePath("post_attention_layernorm", "argument",
                       "residual stream after attention, before the MLP's norm"),
    "resid_post": ModulePath("", "result", "residual stream as the block returns it"),
    "attn_out": ModulePath("attention", "result", "attention output as added to the residual stream"),
    "mlp_out": ModulePath("mlp", "result", "MLP output as added to the residual stream"),
    "mlp_post": ModulePath("mlp.dense_4h_to_h", "operand", "activation before the second linear layer"),
    "z": ModulePath("attention.dense", "operand", "attention result of all heads, before the output projection"),
}, {
    "embed": ModulePath("model.embed_in", "result", "rows of the embedding table"),
    "final_norm": ModulePath("model.final_layer_norm", "result", "output of the final norm, after its weight"),
}, embedding="model.embed_in")

ARCHITECTURES: Final[dict[str, Family]] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": _LLAMA,
    "Qwen3ForCausalLM": _LLAMA,
    "Phi3ForCausalLM": _LLAMA,
    "Gemma2ForCausalLM": _GEMMA,
    "Gemma3ForCausalLM": _GEMMA,
    "MixtralForCausalLM": _mixture("block_sparse_moe"),
    "Qwen3MoeForCausalLM": _mixture("mlp"),
    "OPTForCausalLM": _OPT,
    "GPTNeoXForCausalLM": _GPT_NEOX,
}


def find_points(model: nn.Module, family: Family, names: Sequence[str], sites: tuple[str, ...], n_layers: int,
                hidden: int, stage: Stage | None = None) -> Iterator[TapPoint]:
    """Every (site, layer) to tap, of those that a pipeline's ``stage`` has (None: there is no pipeline); StartError
    names what was looked for and what was found.
    """
    from torch import nn

    blocks = _part(model, family.layers)
    if not isinstance(blocks, nn.ModuleList) or len(blocks) != n_layers:
        found = f"{len(blocks)}" if isinstance(blocks, nn.ModuleList) else type(blocks).__name__
        raise StartError(f"vllm-tap: looked for {n_layers} blocks at {family.layers}, found {found}; use a vLLM "
                         "version that is tested")
    stage = stage or Stage(0, 1, 0, n_layers)
    for site in sites:
        if site in family.found:
            yield from (_found_point(model, site, layer, at, hidden) for layer, at in family.found[site].items()
                        if stage.has(site, layer))
            continue
        places = family.block if SITES[site].per_layer else family.model
        roots = list(enumerate(blocks)) if SITES[site].per_layer else [(0, model)]
        points = [] if (place := places.get(site)) is None else [
            _point(site, layer, module, place, hidden)
            for layer, root in roots if stage.has(site, layer) and (module := _module(root, place)) is not None
        ]
        if not points:
            why = f" ({reason})" if (reason := family.refused.get(site) or _hidden(place, roots)) else ""
            raise StartError(f"vllm-tap: cannot arm {site} on {', '.join(names)}{why}; this model offers: "
                             f"{', '.join(_offered(family, model, blocks))}")
        yield from points


def every_point(model: nn.Module, family: Family, hidden: int, stage: Stage | None = None) -> Iterator[TapPoint]:
    """Every (site, layer) that a family has in a loaded model, as far as a pipeline's ``stage`` has it."""
    blocks = _part(model, family.layers)
    stage = stage or Stage(0, 1, 0, len(blocks))
    for site, places in family.found.items():
        for layer, at in places.items():
            if stage.has(site, layer):
                yield _found_point(model, site, layer, at, hidden)
    for layer, block in enumerate(blocks):
        for site, place in family.block.items():
            if stage.has(site, layer) and (module := _module(block, place)) is not None:
                yield _point(site, layer, module, place, hidden)
    for site, place in family.model.items():
        if stage.has(site) and (module := _part(model, place.path)) is not None:
            yield _point(site, 0, module, place, hidden)


def has_blocks(model: nn.Module, family: Family) -> bool:
    """Whether a model's blocks are where its family has them."""
    return _part(model, family.layers) is not None


def find_adding(model: nn.Module, family: Family) -> dict[int, nn.Module]:
    """The norms that add what a block returns, hidden to the residual, by the layer of the block that is given the sum;
    behind the last block it is the final norm. Not of the first block, which gets no residual.
    """
    after = family.block.get("resid_mid")
    if after is None or after.rule != "second":
        return {layer: norm for layer, path in family.adding.items() if (norm := _part(model, path)) is not None}
    norms = [getattr(block, "input_layernorm", None) for block in _part(model, family.layers)]
    return {layer: norm for layer, norm in enumerate([*norms, _part(model, family.model["final_norm"].path)])
            if layer > 0 and norm is not None}


def find_carried(model: nn.Module, family: Family, adding: Mapping[int, nn.Module], points: Iterable[TapPoint]
                 ) -> Iterator[tuple[tuple[nn.Module, nn.Module], TapPoint]]:
    """The norms of every block that carries (hidden, residual), with a point that has the stream as the block gets it.

    The first of the two is ``adding`` (as of ``find_adding``), the second is handed the stream.
    """
    after = family.block.get("resid_mid")
    streams = {point.layer + 1: point for point in points if point.site == "resid_post"} | {
        point.layer: point for point in points if point.site == "resid_pre"}
    for layer, block in enumerate(_part(model, family.layers)):
        if layer in streams and layer in adding and after and (norm := _part(block, after.path)) is not None:
            yield (adding[layer], norm), streams[layer]


def find_sums(family: Family, layers: Mapping[str, Sequence[int]]) -> list[Sum]:
    """The sums that the staged rows must fulfil, of the sites that have ``layers``."""
    terms: dict[str, tuple[tuple[str, ...], ...]] = {
        "resid_mid": (("resid_pre", "attn_out"),),
        "resid_post": (("resid_mid", "mlp_out"), ("resid_pre", "attn_out", "mlp_out")),
    } if family.sums else {}
    found = [Sum((total, layer), tuple((site, layer) for site in sites))
             for total, ways in terms.items() for sites in ways for layer in layers.get(total, ())
             if all(layer in layers.get(site, ()) for site in sites)]
    return found + [Sum(("resid_pre", layer), (("resid_post", layer - 1),)) for layer in layers.get("resid_pre", ())
                    if layer - 1 in layers.get("resid_post", ())]


def find_embedding(model: nn.Module, family: Family, sites: tuple[str, ...]) -> Embedding | None:
    """The embedding to hold the first rows of armed sites against; None where no armed site has such rows."""
    from torch import nn

    held = tuple(site for site in family.embedded if site in sites)
    if not held:
        return None
    embedding = _part(model, family.embedding)
    if not isinstance(embedding, nn.Module):
        raise StartError(f"vllm-tap: looked for the embedding table at {family.embedding}, not found; use a vLLM "
                         "version that is tested")
    return Embedding(family.embedding, embedding, held)


def is_known(names: Sequence[str]) -> bool:
    """Whether one of a model's architectures is in the table."""
    return any(name in ARCHITECTURES for name in names)


def family_of(names: Sequence[str], config: object) -> Family:
    """Family of the first known of a model's architectures, less what ``config`` (vLLM's, or config.json's) takes away.
    StartError where none is known, or where no site of the model would be what its name says.
    """
    family = next((ARCHITECTURES[name] for name in names if name in ARCHITECTURES), None)
    if family is None:
        raise StartError(f"vllm-tap: no tap is known for the architecture {', '.join(names)}; "
                         f"known: {', '.join(ARCHITECTURES)}")
    switches = turned(names, config)
    if switches.model:
        raise StartError(f"vllm-tap: {', '.join(names)} with {switches.model}; such a model cannot be tapped")
    block, model = ({site: place for site, place in places.items() if site not in switches.sites}
                    for places in (family.block, family.model))
    return replace(family, block=block, model=model, refused=switches.sites, sums=switches.sums)


# Hugging Face's modules of these return the stream, with what they made added; TransformerLens's hooks have that.
_ADDED_INSIDE: Final = frozenset({"BloomForCausalLM"})


def found_names(architectures: Sequence[str], found: Mapping[str, str]) -> dict[str, str]:
    """``Family.names`` of a model in no table, without those that TransformerLens gives other tensors there."""
    return {name: site for name, site in found.items()
            if name == "hook_embed" or _ADDED_INSIDE.isdisjoint(architectures)}


def lens_names(names: Sequence[str]) -> Mapping[str, str]:
    """``Family.names`` of a model's architectures; none where nothing is known of them."""
    return next((ARCHITECTURES[name].names for name in names if name in ARCHITECTURES), {})


def _offered(family: Family, model: nn.Module, blocks: nn.ModuleList) -> list[str]:
    return [site for site, place in family.block.items() if any(_module(b, place) is not None for b in blocks)] + [
        site for site, place in family.model.items() if _part(model, place.path) is not None] + list(family.found)


def _found_point(model: nn.Module, site: str, layer: int, at: ModulePath, hidden: int) -> TapPoint:
    module = _part(model, at.path)
    return TapPoint(site, layer, module, at.rule, at.width or hidden, f"{at.meaning} (found by structure)",
                    _ids(module, at.rule), source="structure")


def _point(site: str, layer: int, module: Any, place: ModulePath, hidden: int) -> TapPoint:
    return TapPoint(site, layer, module, place.rule, _width(module, place.rule, hidden), place.meaning,
                    _ids(module, place.rule))


def _module(root: nn.Module, place: ModulePath) -> Any:
    """The module of a place; None where this model has nothing there, or it is a router that is never called."""
    return None if place.rule == "choice" and _chooses_inside(root, place.path) else _part(root, place.path)


def _ids(module: Any, rule: str) -> int:
    """The number of different ids that a row may hold, where it holds ids."""
    return int(module.global_num_experts) if rule == "choice" else 0


def _hidden(place: ModulePath | None, roots: Iterable[tuple[int, nn.Module]]) -> str:
    """Why a place that a family has is not in these parts of a model; "" where they have nothing like it."""
    return CHOSEN_INSIDE if place is not None and any(
        _part(root, place.path) is not None and _module(root, place) is None for _, root in roots) else ""


def _chooses_inside(root: nn.Module, router: str) -> bool:
    """Whether the expert kernel gets router logits and chooses by itself, so that the router is never called."""
    experts = _part(root, router.rpartition(".")[0])
    return experts is not None and bool(experts.routed_experts.quant_method.is_monolithic)


def _part(module: nn.Module, path: str) -> Any:
    """The module at a dotted path, None where this model has nothing there."""
    found: Any = module
    for name in path.split(".") if path else ():
        found = getattr(found, name, None) or getattr(of_model(found), name, None)
    return found


def of_model(module: Any) -> Any:
    """The model's own layer where ``module`` is what vLLM put around it for adapters, else ``module``."""
    return getattr(module, "base_layer", module)


def _width(module: Any, rule: str, hidden: int) -> int:
    """Numbers in a row, from the module itself; vLLM's parallel layers know their own share."""
    module = of_model(module)
    if rule == "choice":
        return int(module.top_k)
    if rule in ("q", "query"):
        return int(module.num_heads * module.head_size)
    if rule in ("k", "v", "key"):
        return int(module.num_kv_heads * module.head_size)
    if rule in ("argument", "operand"):
        return int(getattr(module, "input_size_per_partition", getattr(module, "in_features", hidden)))
    if rule == "result":
        own = (getattr(module, name, None) for name in ("embedding_dim", "output_size", "out_features"))
        return int(next((width for width in own if width is not None), hidden))
    return hidden
