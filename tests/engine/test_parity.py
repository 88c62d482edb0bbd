"""Every captured row of real vLLM against a Hugging Face forward of the same tokens, under real scheduling."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine_side.codecs import encode
from schemas import codecs
from schemas.errors import SpecError
from schemas.ids import new_ulid
from schemas.read.reader import StoreReader
from tests.support.engines.engines import ALL_ROWS, DTYPE, ON_GPU, SITES, Engine, prompt, start
from tests.support.models.reference import Reference
from tests.support.store_helpers import until
from vllm_tap.tiny_model import LAYERS

BATCHED_TOKENS = 48
RAGGED = [7, 60, 1, 33, 150, 49, 48, 2, 97, 20]
RAW = {"codec": "raw"}


@pytest.fixture(scope="module", params=[pytest.param("qwen3", marks=pytest.mark.versions),
                                        pytest.param("llama", marks=pytest.mark.soak)])
def engine(request: pytest.FixtureRequest, reader: StoreReader,
           reference_of: Callable[[str], Reference]) -> Iterator[Engine]:
    """Chunked prefill is forced by a budget smaller than most prompts; the prefix cache is on, as by default.

    One engine has processes of its own, as an ``LLM`` has by default.
    """
    engine = start(reader, reference_of(request.param), request.param, here=request.param != "qwen3",
                   max_num_batched_tokens=BATCHED_TOKENS)
    yield engine
    engine.close()


def test_every_row_of_a_ragged_batch_in_chunks(engine: Engine) -> None:
    prompts = [prompt(length, seed=length) for length in RAGGED]
    lengths = [12, 3, 9, 1, 6, 17, 4, 8, 2, 10]
    captured = engine.run(prompts, [{"max_tokens": n, "ignore_eos": True} for n in lengths], [RAW] * len(prompts))
    for one, length in zip(captured, lengths, strict=True):
        assert one.manifest.status == "complete"
        assert engine.check(one) == ALL_ROWS * (one.prompt_len + length - 1)
        assert not any(entry.missing for entry in one.manifest.rows)
        assert one.manifest.finish_reason == one.manifest.client_finish_reason == "length"
    told = captured[0].manifest.engine
    assert re.fullmatch(r"vllm\.v1\.worker\.[a-z_.]+\.[A-Z]+ModelRunner", told["runner"]), told
    assert (told["async_scheduling"], told["speculative"]) == (ON_GPU, "")


def test_blocks_go_on_with_the_stream_that_was_captured(engine: Engine) -> None:
    """What these tests compare is then what the model itself computed with."""
    from engine_side import worker
    from engine_side.tap import taps

    if worker.CURRENT is None:
        pytest.skip("this engine has processes of its own")
    reading = [name for name, module in worker.CURRENT.model.named_modules() if hasattr(module, taps.STREAM)]
    assert reading == [f"model.layers.{layer}.post_attention_layernorm" for layer in range(1, LAYERS)]


def test_an_id_of_the_form_of_a_completions_is_no_prompt_number(engine: Engine) -> None:
    from vllm import SamplingParams

    ulid = new_ulid()
    core = engine.llm.llm_engine
    core.add_request("cmpl-x-7", {"prompt_token_ids": prompt(5, seed=5)},
                     SamplingParams(max_tokens=2, extra_args={"capture": {**RAW, "id": ulid}}))
    while core.has_unfinished_requests():
        core.step()
    assert engine.final(ulid).status == "complete"


def test_many_specs_in_one_batch(engine: Engine) -> None:
    specs = [
        {**RAW, "sites": ["resid_post"], "layers": [2], "positions": "prompt"},
        {**RAW, "sites": ["blocks.1.hook_mlp_out", "blocks.3.hook_attn_out"], "positions": "generated"},
        {**RAW, "positions": "last_prompt", "layers": "::2"},
        {**RAW, "positions": [0, 3, 4, 70, 4000], "sites": ["attn_out"]},
        {**RAW, "positions": [[10, 12], [30, 65]], "layers": [0, 3]},
        {"sites": []},
        None,
        {**RAW, "positions": []},
    ]
    prompts = [prompt(60, seed=100 + i) for i in range(len(specs))]
    outcome = engine.run(prompts, [{"max_tokens": 9, "ignore_eos": True}] * len(specs), specs)
    expected = [60, 2 * 8, 3 * 2, LAYERS * 3, 3 * 2 * 37, 0, None, 0]
    for number, (one, count) in enumerate(zip(outcome, expected, strict=True)):
        if count is not None:
            assert (number, engine.check(one)) == (number, count)
            assert one.manifest.status == ("complete" if count else "empty")


CODECS = ["raw16", "int8b64", "fp8row", "nf4b64", "topk:density=0.04", "topk8:k=20", "sketch:k=64,bits=2,seed=3",
          "full8", "rp8:k=32,seed=7"]


def test_every_codec_stores_what_it_makes_of_the_raw_row(engine: Engine) -> None:
    """From the model's step to a reader: bit for bit what the encoder makes of the same tokens' rows."""
    tokens = prompt(90, seed=7)
    rows = {}
    for codec in ("raw", *CODECS):
        (one,) = engine.run([tokens], [{"max_tokens": 8, "ignore_eos": True}], [{"codec": codec}])
        assert one.manifest.status == "complete" and {info.codec for info in one.manifest.sites} == {codec}
        rows[codec] = {site: engine.reader.slice(one.id, site, range(LAYERS), 0, 200).values() for site in SITES}
    for codec in CODECS:
        for site in SITES:
            raw = torch.from_numpy(rows["raw"][site]).to(getattr(torch, DTYPE))
            pieces = {name: piece.numpy() for name, piece in encode(codec, raw).items()}
            wanted = codecs.decode(codec, pieces, raw.shape[-1], DTYPE)
            assert rows[codec][site].shape == (LAYERS, 97, codecs.identified(codec).decoded_width(raw.shape[-1]))
            # A projection adds in another order where a step has other rows beside: codes differ by one here and there.
            same = rows[codec][site] == wanted
            assert same.all() or (":k=" in codec and "seed" in codec and same.mean() > 0.99), (codec, site)
    for site in SITES:
        for layer in range(LAYERS):
            x, y = (rows[codec][site][layer].astype(np.float64) for codec in ("raw", "int8b64"))
            assert 10 * np.log10((x**2).sum() / ((x - y) ** 2).sum()) >= 41, (site, layer)


def test_generation_is_the_same_with_and_without_capture(engine: Engine) -> None:
    prompts = [prompt(length, seed=length + 1) for length in RAGGED]
    params = [{"max_tokens": 12}] * len(prompts)

    def tokens(spec: dict[str, object] | None) -> list[list[int]]:
        engine.llm.reset_prefix_cache()
        outcome = engine.run(prompts, params, [spec] * len(prompts))
        return [list((one.output if spec is not None else one).outputs[0].token_ids) for one in outcome]

    first, second, captured = tokens(None), tokens(None), tokens({"codec": "int8b64"})
    stable = [a == b for a, b in zip(first, second, strict=True)]
    assert sum(stable) >= 8, "the engine does not equal itself: nothing to compare"
    assert [c for c, ok in zip(captured, stable, strict=True) if ok] == [a for a, ok in zip(first, stable, strict=True)
                                                                         if ok]


def test_the_prefix_cache_hides_no_row_unless_allowed(engine: Engine) -> None:
    tokens = prompt(200, seed=11)
    engine.run([tokens], [{"max_tokens": 2}], [None])  # warm: whole blocks of this prompt are cached now
    (recomputed,) = engine.run([tokens], [{"max_tokens": 5, "ignore_eos": True}], [{**RAW, "tags": {"run": "7"}}])
    assert recomputed.manifest.tags == {"run": "7"}
    assert recomputed.manifest.cached == 0 and recomputed.manifest.status == "complete"
    assert engine.check(recomputed) == ALL_ROWS * 204

    (allowed,) = engine.run([tokens], [{"max_tokens": 5, "ignore_eos": True}], [{**RAW, "prefix_cache": "allow"}])
    cached = allowed.output.num_cached_tokens
    assert cached >= 32, "the prefix cache was not used: the test shows nothing"
    assert engine.check(allowed) == ALL_ROWS * (204 - cached)
    assert allowed.manifest.status == "complete"
    for entry in allowed.manifest.rows:
        assert [(m.start, m.stop, m.reason) for m in entry.missing] == [(0, cached, "prefix_cached")]

    (generated,) = engine.run([tokens], [{"max_tokens": 5, "ignore_eos": True}], [{**RAW, "positions": "generated"}])
    assert generated.output.num_cached_tokens == cached, "positions that are always computed must keep the cache"
    assert engine.check(generated) == ALL_ROWS * 4


def test_parallel_samples_make_one_capture_each(engine: Engine) -> None:
    from vllm import SamplingParams

    tokens, ulid = prompt(70, seed=13), new_ulid()
    params = SamplingParams(n=2, temperature=1.0, max_tokens=9, ignore_eos=True,
                            extra_args={"capture": {**RAW, "id": ulid}})
    (output,) = engine.llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)
    assert output.outputs[0].token_ids != output.outputs[1].token_ids
    assert until(lambda: engine.reader.samples(ulid)) == [f"{ulid}.0", f"{ulid}.1"]
    for sample in range(2):
        one = engine.captured(f"{ulid}.{sample}", output, sample)
        assert engine.check(one) == ALL_ROWS * 78


def test_stop_tokens_and_stop_strings_end_as_the_client_saw(engine: Engine) -> None:
    tokens = prompt(40, seed=17)
    (free,) = engine.run([tokens], [{"max_tokens": 12, "ignore_eos": True}], [None])
    ids = list(free.outputs[0].token_ids)
    (by_token,) = engine.run([tokens], [{"max_tokens": 12, "stop_token_ids": [ids[5]]}], [RAW])
    kept = by_token.output.outputs[0].token_ids
    assert list(kept) == ids[: ids.index(ids[5]) + 1]
    assert by_token.manifest.finish_reason == by_token.manifest.client_finish_reason == "stop"
    assert engine.check(by_token) == ALL_ROWS * (40 + len(kept) - 1)

    text = free.outputs[0].text
    word = text[len(text) // 2 :][:4]
    (by_text,) = engine.run([tokens], [{"max_tokens": 12, "stop": [word], "ignore_eos": True}], [RAW])
    assert by_text.output.outputs[0].finish_reason == "stop"
    assert by_text.manifest.finish_reason == "stop" and by_text.manifest.engine_finish_reason == "abort"
    assert by_text.manifest.stop_reason == word
    assert by_text.manifest.status == "complete"
    produced = len(by_text.output.outputs[0].token_ids)
    assert engine.check(by_text) in (ALL_ROWS * (40 + produced - 1), ALL_ROWS * (40 + produced))


def test_every_request_is_captured_where_that_is_asked_for(engine: Engine) -> None:
    """As with VLLM_ACT_CAPTURE=1, which is read when an engine starts; here on the one that runs."""
    front = engine.llm.llm_engine.input_processor
    before, known = front.vllm_tap, {row.id for row in engine.reader.captures(limit=1000)}
    front.vllm_tap = replace(before, capture_all='{"sites": ["resid_post"], "codec": "rp8:k=16,seed=2"}')
    try:
        engine.run([prompt(9, seed=3), prompt(5, seed=4)], [{"max_tokens": 2}] * 2, [None, {"sites": []}])
    finally:
        front.vllm_tap = before
    found = [row for row in engine.reader.captures(limit=1000) if row.id not in known]
    assert sorted(len(row.sites) for row in found) == [0, 1], "one of its own, one as asked of all"
    manifest = engine.final(next(row.id for row in found if row.sites))
    assert manifest.resolved["codec"] == {"resid_post": "rp8:k=16,seed=2"}
    assert {row.captured for row in manifest.rows} == {10} and len(manifest.rows) == LAYERS


def test_bad_specs_are_refused_before_anything_is_scheduled(engine: Engine) -> None:
    from vllm import SamplingParams

    ulid = new_ulid()
    engine.llm.generate([{"prompt_token_ids": [1, 2, 3]}],
                        SamplingParams(max_tokens=1, extra_args={"capture": {"id": ulid}}), use_tqdm=False)
    for spec, field in [({"sites": ["nope"]}, "sites"), ({"layers": [99]}, "layers"), ({"sites": ["q"]}, "sites"),
                        ({"id": ulid}, "id"), ('{"sites"', ""), ({"positions": [[4, 2]]}, "positions"),
                        ('{"tags": {"a": "' + "x" * 70_000 + '"}}', "")]:
        with pytest.raises(SpecError) as raised:
            engine.llm.generate([{"prompt_token_ids": [1, 2, 3]}],
                                SamplingParams(max_tokens=1, extra_args={"capture": spec}), use_tqdm=False)
        assert raised.value.field == field
    for name in ("captures", "Capture", "capture_spec"):
        with pytest.raises(SpecError, match=f"nothing would be captured.*{name}"):
            engine.llm.generate([{"prompt_token_ids": [1, 2, 3]}],
                                SamplingParams(max_tokens=1, extra_args={name: {}}), use_tqdm=False)
    assert engine.run([[5, 6]], [{"max_tokens": 2}], [RAW])[0].manifest.status == "complete"


def test_weights_that_are_loaded_anew_leave_taps_where_they_are(engine: Engine) -> None:
    """vLLM takes every layer apart for that, by its class, and puts it together again."""
    engine.llm.collective_rpc("reload_weights")
    (one,) = engine.run([prompt(60, seed=8)], [{"max_tokens": 4, "ignore_eos": True}], [RAW])
    assert engine.check(one) == ALL_ROWS * 63
