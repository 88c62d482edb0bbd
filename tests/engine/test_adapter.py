"""Requests with LoRA adapters: vLLM serves them as without us, and rows are those of the changed model.

For every site of a family, so for every way in which a tap is put into a layer that vLLM wraps for its adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from engine_side.plugin import register
from schemas.ids import new_ulid
from schemas.read.reader import StoreReader
from tests.engine.test_architectures import SITES, TOLERANCE, site_errors
from tests.support.engines.engines import DTYPE, ON_GPU, SHARED, Engine, in_this_process, prompt
from tests.support.models.adapters import RANK, make
from tests.support.models.blocks_reference import BlocksReference
from tests.support.models.edited import moved, vector
from tests.support.models.families import family_model
from tests.support.models.features import LAYOUTS
from tests.support.models.reference import Reference
from tests.support.models.unlisted import UNLISTED
from vllm_tap.client.listing import Filters

# With adapters vLLM runs experts by kernels in Triton alone: its build for CPUs does not start a mixture so.
THERE = [family for family, sites in SITES.items() if family not in UNLISTED and (ON_GPU or "experts" not in sites)]
NAMES = ("", "songs of the sea", "songs of the hills", "songs of the moors")  # of adapters, "" of none
ASKED = (0, 1, 2, 1, 0, 2)  # which of them each request of the batch has
ALL_SLOTS = (0, 1, 2, 3, 0, 2)  # as many as vLLM has slots for
PROMPTS = [[token % 500 + 5 for token in prompt(length, seed)] for seed, length in enumerate((20, 45, 3, 33, 70, 11))]

EDITS: list[dict[str, Any]] = [{"site": "resid_post.1", "op": "add", "vector": vector(128, 1).tolist()},
                               {"site": "mlp_post.2", "op": "scale", "by": 0.5, "positions": "generated"},
                               {"site": "z.1", "op": "scale", "by": 0}]


@dataclass
class Adapted:
    """A family's engine with taps, references by adapter, and what the same vLLM without taps did."""

    family: str
    engine: Engine
    references: list[Reference | BlocksReference]
    requests: list[Any]
    plain: list[Any]
    crowded: list[Any]
    plain_layers: list[dict[str, tuple[str, str]]]  # by rank
    reloads: bool  # whether this vLLM itself can load weights into layers with adapters
    edited: list[dict[str, Any]]  # edits that it is armed for
    exact: bool  # whether an answer's bits can be told: a GPU's stages take batches of other sizes at other times

    def check(self, output: Any, plain: Any) -> None:
        """An answer is that without taps: bit for bit, or in its first probabilities."""
        if self.exact:
            assert said(output) == said(plain)
            return
        (_, (first, *_)), (_, (wanted, *_)) = said(output), said(plain)
        assert max(first.values()) == pytest.approx(max(wanted.values()), abs=0.05)


def generate(llm: Any, requests: list[Any], ids: Sequence[str | None] = (None,) * len(ASKED),
             asked: tuple[int, ...] = ASKED, edits: Any = None) -> list[Any]:
    """One batch with and without adapters; with a capture, and edits, where there is an id."""
    from vllm import SamplingParams

    sampling = [SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=3,
                               extra_args=None if id_ is None else {
                                   "capture": {"codec": "raw", "id": id_}, **({"edit": edits} if edits else {})})
                for id_ in ids]
    outputs: list[Any] = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], sampling, use_tqdm=False,
                                      lora_request=[requests[number] for number in asked])
    return outputs


def said(output: Any) -> Any:
    """Tokens of an answer, and their probabilities bit for bit."""
    (answer,) = output.outputs
    return answer.token_ids, [{token: one.logprob for token, one in at.items()} for at in answer.logprobs]


def layers(llm: Any) -> list[dict[str, tuple[str, str]]]:
    """What vLLM would look at, by rank: each module's class, and that of its quantization method."""
    return llm.apply_model(_classes)  # type: ignore[no-any-return]


def _classes(model: Any) -> dict[str, tuple[str, str]]:
    return {path: (type(module).__qualname__, type(getattr(module, "quant_method", None)).__qualname__)
            for path, module in model.named_modules()}


def reloaded(llm: Any) -> bool:
    """Load weights anew; vLLM before 0.28 looks for them where adapters have moved them from, and fails."""
    try:
        llm.collective_rpc("reload_weights")
    except Exception:
        return False
    return True


def reference_of(family: str) -> Reference | BlocksReference:
    folder, unlisted = family_model(family, DTYPE), UNLISTED.get(family)
    return BlocksReference(folder, unlisted) if unlisted else Reference(folder)


def start(family: str, layout: str = "") -> Any:
    from vllm import LLM

    # Chunks of a few requests' prompts at a time, so that their adapters are mixed in every way.
    return LLM(str(family_model(family, DTYPE)), dtype=DTYPE, skip_tokenizer_init=True, max_model_len=256,
               max_num_seqs=8, max_num_batched_tokens=64, seed=0, enable_prefix_caching=False,
               enable_lora=True, max_loras=3, max_lora_rank=RANK, **SHARED, **LAYOUTS[layout])


@pytest.fixture(scope="module", params=[
    pytest.param("qwen3", marks=pytest.mark.versions),
    pytest.param("granite", marks=pytest.mark.soak),  # found by structure, before vLLM wraps its layers
    *(pytest.param(family, marks=pytest.mark.soak) for family in THERE if family != "qwen3"),
    pytest.param("qwen3, compiled", marks=pytest.mark.soak),
    *(pytest.param(f"{family}, {layout}", marks=pytest.mark.soak) for family in ("qwen3", "llama", "gemma2", "phi3")
      for layout in ("tensor parallel", *(["pipeline parallel"] if ON_GPU else []))),
])
def adapted(request: pytest.FixtureRequest, reader: StoreReader, tmp_path_factory: pytest.TempPathFactory
            ) -> Iterator[Adapted]:
    """Both engines of a family, one after the other."""
    from vllm.lora.request import LoRARequest

    family, _, how = request.param.partition(", ")
    layout = how if how in LAYOUTS else ""
    folder = tmp_path_factory.mktemp("adapters")
    references, requests = [reference_of(family)], [None]
    for number, name in enumerate(NAMES[1:], 1):
        references.append(reference_of(family))
        path = make(references[-1], family, folder / str(number), number)
        requests.append(LoRARequest(name, number, str(path)))
    here = not (ON_GPU or layout or family == "gpt_neox")  # vLLM changes Hugging Face's classes of that one
    with pytest.MonkeyPatch.context() as patch, in_this_process(here):
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # for ``apply_model`` to a process of its own
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        if how == "compiled":
            patch.delenv("VLLM_CPU_CI_ENV")
        register()  # vLLM loads plugins once a process
        with pytest.MonkeyPatch.context() as without:
            without.delenv("VLLM_TAP_ENDPOINT")
            untapped = Engine(start(family, layout), reader, references[0])
            plain, plain_layers = generate(untapped.llm, requests), layers(untapped.llm)
            crowded, reloads = generate(untapped.llm, requests, asked=ALL_SLOTS), reloaded(untapped.llm)
            untapped.close()
        patch.setenv("VLLM_TAP_ARM", ",".join(SITES[family]))
        edited = [] if family in UNLISTED or layout == "pipeline parallel" else EDITS[:1] if layout else EDITS
        if edited:
            patch.setenv("VLLM_TAP_EDIT", "resid_post.1,attn_out.0,mlp_out.1" + ",mlp_post.2,z.1" * (not layout))
        engine = Engine(start(family, layout), reader, references[0])
        try:
            yield Adapted(family, engine, references, requests, plain, crowded, plain_layers, reloads, edited,
                          not (ON_GPU and layout))
        finally:
            engine.close()


def greedy(reference: Reference | BlocksReference, tokens: tuple[int, ...], prompt_len: int) -> list[int]:
    """What the model with the adapter merged would have generated behind the prompt."""
    with torch.inference_mode():
        last = torch.tensor(reference.rows(tokens)["final_norm", 0][prompt_len - 1 : -1])
        return reference.model.get_output_embeddings()(last).argmax(-1).tolist()  # type: ignore[no-any-return]


def test_adapters_are_served_as_without_taps(adapted: Adapted) -> None:
    for output, plain in zip(generate(adapted.engine.llm, adapted.requests), adapted.plain, strict=True):
        adapted.check(output, plain)
    assert layers(adapted.engine.llm) == adapted.plain_layers
    assert len({tuple(said(one)[0]) for one in adapted.plain}) == len(ASKED)


def test_every_row_is_the_adapted_models(adapted: Adapted) -> None:
    """Of every other request of a mixed batch first, then of all."""
    for chosen in (ASKED[::2], ASKED):
        step = len(ASKED) // len(chosen)
        ids = [new_ulid() if number % step == 0 else None for number in range(len(ASKED))]
        outputs = generate(adapted.engine.llm, adapted.requests, ids)
        for output, plain in zip(outputs, adapted.plain, strict=True):
            adapted.check(output, plain)
        rows = [adapted.engine.captured(id_, output) for id_, output in zip(ids, outputs, strict=True) if id_]
        for one, adapter in zip(rows, chosen, strict=True):
            assert one.manifest.adapter == NAMES[adapter]
            if adapter:
                found = Filters(model=NAMES[adapter]).of(adapted.engine.reader)
                assert one.manifest.id in [row.id for row in found]
            adapted.engine.reference = adapted.references[adapter]
            worst = site_errors(adapted.engine, one, adapted.family)
            assert max(worst.values()) <= TOLERANCE, (NAMES[adapter], worst)
            if not ON_GPU:
                wanted = greedy(adapted.references[adapter], one.tokens, one.prompt_len)
                assert list(one.tokens[one.prompt_len :]) == wanted


def test_edits_beside_adapters(adapted: Adapted) -> None:
    """Every second request of the mixed batch is edited; the others are served as ever."""
    if not (edits := adapted.edited):
        pytest.skip("nothing is armed for edits there")
    ids = [new_ulid() if number % 2 else None for number in range(len(ASKED))]
    for id_, output, plain, adapter in zip(ids, generate(adapted.engine.llm, adapted.requests, ids, edits=edits),
                                           adapted.plain, ASKED, strict=True):
        if id_ is None:
            assert said(output) == said(plain)
            continue
        one = adapted.engine.captured(id_, output)
        reference = adapted.references[adapter]
        assert isinstance(reference, Reference)
        rows, _ = reference.edited(one.tokens, moved(edits, one.prompt_len))
        for entry in one.manifest.rows:
            found = adapted.engine.reader.slice(id_, entry.site, [entry.layer])
            right = rows[entry.site, entry.layer][found.positions]
            assert np.abs(found.values()[0] - right).max() <= TOLERANCE * np.abs(right).max(), entry
        assert said(output) != said(plain)


def test_weights_that_are_loaded_anew_leave_taps_and_adapters_where_they_are(adapted: Adapted) -> None:
    """vLLM takes every layer apart for that, by its class, and puts it together again."""
    if not adapted.reloads:
        pytest.skip("this vLLM cannot, with adapters")
    assert reloaded(adapted.engine.llm)
    test_adapters_are_served_as_without_taps(adapted)
    test_every_row_is_the_adapted_models(adapted)


@pytest.mark.skipif(ON_GPU, reason="of vLLM's kernels for CPUs")
def test_without_a_free_slot_vllm_itself_gives_requests_without_an_adapter_one(adapted: Adapted) -> None:
    """docs/explain/what-it-does-not-do.md says so. It must come last: the third adapter stays in its slot."""
    outputs = generate(adapted.engine.llm, adapted.requests, asked=ALL_SLOTS)
    assert [said(output) for output in outputs] == [said(plain) for plain in adapted.crowded]
    for number, (plain, adapter) in enumerate(zip(adapted.crowded, ALL_SLOTS, strict=True)):
        tokens = (*PROMPTS[number], *plain.outputs[0].token_ids)
        wanted = greedy(adapted.references[adapter], tokens, len(PROMPTS[number]))
        right = list(tokens[len(PROMPTS[number]) :]) == wanted
        assert right or not adapter
        assert adapter or not right or adapted.family != "qwen3"  # of some models the answers are nearly the same
