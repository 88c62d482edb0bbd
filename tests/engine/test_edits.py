"""Edited requests against Hugging Face with hooks: every operation, beside requests that are not edited."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from schemas.errors import SpecError, StartError
from schemas.read.reader import StoreReader
from tests.support.engines.engines import ON_GPU, Captured, Engine, in_this_process, prompt, refused_start, start
from tests.support.models.reference import Edit, Reference
from vllm_tap.tiny_model import HIDDEN

pytestmark = [pytest.mark.timeout(300), pytest.mark.skipif(ON_GPU, reason="held against float32")]

FAMILIES = ["qwen3", "gemma3", "opt"] if os.environ.get("TAP_FAMILIES") != "all" else [
    "llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3", "mixtral", "qwen3_moe", "opt", "gpt_neox"]
NUMBERS = np.random.default_rng(3)
SITES = ("resid_post", "attn_out", "mlp_out", "mlp_post", "z")


def armed(family: str) -> str:
    """What is armed for edits: of a mixture no mlp_post."""
    return "resid_post,attn_out.1,mlp_out.2,z.1" + ("" if family in ("mixtral", "qwen3_moe") else ",mlp_post.2")


def started(reader: StoreReader, reference: Any, family: str, edit: str, **options: Any) -> Engine:
    """An engine that is armed to edit."""
    os.environ["VLLM_TAP_EDIT"] = edit
    try:
        return start(reader, reference, family, max_num_batched_tokens=48, **options)
    finally:
        del os.environ["VLLM_TAP_EDIT"]


@pytest.fixture(scope="module", params=FAMILIES)
def engine(request: pytest.FixtureRequest, reader: StoreReader, reference_of: Callable[[str], Reference],
           tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    save_file({"vector": vector(HIDDEN, 11)}, path := tmp_path_factory.mktemp("vectors") / "tone.safetensors")
    os.environ["VLLM_TAP_VECTORS"] = f"tone={path}"
    try:
        made = started(reader, reference_of(request.param), request.param, armed(request.param),
                       enable_prefix_caching=True)
    finally:
        del os.environ["VLLM_TAP_VECTORS"]
    yield made
    made.close()


def vector(width: int, seed: int, size: float = 1.0) -> Any:
    """A vector of chance."""
    return (np.random.default_rng(seed).standard_normal(width) * size).astype(np.float32)


def run(engine: Engine, prompts: Sequence[Sequence[int]], edits: Sequence[Any], capture: bool = True, n_tokens: int = 6,
        **more: Any) -> list[Any]:
    """Generate all at once, each with its edits (None: none); raw captures of all that the engine has tapped."""
    from schemas.ids import new_ulid
    from vllm import SamplingParams

    ids = [new_ulid() for _ in prompts]
    params = [SamplingParams(temperature=0.0, max_tokens=n_tokens, ignore_eos=True, logprobs=0, extra_args={
        **({"capture": {"codec": "raw", "id": id_, "prefix_cache": "allow"}} if capture else {}),
        **({} if edit is None else {"edit": edit})}, **more) for id_, edit in zip(ids, edits, strict=True)]
    outputs = engine.llm.generate([{"prompt_token_ids": list(p)} for p in prompts], params, use_tqdm=False)
    return [engine.captured(id_, output) if capture else output for id_, output in zip(ids, outputs, strict=True)]


def moved(edits: Sequence[dict[str, Any]], prompt_len: int, named: Any = None) -> dict[tuple[str, int], list[Edit]]:
    """The edits of a request as functions of a reference's rows: written from the documentation, not from the code."""
    found: dict[tuple[str, int], list[Edit]] = {}

    def edit_of(spec: dict[str, Any]) -> Edit:
        given = spec.get("vector")
        v = torch.tensor(named if isinstance(given, str) else given) if given is not None else torch.zeros(1)

        def change(rows: torch.Tensor) -> torch.Tensor:
            unit = v / v.norm()
            along = rows @ unit if spec["op"] in ("ablate", "cap") else torch.zeros(len(rows))
            new = {
                "add": lambda: rows + spec.get("scale", 1) * v,
                "scale": lambda: rows * spec["by"],
                "set": lambda: v.expand_as(rows),
                "ablate": lambda: rows - along[:, None] * unit,
                "cap": lambda: rows + (along.clamp(spec.get("low"), spec.get("high")) - along)[:, None] * unit,
            }[spec["op"]]()
            at, where = torch.arange(len(rows)), spec.get("positions", "all")
            if isinstance(where, str):
                here = {"all": at >= 0, "prompt": at < prompt_len, "generated": at >= prompt_len}[where]
            else:
                here = sum(((at >= a) & (at < b) for a, b in where), torch.zeros(len(rows), dtype=torch.bool))
            return torch.where(here[:, None], new, rows)

        return change

    for spec in edits:
        site, _, layer = spec["site"].partition(".")
        for number in [int(layer)] if layer else spec["layers"]:
            found.setdefault((site, number), []).append(edit_of(spec))
    return found


def check(engine: Engine, captured: Captured, edits: Sequence[dict[str, Any]] | None) -> None:
    """A capture's rows and log-probabilities against those of Hugging Face with the same edits."""
    rows, chances = engine.reference.edited(captured.tokens[:-1], moved(edits or (), captured.prompt_len,
                                                                         vector(HIDDEN, 11)))  # type: ignore[union-attr]
    for entry in captured.manifest.rows:
        assert entry.captured, entry
        found = engine.reader.slice(captured.id, entry.site, [entry.layer])
        right = rows[entry.site, entry.layer][found.positions]
        off = np.linalg.norm(found.values()[0] - right, axis=1) / np.linalg.norm(right, axis=1).clip(1e-6)
        assert off.max() < 1e-5, f"{entry.site}.{entry.layer} is off by {off.max()}"
    for number, each in enumerate(captured.output.outputs[0].logprobs):
        token = captured.tokens[captured.prompt_len + number]
        right = chances[captured.prompt_len - 1 + number]
        assert abs(each[token].logprob - right[token]) < 2e-5 * np.abs(right).max()
        assert right[token] >= right.max() - 1e-4


def operations(engine: Engine) -> list[list[dict[str, Any]]]:
    """One request's edits each: every operation, every site, several in a row, by position."""
    widths = engine.llm.llm_engine.input_processor.vllm_tap_arms.widths
    v = {site: vector(width, number).tolist() for number, (site, width) in enumerate(widths.items())}
    found: list[list[dict[str, Any]]] = [
        [{"site": "resid_post.1", "op": "add", "vector": v["resid_post"], "scale": 2.5}],
        [{"site": "resid_post", "layers": [0, 2], "op": "scale", "by": 0.5, "positions": "generated"}],
        [{"site": "resid_post.2", "op": "ablate", "vector": "tone"}],
        [{"site": "resid_post.1", "op": "cap", "vector": v["resid_post"], "low": -0.1, "high": 0.05}],
        [{"site": "resid_post.1", "op": "set", "vector": v["resid_post"], "positions": [[3, 5], [60, 61]]}],
        [{"site": "resid_post.1", "op": "add", "vector": "tone", "positions": "prompt"},
         {"site": "resid_post.1", "op": "scale", "by": -1, "positions": [[2, 70]]}],
        [{"site": "attn_out.1", "op": "scale", "by": 0}, {"site": "mlp_out.2", "op": "add", "vector": v["mlp_out"]}],
        [{"site": "z.1", "op": "scale", "by": 0, "positions": "generated"}],
    ]
    if "mlp_post" in widths:
        found.append([{"site": "mlp_post.2", "op": "ablate", "vector": v["mlp_post"]},
                      {"site": "mlp_post.2", "op": "add", "vector": v["mlp_post"], "scale": 0.25}])
    return found


def test_every_operation_beside_requests_without_one(engine: Engine) -> None:
    """Prompts of 70 tokens in chunks of 48, so that edits cross the edges of chunks."""
    edits: list[Any] = [None, *operations(engine), None]
    prompts = [prompt(70, seed=90)] * len(edits)
    alone = run(engine, prompts[:1], [None])[0]
    for captured, edit in zip(run(engine, prompts, edits), edits, strict=True):
        check(engine, captured, edit)
        if edit is None:
            assert captured.tokens == alone.tokens
    again = run(engine, prompts[:1], [None])[0]
    assert again.tokens == alone.tokens  # and nothing of what was edited is read from the prefix cache


def test_a_set_row_is_that_row(engine: Engine) -> None:
    given = vector(engine.llm.llm_engine.input_processor.vllm_tap_arms.widths["resid_post"], 77)
    captured, = run(engine, [prompt(20, seed=4)], [[
        {"site": "resid_post.1", "op": "set", "vector": given.tolist(), "positions": [4, 21]}]])
    found = engine.reader.slice(captured.id, "resid_post", [1])
    assert np.array_equal(found.values()[0][[4, 21]], np.stack([given, given]))


def test_neighbours_have_the_same_bits(engine: Engine) -> None:
    """The same batch with and without edits of the others."""
    prompts = [prompt(25 + number, seed=200 + number) for number in range(4)]
    edits = [None, operations(engine)[0], None, operations(engine)[2]]
    with_edits = run(engine, prompts, edits)
    salted = [list(reversed(each)) for each in prompts]  # so that nothing is cached in one of the two
    plain = run(engine, salted, [None] * 4)
    beside = run(engine, salted, edits)
    for number in (0, 2):
        assert beside[number].tokens == plain[number].tokens
        for entry in plain[number].manifest.rows:
            one, other = (engine.reader.slice(each[number].id, entry.site, [entry.layer]) for each in (plain, beside))
            there = np.isin(one.positions, other.positions)
            assert there.any() and np.array_equal(one.values()[0][there], other.values()[0])
    assert with_edits[1].tokens[:26] == tuple(prompts[1])
