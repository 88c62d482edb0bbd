"""Edited requests against Hugging Face with hooks: every operation, beside requests that are not edited."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from engine_side import worker
from engine_side.edits import places
from engine_side.seams import self_test
from schemas.edits.vectors import digest_of
from schemas.errors import SpecError, StartError
from schemas.read.reader import StoreReader
from tests.support.engines.engines import (
    DTYPE,
    ON_GPU,
    SHARED,
    Captured,
    Engine,
    OneAtATime,
    in_this_process,
    refused_start,
)
from tests.support.models.blocks_reference import BlocksReference
from tests.support.models.common import COMMON
from tests.support.models.edited import HEAD, at_every_place, moved, vector
from tests.support.models.families import FAMILIES as KNOWN
from tests.support.models.families import family_model
from tests.support.models.features import FEATURES, GROUPS, Feature, not_run, options, tokens
from tests.support.models.reference import Reference
from tests.support.models.unlisted import UNLISTED

HIDDEN = COMMON["hidden_size"]
BAR = 0.05 if ON_GPU else 1e-5  # of a row's length: bfloat16 with graphs there

FAMILIES = os.environ.get("TAP_FAMILIES", "qwen3").replace("all", ",".join(KNOWN)).split(",")
MIXTURES = ("mixtral", "qwen3_moe")


PLACES = {"resid_pre.0": (), "resid_pre.2": (), "resid_mid.1": ("gpt_neox",), "q.1": ("gpt_neox",),
          "k.2": ("gpt_neox",), "v.0": ("gpt_neox",), "q_rot.0": ("gpt_neox", "opt"), "k_rot.1": ("gpt_neox", "opt"),
          "z.1": (), "z.2": (), "mlp_post.2": MIXTURES, "attn_out.1": (), "mlp_out.2": ()}  # and who lacks the site


def armed(family: str) -> str:
    """What is armed for edits."""
    return ",".join(["resid_post", *(place for place, lacking in PLACES.items() if family not in lacking)])


def started(reader: StoreReader, family: str, group: str = "scheduler", edit: str = "", **more: Any) -> Engine:
    """An engine that is armed to edit, with a vector called ``tone``."""
    from vllm import LLM

    folder = family_model(family, DTYPE)
    with pytest.MonkeyPatch.context() as patch:
        for name in GROUPS[group].without:
            patch.delenv(name)
        patch.setenv("VLLM_TAP_EDIT", edit or armed(family))
        with in_this_process(not family.startswith("gpt_neox") and not ON_GPU):
            llm: Any = LLM(str(folder), dtype=DTYPE, skip_tokenizer_init=True, max_model_len=256, max_num_seqs=8,
                           seed=0, **{**SHARED, **options(family, group), **more})
    return Engine(llm, reader, BlocksReference(folder, UNLISTED[family]) if family in UNLISTED else Reference(folder))


@pytest.fixture(scope="module", params=[*FAMILIES, *(pytest.param(family, marks=pytest.mark.soak)
                                                     for family in KNOWN if family not in FAMILIES)])
def engine(request: pytest.FixtureRequest, reader: StoreReader, tmp_path_factory: pytest.TempPathFactory
           ) -> Iterator[Engine]:
    save_file({"vector": vector(HIDDEN, 11)}, path := tmp_path_factory.mktemp("vectors") / "tone.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_TAP_VECTORS", f"tone={path}")
        patch.setenv("VLLM_TAP_EDIT_ROWS", "200")
        patch.setenv("VLLM_TAP_ARM", ",".join(dict.fromkeys(
            place.partition(".")[0] for place in armed(request.param).split(","))))
        made = started(reader, request.param)
    yield made
    made.close()


def run(engine: Engine, prompts: Sequence[Sequence[int]], edits: Sequence[Any], most: int = 6, **more: Any
        ) -> list[Captured]:
    """Generate ``most`` tokens of all at once, each with its edits (None: none); raw captures of all that the engine
    has tapped.
    """
    from vllm import SamplingParams

    from schemas.ids import new_ulid

    ids = [new_ulid() for _ in prompts]
    params = [SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True, logprobs=0, extra_args={
        "capture": {"codec": "raw", "id": id_, "prefix_cache": "allow", **more},
        **({} if edit is None else {"edit": edit})}) for id_, edit in zip(ids, edits, strict=True)]
    outputs = engine.llm.generate([{"prompt_token_ids": list(p)} for p in prompts], params, use_tqdm=False)
    return [engine.captured(id_, output) for id_, output in zip(ids, outputs, strict=True)]


def check(engine: Engine, captured: Captured, edits: Sequence[dict[str, Any]] | None, greedy: bool = True,
          bar: float = BAR) -> None:
    """A capture's rows and tokens against those of Hugging Face with the same edits."""
    rows, chances = engine.reference.edited(captured.tokens, moved(edits or (), captured.prompt_len,
                                                                   vector(HIDDEN, 11)))
    for edit in captured.manifest.edits:
        for layers in edit.get("rows", ()):
            assert layers["missing"] == 0 and layers["applied"] + layers["cached"] == layers["expected"] > 0, edit
    for entry in captured.manifest.rows:
        assert entry.captured, entry
        if entry.site.startswith("probe."):
            continue
        found = engine.reader.slice(captured.id, entry.site, [entry.layer])
        right = rows[entry.site, entry.layer][found.positions]
        off = np.linalg.norm(found.values()[0] - right, axis=1) / np.linalg.norm(right, axis=1).clip(1e-6)
        assert off.max() < bar, f"{entry.site}.{entry.layer} is off by {off.max()}"
    for number, token in enumerate(captured.tokens[captured.prompt_len :]):
        right = chances[captured.prompt_len - 1 + number]
        assert not greedy or right[token] >= right.max() - (0.5 if ON_GPU else 1e-4)
        if captured.output is not None and captured.output.outputs[0].logprobs:
            said = captured.output.outputs[0].logprobs[number][token].logprob
            assert abs(said - right[token]) < 2 * bar * np.abs(right).max()


def operations(engine: Engine) -> list[list[dict[str, Any]]]:
    """One request's edits each: every operation, every site, several in a row, by position."""
    widths = engine.llm.llm_engine.input_processor.vllm_tap_edits.arms.widths
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
        [{"site": "resid_post.1", "op": "set", "positions": [60, 7, 50, 6], "rows": rows(widths["resid_post"], 4)},
         {"site": "resid_post.2", "op": "add", "vector": "tone", "positions": [[5, 9]]},
         {"site": "z.1", "op": "set", "positions": [[44, 52], [72, 73]], "rows": rows(widths["z"], 9)}],
    ]
    found.append([{"site": "z.1", "heads": [2], "op": "set", "positions": [60, 5], "rows": rows(HEAD, 2)},
                  {"site": "z.1", "heads": [3, 0], "op": "set", "positions": [[7, 9]], "rows": rows(widths["z"], 2)}])
    if "mlp_post" in widths:
        found.append([{"site": "mlp_post.2", "op": "ablate", "vector": v["mlp_post"]},
                      {"site": "mlp_post.2", "op": "add", "vector": v["mlp_post"], "scale": 0.25}])
    return found


def rows(width: int, count: int, seed: int = 70) -> list[list[float]]:
    """Rows of chance for an edit that has one for each position."""
    return [vector(width, seed + number).tolist() for number in range(count)]


def test_every_operation_beside_requests_without_one(engine: Engine) -> None:
    """Prompts of 70 tokens in chunks of 48, so that edits cross the edges of chunks."""
    edits: list[Any] = [None, *operations(engine), None]
    prompts = [tokens(70, seed=90)] * len(edits)
    alone = run(engine, prompts[:1], [None])[0]
    for captured, edit in zip(run(engine, prompts, edits), edits, strict=True):
        check(engine, captured, edit)
        if edit is None:
            assert captured.tokens == alone.tokens
    again = run(engine, prompts[:1], [None])[0]
    assert again.tokens == alone.tokens  # and nothing of what was edited is read from the prefix cache


def places_of(engine: Engine, heads: bool = False) -> dict[tuple[str, int], int]:
    """The places of ``PLACES`` that are armed, or those that have heads, and the width of their rows."""
    arms = engine.llm.llm_engine.input_processor.vllm_tap_edits.arms
    found = [(site, int(layer)) for site, _, layer in (place.partition(".") for place in PLACES)]
    return {(site, layer): arms.widths[site] for site, layer in found if layer in arms.layers.get(site, ())
            and (site in arms.heads or not heads)}


def eight_at_most(edits: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    """The same with so many edits a request."""
    return [part for each in edits for part in (each[: len(each) // 2], each[len(each) // 2 :])]


@pytest.mark.parametrize("heads", [False, True], ids=["rows", "heads"])
def test_every_operation_at_every_place(engine: Engine, heads: bool) -> None:
    """Beside requests without any, which have the bits that they have alone."""
    edits: list[Any] = [None, *eight_at_most(at_every_place(places_of(engine, heads), heads)), None]
    prompts = [tokens(70, seed=700 + number) for number in range(len(edits))]
    for captured, edit in zip(run(engine, prompts, edits), edits, strict=True):
        check(engine, captured, edit)


def test_a_set_row_is_that_row_at_every_place(engine: Engine) -> None:
    asked = {place: vector(width, 30 + number) for number, (place, width) in enumerate(places_of(engine).items())}
    edits = [[{"site": f"{site}.{layer}", "op": "set", "vector": given.tolist(), "positions": [4, 21]}]
             for (site, layer), given in asked.items()]
    for captured, ((site, layer), given) in zip(run(engine, [tokens(20, seed=4)] * len(edits), edits), asked.items(),
                                                strict=True):
        found = engine.reader.slice(captured.id, site, [layer])
        assert np.array_equal(found.values()[0][[4, 21]], np.stack([given, given])), (site, layer)


def test_a_set_row_is_that_row(engine: Engine) -> None:
    given = vector(engine.llm.llm_engine.input_processor.vllm_tap_edits.arms.widths["resid_post"], 77)
    captured, = run(engine, [tokens(20, seed=4)], [[
        {"site": "resid_post.1", "op": "set", "vector": given.tolist(), "positions": [4, 21]}]])
    found = engine.reader.slice(captured.id, "resid_post", [1])
    assert np.array_equal(found.values()[0][[4, 21]], np.stack([given, given]))
    many = rows(len(given), 3)
    captured, = run(engine, [tokens(20, seed=4)], [[
        {"site": "resid_post.1", "op": "set", "rows": many, "positions": [22, 4, 21]}]])
    found = engine.reader.slice(captured.id, "resid_post", [1])
    assert np.array_equal(found.values()[0][[22, 4, 21]], np.array(many, np.float32))


def test_neighbours_have_the_same_bits(engine: Engine) -> None:
    """The same batch with and without edits of the others."""
    edits = [None, operations(engine)[0], None, operations(engine)[2],
             *eight_at_most(at_every_place(places_of(engine)))[:2],
             *eight_at_most(at_every_place(places_of(engine, heads=True), heads=True))[:2]]
    prompts = [tokens(25 + number, seed=200 + number) for number in range(len(edits))]
    with_edits = run(engine, prompts, edits)
    salted = [list(reversed(each)) for each in prompts]  # so that nothing is cached in one of the two
    plain = run(engine, salted, [None] * len(edits))
    beside = run(engine, salted, edits)
    for number in (0, 2):
        assert beside[number].tokens == plain[number].tokens
        for entry in plain[number].manifest.rows:
            one, other = (engine.reader.slice(each[number].id, entry.site, [entry.layer]) for each in (plain, beside))
            there = np.isin(one.positions, other.positions)
            assert there.any() and np.array_equal(one.values()[0][there], other.values()[0])
    assert with_edits[1].tokens[:26] == tuple(prompts[1])


def one(**fields: Any) -> list[dict[str, Any]]:
    """A request's edits: one that can be made, but for these fields."""
    made = {"site": "resid_post.1", "op": "scale", "by": 2, **fields}
    return [{name: value for name, value in made.items() if value is not None}]


@pytest.mark.parametrize(("edit", "said"), [
    (one()[0], "must be a list"),
    (one(site="router_logits.1"), r"edit\[0\].site = 'router_logits.1': cannot be edited; valid: one of"),
    (one(site="mlp_out.1"), r"edit\[0\].layers = \[1\]: not armed for edits of mlp_out; armed: \[2\]"),
    (one(site="resid_post.9"), r"edit\[0\].layers = \[9\]: out of range"),
    (one(op="twist"), r"edit\[0\].op = 'twist': valid: add, scale"),
    (one(op="add", by=None), r"edit\[0\].vector: missing; add needs it"),
    (one(op="add", by=None, vector=[1, 2]), r"edit\[0\].vector = '2 numbers': rows of resid_post have 128"),
    (one(op="add", by=None, vector=[float("nan")] * 128), r"vector\[0\] = nan: valid: a finite number"),
    (one(op="add", by=None, vector=[1e39] * 128), r"vector\[0\] = 1e\+39: valid: a finite number"),
    (one(op="ablate", by=None, vector=[0.0] * 128), "ablate needs a direction"),
    (one(op="add", by=None, vector="nobody"), r"no such vector; registered: tone"),
    (one(scale=3), r"edit\[0\].scale = 3: scale has by, and no scale"),
    (one(head=3), r"edit\[0\].head = 3: unknown field; valid: site"),
    (one(heads=[0]), r"edit\[0\].heads = \[0\]: resid_post has no heads; valid with heads: q, k, v, q_rot, k_rot, z"),
    (one(site="z.1", heads=[]), r"edit\[0\].heads"),
    (one(site="z.1", heads=[4, 1]), r"edit\[0\].heads = \[4\]: out of range; z has heads 0 to 3 in this model"),
    (one(site="z.1", heads=[1], op="add", by=None, vector=[1.0] * 33), r"'33 numbers': rows of z have 128, heads 32"),
    (one(site="z.1", op="add", by=None, vector=[1.0] * 32), r"'32 numbers': rows of z have 128"),
    (one(site="z.1", heads=[2], op="cap", by=None, low=0, vector=[1.0] * 64 + [0.0] * 64), r"zeros for head 2"),
    (one(site="z.1", heads=[1], op="set", by=None, rows=[[1.0] * 33], positions=[3]), r"'33 numbers': .* 128 or 32"),
    (one(site="resid_pre.1"), r"edit\[0\].layers = \[1\]: not armed for edits of resid_pre; armed: \[0, 2\]"),
    ([*one(site="resid_post.1"), *one(site="resid_pre.2"), *one(site="resid_post.1")], r"edit 3 of resid_post.1"),
    (one(op="cap", by=None, vector="tone", low=2, high=1), r"edit\[0\].low = 2: is above high"),
    (one(positions=[[5, 5]]), r"start < stop"),
    (one(positions=[-1]), r"edit\[0\].positions"),
    (one(positions="later"), r"edit\[0\].positions = 'later'"),
    (one(op="set", by=None, rows=[[1.0] * 128]), r"edit\[0\].positions = 'all': rows need listed positions"),
    (one(op="set", by=None, rows=[[1.0] * 128], positions=[3, 4]), r"edit\[0\].rows = '1 rows': positions lists 2"),
    (one(op="set", by=None, rows=[[1.0] * 127], positions=[3]), r"edit\[0\].rows\[0\] = '127 numbers': .* have 128"),
    (one(op="set", by=None, rows=[[1.0] * 127 + [math.inf]], positions=[3]), r"rows\[0\]\[127\] = inf: valid: a fin"),
    (one(op="set", by=None, rows=[[1.0] * 128] * 2, positions=[3, 3]), r"names a position twice"),
    (one(op="set", by=None, rows=[[1.0] * 128], vector="tone", positions=[3]), r"vector, .* or rows, .* not both"),
    (one(op="set", by=None, rows={"base64": "AAAA"}, positions=[3]), r"rows.base64 = '3 bytes': float32 takes 4 bytes"),
    (one(op="set", by=None, rows={"base64": "AAAAAA=="}, positions=[3]), r"rows = '1 numbers': 1 positions of 128"),
    (one(op="set", by=None, rows={"base64": "AADAfw=="}, positions=[3]), r"base64\[0\] = nan: valid: a finite number"),
    (one(op="add", by=None, rows=[[1.0] * 128], positions=[3]), r"rows = .*: add has vector and scale, and no rows"),
    (one(op="set", by=None, rows=[[1.0] * 128] * 201, positions=[[0, 201]]), r"201 rows': the engine keeps 200 for"),
    (one(positions=[256]), r"positions = \[256, 257\]: beyond the model: a request has 256 tokens"),
    (one() * 3, r"edit 3 of resid_post.1: the engine makes at most 2"),
    (one() * 9, r"edits: 9 asked, limit 8"),
    ("[", "malformed JSON"),
    (7, "must be a list"),
])
def test_what_cannot_be_edited_is_refused(engine: Engine, edit: Any, said: str) -> None:
    from vllm import SamplingParams

    with pytest.raises(SpecError, match=said):
        engine.llm.generate([{"prompt_token_ids": tokens(5, seed=1)}], SamplingParams(extra_args={"edit": edit}),
                            use_tqdm=False)


def test_rows_that_are_in_use_are_not_given_twice(engine: Engine) -> None:
    """A request beyond the rows that the engine keeps is refused while others have them, under an id that is free
    afterwards; and rows in pieces are put together.
    """
    width = engine.llm.llm_engine.input_processor.vllm_tap_edits.arms.widths["resid_post"]
    held: Any = [[{"site": "resid_post.1", "op": "set", "positions": [[0, count]], "rows": rows(width, count, seed)}]
                 for seed, count in enumerate((40, 20, 60, 50, 60))]
    prompts = [tokens(70, seed=600 + number) for number in range(len(held))]
    with pytest.raises(SpecError, match=r"60 rows.*room for 200, and running requests use 170"):
        run(engine, prompts, held)
    engine.llm.llm_engine.abort_request([*engine.llm.llm_engine.output_processor.request_states], internal=True)
    while engine.llm.llm_engine.has_unfinished_requests():
        engine.llm.llm_engine.step()
    for chosen in ([0, 1, 2, 3], [4, 1, 0], [3, 2, 4]):
        for captured, number in zip(run(engine, [prompts[number] for number in chosen],
                                        [held[number] for number in chosen]), chosen, strict=True):
            check(engine, captured, held[number])


FAULTS: dict[str, Callable[[Any, Any, Any, Any], Any]] = {
    "a neighbour's rows": lambda fill, requests, starts, at: fill([*requests[1:], requests[0]], starts, at),
    "a position late": lambda fill, requests, starts, at: fill(requests, starts, at + 1),
    "the rows of a step ago": lambda fill, requests, starts, at: None if int(at[0]) else fill(requests, starts, at),
    "a row late": lambda fill, requests, starts, at: fill(requests, np.array([0, *(starts[1:] + 1)]), at),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_filled_in_wrongly_is_seen(fault: str, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison with Hugging Face is one that can fail."""
    editor = worker.CURRENT.editor if worker.CURRENT is not None else None
    if editor is None:
        pytest.skip("the engine is in another process")
    right = editor.before_forward
    monkeypatch.setattr(editor, "before_forward", lambda *step: FAULTS[fault](right, *step))
    edits = [one(positions="prompt"), None, one(op="add", by=None, vector="tone", positions="generated")]
    prompts = [tokens(20 + number, seed=400 + number) for number in range(3)]
    found = run(engine, prompts, edits)
    with pytest.raises(AssertionError):
        for captured, edit in zip(found, edits, strict=True):
            check(engine, captured, edit)
    monkeypatch.undo()
    for captured, edit in zip(run(engine, prompts, edits), edits, strict=True):
        check(engine, captured, edit)


def test_rows_that_were_left_out_are_counted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device counts what the graph has done, not what it was told to do."""
    editor = worker.CURRENT.editor if worker.CURRENT is not None else None
    if editor is None:
        pytest.skip("the engine is in another process")
    edits = [*one(layers=[0, 1, 2], site="resid_post"), *one(site="attn_out.1", positions="generated")]
    right = editor.before_forward

    def left_out(requests: Any, starts: Any, at: Any) -> None:
        """Nothing is filled in for the third step."""
        right([] if int(at[0]) == 11 else requests, starts, at)

    def undone(requests: Any, starts: Any, at: Any) -> None:
        """It is filled in, and the graph does not read it, or not at one place."""
        right(requests, starts, at)
        editor.tables.slots["resid_post", 1].zero_()

    for fault, applied in ((left_out, [[14, 14, 14], [4]]), (undone, [[15, 0, 15], [5]])):
        monkeypatch.setattr(editor, "before_forward", fault)
        captured, = run(engine, [tokens(10, seed=41)], [edits])
        for edit, right_ones in zip(captured.manifest.edits, applied, strict=True):
            found = {layer: each for each in edit["rows"] for layer in each["layers"]}
            assert [found[layer]["applied"] for layer in edit["layers"]] == right_ones
            for each in found.values():
                assert each["expected"] == each["applied"] + each["missing"] and each["cached"] == 0
                assert each.get("reason") == ("not_applied" if each["missing"] else None)


@pytest.mark.skipif(ON_GPU, reason="an engine in this process")
def test_an_edit_that_does_nothing_ends_the_start(reader: StoreReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "_put_back", lambda module, call, result: result)
    with refused_start("edits of attn_out.1 do not act"):
        started(reader, "qwen3", edit="mlp_post.0,attn_out.1")


@pytest.mark.skipif(ON_GPU, reason="an engine in this process")
def test_a_compiler_that_gets_it_wrong_ends_the_start(reader: StoreReader, monkeypatch: pytest.MonkeyPatch) -> None:
    right = places._put_back
    monkeypatch.setattr(places, "_put_back", lambda module, call, result: (
        -result if torch.compiler.is_compiling() else right(module, call, result)))
    with refused_start("with edits armed the compiled model returns other rows than .* of their norm"):
        started(reader, "qwen3", edit="attn_out.1")


def test_each_place_that_does_not_act_is_seen(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The look at a start, with edits that are not filled in at one place."""
    core, current = getattr(engine.llm.llm_engine.engine_core, "engine_core", None), worker.CURRENT
    if core is None or current is None or current.editor is None:
        pytest.skip("the engine is in another process")
    runner, right = core.model_executor.driver_worker.worker.model_runner, current.editor.setting
    for idle in [place for place in current.editor.tables.slots if place[0] != "resid_post"]:
        monkeypatch.setattr(current.editor, "setting", lambda place, rows, idle=idle: (
            nullcontext() if place == idle else right(place, rows)))
        with pytest.raises(StartError, match=rf"edits of {idle[0]}\.{idle[1]} do not act"):
            self_test.check_edits(runner, current, "here")
    monkeypatch.undo()
    self_test.check_edits(runner, current, "here")


def test_the_manifest_tells_of_edits(engine: Engine) -> None:
    """Also where nothing is captured, under the id that the request names."""
    given, tone = vector(HIDDEN, 3), vector(HIDDEN, 11).astype(np.float64)
    direction = (tone / np.linalg.norm(tone)).astype(np.float32)
    edits = [
        {"site": "blocks.1.hook_resid_post", "op": "add", "vector": given.tolist(), "scale": 2},
        {"site": "resid_post", "layers": [0, 2], "op": "cap", "vector": "tone", "high": 1.5, "positions": "prompt"},
        {"site": "blocks.1.attn.hook_z", "heads": [3, 1], "op": "scale", "by": 0},
        {"site": "blocks.2.hook_resid_pre", "op": "scale", "by": 2, "positions": [3]}]
    told = [{"site": "resid_post", "layers": [1], "op": "add", "scale": 2, "digest": digest_of(given)},
            {"site": "resid_post", "layers": [0, 2], "op": "cap", "high": 1.5, "positions": "prompt", "vector": "tone",
             "digest": digest_of(direction)},
            {"site": "z", "layers": [1], "heads": [3, 1], "op": "scale", "by": 0},
            {"site": "resid_pre", "layers": [2], "op": "scale", "by": 2, "positions": [3]}]
    captured, = run(engine, [tokens(8, seed=9)], [edits])
    rows = [{"layers": [1], "expected": 13, "applied": 13, "cached": 0, "missing": 0},
            {"layers": [0, 2], "expected": 8, "applied": 8, "cached": 0, "missing": 0},
            {"layers": [1], "expected": 13, "applied": 13, "cached": 0, "missing": 0},
            {"layers": [2], "expected": 1, "applied": 1, "cached": 0, "missing": 0}]
    told = [{**edit, "rows": [counted]} for edit, counted in zip(told, rows, strict=True)]
    assert captured.manifest.edits == told
    alone, = run(engine, [tokens(8, seed=9)], [edits], sites=[])
    assert alone.manifest.edits == told and alone.manifest.rows == [] and alone.tokens == captured.tokens
    plain, = run(engine, [tokens(8, seed=9)], [None])
    assert plain.manifest.edits == []


def test_without_a_salt_the_prefix_cache_is_poisoned(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The salt is what keeps it clean: without it, a plain request reads what an edited one left there."""
    edit = operations(engine)[0]
    prompt = tokens(96, seed=31)
    clean, = run(engine, [prompt], [None])
    monkeypatch.setattr(engine.llm.llm_engine.input_processor, "process_inputs", unsalted(engine))
    other = tokens(96, seed=32)
    run(engine, [other], [edit])
    poisoned, = run(engine, [other], [None])
    assert poisoned.output.num_cached_tokens >= 32
    with pytest.raises(AssertionError):
        check(engine, poisoned, None)
    monkeypatch.undo()
    third = tokens(96, seed=33)
    run(engine, [third], [edit])
    right, = run(engine, [third], [None])
    assert right.output.num_cached_tokens == 0
    check(engine, right, None)
    shared, = run(engine, [third], [edit])
    assert shared.output.num_cached_tokens >= 32  # equal edits share
    check(engine, shared, edit)
    check(engine, clean, None)


def test_what_is_no_number_stays_with_its_request(engine: Engine) -> None:
    """Beside such requests and after them, in the blocks of the K/V cache that they had."""
    beyond: list[Any] = [[one(site="resid_post.0", by=1e38)[0]] * 2,
                         one(site="resid_post.0", op="add", by=None, vector="tone", scale=3e38),
                         one(site="resid_post.1", by=1e38) * 2]
    for turn in range(3):
        prompts = [tokens(40 + 7 * number, seed=1000 + 10 * turn + number) for number in range(4)]
        *beside, plain = run(engine, prompts, [*beyond, None])
        check(engine, plain, None)
        for captured in beside:  # a sampler may take no number for the largest, behind the vocabulary
            chosen = captured.output.outputs[0]
            assert max(chosen.token_ids) < COMMON["vocab_size"]
            assert all(math.isfinite(each.logprob) for step in chosen.logprobs for each in step.values())
        for number in range(3):
            alone, = run(engine, [tokens(20 + 17 * number, seed=2000 + 10 * turn + number)], [None])
            check(engine, alone, None)
    rows = engine.reader.slice(beside[0].id, "resid_post", [0]).values()[0]
    assert not np.isfinite(rows).all(), "nothing was beyond"


def test_edits_beside_a_capture_under_another_name_are_not_passed_over(engine: Engine) -> None:
    from vllm import SamplingParams

    with pytest.raises(SpecError, match=r"nothing would be edited, because the edits are in extra_args\['edits'\]"):
        engine.llm.generate([{"prompt_token_ids": tokens(5, seed=1)}], SamplingParams(extra_args={
            "capture": {}, "edits": one()}), use_tqdm=False)


def unsalted(engine: Engine) -> Any:
    """The way in without a salt."""
    original = engine.llm.llm_engine.input_processor.process_inputs

    def process_inputs(*args: Any, **kwargs: Any) -> Any:
        request = original(*args, **kwargs)
        request.cache_salt = None
        return request

    return process_inputs


UNTABLED: list[Any] = ["granite", *(pytest.param(name, marks=pytest.mark.soak) for name in ("gpt2", "mamba2"))]
if os.environ.get("TAP_FAMILIES") is not None:
    UNTABLED = [name for name, unlisted in UNLISTED.items() if unlisted.here and not unlisted.dtype]


LAYER = {("nemotron_h", "attn_out"): 2}  # where it is not 1: of a site that layer 1 lacks


@pytest.mark.parametrize("family", UNTABLED)
def test_a_model_that_is_in_no_table(family: str, reader: StoreReader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sites that are found by structure are edited where they were found."""
    about = UNLISTED[family]
    sites = [site for site in ("resid_post", "attn_out", "mlp_out", *about.more) if site in about.sites
             and (about.factor == 1 or site not in ("attn_out", "mlp_out"))]
    layers = {site: LAYER.get((family, site), 1) for site in sites}
    edits: list[Any] = [None, one(site="resid_post.1"), one(site="resid_pre.0", by=0.5, positions=[[3, 32]]), *(
        one(site=f"{site}.{layers[site]}", positions="generated") for site in sites[1:]), None]
    monkeypatch.setenv("VLLM_TAP_ARM", ",".join(sites))
    engine = started(reader, family, edit=",".join(["resid_pre.0", *(f"{site}.{layers[site]}" for site in sites)]))
    try:
        prompts = [tokens(30 + number, seed=500 + number) for number in range(len(edits))]
        for captured, edit in zip(run(engine, prompts, edits, sites=sites), edits, strict=True):
            check(engine, captured, edit, bar=max(BAR, UNLISTED[family].tolerance))
    finally:
        engine.close()


WHILE = [feature for feature in FEATURES if feature.group in (
    ("scheduler", "speculative", "async") if os.environ.get("TAP_FAMILIES") is None else GROUPS) and not (
        not_run(GROUPS[feature.group]))]


SHORT = ("ragged batch", "preemption", "prefix cache, allowed", "abort")


@pytest.fixture(scope="module")
def playing(reader: StoreReader) -> Iterator[OneAtATime]:
    made = OneAtATime(lambda group: started(reader, "qwen3", group, "resid_post.1,mlp_post.0"))
    yield made
    made.close()


@pytest.mark.soak
def test_with_drafts_there_are_no_conditions(playing: OneAtATime) -> None:
    with pytest.raises(SpecError, match="a condition cannot be had with speculative decoding"):
        run(playing.of("speculative"), [tokens(5, seed=1)], [[{"op": "stop", "when": {"probe": "p", "above": 1}}]])


@pytest.mark.parametrize("feature", [
    feature if feature.name in SHORT else pytest.param(feature, marks=pytest.mark.soak) for feature in WHILE],
    ids=lambda feature: feature.name.replace(" ", "_"))
def test_whatever_the_scheduler_does(feature: Feature, playing: OneAtATime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request of a feature is edited alike; what they share in the prefix cache is theirs."""
    engine = playing.of(feature.group)
    edits = [{"site": "resid_post.1", "op": "add", "vector": vector(HIDDEN, 5).tolist(), "scale": 0.7},
             {"site": "resid_post.1", "op": "ablate", "vector": vector(HIDDEN, 6).tolist(), "positions": [[5, 40]]},
             {"site": "mlp_post.0", "op": "scale", "by": 0.25, "positions": "generated"}]
    processor = engine.llm.llm_engine.input_processor
    original = processor.process_inputs

    def as_if_asked(request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        params.extra_args = {**(params.extra_args or {}), "edit": edits}
        return original(request_id, prompt, params, *args, **kwargs)

    monkeypatch.setattr(processor, "process_inputs", as_if_asked)
    for captured in feature.run(engine):
        check(engine, captured, edits, greedy=feature.name != "n = 2")
