"""A place measured on a model of one layer, without an engine: who is told from whom, and which controls speak."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from engine_side.seams.kept.keys_values import Change, Rows
from schemas.errors import ArgumentError, StartError
from vllm_tap.fidelity import texts
from vllm_tap.fidelity.bench import Answer, Bench, Unpublished
from vllm_tap.fidelity.distributions import I64
from vllm_tap.fidelity.kv import retrieval
from vllm_tap.fidelity.kv.codecs import Coder, Float8, Stand, own_codec
from vllm_tap.fidelity.kv.modes import MODES, Make, Window, noise_like, one_wrong, shuffled, window_of
from vllm_tap.fidelity.kv.retrieval import study_retrieval
from vllm_tap.fidelity.kv.study import Where, study_kv
from vllm_tap.fidelity.study import PlaceStudy

PROMPTS, TOKENS, CONTEXT, HEADS, HEAD, VOCABULARY = 4, 16, 8, 2, 16, 32
DRAWN = np.random.default_rng(0).integers(0, VOCABULARY, (PROMPTS, TOKENS))
READ = np.random.default_rng(1).normal(size=(2 * HEADS * HEAD, VOCABULARY)).astype(np.float32)


class OneLayer(Bench):
    """Keys and values are of the token alone; logits read the sum of the last ``window`` of them, written in steps of
    so many tokens. ``preempted``: the first step comes by twice.
    """

    def __init__(self, window: int = TOKENS, preempted: bool = False, step: int = CONTEXT) -> None:
        self.window, self.preempted, self.step = window, preempted, step

    @property
    def dtype(self) -> str:
        return "float32"

    def number_of(self, request: str) -> int:
        return int(request)

    def logits(self, norm: Any) -> Any:
        return norm

    def unedited(self, prompts: I64) -> list[Answer]:
        return self._answers([self._rows(prompts)] * -(-TOKENS // self.step))

    def rewritten(self, prompts: I64, change: Change) -> list[Answer]:
        exact = self._rows(prompts)
        found, count = exact.clone(), len(prompts)
        steps, states = [(at, min(at + self.step, TOKENS)) for at in range(0, TOKENS, self.step)], []
        for start, stop in (*steps[:1] * self.preempted, *steps):
            owners = torch.arange(count).repeat_interleave(stop - start)
            positions = torch.arange(start, stop).repeat(count)
            keys, values = (exact[:, start:stop, at].flatten(0, 1) for at in (0, 1))
            rows = Rows([str(at) for at in range(count)], owners, positions, keys, values, owners * TOKENS + positions)
            for made_keys, made_values, slots in change(0, rows):
                found.flatten(0, 1)[slots, 0], found.flatten(0, 1)[slots, 1] = made_keys, made_values
            states.append(found.clone())
        return self._answers(states[-len(steps):])

    def _rows(self, prompts: I64) -> torch.Tensor:
        table = np.random.default_rng(2).normal(size=(VOCABULARY, 2, HEADS, HEAD)).astype(np.float32)
        return torch.from_numpy(table[prompts])

    def _answers(self, states: Sequence[torch.Tensor]) -> list[Answer]:
        """Of each position what lies in the cache when its step is written."""
        found = []
        for of_prompt in zip(*states, strict=True):
            norm = [np.tanh((part[max(0, at + 1 - self.window):at + 1] * (1 + torch.arange(
                max(0, at + 1 - self.window), at + 1))[:, None, None, None]).flatten(1).sum(0).numpy() @ READ / 64)
                    for part, at in ((of_prompt[at // self.step], at) for at in range(TOKENS))]
            found.append(Answer((0,), np.stack(norm).astype(np.float32), None))
        return found


def studied(bench: Bench, mode: str = "in-forward", coders: Sequence[Coder] = (), part: str = "kv",
            tokens: I64 = DRAWN, window: Window | None = None) -> PlaceStudy:
    coders = coders or [Coder.of("mine", Float8)]
    sizes = {(one.name, 0, what): HEADS * HEAD for one in coders for what in "kv"}
    return study_kv(bench, tokens, Where(mode, part, (0,), -1, window), coders, (sizes, {0: (HEADS, HEAD)}),
                    (PROMPTS, CONTEXT), lambda: None)


def test_a_codec_named_as_a_control_is_not_mixed_with_it() -> None:
    names = {name: {(one.kind, one.name): one.prompts["kl"] for one in studied(
        OneLayer(), coders=[Coder.of(name, Float8)]).patched} for name in ("mine", "shuffled")}
    assert names["shuffled"]["codec", "shuffled"] == names["mine"]["codec", "mine"]
    assert names["shuffled"]["control", "shuffled"] == names["mine"]["control", "shuffled"]


@pytest.mark.parametrize("name", ["shuffled", "identity"])
def test_the_name_of_a_control_is_not_taken_for_a_codec(name: str) -> None:
    with pytest.raises(ArgumentError, match=rf"--codec = '{name}=.*{name} is the name of a control; take another"):
        own_codec(f"{name}=vllm_tap.fidelity.kv.codecs:Float8")


@pytest.mark.parametrize("mode", MODES)
def test_a_cache_that_is_too_small_is_told_with_what_would_do(mode: str) -> None:
    with pytest.raises(Unpublished, match=rf"{mode}/kv: requests were preempted .*VLLM_CPU_KVCACHE_SPACE.*"
                                          r"--num-gpu-blocks-override.*fewer --tokens"):
        studied(OneLayer(preempted=True), mode)


@pytest.mark.parametrize(("mode", "at", "first"), [("snapshot", 7, 8), ("direct", 12, 12), ("in-forward", 12, 12)])
def test_one_wrong_row_is_seen_through_a_short_window(mode: str, at: int, first: int) -> None:
    assert studied(OneLayer(window=2), mode).told["one wrong row"] == (
        f"written at position {at} of prompt 2, first difference at {first}, in no other prompt")


@pytest.mark.parametrize(("mode", "equal", "at"), [("snapshot", (7, 6), 5), ("in-forward", (11, 12), 13),
                                                   ("in-forward", (12, 13), 11)])
def test_one_wrong_row_is_not_that_of_an_equal_token(mode: str, equal: tuple[int, ...], at: int) -> None:
    tokens = np.arange(PROMPTS * TOKENS).reshape(PROMPTS, TOKENS) % VOCABULARY
    for each in equal:
        tokens[2, each] = tokens[2, each - 1] if mode != "snapshot" else tokens[2, 5]
    assert studied(OneLayer(), mode, tokens=tokens).told["one wrong row"].startswith(
        f"written at position {at} of prompt 2,")


def test_a_prompt_of_one_token_alone_tells_nothing() -> None:
    with pytest.raises(Unpublished, match=r"one wrong row at in-forward/kv: from position 8 on each token of prompt 2 "
                                          r"is the one before"):
        studied(OneLayer(), tokens=np.full((PROMPTS, TOKENS), 3))


# ── a window that rolls ─────────────────────────────────────────────────────────────────────────────────────────────

ROLLS = Window(exact=3, first=4, step=2)


class Seen(Float8):
    """The codec, and the rows that it was given."""

    rows: list[torch.Tensor] = []

    def encode(self, rows: torch.Tensor, what: str) -> Any:
        if what == "k":
            Seen.rows.append(rows.clone())
        return super().encode(rows, what)


def test_rolling_codes_each_row_once_as_it_leaves_the_window() -> None:
    Seen.rows = []
    bench = OneLayer(step=2)
    place = studied(bench, "rolling", [Coder.of("mine", Seen)], window=ROLLS)
    rows, coded = bench._rows(DRAWN)[:, :, 0], torch.cat(Seen.rows)
    due = rows[:, ROLLS.first : ROLLS.stop(TOKENS)].flatten(0, 1)  # neither the first nor those still within at the end
    assert len(coded) == len(due) == PROMPTS * (11 - 4)
    assert {each.numpy().tobytes() for each in coded} == {each.numpy().tobytes() for each in due}
    assert place.harness == [0.0] * PROMPTS and place.told["identity"] == "the same bits"
    # A row at 8 is changed beside that at 7 in the step from 12 on, which reads it.
    assert place.told["one wrong row"] == (
        "written at position 8 of prompt 2, first difference at 12, in no other prompt")
    mean = {one.name: np.mean(one.prompts["kl"]) for one in place.patched}
    assert 0 < mean["mine"] < mean["shuffled"]


@pytest.mark.parametrize("exact", [1, 3, 5, 7])
def test_the_longer_the_window_the_less_a_codec_costs_and_the_more_bytes_it_takes(exact: int) -> None:
    costs, sizes = {}, {}
    for each in (exact, exact + 1):
        one, = (one for one in studied(OneLayer(step=2), "rolling", window=Window(each, 4, 2)).patched
                if one.name == "mine")
        costs[each], sizes[each] = np.mean(one.prompts["kl"]), one.row_bytes
    assert costs[exact] >= costs[exact + 1] > 0
    whole, coded = 4 * HEADS * HEAD, 2 * HEADS * HEAD
    assert sizes == {each: -(-(coded * (TOKENS - 4 - each) + whole * (4 + each)) // TOKENS) for each in sizes}


def test_what_a_short_window_of_attention_does_not_read_costs_nothing() -> None:
    """A model that reads no further back than the window keeps exact: then no wrong row is ever seen."""
    with pytest.raises(Unpublished, match=r"one wrong row at rolling/kv: written at position 8 .*nothing differs"):
        studied(OneLayer(window=3, step=2), "rolling", window=ROLLS)


def test_steps_that_are_longer_than_the_windows_are_refused() -> None:
    with pytest.raises(StartError, match=r"a step has 4 positions of one prompt, and 2 are exact beside the window"):
        studied(OneLayer(step=4), "rolling", window=ROLLS)


def test_requests_that_were_preempted_publish_nothing_of_a_window() -> None:
    with pytest.raises(Unpublished, match=r"rolling/kv: requests were preempted"):
        studied(OneLayer(preempted=True, step=2), "rolling", window=Window(1, 0, 2))


@pytest.mark.parametrize(("tokens", "context", "exact", "window"), [
    (128, 64, None, Window(32, 4, 8)), (512, 256, None, Window(128, 4, 32)), (2048, 1024, None, Window(128, 4, 32)),
    (24, 12, 6, Window(6, 4, 4)), (26, 13, 6, Window(6, 4, 13)), (128, 64, 1, Window(1, 4, 4))])
def test_the_window_of_prompts(tokens: int, context: int, exact: int | None, window: Window) -> None:
    assert window_of(tokens, context, exact) == window and context % window.step == 0


def test_a_window_that_hardly_a_row_leaves_is_refused_with_what_would_do() -> None:
    with pytest.raises(ArgumentError, match=r"--window = 120: in prompts of 128 tokens hardly a row leaves it: valid: "
                                            r"at most \d+, or take more --tokens") as refused:
        window_of(128, 64, 120)
    most = int(str(refused.value).split("at most ")[1].split(",")[0])
    assert window_of(128, 64, most).exact == most
    with pytest.raises(ArgumentError):
        window_of(128, 64, most + 1)


# ── noise, components, retrieval ────────────────────────────────────────────────────────────────────────────────


def test_noise_has_each_heads_own_power_and_no_other() -> None:
    coder, rows = Coder.of("mine", Float8), torch.randn(50, HEADS, HEAD, generator=torch.Generator().manual_seed(0))
    stand = Stand(torch.ones(50).long(), 0, torch.arange(50), "k")
    off, noise = coder.coded(rows, stand) - rows, noise_like(coder)(rows, stand) - rows
    assert torch.allclose(noise.norm(dim=-1), off.norm(dim=-1), rtol=1e-3)
    assert (off * noise).sum() ** 2 < 0.05 * off.square().sum() * noise.square().sum()  # another direction
    assert torch.equal(noise_like(coder)(rows, stand) - rows, noise)
    other = noise_like(coder)(rows, Stand(torch.full((50,), 2), 0, torch.arange(50), "k")) - rows
    assert not torch.allclose(other, noise)


@pytest.mark.parametrize("make", [Coder.of("mine", Float8).coded, noise_like(Coder.of("mine", Float8)), shuffled(3),
                                  one_wrong(7, 5)], ids=["codec", "noise", "shuffled", "one wrong"])
def test_prompts_that_share_a_step_are_changed_as_each_alone(make: Make) -> None:
    """A step has rows of several prompts, at positions of their own; none gets a row of another."""
    rows = torch.randn(30, HEADS, HEAD, generator=torch.Generator().manual_seed(1))
    prompts = torch.tensor([7] * 12 + [2] + [9] * 17)
    places = torch.cat([torch.arange(12), torch.tensor([5]), torch.arange(3, 20)])
    together = make(rows, Stand(prompts, 0, places, "k"))
    for part in (slice(0, 12), slice(12, 13), slice(13, 30)):
        alone = make(rows[part], Stand(prompts[part], 0, places[part], "k"))
        assert torch.equal(together[part], alone)
    assert not torch.equal(together, rows)


def test_noise_is_measured_beside_each_codec_where_it_is_asked_for() -> None:
    where = Where("in-forward", "kv", (0,), noisy=True)
    coders = [Coder.of("mine", Float8)]
    place = study_kv(OneLayer(), DRAWN, where, coders, ({("mine", 0, what): 32 for what in "kv"}, {0: (HEADS, HEAD)}),
                     (PROMPTS, CONTEXT), lambda: None)
    assert [(one.kind, one.name) for one in place.patched] == [("codec", "mine"), ("noise", "mine"),
                                                              ("control", "shuffled")]
    codec, noise, shuffled = (float(np.mean(one.prompts["kl"])) for one in place.patched)
    assert 0.1 * noise < codec < 10 * noise and noise < shuffled / 3


class Copies(OneLayer):
    """Logits are those of the token whose values lie ``back`` positions before the next one, as a head that copies."""

    back = 4

    def _answers(self, states: Sequence[torch.Tensor]) -> list[Answer]:
        table = np.random.default_rng(2).normal(size=(VOCABULARY, 2, HEADS * HEAD)).astype(np.float32)[:, 1]
        return [Answer((0,), np.stack([of_prompt[at // self.step][max(0, at + 1 - self.back), 1].flatten().numpy()
                                       @ table.T for at in range(TOKENS)]), None)
                for of_prompt in zip(*states, strict=True)]


class Nothing(Float8):
    def decode(self, pieces: Any, heads: int, head: int, what: str) -> torch.Tensor:
        return 0 * super().decode(pieces, heads, head, what)


def retrieved(monkeypatch: pytest.MonkeyPatch, bench: Bench, *modes: str) -> Any:
    for module in (texts, retrieval):
        monkeypatch.setattr(module, "RUN", 4)
    coders = [Coder.of("fp8", Float8), Coder.of("nothing", Nothing), Coder.of("broken", Broken)]
    places = [Where(mode, "kv", (0,)) for mode in modes]
    return study_retrieval(bench, DRAWN, np.arange(8), places, coders, (2, CONTEXT), lambda: None)


class Broken(Float8):
    def decode(self, pieces: Any, heads: int, head: int, what: str) -> torch.Tensor:
        return super().decode(pieces, heads, head, what) * float("nan")


def test_what_is_copied_through_a_codec_is_counted_by_place(monkeypatch: pytest.MonkeyPatch) -> None:
    found = retrieved(monkeypatch, Copies(), *MODES)
    assert found.positions == 3 and found.exact == [1.0] * PROMPTS
    assert list(found.copied) == [f"{mode}/kv" for mode in MODES]
    for place, shares in found.copied.items():
        assert list(shares) == ["fp8", "nothing", "shuffled"]
        assert shares["fp8"] == [1.0] * PROMPTS, place
        assert np.mean(shares["nothing"]) < 0.5 > np.mean(shares["shuffled"]), place
        assert found.told[f"{place} broken"] == "broken here: it decodes to what is no number"


@pytest.mark.parametrize(("bench", "match"), [
    (OneLayer(), r"the model itself tells \d+ % of the tokens of a run that comes again, and at least 50 % are needed"),
    (type("Late", (Copies,), {"back": 3})(), r"the model itself tells \d+ %")])
def test_what_the_model_itself_does_not_copy_is_not_shown(monkeypatch: pytest.MonkeyPatch, bench: Bench, match: str
                                                          ) -> None:
    with pytest.raises(Unpublished, match=match):
        retrieved(monkeypatch, bench, "in-forward")


def test_a_model_that_copies_from_elsewhere_than_the_cache_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its shuffled rows are as good as exact ones."""
    monkeypatch.setattr(Copies, "rewritten", lambda self, prompts, change: [
        OneLayer.rewritten(self, prompts, change), self.unedited(prompts)][1])
    with pytest.raises(Unpublished, match=r"at in-forward/kv as much is copied from shuffled rows as from exact ones"):
        retrieved(monkeypatch, Copies(), "in-forward")
