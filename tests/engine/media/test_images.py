"""Prompts with images on real vLLM: rows of text and of images against Hugging Face with the same pixels.

Prompts of text alone are in test_architectures.py, under every feature of the scheduler.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from schemas.errors import SpecError
from schemas.ids import new_ulid
from schemas.read.reader import StoreReader
from tests.engine.discovery.test_prove import prove
from tests.engine.test_architectures import TABLE, site_errors, started, tolerance
from tests.support.engines.engines import DTYPE, ON_GPU, Captured, Engine, OneAtATime, in_this_process, refused_start
from tests.support.models.families import family_model
from tests.support.models.features import BATCHED_TOKENS, BLOCK, GREEDY, RAW, tokens
from tests.support.models.imaged import IMAGED, NO_VISION, PART, image
from tests.support.models.images_reference import ImagesReference

on_a_cpu = pytest.mark.skipif(ON_GPU, reason="vLLM has the same there, and its engine is in another process")

NOT_ON_A_GPU = {"gemma3": "there its images' parts attend to later ones, which the reference does not model",
                "mistral3": "vLLM 0.26 does not import it beside transformers 5.17"} if ON_GPU else {}
# Without a table to fill those that differ most: layers with a window, and positions in three dimensions.
FAMILIES = [pytest.param(name, marks=[
    *([pytest.mark.skip(reason=why)] if (why := NO_VISION or NOT_ON_A_GPU.get(name, "")) else []),
    *([] if name in ("gemma3", "qwen2_5_vl") or TABLE else [pytest.mark.soak])]) for name in IMAGED]


@pytest.fixture(scope="module")
def engines(reader: StoreReader) -> Iterator[OneAtATime]:
    """One engine at a time."""
    def start(family: str) -> Engine:
        engine = started(family, "scheduler", reader)
        return Engine(engine.llm, reader, ImagesReference(family_model(family, DTYPE), family))

    kept = OneAtATime(start)
    yield kept
    kept.close()


def asked(family: str, *lengths: int) -> list[int]:
    """Text of these lengths, and an image between each two."""
    found = tokens(lengths[0], seed=lengths[0])
    for length in lengths[1:]:
        found += [*IMAGED[family].asks, *tokens(length, seed=length)]
    return [token if token in IMAGED[family].asks else max(token, 20) for token in found]


def run(engine: Engine, prompt: Sequence[int], images: Sequence[Any], spec: dict[str, Any] | None, max_tokens: int = 6
        ) -> Any:
    """Generate: a Captured, or without a spec what vLLM returns. The reference sees the images from now on."""
    from vllm import SamplingParams

    ulid = new_ulid()
    params = SamplingParams(temperature=0, max_tokens=max_tokens, **GREEDY,
                            extra_args=None if spec is None else {"capture": {**spec, "id": ulid}})
    (output,) = engine.llm.generate([{"prompt_token_ids": list(prompt), "multi_modal_data": {"image": list(images)}}],
                                    params, use_tqdm=False)
    engine.reference.images = images
    return output if spec is None else engine.captured(ulid, output)


def check(engine: Engine, one: Captured, family: str) -> None:
    worst = site_errors(engine, one, family)
    assert max(worst.values()) <= tolerance(family), worst
    filled = [position for start, stop in one.manifest.resolved["images"] for position in range(start, stop)]
    assert filled == [position for position, token in enumerate(one.tokens[: one.prompt_len]) if token == PART] != []


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_text_and_images(family: str, engines: OneAtATime) -> None:
    engine = engines.of(family)
    images = [image(1), image(2, 48, 32)]
    check(engine, run(engine, asked(family, 9, 7, 12), images, RAW), family)
    text = engine.run([tokens(9, seed=1)], [{"max_tokens": 2, **GREEDY}], [RAW])[0]
    assert "images" not in text.manifest.resolved


@pytest.mark.parametrize("family", FAMILIES)
def test_a_long_prompt_with_images_is_computed_in_several_steps(family: str, engines: OneAtATime) -> None:
    engine = engines.of(family)
    one = run(engine, asked(family, 60, 60, 40), [image(3), image(4)], RAW)
    assert one.prompt_len > 2 * BATCHED_TOKENS
    check(engine, one, family)


@pytest.mark.parametrize("family", [each for each in FAMILIES if each.values != ("gemma3",)])
def test_other_images_at_the_same_tokens_are_other_rows(family: str, engines: OneAtATime) -> None:
    """In the prefix cache, too: rows behind another image are computed, and those of the same one named as cached."""
    engine, prompt = engines.of(family), asked(family, 40, 90)
    run(engine, prompt, [image(5)], None)
    other = run(engine, prompt, [image(6)], {**RAW, "prefix_cache": "allow"})
    assert other.manifest.cached <= BLOCK  # of the text before the image
    check(engine, other, family)
    same = run(engine, prompt, [image(5)], {**RAW, "prefix_cache": "allow"})
    assert same.manifest.cached > 2 * BLOCK, "the prefix cache was not used"
    assert same.tokens[: same.prompt_len] == other.tokens[: same.prompt_len]
    check(engine, same, family)
    again = run(engine, prompt, [image(5)], RAW)
    assert again.manifest.cached == 0
    check(engine, again, family)
    at = again.prompt_len - 1
    ends = [engine.reader.slice(one.id, "resid_post", [2], at, at + 1).values()[0] for one in (other, again)]
    assert abs(ends[0] - ends[1]).max() > 1e-3


@pytest.mark.skipif(bool(NO_VISION), reason=NO_VISION)
def test_an_image_of_a_refused_request_is_sent_with_the_next(engines: OneAtATime) -> None:
    """vLLM's front end has counted it as sent by then; its engine has never seen it."""
    family = "qwen2_5_vl"
    engine, prompt = engines.of(family), asked(family, 9, 7)
    with pytest.raises(Exception, match="unknown site"):
        run(engine, prompt, [image(9)], {"sites": ["nonsense"]})
    check(engine, run(engine, prompt, [image(9)], RAW), family)


@on_a_cpu
@pytest.mark.skipif(bool(NO_VISION), reason=NO_VISION)
@pytest.mark.parametrize(("setting", "value", "why"), [
    ("VLLM_TAP_ARM", "resid_post,embed", "cannot arm embed.*resid_pre.0.*--language-model-only"),
    ("VLLM_TAP_ARM", "resid_post,experts", "cannot arm experts: this model takes images or sound"),
    ("", "", "enable_lora: adapters of models that take images or sound, such as Gemma3ForConditionalGeneration")])
def test_what_was_not_shown_is_refused_at_start(setting: str, value: str, why: str, reader: StoreReader,
                                                monkeypatch: pytest.MonkeyPatch, engines: OneAtATime) -> None:
    from vllm import LLM

    engines.close()

    if setting:
        monkeypatch.setenv(setting, value)
    with in_this_process(), refused_start(why):
        LLM(str(family_model("gemma3", DTYPE)), dtype=DTYPE, max_model_len=256, enable_lora=not setting)


def test_other_media_are_refused_by_name() -> None:
    import torch
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    from engine_side.seams.media.prompts import image_positions

    def feature(modality: str, place: PlaceholderRange) -> MultiModalFeatureSpec:
        return MultiModalFeatureSpec(data=None, modality=modality, identifier="a", mm_position=place)

    with pytest.raises(SpecError, match="a prompt with video cannot be captured"):
        image_positions([feature("video", PlaceholderRange(offset=3, length=4))])
    broken = PlaceholderRange(offset=9, length=5, is_embed=torch.tensor([True, True, False, True, False]))
    assert image_positions([feature("image", broken), feature("image", PlaceholderRange(offset=2, length=3))]) == [
        (2, 5), (9, 11), (12, 13)]


@on_a_cpu
@pytest.mark.skipif(bool(NO_VISION), reason=NO_VISION)
def test_sites_of_such_a_model_are_proved_by_the_command() -> None:
    done = prove(family_model("qwen2_5_vl", "float32"), "--json", "--", "--dtype", "float32")
    assert done.returncode == 0, done
    found = json.loads(done.stdout)
    places = found["proof"]["sites"]["resid_post"]["places"]
    assert [place["path"] for place in places] == [f"language_model.model.layers.{layer}" for layer in range(3)]
    assert "embed" not in found["proof"]["sites"] and "outside of the step" in found["refused"]["embed"]


@on_a_cpu
@pytest.mark.skipif(bool(NO_VISION), reason=NO_VISION)
def test_the_language_model_alone_has_its_embedding(reader: StoreReader, monkeypatch: pytest.MonkeyPatch,
                                                    engines: OneAtATime) -> None:
    from vllm import LLM

    engines.close()
    monkeypatch.setenv("VLLM_TAP_ARM", "embed")
    folder = family_model("qwen2_5_vl", DTYPE)
    with in_this_process():
        llm: Any = LLM(str(folder), dtype=DTYPE, max_model_len=256, language_model_only=True)
    engine = Engine(llm, reader, ImagesReference(folder, "qwen2_5_vl"))
    (one,) = engine.run([tokens(30, seed=3)], [{"max_tokens": 3, **GREEDY}], [RAW])
    table = engine.reference.model.get_input_embeddings().weight.detach().numpy()
    rows = engine.reader.slice(one.id, "embed", [0], 0, len(one.tokens)).values()[0]
    assert np.array_equal(rows, table[list(one.tokens[:-1])])
    engine.close()
