"""What codecs of keys and values cost, on a real engine: what Hugging Face's cache says, and what is broken is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine_side.seams.kept import keys_values
from engine_side.seams.kept.rotary import Rotary, rotaries_of
from schemas.errors import ArgumentError, StartError
from schemas.read.reader import StoreReader
from tests.engine.edits.test_fidelity import drawn
from tests.support.engines.engines import DTYPE, ON_GPU, in_this_process, shut_down
from tests.support.models.families import family_model
from vllm_tap import open_store
from vllm_tap.fidelity.bench import Bench
from vllm_tap.fidelity.distributions import compare, log_softmax
from vllm_tap.fidelity.job import FidelityJob, Made
from vllm_tap.fidelity.kv import modes
from vllm_tap.fidelity.kv.codecs import Coder, chosen
from vllm_tap.fidelity.kv.job import KVJob, study
from vllm_tap.fidelity.kv.study import Where, measured_sizes, study_kv
from vllm_tap.fidelity.reports.report import Report, lines_of, load_report
from vllm_tap.fidelity.study import PlaceStudy, Unpublished
from vllm_tap.fidelity.texts import Corpus

pytestmark = [pytest.mark.skipif(ON_GPU, reason="an engine in this process")]

PROMPTS, TOKENS, CONTEXT = 6, 24, 12
CODECS = ("kv8", "k8v4", "kv4", "kv4-pooled", "pca4")
MADE = Made((), TOKENS, drawn(0), drawn(1), Corpus("chance", "c" * 32, ("",), ("",), True), np.arange(8))


@contextmanager
def running(reader: StoreReader, model: Path, dtype: str = DTYPE, step: int = CONTEXT, **more: Any
            ) -> Iterator[Bench]:
    """A bench on an engine as the command starts it, whose steps have so many tokens of a prompt."""
    from vllm import LLM

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_TAP_ARM", "final_norm")
        with in_this_process():
            llm: Any = LLM(str(model), dtype=dtype, skip_tokenizer_init=True, max_model_len=64,
                           max_num_seqs=PROMPTS + 1, block_size=32, seed=0, enforce_eager=True,
                           enable_prefix_caching=False, long_prefill_token_threshold=step,
                           max_num_batched_tokens=(PROMPTS + 1) * step, **more)
    with open_store(reader.path) as store:
        yield Bench(llm.llm_engine, store, 4)
    shut_down(llm)


@pytest.fixture(scope="module")
def bench(reader: StoreReader) -> Iterator[Bench]:
    with running(reader, family_model("qwen3", DTYPE)) as found:
        yield found


def job(out: Path, **more: Any) -> KVJob:
    out.mkdir(exist_ok=True)
    return KVJob(FidelityJob(str(family_model("qwen3", DTYPE)), out), codecs=CODECS, **more)


@pytest.fixture(scope="module")
def measured(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Report]:
    out = tmp_path_factory.mktemp("kv")
    return out, study(job(out), MADE, bench)


def costs(report: Report, site: str) -> dict[str, float]:
    place = next(one for one in report.places if one.site == site)
    return {one.name: float(np.mean(one.prompts["kl"])) for one in place.patched if one.kind != "noise"}


def test_every_control_behaves_and_is_told(measured: tuple[Path, Report]) -> None:
    report = measured[1]
    assert [place.name for place in report.places] == [f"{mode}/{part}" for mode in modes.MODES
                                                       for part in modes.PARTS]
    for place in report.places:
        assert place.harness == [0.0] * PROMPTS  # exactly
        assert place.told["identity"] == "the same bits"
        at, first = (11, 12) if place.site.startswith("snapshot") else (18, 18)
        assert place.told["one wrong row"] == (f"written at position {at} of prompt 3, first difference at {first}, in "
                                               "no other prompt")
        assert place.told["shuffled"].endswith("nats, worse than every codec")


def test_in_forward_costs_more_than_a_snapshot_and_a_scale_a_head_less_than_one_for_all(
        measured: tuple[Path, Report]) -> None:
    report = measured[1]
    for part in modes.PARTS:
        snapshot, forward = costs(report, f"snapshot/{part}"), costs(report, f"in-forward/{part}")
        for name in CODECS:
            assert forward[name] > snapshot[name] > 0, (part, name)
            assert forward[name] < forward["shuffled"] / 3, (part, name)
        for each in (snapshot, forward):
            assert each["kv8"] < each["kv4"] < each["shuffled"]
            assert each["kv4"] < each["kv4-pooled"] < each["shuffled"]
    lines = {one.name: one for one in lines_of(report) if one.site == "in-forward/kv" and one.kind != "noise"}
    width = report.places[0].width
    assert lines["kv8"].row_bytes < lines["k8v4"].row_bytes * 1.5 and lines["kv4"].row_bytes > width // 2
    assert lines["pca4"].row_bytes == width // 2 + width // 32 * 2  # heads of 32 numbers
    assert {one.kind for one in lines_of(report) if one.site != "in-forward/kv"} == {"codec", "control"}
    noise = [one for one in lines_of(report) if one.kind == "noise"]
    assert [one.name for one in noise] == list(CODECS)
    assert all(0.1 < (lines[name].structure or 0) < 10 for name in CODECS)


def test_what_a_model_of_chance_does_not_copy_is_not_shown(measured: tuple[Path, Report]) -> None:
    assert measured[1].retrieval is not None
    assert measured[1].retrieval["why"].startswith("a context of 12 tokens has no whole run of 32")


def test_keys_turned_back_are_hugging_faces_before_its_rotary_embedding(bench: Bench) -> None:
    from transformers import AutoModelForCausalLM

    net: Any = AutoModelForCausalLM.from_pretrained(family_model("qwen3", DTYPE), dtype=torch.float32).eval()
    theirs: dict[int, torch.Tensor] = {}
    for layer, block in enumerate(net.model.layers):
        block.self_attn.k_norm.register_forward_hook(
            lambda _module, _given, output, layer=layer: theirs.__setitem__(layer, output[0]))
    rows, turns = modes.Kept(TOKENS, bench.number_of), rotaries_of(bench.engine)
    bench.rewritten(MADE.judged.tokens, rows)
    with torch.inference_mode():
        net(torch.from_numpy(MADE.judged.tokens[:1]))
    for layer, expected in theirs.items():
        turn = turns[layer]
        assert isinstance(turn, Rotary)
        given = rows.exact[layer, 0][0]
        assert torch.allclose(turn.turned(given, torch.arange(TOKENS), back=True), expected, atol=1e-4)
        assert not torch.allclose(given, expected, atol=0.1)


def test_what_a_codec_costs_is_what_hugging_faces_cache_says(measured: tuple[Path, Report]) -> None:
    """In-forward: what the cache is given is coded; direct: an exact run's; snapshot: what it holds, in the middle."""
    from transformers import AutoModelForCausalLM, DynamicCache

    net: Any = AutoModelForCausalLM.from_pretrained(family_model("qwen3", DTYPE), dtype=torch.float32).eval()
    coder = chosen(("k8v4",), {})[0]

    def coded(rows: torch.Tensor, what: str) -> torch.Tensor:  # [1, heads, tokens, head]
        return coder.round_trip(rows[0].transpose(0, 1), what).transpose(0, 1)[None]

    class Coding(DynamicCache):
        def update(self, key_states: Any, value_states: Any, layer_idx: int, *more: Any, **others: Any) -> Any:
            keys, values = exact[layer_idx] if exact else (key_states, value_states)
            return super().update(coded(keys, "k"), coded(values, "v"), layer_idx, *more, **others)

    theirs: dict[str, list[float]] = {mode: [] for mode in modes.MODES}
    with torch.inference_mode():
        for row in MADE.judged.tokens:
            tokens, exact = torch.from_numpy(row[None]), list[tuple[torch.Tensor, torch.Tensor]]()
            clean = DynamicCache()
            before = log_softmax(net(tokens, past_key_values=clean).logits[0].numpy())
            other = {"in-forward": net(tokens, past_key_values=Coding()).logits[0].numpy()}
            exact = [(layer.keys.clone(), layer.values.clone()) for layer in clean.layers]
            other["direct"] = net(tokens, past_key_values=Coding()).logits[0].numpy()
            cut = DynamicCache()
            first = net(tokens[:, :CONTEXT], past_key_values=cut).logits[0].numpy()
            for layer in cut.layers:
                layer.keys, layer.values = coded(layer.keys, "k"), coded(layer.values, "v")
            other["snapshot"] = np.concatenate([first, net(tokens[:, CONTEXT:], past_key_values=cut).logits[0].numpy()])
            for mode, logits in other.items():
                theirs[mode].append(float(compare(before, log_softmax(logits), row).kl[CONTEXT:].mean()))
    for mode in modes.MODES:
        place = next(one for one in measured[1].places if one.site == f"{mode}/kv")
        ours = next(one for one in place.patched if one.name == "k8v4")
        assert ours.prompts["kl"] == pytest.approx(theirs[mode], rel=0.02), mode


def test_a_run_that_was_ended_goes_on_where_it_was(measured: tuple[Path, Report], bench: Bench, tmp_path: Path) -> None:
    out, report = measured
    lines = (out / "progress.jsonl").read_text().splitlines(keepends=True)
    assert len(lines) == 11  # the floors, nine places and retrieval
    (out / "progress.jsonl").write_text("".join(lines[:9]) + lines[9][:50])  # killed while it wrote
    again = study(job(out), MADE, bench)
    assert again.places == report.places and again.floors == report.floors
    (tmp_path / "report.json").write_text(again.to_json())
    assert load_report(tmp_path / "report.json").places == report.places
    with pytest.raises(ArgumentError, match=r"--out = .*progress.jsonl of another run"):
        study(job(out, parts=("kv",)), MADE, bench)


def test_one_layer_alone_is_a_place_of_its_own_and_costs_less(measured: tuple[Path, Report], bench: Bench,
                                                              tmp_path: Path) -> None:
    asked = KVJob(FidelityJob(str(family_model("qwen3", DTYPE)), tmp_path, layers=(1,)), ("in-forward",), ("kv",),
                  ("kv4",))
    found = study(asked, MADE, bench).places
    assert [one.name for one in found] == ["in-forward/kv.1"]
    alone = next(one for one in found[0].patched if one.name == "kv4")
    whole = next(one for place in measured[1].places if place.site == "in-forward/kv" for one in place.patched
                 if one.name == "kv4")
    assert np.mean(alone.prompts["kl"]) < np.mean(whole.prompts["kl"]) / 1.3
    assert whole.row_bytes == alone.row_bytes * len(keys_values.heads_of(bench.engine))
    with pytest.raises(ArgumentError, match=r"--layers = 99: has no keys and values; these have: 0, 1"):
        study(KVJob(FidelityJob(str(family_model("qwen3", DTYPE)), tmp_path, layers=(99,))), MADE, bench)


# ── codecs that are not what they say ───────────────────────────────────────────────────────────────────────────


class Half:
    """Rows in half precision; what is wrong with those below."""

    def encode(self, rows: torch.Tensor, what: str) -> Any:
        return {"x": rows.half()}

    def decode(self, pieces: Any, heads: int, head: int, what: str) -> torch.Tensor:
        found: torch.Tensor = pieces["x"].float()
        return found

    def token_bytes(self, heads: int, head: int, what: str) -> int:
        return 2 * heads * head


class Understates(Half):
    def token_bytes(self, heads: int, head: int, what: str) -> int:
        return heads * head // 2


class KeepsItBack(Half):
    kept: torch.Tensor

    def encode(self, rows: torch.Tensor, what: str) -> Any:
        KeepsItBack.kept = rows.clone()
        return {"x": torch.zeros(len(rows), 1, dtype=torch.uint8)}

    def decode(self, pieces: Any, heads: int, head: int, what: str) -> torch.Tensor:
        return KeepsItBack.kept

    def token_bytes(self, heads: int, head: int, what: str) -> int:
        return 1


class OneForAll(Half):
    def encode(self, rows: torch.Tensor, what: str) -> Any:
        return {**super().encode(rows, what), "scale": rows.float().abs().amax()[None]}


class TogetherOnly(Half):
    def decode(self, pieces: Any, heads: int, head: int, what: str) -> torch.Tensor:
        found = super().decode(pieces, heads, head, what)
        return found - found.mean(0)


class Fails(Half):
    def encode(self, rows: torch.Tensor, what: str) -> Any:
        raise RuntimeError("no table for this head")


class OtherShape(Half):
    def decode(self, pieces: Any, heads: int, head: int, what: str) -> torch.Tensor:
        return super().decode(pieces, heads, head, what)[:, :1]


class NoNumber(Half):
    def decode(self, pieces: Any, heads: int, head: int, what: str) -> torch.Tensor:
        return super().decode(pieces, heads, head, what) * float("nan")


def own(bench: Bench, kind: Callable[[], Any]) -> None:
    measured_sizes(bench, MADE.judged.tokens, [Coder.of("mine", kind)], [0, 1])


@pytest.mark.parametrize(("kind", "match"), [
    (Understates, r"declares 32 bytes for keys of a token in 2 heads of 32, and packed they are 128"),
    (KeepsItBack, r"decodes to something else from the packed codes alone: it keeps what it does not count"),
    (OneForAll, r"its piece 'scale' of 24 tokens is no tensor \[24, \.\.\.\]"),
    (TogetherOnly, r"decodes a token otherwise beside others than alone"),
    (Fails, r"fails on 24 tokens: RuntimeError: no table for this head"),
    (OtherShape, r"decodes to \[24, 1, 32\], not to \[24, 2, 32\]")])
def test_a_codec_that_is_not_what_it_says_is_refused_by_name(bench: Bench, kind: Callable[[], Any], match: str) -> None:
    with pytest.raises(ArgumentError, match=rf"--codec = 'mine': {match}"):
        own(bench, kind)


def test_a_codec_of_the_users_is_measured_beside_those_that_are_shipped(bench: Bench, tmp_path: Path) -> None:
    asked = KVJob(FidelityJob(str(family_model("qwen3", DTYPE)), tmp_path), ("in-forward",), ("kv",), ("kv8",),
                  {"mine": Half, "broken": NoNumber})
    place = study(asked, MADE, bench).places[0]
    mean = {one.name: (float(np.mean(one.prompts["kl"])), one.row_bytes) for one in place.patched
            if one.kind != "noise"}
    assert 0 < mean["mine"][0] < mean["kv8"][0] / 10 and mean["mine"][1] == 2 * place.width
    assert place.broken["broken"]["why"] == "it decodes to what is no number"
    assert place.told["broken"] == "broken here: it decodes to what is no number"


# ── engines that are broken on purpose ──────────────────────────────────────────────────────────────────────────


def studied(bench: Bench, mode: str = "in-forward", part: str = "kv", codecs: tuple[str, ...] = CODECS[:4]
            ) -> PlaceStudy:
    heads, coders = keys_values.heads_of(bench.engine), chosen(codecs, {})
    layers = tuple(sorted(heads))
    sizes = measured_sizes(bench, MADE.judged.tokens, coders, layers)
    return study_kv(bench, MADE.judged.tokens, Where(mode, part, layers), coders, (sizes, heads), (PROMPTS, CONTEXT),
                    lambda: None)


def test_batches_of_other_sizes_give_the_same_numbers(bench: Bench, measured: tuple[Path, Report]) -> None:
    """Five prompts by twos: the last batch has three, as a lone prompt would be cut otherwise."""
    heads, coders = keys_values.heads_of(bench.engine), chosen(("kv4",), {})
    layers = tuple(sorted(heads))
    sizes = measured_sizes(bench, MADE.judged.tokens, coders, layers)
    place = study_kv(bench, MADE.judged.tokens[:5], Where("snapshot", "kv", layers), coders, (sizes, heads),
                     (2, CONTEXT), lambda: None)
    whole = next(one for one in measured[1].places if one.site == "snapshot/kv")
    ours, theirs = (next(one for one in each.patched if one.name == "kv4").prompts["kl"] for each in (place, whole))
    assert ours == pytest.approx(theirs[:5], rel=1e-3)


@pytest.mark.parametrize("mode", modes.MODES)
def test_rows_written_a_slot_late_publish_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    right = modes.Coding.__call__

    def late(self: Any, layer: int, rows: Any) -> Any:
        for keys, values, slots in right(self, layer, rows):
            yield keys.roll(1, 0), values.roll(1, 0), slots

    monkeypatch.setattr(modes.Coding, "__call__", late)
    with pytest.raises(Unpublished, match=rf"identity at {mode}/kv: keys and values written back as they were change"):
        studied(bench, mode)


def test_a_change_that_does_not_reach_the_cache_publishes_nothing(bench: Bench,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    right = modes.Coding.__call__

    def idle(self: Any, layer: int, rows: Any) -> Any:
        list(right(self, layer, rows))
        yield rows.keys, rows.values, rows.slots

    monkeypatch.setattr(modes.Coding, "__call__", idle)
    with pytest.raises(Unpublished, match=r"one wrong row at in-forward/kv: written at position 18 .*nothing differs"):
        studied(bench)


def test_a_layer_that_is_left_out_publishes_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    right = keys_values.layers_of
    monkeypatch.setattr(keys_values, "layers_of", lambda runner: {
        layer: part for layer, part in right(runner).items() if layer})
    heads = {0: (2, 32), **keys_values.heads_of(bench.engine)}
    coders, layers = chosen(("kv8",), {}), tuple(sorted(heads))
    with pytest.raises(Unpublished, match=r"in-forward/kv: of position 0 \d+ rows came by, and \d+ are written"):
        study_kv(bench, MADE.judged.tokens, Where("in-forward", "kv", layers), coders, ({}, heads), (PROMPTS, CONTEXT),
                 lambda: None)


def test_a_prompt_that_is_cut_elsewhere_is_refused(bench: Bench) -> None:
    coders, heads = chosen(("kv8",), {}), keys_values.heads_of(bench.engine)
    layers = tuple(sorted(heads))
    with pytest.raises(StartError, match=r"a step has positions on both sides of 7"):
        study_kv(bench, MADE.judged.tokens, Where("snapshot", "kv", layers), coders,
                 (measured_sizes(bench, MADE.judged.tokens, coders, layers), heads), (PROMPTS, 7), lambda: None)


def test_the_engine_is_what_it_was_when_nothing_is_changed_any_more(bench: Bench) -> None:
    """This one comes last: a step was ended by an exception above."""
    parts = keys_values.layers_of(keys_values.runner_of(bench.engine))
    assert all("do_kv_cache_update" not in vars(part.impl) for part in parts.values())
