"""Sites by structure, on models made for it: every way in which blocks carry a stream, and every way to be wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from engine_side.discovery.discover import ROWS, Crossing, Discovery, Shape
from engine_side.discovery.identities import ROUNDINGS
from engine_side.discovery.joined import Part, joined
from engine_side.discovery.nudge import Nudge
from engine_side.discovery.parts import Roles
from engine_side.tap.architectures import Family, every_point, find_points
from engine_side.tap.stages import Stage
from engine_side.tap.taps import Call, rule_of
from schemas.errors import StartError

WIDTH, LAYERS, VOCABULARY = 32, 3, 64
IDS = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(1))[:ROWS]


class Kernel(nn.Module):
    """Attention without a cache: it hands on memory as it was."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return torch.full_like(query, float("nan"))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj, self.kernel, self.out = nn.Linear(WIDTH, 48), Kernel(), nn.Linear(16, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.last = self.out(self.kernel(*self.proj(hidden).split(16, dim=-1)))
        return self.last


class Mixer(nn.Module):
    """A mixer without a cache: what its kernel would write stays zero. ``kind`` says where it makes rows."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.into, self.steps = kind, nn.Linear(WIDTH, 40), nn.Linear(WIDTH, 4)
        self.out = nn.Linear(16, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.kind != "hidden mixer":
            return self.mix(hidden)
        made = torch.empty_like(hidden)
        RUNNING.append(self)
        torch.ops.tap_played.mix(hidden, made)
        return made

    def mix(self, hidden: torch.Tensor) -> torch.Tensor:
        made = self.into(hidden / 2 if self.kind == "scaling mixer" else hidden)
        if self.kind == "mixer of two":
            made = made * self.steps(hidden).mean()
        result: torch.Tensor = self.out(made[:, :16] * torch.zeros_like(made[:, :16]))
        return result * 2 if self.kind == "scaled mixer" else result


RUNNING: list[Mixer] = []


@torch.library.custom_op("tap_played::mix", mutates_args=("made",))
def mix(hidden: torch.Tensor, made: torch.Tensor) -> None:
    made.copy_(RUNNING.pop().mix(hidden))


class Mlp(nn.Module):
    def __init__(self, scale: float = 1) -> None:
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH), scale

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(hidden))) * self.scale  # type: ignore[no-any-return]


class WritingMlp(Mlp):
    """One that returns nothing."""

    def forward(self, hidden: torch.Tensor, output: torch.Tensor) -> None:  # type: ignore[override]
        output.copy_(super().forward(hidden))


class Norm(nn.Module):
    """With a residual it adds first, in place, and returns both, as fused ones do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(WIDTH))

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is not None:
            residual += hidden
            hidden = residual
        normed = hidden / hidden.norm(dim=-1, keepdim=True) * self.weight
        return normed if residual is None else (normed, residual)


class Block(nn.Module):
    """Parts of which every kind of block is made."""

    def __init__(self, kind: str, layer: int) -> None:
        super().__init__()
        self.kind, self.layer = kind, layer
        self.norm1, self.norm2 = Norm(), Norm()
        self.attention = Mixer(kind) if "mixer" in kind and not (kind == "mixers" and layer == 1) else Attention()
        small = {"tiny": 1e-7, "small": 3e-4, "small once": 1e-7 if layer == 1 else 1.0}
        self.mlp = WritingMlp() if kind == "writes" else Mlp(small.get(kind, 1))
        self.post1, self.post2, self.mlp2 = Norm(), Norm(), Mlp()
        if kind == "kinds":
            delattr(self, "mlp" if layer == 0 else "attention")

    def forward(self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        attention, mlp = getattr(self, "attention", None), getattr(self, "mlp", None)
        match self.kind:
            case "pair":
                residual, hidden = (hidden.clone(), self.norm1(hidden)) if residual is None else \
                    self.norm1(hidden, residual)[::-1]
                hidden, residual = self.norm2(attention(hidden), residual)
                return mlp(hidden), residual
            case "fused sandwich":
                residual, hidden = (hidden.clone(), self.norm1(hidden)) if residual is None else \
                    self.norm1(hidden, residual)[::-1]
                hidden, residual = self.norm2(self.post1(attention(hidden)), residual)
                return self.post2(mlp(hidden)), residual
            case "stale":
                mid = hidden + attention(self.norm1(hidden))
                return mid + mlp(self.norm2(mid)), mid
            case "sandwich":
                mid = hidden + self.post1(attention(self.norm1(hidden)))
                return mid + self.post2(mlp(self.norm2(mid)))
            case "post-norm":
                mid = hidden + self.post1(attention(hidden))
                return mid + self.post2(mlp(mid))
            case "parallel":
                normed = self.norm1(hidden)
                return hidden + attention(normed) + mlp(normed)
            case "granite" | "unnamed factor":
                factor = 0.22 if self.kind == "granite" else 0.31
                mid = hidden + factor * attention(self.norm1(hidden))
                return mid + factor * mlp(self.norm2(mid))
            case "writes":
                mid = hidden + attention(self.norm1(hidden))
                made = torch.empty_like(mid)
                mlp(self.norm2(mid), output=made)
                return mid + made
            case "share":
                mid = hidden + attention(self.norm1(hidden))
                normed = self.norm2(mid)
                return mid + mlp(normed + self.post1(normed[: ROWS // 2]).mean())
            case "kinds":  # attention in the first block, an MLP in the others
                return hidden + (mlp if self.layer else attention)(self.norm1(hidden))
            case "two":
                mid = hidden + attention(self.norm1(hidden))
                normed = self.norm2(mid)
                return mid + mlp(normed) + self.mlp2(normed)
            case "norms after":  # as opt-350m
                mid = self.norm1(hidden + attention(hidden))
                return self.norm2(mid + mlp(mid))
            case "scaled stream":
                mid = hidden + attention(self.norm1(hidden))
                return 0.5 * (mid + mlp(self.norm2(mid)))
            case "copy":  # what the module returned is not what the model goes on with
                attention(self.norm1(hidden))
                mid = hidden + attention.last
                return mid + mlp(self.norm2(mid))
            case "copied stream":
                mid = hidden + attention(self.norm1(hidden))
                self.last = mid + mlp(self.norm2(mid))
                return self.last
            case "hyper-connections":  # [tokens, streams, width]: read as a mix of them, written to each
                for norm, part in ((self.norm1, attention), (self.norm2, mlp)):
                    hidden = hidden + part(norm(hidden.mean(dim=1))).unsqueeze(1) * torch.tensor([[1.0], [0.5]])
                return hidden
            case "stack":  # [streams, tokens, width], as Gemma 3n
                made = hidden[0] + attention(self.norm1(hidden[0]))
                return torch.stack([made + mlp(self.norm2(made)), 0.9 * hidden[1] + 0.1 * made])
            case "no module":
                mid = hidden + attention(self.norm1(hidden))
                return mid + mlp(self.norm2(mid)) + torch.sin(mid)
            case "nearly":
                mid = hidden + attention(self.norm1(hidden))
                return mid + mlp(self.norm2(mid)) + 3e-6 * torch.sin(mid)
            case _:
                mid = hidden + attention(self.norm1(hidden))
                return mid + mlp(self.norm2(mid))


class Model(nn.Module):
    """Embedding, blocks and a norm, put together as ``kind`` says."""

    def __init__(self, kind: str, layers: int = LAYERS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.embed, self.position = kind, nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(ROWS, WIDTH)
        self.layers = nn.ModuleList(Block(kind, layer) for layer in range(layers))
        self.norm = Norm()
        if kind == "two lists":
            self.others = nn.ModuleList(Block(kind, layer) for layer in range(LAYERS))
        if kind == "fused sandwich":  # a norm of the first block's sum is the sum: its rows have that length already
            self.embed.weight.data *= 1e-6
            for norm in (module for module in self.modules() if isinstance(module, Norm)):
                norm.weight.data.fill_(1)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden, residual = self.embed(input_ids), None
        if self.kind == "positions":
            hidden = hidden + self.position(positions)
        if self.kind == "scaled embeddings":
            hidden = 4 * hidden
        if self.kind in ("hyper-connections", "stack"):
            hidden = torch.stack([hidden, 0.5 * hidden], dim=0 if self.kind == "stack" else 1)
        order = [2, 0, 1] if self.kind == "other order" else [0, 1, 1, 2] if self.kind == "twice" else range(LAYERS)
        for layer in order:
            if self.kind in ("pair", "fused sandwich"):
                hidden, residual = self.layers[layer](positions, hidden, residual)
            else:
                hidden = self.layers[layer](positions, hidden)
            if self.kind == "copied stream":
                hidden = self.layers[layer].last
            if self.kind == "stale":
                hidden, _ = hidden
            if self.kind in ("between blocks", "nearly"):
                hidden = hidden + (0.1 if self.kind == "between blocks" else 1e-6) * torch.cos(hidden)
        if self.kind in ("pair", "fused sandwich"):
            return self.norm(hidden, residual)[0]  # type: ignore[no-any-return]
        if self.kind in ("hyper-connections", "stack"):
            hidden = hidden.mean(dim=0 if self.kind == "stack" else 1)
        if self.kind == "norm of another":
            hidden = 2 * hidden + 1
        return hidden if self.kind == "no norm" else self.norm(hidden)


class Staged(Model):
    """The blocks of one stage: it is handed tensors in the place of tokens, and hands on such."""

    def __init__(self, kind: str, layers: int, stage: Stage) -> None:
        super().__init__(kind, layers)
        self.stage = stage
        for layer in range(layers):
            if not stage.has("resid_post", layer):
                self.layers[layer] = nn.Identity()

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor,  # type: ignore[override]
                handed: dict[str, torch.Tensor] | None = None) -> Any:
        hidden, residual = (self.embed(input_ids), None) if handed is None else (handed["hidden"], handed["residual"])
        for layer in range(self.stage.start, self.stage.stop):
            if self.kind == "pair":
                hidden, residual = self.layers[layer](positions, hidden, residual)
            else:
                hidden = self.layers[layer](positions, hidden)
            if self.kind == "stale":
                hidden, residual = hidden
        if not self.stage.last:
            if self.kind == "changed on its way":
                hidden = 1.1 * hidden
            return {"hidden": hidden, "residual": torch.zeros(()) if residual is None else residual}
        if self.kind == "no norm":
            return hidden
        return self.norm(hidden, residual)[0] if self.kind == "pair" else self.norm(hidden)


ROLES = Roles(lambda module: isinstance(module, Kernel | Mixer), lambda module: isinstance(module, nn.Linear))


def find(model: Model, factors: tuple[float, ...] = (0.22, 6.0)) -> Family:
    noise = torch.Generator().manual_seed(2)
    search = Discovery(model, Shape(LAYERS, WIDTH, torch.float32, factors), IDS, ROLES)
    with torch.inference_mode():
        with search.recorded(lambda rows: rows.copy_(torch.randn(rows.shape, generator=noise))) as outside:
            model(IDS, torch.arange(ROWS))
        return joined([search.found(outside)])


def found_on(kind: str, stages: Sequence[Stage], layers: int) -> list[Part]:
    """What each stage finds of a model, with noise in the place of what it is handed."""
    parts = []
    for stage in stages:
        noise, model = torch.Generator().manual_seed(2), Staged(kind, layers, stage)
        search = Discovery(model, Shape(layers, WIDTH, torch.float32, (0.22, 6.0), stage=stage), IDS, ROLES)
        came = {} if stage.first else {name: torch.randn(ROWS, WIDTH, generator=noise)
                                       for name in ("hidden", "residual")}
        with torch.inference_mode():
            with search.recorded(lambda rows, noise=noise: rows.copy_(  # type: ignore[misc]
                    torch.randn(rows.shape, generator=noise))) as outside:
                left = model(IDS, torch.arange(ROWS), {name: rows.clone() for name, rows in came.items()} or None)
            parts.append(search.found(outside, Crossing(came, {} if stage.last else left)))
    return parts


def stages_of(*starts: int) -> list[Stage]:
    """Stages that begin at such blocks; the last number is how many blocks there are."""
    return [Stage(number, len(starts) - 1, start, stop) for number, (start, stop) in enumerate(pairwise(starts))]


HEADS = {"q", "k", "v", "q_rot", "k_rot", "z"}
EVERY = {"resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "mlp_post", "embed", "final_norm", *HEADS}


@pytest.mark.parametrize(("kind", "sites"), [
    ("pair", EVERY),
    ("single", EVERY),
    ("stale", EVERY),
    ("sandwich", EVERY | {"attn_out_raw", "mlp_out_raw"}),
    ("fused sandwich", EVERY | {"attn_out_raw", "mlp_out_raw"}),
    ("post-norm", EVERY | {"attn_out_raw", "mlp_out_raw"}),
    ("parallel", EVERY - {"resid_mid"}),
    ("granite", EVERY),
    ("writes", EVERY),
    ("share", EVERY),  # rows of some of the tokens, as of a rank, are not the step's
    ("positions", EVERY),
    ("scaled embeddings", EVERY),
    ("kinds", EVERY - {"resid_mid"}),
    ("two", EVERY - {"mlp_out", "mlp_post"}),
    ("unnamed factor", EVERY - {"attn_out", "mlp_out"}),
    ("tiny", EVERY - {"resid_mid", "mlp_out", "mlp_post"}),  # an MLP that adds nothing
    ("mixer", EVERY - HEADS | {"mix_in", "mix_post"}),
    ("mixers", EVERY | {"mix_in", "mix_post"}),  # and attention in one layer
    ("mixer of two", EVERY - HEADS | {"mix_in", "mix_steps", "mix_post"}),
    ("hidden mixer", EVERY - HEADS),
    ("scaling mixer", EVERY - HEADS | {"mix_post"}),
    ("scaled mixer", EVERY - HEADS | {"mix_in"}),
])
def test_sites_are_found_and_their_rules_take_the_right_rows(kind: str, sites: set[str]) -> None:
    """Each place, read by the rule that a tap would use, in a step of its own, against the sums that define it."""
    model = Model(kind)
    family = find(model)
    assert set(family.found) == sites
    proven = [(proof.site, proof.layer) for proof in family.proofs]
    assert sorted(proven) == sorted((site, layer) for site, places in family.found.items() for layer in places)
    assert all(proof.off is None or proof.off < 1e-6 for proof in family.proofs)
    assert ("resid_pre" in family.embedded) is (kind not in ("positions", "scaled embeddings"))
    assert not any("forward" in vars(module) for module in model.modules())  # all is as it was
    assert family.adding == ({1: "layers.1.norm1", 2: "layers.2.norm1", 3: "norm"} if kind in ("pair", "fused sandwich")
                             else {})
    rows = taken(model, family)
    for layer in range(LAYERS):
        held = {site: value for (site, at), value in rows.items() if at == layer}
        if {"attn_out", "mlp_out"} <= set(family.found):
            added = sum(held.get(site, torch.zeros(())) for site in ("attn_out", "mlp_out"))
            torch.testing.assert_close(held["resid_pre"] + added, held["resid_post"])
        if "resid_mid" in held and "attn_out" in held:
            torch.testing.assert_close(held["resid_pre"] + held["attn_out"], held["resid_mid"])
        if layer:
            torch.testing.assert_close(held["resid_pre"], rows["resid_post", layer - 1])
    torch.testing.assert_close(rows["final_norm", 0], model.norm(rows["resid_post", LAYERS - 1]))
    torch.testing.assert_close(rows["embed", 0], model.embed.weight[IDS])


@pytest.mark.parametrize(("kind", "reasons"), [
    ("mixer", {"mix_steps": "one projection makes all that the mixer makes of a token: mix_in",
               "q": "a mixer has none"}),
    ("hidden mixer", dict.fromkeys(("mix_in", "mix_steps", "mix_post"),
                                   "vLLM computes this mixer in one operation, with its projections")),
    ("scaling mixer", dict.fromkeys(("mix_in", "mix_steps"), "the mixer has 0 projections of what it gets")),
    ("scaled mixer", {"mix_post": "0 projections make what the mixer returns"}),
])
def test_ends_of_a_mixer_that_are_not_there_are_refused_with_the_reason(kind: str, reasons: dict[str, str]) -> None:
    refused = find(Model(kind)).refused
    assert {site: refused[site] for site in reasons} == reasons


def test_ends_of_a_mixer_are_its_rows() -> None:
    model = Model("mixer of two")
    rows = taken(model, find(model))
    for layer, block in enumerate(model.layers):
        given, mixer = block.norm1(rows["resid_pre", layer]), block.attention
        torch.testing.assert_close(rows["mix_in", layer], mixer.into(given))
        torch.testing.assert_close(rows["mix_steps", layer], mixer.steps(given))
        assert rows["mix_post", layer].shape == (ROWS, 16) and not rows["mix_post", layer].any()


def taken(model: Model, family: Family) -> dict[tuple[str, int], torch.Tensor]:
    """Rows of every place in a step, by the rules of taps."""
    rows: dict[tuple[str, int], torch.Tensor] = {}
    for site, places in family.found.items():
        for layer, place in places.items():
            _watch(model.get_submodule(place.path), place.rule,
                   lambda made, key=(site, layer): rows.update({key: made.clone()}))
    torch.manual_seed(3)
    for kernel in (module for module in model.modules() if isinstance(module, Kernel)):
        kernel.forward = lambda query, key, value: torch.randn_like(query)  # type: ignore[method-assign]
    with torch.no_grad():
        model(IDS, torch.arange(ROWS))
    return rows


def _watch(module: nn.Module, name: str, keep: Callable[[torch.Tensor], None]) -> None:
    rule, forward = rule_of(name), module.forward
    places = {name: number for number, name in enumerate(forward.__code__.co_varnames[1:])} if hasattr(
        forward, "__code__") else {}

    def watched(*args: Any, **kwargs: Any) -> Any:
        if rule.before:
            keep(rule.rows(Call(places, args, kwargs)))
        result = forward(*args, **kwargs)
        if not rule.before:
            keep(rule.rows(Call(places, args, kwargs)) if rule.written else rule.rows(module, result))
        return result

    module.forward = watched  # type: ignore[method-assign]


def test_a_proof_says_how_far_its_rows_are_off() -> None:
    """A stream that is not quite handed on, and blocks that add a little more than their parts make."""
    off: dict[str, list[float | None]] = {}
    for proof in find(Model("nearly")).proofs:
        if proof.site in (*HEADS, "mlp_post"):
            continue
        off.setdefault(proof.identity, []).append(proof.off)
    assert off.pop("the one module that is given the tokens alone") == [None]
    assert off.pop("resid_pre = embed") == [0.0]
    handed = off.pop("resid_pre = resid_post of the layer before")
    sums = off.pop("resid_post = resid_pre + attn_out + mlp_out")
    (norm,) = off.pop("final_norm = norm(resid_post.2)")
    assert len(handed) == LAYERS - 1 and len(sums) == 3 * LAYERS and set(off) == {"resid_mid = resid_pre + attn_out"}
    for number in (*handed, *sums, norm):
        assert number is not None and 2e-7 < number < 3e-6


@pytest.mark.parametrize(("kind", "identity"), [
    ("kinds", "resid_post = resid_pre + mlp_out"),
    ("two", "resid_post = resid_pre + attn_out + mlp + mlp2"),
    ("unnamed factor", "resid_post = resid_pre + 0.31·attention + 0.31·mlp"),
    ("granite", "resid_post = resid_pre + attn_out + mlp_out"),
    ("sandwich", "attn_out = norm(attn_out_raw)"),
])
def test_an_identity_names_sites_and_else_modules(kind: str, identity: str) -> None:
    assert identity in {proof.identity for proof in find(Model(kind)).proofs if proof.layer == 1}


@pytest.mark.parametrize(("kind", "why"), [
    ("norms after", "no sum of up to 3 .*: the nearest, attention .* mlp, differs by [0-9.]+e-01 of the stream"),
    ("scaled stream", "no sum of up to 3"),
    ("no module", "no sum of up to 3"),
    ("small", "(mlp is .* of the stream: too little to prove|can be explained in 2 ways)"),
    ("small once", "blocks 0 and 1 have the same modules, and differ in mlp_out, resid_mid"),
    ("between blocks", r"layers.1 does not receive .*nearest: result 0 and argument hidden, [0-9.]+e-02 apart\)"),
    ("hyper-connections", "several streams: layers.0 returns 2 rows of 32 numbers a token, and layers.1 is given as "),
    ("stack", "several streams: layers.0 returns 2 rows of 32 numbers a token, and layers.1 is given as many; no "),
    ("other order", "layers.2 ran in the place of layers.0"),
    ("twice", "layers.1 ran in the place of layers.2"),
    ("two lists", "looked for one list of 3 blocks with attention in them, found layers, others"),
    ("norm of another", "no norm after the last block .*: the nearest, norm, differs by [0-9.]+e-01"),
    ("no norm", "no norm after the last block"),
])
def test_what_is_no_stream_is_refused_with_its_reason(kind: str, why: str) -> None:
    with pytest.raises(StartError, match=f"the search for its sites failed: .*{why}"):
        find(Model(kind))


@pytest.mark.parametrize(("kind", "missing", "attention"), [
    ("pair", set(), "attn_out"), ("sandwich", set(), "attn_out_raw"), ("positions", set(), "attn_out"),
    ("granite", {"attn.hook_out", "mlp.hook_out"}, None), ("scaled embeddings", {"hook_embed"}, "attn_out"),
])
def test_a_transformer_lens_name_of_what_no_site_is_has_no_meaning(kind: str, missing: set[str], attention: str | None
                                                                   ) -> None:
    """There modules' results are before a factor, and embeddings behind one (make lens has held it)."""
    names = find(Model(kind)).names
    assert {"attn.hook_out", "mlp.hook_out", "hook_embed"} - names.keys() == missing
    assert names.get("attn.hook_out") == attention


@pytest.mark.parametrize("scale", [0, 1e-5])
def test_attention_that_adds_nothing_is_not_offered(scale: float) -> None:
    """A step that leaves zeros in its place would make the MLP all that a block adds, and the stream its own sum."""
    model = Model("single")
    for block in model.layers:
        block.attention.out.weight.data *= scale
        block.attention.out.bias.data *= scale
    assert set(find(model).found) == EVERY - {"attn_out", "resid_mid", "z"}


def test_a_site_that_was_not_found_is_refused_with_those_that_were() -> None:
    model = Model("parallel")
    with pytest.raises(StartError, match=r"cannot arm resid_mid on New.*offers: resid_pre, resid_post, attn_out"):
        list(find_points(model, find(model), ["New"], ("resid_mid",), LAYERS, WIDTH))


def test_an_unnamed_factor_is_said() -> None:
    family = find(Model("unnamed factor"))
    assert "it is added times 0.31, which the configuration does not name" in family.refused["attn_out"]
    assert find(Model("unnamed factor"), (0.31,)).refused == {}


def nudged(kind: str) -> list[str]:
    """What does not move as it must in a step of a model with noise in it."""
    model, draws = Model(kind), torch.Generator().manual_seed(4)
    family = find(model)
    for kernel in (module for module in model.modules() if isinstance(module, Kernel)):
        kernel.forward = lambda query, key, value: torch.randn(query.shape, generator=draws)  # type: ignore[method-assign]
    with torch.inference_mode(), Nudge(every_point(model, family, WIDTH), ROWS, draws) as nudge:
        model(IDS, torch.arange(ROWS))
    assert {site for site, _ in nudge.noise} == {"attn_out", "mlp_out", "resid_post"} & set(family.found)
    return list(nudge.wrong(family.sums, ROUNDINGS[torch.float32]))


@pytest.mark.parametrize("kind", ["pair", "single", "stale", "sandwich", "post-norm", "parallel", "granite", "writes",
                                  "kinds", "two", "unnamed factor"])
def test_the_stream_moves_with_what_is_added_to_it(kind: str) -> None:
    assert nudged(kind) == []


@pytest.mark.parametrize(("kind", "site"), [("copy", "resid_mid.0"), ("copied stream", "resid_pre.1")])
def test_a_model_that_goes_on_with_a_copy_is_seen(kind: str, site: str) -> None:
    assert nudged(kind)[0].startswith(f"{site} differs by")


@pytest.mark.parametrize("starts", [(0, 2, 4), (0, 3, 4), (0, 2, 3, 5)])  # a stage of one block, in the middle too
@pytest.mark.parametrize("kind", ["pair", "single", "stale", "sandwich", "post-norm", "parallel", "granite", "writes",
                                  "two", "tiny"])
def test_stages_find_together_what_one_process_finds(kind: str, starts: tuple[int, ...]) -> None:
    layers = starts[-1]
    whole = joined(found_on(kind, [Stage(0, 1, 0, layers)], layers))
    family = joined(found_on(kind, stages_of(*starts), layers))
    assert family.found == whole.found and family.names == whole.names and family.sums == whole.sums
    assert family.adding == whole.adding and len(family.adding) == (layers if kind == "pair" else 0)
    assert dict(family.refused) == dict(whole.refused) and family.embedded == whole.embedded
    places = [sorted((one.site, one.layer) for one in each.proofs) for each in (family, whole)]
    assert places[0] == places[1]
    assert {proof.layer for proof in family.proofs if proof.identity.endswith("the stage before hands on")} == \
        set(starts[1:-1])


@pytest.mark.parametrize(("kind", "starts", "why"), [
    ("single", (0, 1, 3), "with a single block.*VLLM_PP_LAYER_PARTITION"),
    ("changed on its way", (0, 2, 4), "the stage hands on no tensor, nor sum of two, that its last block returns: the "
                                      "nearest, tensor hidden, differs by 1.0e-01"),
    ("no norm", (0, 2, 4), "no norm after the last block"),
])
def test_stages_that_do_not_tell_are_refused(kind: str, starts: tuple[int, ...], why: str) -> None:
    with pytest.raises(StartError, match=f"the search for its sites failed: .*{why}"):
        joined(found_on(kind, stages_of(*starts), starts[-1]))


def test_stages_that_do_not_fit_are_refused() -> None:
    """What each finds by itself is right: parts of other models, and of the same in another order."""
    stages = stages_of(0, 2, 4)
    pair, single, two = (found_on(kind, stages, 4) for kind in ("pair", "single", "two"))
    with pytest.raises(StartError, match="blocks of stages 0 and 1 of the pipeline carry the stream differently"):
        joined([pair[0], single[1]])
    with pytest.raises(StartError, match=r"leaves as tensor hidden and arrives as tensors hidden . residual"):
        joined([single[0], replace(single[1], came="tensors hidden + residual")])
    with pytest.raises(StartError, match="blocks 0 and 2 have the same modules, and differ in mlp_out"):
        joined([single[0], replace(two[1], stream=single[1].stream)])
