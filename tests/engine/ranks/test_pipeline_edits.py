"""Edits on the two stages of a pipeline: in each, at the border between them, and beside requests that are not edited.

Every row is held against Hugging Face with hooks; what was done is counted by each stage, and put together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from vllm.distributed import get_tensor_model_parallel_rank

from schemas.errors import SpecError
from schemas.read.reader import StoreReader
from tests.engine.edits.test_edits import check, one, rows, run
from tests.support.engines.engines import DTYPE, ON_GPU, SHARED, Captured, Engine, in_this_process
from tests.support.models.common import COMMON
from tests.support.models.edited import vector
from tests.support.models.families import family_model
from tests.support.models.features import tokens
from tests.support.models.reference import Reference

pytestmark = [pytest.mark.timeout(600), pytest.mark.soak,
              pytest.mark.skipif(ON_GPU and torch.cuda.device_count() < 2, reason="one GPU cannot hold two ranks")]

FAMILY = "qwen3, two K/V heads"
LAYERS = 4
BORDER = 2  # the first layer of the second stage
HIDDEN = COMMON["hidden_size"]
EDIT = "resid_post,resid_pre.0,resid_pre.2,resid_mid.1,resid_mid.2,attn_out.1,mlp_out.2,mlp_post.3,q.2,v.0,z.1,z.3"
ARM = "resid_pre,resid_mid,resid_post,attn_out,mlp_out,mlp_post,q,v,z"


def staged(reader: StoreReader, stages: int, **more: Any) -> Engine:
    from vllm import LLM

    folder = family_model(FAMILY, DTYPE)
    with pytest.MonkeyPatch.context() as patch, in_this_process(not ON_GPU):  # but for the workers of stages
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        if stages == 2:
            patch.setenv("VLLM_PP_LAYER_PARTITION", f"{BORDER},{LAYERS - BORDER}")
        llm: Any = LLM(str(folder), **{
            "dtype": DTYPE, "skip_tokenizer_init": True, "max_model_len": 256, "max_num_seqs": 8, "seed": 0,
            "block_size": 32, "max_num_batched_tokens": 48, "pipeline_parallel_size": stages, **SHARED, **more})
    return Engine(llm, reader, Reference(folder))


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Edits in both stages, a vector called ``tone``, and functions that go to the workers."""
    save_file({"vector": vector(HIDDEN, 11)}, path := tmp_path_factory.mktemp("vectors") / "tone.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_TAP_VECTORS", f"tone={path}")
        patch.setenv("VLLM_TAP_EDIT_ROWS", "200")
        patch.setenv("VLLM_TAP_EDIT", EDIT)
        patch.setenv("VLLM_TAP_ARM", ARM)
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
        yield


@pytest.fixture(scope="module")
def alone(settings: None, reader: StoreReader) -> Iterator[list[Captured]]:
    """What the same engine with one stage makes of the requests."""
    made = staged(reader, 1)
    try:
        yield asked(made)
    finally:
        made.close()


@pytest.fixture(scope="module")
def engine(settings: None, alone: list[Captured], reader: StoreReader) -> Iterator[Engine]:
    """Two stages."""
    made = staged(reader, 2)
    yield made
    made.close()


def requests() -> list[list[dict[str, Any]] | None]:
    """The edits of each: one in a stage, in both, at the border, and none."""
    v = vector(HIDDEN, 8).tolist()
    return [
        None,
        one(site="resid_post.0", op="add", by=None, vector=v, scale=2.5),  # the first stage alone
        one(site="resid_post.3", op="ablate", by=None, vector="tone"),  # the second
        one(site="resid_post.1", by=0.5, positions="generated"),  # what travels
        one(site="resid_pre.2", op="add", by=None, vector="tone"),  # the same, as the next stage calls it
        [*one(site="resid_post.1", op="set", by=None, rows=rows(HIDDEN, 4), positions=[60, 7, 50, 6]),
         *one(site="resid_mid.2", op="cap", by=None, vector=v, low=-0.1, high=0.05)],
        [*one(site="resid_post", layers=[0, 1, 2, 3], op="add", by=None, vector="tone", positions=[[2, 71]]),
         *one(site="resid_pre.0", by=0.5, positions=[[3, 32]])],
        [*one(site="attn_out.1", by=0), *one(site="mlp_out.2", op="add", by=None, vector=v),
         *one(site="resid_mid.1", by=1.5)],
        [*one(site="z.1", heads=[2], by=0), *one(site="z.3", op="set", by=None, positions=[[7, 9]], heads=[3],
                                                   rows=rows(32, 2)), *one(site="q.2", by=0.5), *one(site="v.0", by=2)],
        one(site="mlp_post.3", by=0.25, positions="prompt"),
        None,
    ]


def asked(engine: Engine) -> list[Captured]:
    """All requests at once: more than run side by side, so that several batches of them are under way."""
    return run(engine, [tokens(70, seed=90 + number) for number in range(len(requests()))], requests(), most=8)


def test_edits_in_each_stage_and_at_the_border(engine: Engine, alone: Sequence[Captured]) -> None:
    """Prompts of 70 tokens in chunks of 48; two batches of different requests are under way at once."""
    engine.llm.collective_rpc(watch)
    held_against(engine, alone)
    for batches in engine.llm.collective_rpc(watched):
        turns = sum(not set(one) & set(other) for one, other in pairwise(batches))
        assert ON_GPU or turns > 4, "one batch followed the other, and no requests beside"


def held_against(engine: Engine, alone: Sequence[Captured]) -> None:
    """Rows, tokens and what is told of edits: of Hugging Face, and of one stage."""
    for edits, one_stage, captured in zip(requests(), alone, asked(engine), strict=True):
        check(engine, captured, edits)
        assert captured.manifest.status == "complete"
        assert ON_GPU or captured.tokens == one_stage.tokens
        assert captured.manifest.edits == one_stage.manifest.edits
        for row in one_stage.manifest.rows:
            found, right = (engine.reader.slice(each.id, row.site, [row.layer]) for each in (captured, one_stage))
            there = np.isin(right.positions, found.positions)
            assert ON_GPU or np.allclose(found.values()[0], right.values()[0][there], rtol=1e-4, atol=1e-4)


def edit_all(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Edits that every request from now on has, in both stages and at the border."""
    edits = [{"site": "resid_post.1", "op": "add", "vector": vector(HIDDEN, 5).tolist(), "scale": 0.7},
             {"site": "resid_pre.2", "op": "ablate", "vector": vector(HIDDEN, 6).tolist(), "positions": [[5, 40]]},
             {"site": "resid_post.3", "op": "scale", "by": 0.25, "positions": "generated"}]
    processor = engine.llm.llm_engine.input_processor
    original = processor.process_inputs

    def as_if_asked(request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        params.extra_args = {**(params.extra_args or {}), "edit": edits}
        return original(request_id, prompt, params, *args, **kwargs)

    monkeypatch.setattr(processor, "process_inputs", as_if_asked)
    return edits


def watch(_: Any) -> None:
    """Of a rank's worker: note the requests of every step from now on."""
    editor, seen = editor_here(), list[list[str]]()
    right = type(editor).before_forward

    def noted(requests: Any, starts: Any, at: Any) -> None:
        seen.append(list(requests))
        right(editor, requests, starts, at)

    editor.before_forward, editor.seen = noted, seen


def watched(_: Any) -> list[list[str]]:
    """What was noted."""
    editor = editor_here()
    del editor.before_forward
    return list(editor.seen)


def editor_here() -> Any:
    """The editor of a worker, on which a test may put what it likes."""
    from engine_side import worker

    assert worker.CURRENT is not None and worker.CURRENT.editor is not None
    editor: Any = worker.CURRENT.editor
    return editor


STALE, LATE, UNDONE = "the tables of the batch before", "a position late", "nothing at one place"


def break_it(_: Any, fault: str, layer: int, rank: int | None = None) -> None:
    """Break the editor of the stage that has a layer, on all of its ranks or on one."""
    editor = editor_here()
    if rank not in (None, get_tensor_model_parallel_rank()):
        return
    right = type(editor).before_forward
    if ("resid_post", layer) not in editor.tables.slots:
        return

    def before_forward(requests: Any, starts: Any, at: Any) -> None:
        other, editor.last = list(requests) != editor.last, list(requests)
        if fault == STALE and other:
            return
        right(editor, requests, starts, at + 1 if fault == LATE else at)
        if fault == UNDONE:
            editor.tables.slots["resid_post", layer].zero_()

    editor.before_forward, editor.last = before_forward, []


def repair(_: Any) -> None:
    """Take that out again."""
    vars(editor_here()).pop("before_forward", None)


@pytest.mark.parametrize("layer", [BORDER - 1, BORDER], ids=["first stage", "second stage"])
def test_a_stage_that_edits_wrongly_is_seen(engine: Engine, layer: int) -> None:
    """The comparison is one that can fail, and the counts are those of each stage."""
    edits = one(site="resid_post", layers=[0, 1, 2, 3], by=0.5, positions="generated")
    engine.llm.collective_rpc(break_it, args=(LATE, layer))
    found, = run(engine, [tokens(20, seed=50 + layer)], [edits])
    with pytest.raises(AssertionError):
        check(engine, found, edits)
    engine.llm.collective_rpc(repair)
    engine.llm.collective_rpc(break_it, args=(UNDONE, layer))
    found, = run(engine, [tokens(20, seed=60 + layer)], [edits])
    engine.llm.collective_rpc(repair)
    told = {at: group for group in found.manifest.edits[0]["rows"] for at in group["layers"]}
    assert sorted(told) == list(range(LAYERS)) and {group["expected"] for group in told.values()} == {5}
    for at, group in told.items():
        assert (group["applied"], group.get("reason")) == ((0, "not_applied") if at == layer else (5, None))
    right, = run(engine, [tokens(20, seed=70 + layer)], [edits])
    check(engine, right, edits)


def test_a_set_row_is_that_row_on_both_sides_of_the_border(engine: Engine) -> None:
    """What travels is the row, bit for bit; so are rows of a stored capture that are put back in another request."""
    source, = run(engine, [tokens(20, seed=5)], [None])
    for site, layer, others in (("resid_post", 1, [("resid_pre", 2)]), ("resid_pre", 2, [("resid_post", 1)]),
                                ("resid_post", 2, [("resid_pre", 3)]), ("resid_mid", 2, []), ("z", 3, [])):
        given = engine.reader.slice(source.id, site, [layer]).values()[0][[4, 11, 19]]
        edits = one(site=f"{site}.{layer}", op="set", by=None, positions=[11, 4, 19],
                    rows=given[[1, 0, 2]].tolist())
        captured, = run(engine, [tokens(20, seed=6)], [edits])
        check(engine, captured, edits)
        for name, at in ((site, layer), *others):
            found = engine.reader.slice(captured.id, name, [at])
            assert np.array_equal(found.values()[0][[4, 11, 19]], given), (site, layer, name, at)


def test_neighbours_have_the_same_bits(engine: Engine) -> None:
    """All in one batch of which nothing is cached, with and without edits of the others."""
    edits: list[Any] = [None, one(site="resid_post.1", by=3), None, one(site="resid_post.2", op="ablate", by=None,
                                                                       vector="tone")]
    plain, beside = (run(engine, [[turn + 3, *tokens(8 + number, seed=200 + number)] for number in range(4)], chosen)
                     for turn, chosen in ((1, [None] * 4), (1, edits)))
    for number in (0, 2):
        assert beside[number].tokens == plain[number].tokens
        for entry in plain[number].manifest.rows:
            rows_of = [engine.reader.slice(each[number].id, entry.site, [entry.layer]) for each in (plain, beside)]
            assert len(rows_of[0].positions) == len(rows_of[1].positions) > 8
            assert np.array_equal(rows_of[0].values(), rows_of[1].values()), (entry.site, entry.layer)
    for number in (1, 3):
        assert len(beside[number].manifest.edits[0]["rows"]) == 1
        check(engine, beside[number], edits[number])


@pytest.mark.parametrize("site", ["resid_post.3", "resid_post.0", "resid_pre.2"])
def test_without_rows_the_stage_that_edits_still_tells(engine: Engine, site: str) -> None:
    """Nothing is captured; equal edits share what they left in the prefix cache, and count it."""
    edits, prompt = one(site=site, by=2), tokens(70, seed=len(site) + int(site[-1]))
    first, again = (run(engine, [prompt], [edits], sites=[])[0] for _ in range(2))
    assert first.tokens == again.tokens and first.manifest.rows == again.manifest.rows == []
    cached = again.output.num_cached_tokens
    assert cached >= 32 and {each.manifest.status for each in (first, again)} == {"empty"}
    for captured, read in ((first, 0), (again, cached)):
        group, = captured.manifest.edits[0]["rows"]
        assert group == {"layers": [int(site[-1])], "expected": 75, "applied": 75 - read, "cached": read, "missing": 0}
    stage = 1 if site == "resid_post.3" else 0
    assert [(part.rank, part.state) for part in first.manifest.parts] == [
        (rank, "finished") for rank in range(stage + 1)]


@pytest.mark.parametrize(("edit", "said"), [
    (one(site="resid_post.4"), r"edit\[0\].layers = \[4\]: out of range"),
    (one(site="resid_mid.3"), r"edit\[0\].layers = \[3\]: not armed for edits of resid_mid; armed: \[1, 2\]"),
    (one(site="k.2"), r"edit\[0\].site = 'k.2': not armed for edits; armed: resid_post \[0, 1, 2, 3\]"),
    (one(site="resid_post.3", when={"probe": "p", "above": 1}), "a condition cannot be had with pipeline parallelism"),
])
def test_what_no_stage_has_is_refused_by_name(engine: Engine, edit: Any, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        run(engine, [tokens(5, seed=1)], [edit])
