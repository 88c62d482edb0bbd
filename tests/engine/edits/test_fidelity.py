"""The laboratory of codecs on a real engine: it measures what Hugging Face does, and what is broken is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine_side import worker
from engine_side.edits import editor as editor_module
from schemas.edits.resolved import IDENTITY
from schemas.errors import ArgumentError
from schemas.read.reader import StoreReader
from tests.support.engines.engines import DTYPE, ON_GPU, in_this_process, shut_down
from tests.support.models.families import family_model
from tests.support.store_helpers import until
from vllm_tap import open_store
from vllm_tap.fidelity import coding
from vllm_tap.fidelity import study as study_module
from vllm_tap.fidelity.bench import Bench
from vllm_tap.fidelity.distributions import compare, log_softmax
from vllm_tap.fidelity.job import FidelityJob, Made, study
from vllm_tap.fidelity.reports.report import Report, lines_of
from vllm_tap.fidelity.study import PlaceStudy, Unpublished, study_place
from vllm_tap.fidelity.texts import Corpus, Prompts
from vllm_tap.fidelity.unpatched import drafting
from vllm_tap.fidelity.unpatched.drafting import accepted

pytestmark = [pytest.mark.skipif(ON_GPU, reason="an engine in this process")]

PROMPTS, TOKENS, SITES = 6, 24, ("resid_post", "mlp_post")
PLACE = ("resid_post", 1)
CODECS = ("raw16", "int8b64", "fp8row")


def drawn(seed: int) -> Prompts:
    """Prompts of chance whose labels say whether a token is an even number."""
    tokens = np.random.default_rng(seed).integers(10, 200, (PROMPTS, TOKENS))
    return Prompts(tokens, np.arange(PROMPTS), tokens % 2 == 0)


MADE = Made(SITES, TOKENS, drawn(0), drawn(1), Corpus("chance", "c" * 32, ("",), ("",), True), np.arange(8),
            attended=("q_rot", "k_rot", "v", "z"))


@pytest.fixture(scope="module")
def bench(reader: StoreReader) -> Iterator[Bench]:
    from vllm import LLM

    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"ARM": "resid_post,mlp_post,final_norm,q_rot,k_rot,v,z", "EDIT": "resid_post.1,mlp_post.1",
                            "EDIT_ROWS": "1000"}.items():
            patch.setenv(f"VLLM_TAP_{name}", value)
        with in_this_process():
            llm: Any = LLM(str(family_model("qwen3", DTYPE)), dtype=DTYPE, skip_tokenizer_init=True, max_model_len=64,
                           max_num_seqs=PROMPTS, block_size=32, seed=0)
    with open_store(reader.path) as store:
        # Others have sent to this store before: a busy writer hears of this engine after its start.
        assert until(lambda: (info := reader.engine()) is not None and "q_rot" in info.armed.sites)
        yield Bench(llm.llm_engine, store, 8)
    shut_down(llm)


def job(out: Path, **more: Any) -> FidelityJob:
    out.mkdir(exist_ok=True)
    return FidelityJob(str(family_model("qwen3", DTYPE)), out, codecs=CODECS, **more)


@pytest.fixture(scope="module")
def measured(bench: Bench, reader: StoreReader, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Report]:
    out = tmp_path_factory.mktemp("fidelity")
    return out, study(job(out), MADE, bench, reader.engine())


def test_every_control_behaves_and_is_told(measured: tuple[Path, Report]) -> None:
    report = measured[1]
    assert [(place.site, place.layer) for place in report.places] == [("resid_post", 1), ("mlp_post", 1)]
    for place in report.places:
        assert set(place.told) == {"identity", "one wrong row", "engine's codes", "shuffled", "one late"}
        assert place.told["identity"] == "the same bits" and place.harness == [0.0] * PROMPTS  # float32
        assert place.told["one wrong row"] == "first difference at position 12 of prompt 3, in no other prompt"
        assert place.told["engine's codes"].startswith("100 % of rows")
        lines = {(one.kind, one.name): one for one in lines_of(report, [place])}
        costs = [lines["codec", name].kl.value for name in CODECS] + [lines["control", "shuffled"].kl.value]
        assert costs == sorted(costs) and costs[0] < costs[1] < costs[2] / 3 and costs[3] > 100 * costs[2]
        assert {one.kind for one in lines.values()} == {"codec", "noise", "control"}
        assert 0.2 < (lines["codec", "int8b64"].structure or 0) < 5
        assert lines["control", "shuffled"].same_tokens < 4 and lines["codec", "raw16"].same_tokens == 8
    assert 0 <= report.free < report.bar < 1 and report.settings["arithmetic"].startswith("bfloat16 against float32")
    neurons = report.places[1].rows["shuffled"]["neurons"]
    assert neurons["magnitude"] > 0.99 and neurons["concept"]["value"] < 0.9
    assert report.places[0].rows["int8b64"]["probe"]["lost"]["high"] < 0.02


def test_attention_out_of_coded_rows_is_held_against_the_kernels_own(measured: tuple[Path, Report]) -> None:
    found = measured[1].attention
    assert found is not None and found["layer"] == 1 and found["told"]["kernel"].startswith("its outputs are at most ")
    assert float(found["told"]["kernel"].split()[5]) < 1e-5
    mass, overlap = ({name: float(np.mean(each[what])) for name, each in found["prompts"].items()}
                     for what in ("mass", "overlap"))
    assert list(mass) == [*CODECS, "shuffled"] and sorted(mass.values(), reverse=True) == list(mass.values())
    assert mass["raw16"] > 0.9999 and overlap["raw16"] > 0.99 and mass["shuffled"] < 0.9
    assert found["sizes"]["raw16"] == [256, 128] and found["told"]["shuffled"].endswith("more than with every codec")


def test_a_drafter_of_too_few_rows_is_not_shown(measured: tuple[Path, Report]) -> None:
    found = measured[1].drafter
    assert found is not None and list(found) == ["why"] and "144 rows of width 128 are too few" in found["why"]


def test_a_drafters_rows_and_tokens_belong_together(bench: Bench) -> None:
    """A head of the identity drafts the token that the model gave itself, one too late: where it repeats itself."""
    answers = bench.unedited(MADE.judged.tokens, generated=True)
    for one, prompt in zip(answers, MADE.judged.tokens, strict=True):
        assert len(one.norm) == len(prompt) + len(one.tokens) - 1
        made = one.norm[len(one.norm) - len(one.tokens):]
        own = bench.logits(made).argmax(-1)
        assert own.tolist() == list(one.tokens)
        heads = np.repeat(np.eye(one.norm.shape[1] + 1, one.norm.shape[1])[None], 5, 0)
        starts = len(one.tokens) - 5
        expected = accepted(np.stack([own[:starts]] * 5, 1), one.tokens)
        assert drafting._accepted(bench, heads, made, one.tokens) == expected


def test_a_run_that_was_ended_goes_on_where_it_was(measured: tuple[Path, Report], bench: Bench, reader: StoreReader,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    out, report = measured
    lines = (out / "progress.jsonl").read_text().splitlines(keepends=True)
    assert len(lines) == 5  # the floors, two places, attention and the drafter
    (out / "progress.jsonl").write_text("".join(lines[:2]) + lines[2][:50])  # killed while it wrote
    again = study(job(out), MADE, bench, reader.engine())
    assert again.places == report.places and again.floors == report.floors
    monkeypatch.setattr(bench.engine, "add_request", None)  # nothing is run where everything is there
    (out / "progress.jsonl").write_text("".join(lines))
    assert study(job(out), MADE, bench, reader.engine()).to_json() == report.to_json()
    with pytest.raises(ArgumentError, match=r"--out = .*progress.jsonl of another run"):
        study(job(out, bar=0.5), MADE, bench, reader.engine())


def test_logits_are_those_that_tokens_are_drawn_from(bench: Bench) -> None:
    answers = bench.unedited(MADE.judged.tokens)
    assert [int(bench.logits(one.norm)[-1].argmax()) for one in answers] == [one.tokens[0] for one in answers]


def test_what_a_codec_costs_is_what_hugging_face_says(bench: Bench, measured: tuple[Path, Report]) -> None:
    from transformers import AutoModelForCausalLM

    net: Any = AutoModelForCausalLM.from_pretrained(family_model("qwen3", DTYPE), dtype=torch.float32).eval()
    block = net.model.layers[PLACE[1]]
    tokens = MADE.judged.tokens
    with torch.inference_mode():
        exact = log_softmax(net(torch.from_numpy(tokens)).logits.numpy())

        def coded(_module: Any, _given: Any, output: Any) -> Any:
            rows = output[0] if isinstance(output, tuple) else output
            made = torch.from_numpy(coding.round_trip("fp8row", rows.flatten(0, 1).numpy(), "float32")).view_as(rows)
            return (made, *output[1:]) if isinstance(output, tuple) else made

        handle = block.register_forward_hook(coded)
        other = log_softmax(net(torch.from_numpy(tokens)).logits.numpy())
        handle.remove()
    theirs = [float(compare(*each).kl[1:].mean()) for each in zip(exact, other, tokens, strict=True)]
    ours = next(one for one in measured[1].places[0].patched if one.name == "fp8row" and one.kind == "codec")
    assert ours.prompts["kl"] == pytest.approx(theirs, rel=0.02)


# ── engines that are broken on purpose ──────────────────────────────────────────────────────────────────────────


def studied(bench: Bench, batch: int = PROMPTS, thorough: bool = True, tell: Callable[[], None] = lambda: None
            ) -> PlaceStudy:
    return study_place(bench, MADE.judged.tokens, PLACE, CODECS, batch, thorough, tell)[0]


class Idle:
    """An engine that, while ``on``, takes and counts edits that set rows and changes none."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        assert worker.CURRENT is not None
        editor: Any = worker.CURRENT.editor
        right, self.on = editor._write_slots, False

        def write(width: int, new: Any) -> None:
            right(width, new)
            if self.on:
                editor.tables.pools[width].forms[:] = torch.tensor(IDENTITY)

        patch.setattr(editor, "_write_slots", write)


def test_an_engine_that_sets_other_rows_publishes_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    right = editor_module.numbers_of
    monkeypatch.setattr(editor_module, "numbers_of", lambda *given: np.roll(right(*given), 1, 0))
    with pytest.raises(Unpublished, match=r"identity at resid_post.1: rows put back as they were change"):
        studied(bench)


def test_an_engine_that_leaves_edits_out_is_told_of_by_its_own_count(bench: Bench,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    assert worker.CURRENT is not None
    editor: Any = worker.CURRENT.editor
    right = editor.before_forward
    monkeypatch.setattr(editor, "before_forward", lambda requests, starts, at: right([], starts, at))
    with pytest.raises(Unpublished, match=r"edits of resid_post.1: 24 of 24 rows were not set"):
        studied(bench)


@pytest.mark.parametrize(("batch", "after", "match"), [
    (PROMPTS, 0, r"one wrong row at resid_post.1: set at position 12 of prompt 3, and nothing differs"),
    (3, 2 + len(CODECS), r"one wrong row at resid_post.1: set at position 12 of prompt 1, and nothing differs"),
    (PROMPTS, 2, r"raw16 at resid_post.1: 24 rows of prompt 0 were set to others and not a bit of the last norm")])
def test_edits_that_change_nothing_are_found_in_every_batch_and_of_every_codec(
        bench: Bench, monkeypatch: pytest.MonkeyPatch, batch: int, after: int, match: str) -> None:
    engine, done = Idle(monkeypatch), 0

    def tell() -> None:
        nonlocal done
        done += 1
        engine.on = done >= after

    engine.on = after == 0
    with pytest.raises(Unpublished, match=match):
        studied(bench, batch, thorough=False, tell=tell)  # as outside the middle layer


def test_a_codec_that_decodes_to_no_number_is_told_and_the_others_are_measured(
        bench: Bench, measured: tuple[Path, Report], monkeypatch: pytest.MonkeyPatch) -> None:
    right = coding.decode

    def decode(identity: str, *given: Any) -> Any:
        rows = right(identity, *given)
        return np.where(np.arange(len(rows))[:, None] == 5, np.nan, rows) if identity == "fp8row" else rows

    monkeypatch.setattr(coding, "decode", decode)
    found = studied(bench)
    whole = next(one for one in measured[1].places if (one.site, one.layer) == PLACE)
    assert found.patched == [one for one in whole.patched if one.name != "fp8row"]
    assert found.broken == {"fp8row": {"why": "it decodes to what is no number", "kl": [None] * PROMPTS,
                                       "row_bytes": 130}}
    assert found.told["fp8row"] == "broken here: it decodes to what is no number"


def test_logits_by_pieces_are_judged_as_whole_ones(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = studied(bench, thorough=False)
    monkeypatch.setattr(study_module, "_PIECE", 7)
    pieces = studied(bench, thorough=False)
    for one, other in zip(whole.patched, pieces.patched, strict=True):
        assert list(one.prompts) == list(other.prompts)
        for name, values in one.prompts.items():
            assert other.prompts[name] == pytest.approx(values, rel=1e-3, abs=1e-9), name


def test_a_codec_that_makes_more_bytes_than_it_declares_is_refused(bench: Bench,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    right = coding.encode
    monkeypatch.setattr(coding, "encode", lambda name, rows: {**right(name, rows), "hidden": rows[:, :1].clone()})
    with pytest.raises(ArgumentError, match=r"--codecs = 'raw16': declares \d+ bytes a row .* its encoder makes"):
        studied(bench)
