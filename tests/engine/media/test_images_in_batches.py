"""Prompts with images beside others: several in a step, preempted, in two samples, and edited."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from schemas.ids import new_ulid
from schemas.read.reader import StoreReader
from tests.engine.edits.test_edits import check as held_edited
from tests.engine.edits.test_edits import one
from tests.engine.media.test_images import asked, check
from tests.engine.test_architectures import started
from tests.support.engines.engines import DTYPE, ON_GPU, Captured, Engine, OneAtATime, in_this_process
from tests.support.models.common import COMMON
from tests.support.models.edited import vector
from tests.support.models.families import family_model
from tests.support.models.features import GREEDY, LAYOUTS, RAW, counted
from tests.support.models.imaged import IMAGED, NO_VISION, image
from tests.support.models.images_reference import ImagesReference

HIDDEN = COMMON["hidden_size"]
SITES = ["resid_pre", "resid_post", "attn_out", "mlp_out"]
EDIT = "resid_pre.0,resid_pre.1,resid_post,attn_out.1,mlp_out.1"
pytestmark = [pytest.mark.skipif(ON_GPU, reason="rows are held against the reference in float32, on a CPU"),
              pytest.mark.skipif(bool(NO_VISION), reason=NO_VISION)]
FAMILIES = [name if name == "qwen2_5_vl" else pytest.param(name, marks=pytest.mark.soak) for name in IMAGED]


@pytest.fixture(scope="module")
def engines(reader: StoreReader, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneAtATime]:
    """One engine at a time, armed for edits, with few blocks of the K/V cache."""
    save_file({"vector": vector(HIDDEN, 11)}, path := tmp_path_factory.mktemp("vectors") / "tone.safetensors")

    def start(family: str) -> Engine:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VLLM_TAP_EDIT", EDIT)
            patch.setenv("VLLM_TAP_VECTORS", f"tone={path}")
            patch.setenv("VLLM_TAP_EDIT_ROWS", "64")
            engine = started(family, "scheduler", reader)
        return Engine(engine.llm, reader, ImagesReference(family_model(family, DTYPE), family))

    kept = OneAtATime(start)
    yield kept
    kept.close()


def run(engine: Engine, prompts: Sequence[tuple[Sequence[int], Sequence[Any]]], edits: Sequence[Any] = (),
        max_tokens: int = 6, **spec: Any) -> list[Captured]:
    """Generate of all at once: of token ids and the images that they ask for."""
    from vllm import SamplingParams

    ids = [new_ulid() for _ in prompts]
    params = [SamplingParams(temperature=0, max_tokens=max_tokens, **GREEDY, extra_args={
        "capture": {**RAW, **spec, "id": id_}, **({"edit": edit} if edit else {})})
        for id_, edit in zip(ids, edits or [None] * len(ids), strict=True)]
    outputs = engine.llm.generate(
        [{"prompt_token_ids": list(tokens), **({"multi_modal_data": {"image": list(images)}} if images else {})}
         for tokens, images in prompts], params, use_tqdm=False)
    return [engine.captured(id_, output) for id_, output in zip(ids, outputs, strict=True)]


def mixed(family: str, first: int) -> list[tuple[list[int], list[Any]]]:
    """Prompts of text, of images and of both in turns, each with images of its own."""
    lengths = ((9, 7), (40,), (30, 12, 20), (70,), (5, 5), (50, 9))
    return [(asked(family, *some), [image(first + 10 * number + place, 32, 48 if place else 32)
                                    for place in range(len(some) - 1)]) for number, some in enumerate(lengths)]


@pytest.mark.parametrize("family", FAMILIES)
def test_images_and_text_in_one_batch_are_preempted(family: str, engines: OneAtATime) -> None:
    engine, prompts = engines.of(family), mixed(family, 100)
    before = counted(engine, "num_preemptions")
    found = run(engine, prompts, max_tokens=50)
    assert counted(engine, "num_preemptions") > before, "nothing was preempted"
    for captured, (_, images) in zip(found, prompts, strict=True):
        engine.reference.images = images
        if images:
            check(engine, captured, family)
        else:
            engine.check(captured)


@pytest.mark.parametrize("family", FAMILIES)
def test_two_samples_of_a_prompt_with_an_image(family: str, engines: OneAtATime) -> None:
    from vllm import SamplingParams

    engine, ulid, picture = engines.of(family), new_ulid(), image(7)
    params = SamplingParams(n=2, temperature=1.0, max_tokens=9, **GREEDY, extra_args={"capture": {**RAW, "id": ulid}})
    (output,) = engine.llm.generate([{"prompt_token_ids": asked(family, 9, 30),
                                      "multi_modal_data": {"image": [picture]}}], params, use_tqdm=False)
    assert output.outputs[0].token_ids != output.outputs[1].token_ids
    engine.reference.images = [picture]
    for sample in range(2):
        check(engine, engine.captured(f"{ulid}.{sample}", output, sample), family)


@pytest.mark.parametrize("family", FAMILIES)
def test_edits_of_rows_of_images_and_of_text(family: str, engines: OneAtATime) -> None:
    """Each of its own request alone, at the images' positions, at those of text, and in what is generated."""
    engine, prompts = engines.of(family), mixed(family, 200)
    v = vector(HIDDEN, 8).tolist()
    edits: list[Any] = [
        one(site="resid_post.0", op="add", by=None, vector=v, scale=2.5, positions=[[9, 12]]),  # of the image
        one(site="resid_post", layers=[0, 1, 2], by=0.5, positions="generated"),
        [*one(site="resid_pre.0", op="add", by=None, vector="tone"), *one(site="attn_out.1", by=0)],
        None,
        one(site="resid_pre.1", op="ablate", by=None, vector="tone", positions="prompt"),
        one(site="mlp_out.1", op="set", by=None, rows=np.random.default_rng(3).standard_normal((2, HIDDEN)).tolist(),
            positions=[51, 3])]
    for captured, edit, (_, images) in zip(run(engine, prompts, edits, sites=SITES), edits, prompts,
                                           strict=True):
        engine.reference.images = images
        held_edited(engine, captured, edit)
        assert bool(edit) == bool(captured.manifest.edits)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_an_edited_prompt_leaves_in_the_prefix_cache_is_its_own(family: str, engines: OneAtATime) -> None:
    engine, prompts = engines.of(family), [(asked(family, 67, 61), [image(31)])]
    engine.reference.images = prompts[0][1]
    edit = one(site="resid_post.0", op="add", by=None, vector="tone", scale=2)
    edited, = run(engine, prompts, [edit], prefix_cache="allow", sites=SITES)
    plain, = run(engine, prompts, prefix_cache="allow")
    assert plain.manifest.cached == 0
    check(engine, plain, family)
    again, = run(engine, prompts, [edit], prefix_cache="allow", sites=SITES)
    assert again.manifest.cached > 0 and again.tokens == edited.tokens
    held_edited(engine, again, edit)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", ["tensor parallel", "pipeline parallel"])
@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl", "qwen3_vl"])
def test_images_on_two_ranks(family: str, layout: str, reader: StoreReader, engines: OneAtATime, tmp_path: Path,
                             monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import LLM

    engines.close()
    save_file({"vector": vector(HIDDEN, 11)}, tmp_path / "tone.safetensors")
    for name, value in (("VLLM_TAP_ARM", ",".join(SITES)), ("VLLM_TAP_EDIT", EDIT), ("VLLM_TAP_EDIT_ROWS", "64"),
                        ("VLLM_TAP_VECTORS", f"tone={tmp_path / 'tone.safetensors'}"),
                        ("VLLM_CPU_OMP_THREADS_BIND", "nobind")):
        monkeypatch.setenv(name, value)
    folder = family_model(family, DTYPE)
    with in_this_process(False):
        llm: Any = LLM(str(folder), dtype=DTYPE, max_model_len=256, max_num_seqs=8, seed=0, max_num_batched_tokens=64,
                       block_size=32, **LAYOUTS[layout])
    engine, prompts = Engine(llm, reader, ImagesReference(folder, family)), mixed(family, 300)
    edits: list[Any] = [None, one(site="resid_post", layers=[0, 1, 2], by=0.5, positions="generated"),
                        one(site="resid_post.1", op="add", by=None, vector="tone", scale=2), None,
                        one(site="resid_pre.0", by=0.5), one(site="attn_out.1", by=0)]
    try:
        for captured, edit, (_, images) in zip(run(engine, prompts, edits), edits, prompts, strict=True):
            engine.reference.images = images
            assert captured.manifest.status == "complete" and len(captured.manifest.parts) == 2
            held_edited(engine, captured, edit)
    finally:
        engine.close()
