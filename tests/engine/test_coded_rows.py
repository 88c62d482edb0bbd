"""No row is another's: on a model whose rows say whose they are, every stored row proves token, position and layer.

One engine with few blocks (requests are preempted), a small budget (prompts come in chunks) and the prefix cache; one
with speculative decoding. What each capture must hold is worked out in accounts.py from what was asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import msgspec
import numpy as np
import pytest

from schemas.manifest import Manifest, Missing
from schemas.read.reader import Slice, StoreReader
from tests.engine.conftest import Store
from tests.support.engines.accounts import Request, check, tell
from tests.support.engines.draws import SITES, Setting, mix
from tests.support.engines.play import Played, counted, engine, prove
from tests.support.models.coded_model import LAYERS, greedy, text, words

SETTING = Setting(budget=48, requests=16, block_size=32, blocks=10, piece=16)
DRAFTING = Setting(budget=48, requests=16, block_size=32, blocks=10, drafts=True)
RAW = {"codec": "raw"}
LONG = {"max_tokens": 40, "ignore_eos": True}
EVERYTHING = {site: (0,) if site == "embed" else tuple(range(LAYERS)) for site in SITES}


@pytest.fixture(scope="module")
def llm(store: Store) -> Iterator[Any]:
    with engine(SETTING) as started:
        yield started


@pytest.fixture(scope="module")
def pair(llm: Any, reader: StoreReader) -> list[Played]:
    """Two requests that ran side by side."""
    return proven(llm, reader, whole(prompt(2, 60)), whole(prompt(3, 60)))  # they fit: none is preempted


def prompt(of: int, length: int, shared: int = 0) -> tuple[int, ...]:
    """The first words are everybody's, the others the request's own, as the model would go on."""
    begin = (words(of)[of % 7], words(of)[7 * of % 64])
    return tuple(islice((*words(0), *words(0)), shared)) + (*begin, *islice(greedy(begin), length))[: length - shared]


def whole(tokens: tuple[int, ...], params: dict[str, Any] | None = None, **more: Any) -> Request:
    """A request with a capture of all that is armed, as it is."""
    spec = {**RAW, **more.pop("spec", {})}
    return Request(tokens, {**LONG, **(params or {})}, spec, EVERYTHING, dict.fromkeys(EVERYTHING, "raw"), **more)



def proven(llm: Any, reader: StoreReader, *requests: Request) -> list[Played]:
    return prove(llm, reader, requests, SETTING.circumstances(list(requests)))


def statuses(reader: StoreReader, played: list[Played]) -> list[str]:
    return [reader.manifest(capture).status for one in played for capture in one.captures]


def test_a_ragged_batch_in_chunks_with_many_specs_and_requests_without_one(llm: Any, reader: StoreReader) -> None:
    requests = [whole(prompt(of, length), {"max_tokens": 1 + 3 * of}) for of, length in enumerate(
        (1, 2, 150, 47, 48, 49, 97), start=1)]
    layers = {"resid_post": (2,), "mlp_out": (0, 3)}
    named = ["blocks.2.hook_out", "mlp_out.0", "blocks.3.hook_mlp_out"]
    for of, positions in enumerate(("prompt", "generated", "last_prompt", [0, 3, 70, 9999], [[10, 12], [30, 65]]), 8):
        requests.append(Request(prompt(of, 60), LONG, {**RAW, "sites": named, "positions": positions}, layers,
                                dict.fromkeys(layers, "raw")))
        requests.append(Request(prompt(of + 8, 33), LONG))
    for of in (20, 21):  # a part of what others take whole, decoded beside them
        requests.append(Request(prompt(of, 20), LONG, {**RAW, "sites": ["mlp_out"]},
                                {"mlp_out": EVERYTHING["mlp_out"]}, {"mlp_out": "raw"}))
    played = proven(llm, reader, *requests)
    assert set(statuses(reader, played)) == {"complete"}


def test_preempted_requests(llm: Any, reader: StoreReader) -> None:
    before = counted(llm, "vllm:num_preemptions")
    played = proven(llm, reader, *(whole(prompt(of, 40 + 9 * of), {"max_tokens": 60}) for of in range(1, 9)))
    assert counted(llm, "vllm:num_preemptions") > before, "nothing was preempted: the test shows nothing"
    assert sum(reader.manifest(capture).recomputed for one in played for capture in one.captures) > 0
    assert set(statuses(reader, played)) == {"complete"}


def test_an_engine_that_rests_between_requests(llm: Any, reader: StoreReader) -> None:
    """Requests one after the other, each ended and in the store before the next: rows that a step hands over late, or
    to the next one, have none to follow. Captures come after steps that took nothing, and such steps after captures.
    """
    short, last = {"max_tokens": 1}, {"spec": {"positions": "last_prompt"}}
    played: list[Played] = []
    for of, (length, params, more) in enumerate((
        (30, {}, None), (30, {}, {}), (1, short, {}), (1, short, None), (100, short, {}), (60, {}, last), (2, {}, None),
        (20, {}, {"abort": 9}), (20, {}, {}), (31, {"max_tokens": 2}, {}),
    ), start=1):
        tokens = prompt(of, length)
        played += proven(llm, reader, whole(tokens, params, **more) if more is not None else Request(
            tokens, {**LONG, **params}))
    played += proven(llm, reader, *(whole(prompt(of, 9), {"max_tokens": 25}, arrival=4 * of) if of % 2 else Request(
        prompt(of, 40), {**LONG, "max_tokens": 6}, arrival=4 * of) for of in range(11, 21)))  # one ends as others begin
    assert set(statuses(reader, played)) == {"complete"}


def test_prompts_from_the_prefix_cache(llm: Any, reader: StoreReader) -> None:
    tokens = prompt(9, 110, shared=100)
    proven(llm, reader, Request(tokens, LONG))  # whole blocks of this prompt are cached now
    played = proven(llm, reader, *(whole(prompt(of, 110, shared=100), {"max_tokens": 5}, spec={"prefix_cache": how})
                                   for of, how in ((10, "allow"), (11, "recompute"), (12, "allow"))))
    assert [reader.manifest(one.captures[0]).cached for one in played] == [96, 0, 96]
    assert set(statuses(reader, played)) == {"complete"}


def test_blocks_of_another_request_after_a_preemption(llm: Any, reader: StoreReader) -> None:
    """Two prompts begin alike and are computed side by side; the later one is preempted on the way. When it goes on,
    the cache has more of its prompt than it had computed itself: that part is missing, and for that reason.
    """
    llm.reset_prefix_cache()
    allow = {"prefix_cache": "allow"}
    played = proven(
        llm, reader, whole(prompt(23, 70), {"max_tokens": 60}),
        *(whole(prompt(of, 150, shared=149), {"max_tokens": 3}, arrival=6, spec=allow) for of in (24, 25)))
    manifests = [reader.manifest(one.captures[0]) for one in played]
    gaps = {(gap.start, gap.stop, gap.reason) for manifest in manifests for entry in manifest.rows
            for gap in entry.missing}
    assert gaps and all(start > 0 for start, _, _ in gaps), f"nothing was read from the cache half-way: {manifests}"
    assert {reason for _, _, reason in gaps} == {"prefix_cached"}
    assert {manifest.status for manifest in manifests} == {"complete"}


def test_parallel_samples(llm: Any, reader: StoreReader) -> None:
    (played,) = proven(llm, reader, whole(prompt(13, 70), {"n": 4, "temperature": 1.0}))
    assert len(set(played.tokens)) == 4, "the samples are the same: the test shows nothing"
    assert statuses(reader, [played]) == ["complete"] * 4


def test_clients_that_leave(llm: Any, reader: StoreReader) -> None:
    requests = [whole(prompt(of, 90), {"max_tokens": 100}, abort=of % 4 * 5) for of in range(14, 20)]
    played = proven(llm, reader, *requests, whole(prompt(20, 30), arrival=8))
    assert [one.seen[0].reason for one in played] == [None] * 6 + ["length"]
    assert any(one.seen[0].tokens for one in played[:6]), "all left before the first token"


def test_stop_tokens_and_stop_strings(llm: Any, reader: StoreReader) -> None:
    """A string that spans two tokens; one that ends with the last token that was asked for; a token."""
    tokens = prompt(21, 40)
    future = list(islice(greedy(tokens), 12))
    string = f"{text(future[4])} {text(future[5])}"[3:-1]
    played = proven(llm, reader, whole(tokens, {"stop": [string]}),
                    whole(tokens, {"stop": [text(future[7])], "max_tokens": 8}),
                    whole(tokens, {"stop_token_ids": [future[9]]}))
    assert [one.seen[0].reason for one in played] == ["stop"] * 3
    assert [one.seen[0].stop_reason for one in played] == [string, text(future[7]), future[9]]


@pytest.mark.parametrize("draw", range(5))
def test_random_requests(llm: Any, reader: StoreReader, draw: int) -> None:
    """A handful of what ``make soak`` does for long."""
    proven(llm, reader, *mix(1, draw, SETTING))


class Tampered(StoreReader):
    """A reader that answers something else than it found."""

    change: Callable[[Any], Any]

    def slice(self, *args: Any, **kwargs: Any) -> Slice:
        return self._changed(super().slice(*args, **kwargs))

    def manifest(self, *args: Any, **kwargs: Any) -> Manifest:
        return self._changed(super().manifest(*args, **kwargs))

    def _changed(self, found: Any) -> Any:
        return self.change(found) if type(found).__name__ == self.change.__annotations__["found"] else found


def rows_shifted(found: Slice) -> Slice:
    return replace(found, pieces={"x": np.roll(found.pieces["x"], 1, axis=1)})


def one_number_off(found: Slice) -> Slice:
    x = found.pieces["x"].copy()
    bits = x.view(f"u{x.itemsize}")
    bits[0, 0, 0] ^= 1 << 8 * x.itemsize - 1  # its sign
    return replace(found, pieces={"x": x})


def positions_shifted(found: Slice) -> Slice:
    return replace(found, positions=found.positions + 1)


def tokens_shifted(found: Slice) -> Slice:
    return replace(found, token_ids=np.roll(found.token_ids, 1))


def last_row_gone(found: Slice) -> Slice:
    return replace(found, positions=found.positions[:-1], token_ids=found.token_ids[:-1],
                   pieces={"x": found.pieces["x"][:, :-1]})


def rows_fewer(found: Manifest) -> Manifest:
    return msgspec.structs.replace(found, rows=[
        msgspec.structs.replace(entry, expected=entry.expected - 1, captured=entry.captured - 1)
        for entry in found.rows])


def a_row_dropped(found: Manifest) -> Manifest:
    return msgspec.structs.replace(found, rows=[
        msgspec.structs.replace(entry, captured=entry.captured - 1, missing=[Missing(3, 4, "dropped")])
        for entry in found.rows])


def layer_gone(found: Manifest) -> Manifest:
    return msgspec.structs.replace(found, rows=found.rows[:-1])


def longer(found: Manifest) -> Manifest:
    return msgspec.structs.replace(found, end=found.end + 1)


def other_token(found: Manifest) -> Manifest:
    return msgspec.structs.replace(found, output_token_ids=[*found.output_token_ids[:-1], 7])


def recomputed(found: Manifest) -> Manifest:
    return msgspec.structs.replace(found, recomputed=1)


def incomplete(found: Manifest) -> Manifest:
    return msgspec.structs.replace(found, status="incomplete")


@pytest.mark.parametrize("change", [
    rows_shifted, one_number_off, positions_shifted, tokens_shifted, last_row_gone, rows_fewer, a_row_dropped,
    layer_gone, longer, other_token, recomputed, incomplete], ids=lambda change: change.__name__)
def test_the_proof_can_fail(pair: list[Played], store: Store, change: Callable[[Any], Any]) -> None:
    one = pair[0]
    under = replace(SETTING.circumstances([one.request]), preemptions=False)
    with Tampered(store.path) as tampered:
        tampered.change = change
        with pytest.raises(AssertionError):
            check(tampered, one.captures[0], one.request, one.seen[0], under, tell)


def test_rows_of_another_request_or_layer_are_seen(pair: list[Played], reader: StoreReader) -> None:
    """Two requests of one length in one batch: all that tells their rows from each other is what is in them."""
    one, other = pair
    tokens = (*one.request.prompt, *one.seen[0].tokens)
    at = np.arange(len(tokens) - 1)
    for site, layers in EVERYTHING.items():
        for layer in layers:
            rows = reader.slice(one.captures[0], site, [layer]).values()[0]
            tell(tokens, site, layer, "raw", at, rows)
            with pytest.raises(AssertionError):
                tell(tokens, site, layer, "raw", at, reader.slice(other.captures[0], site, [layer]).values()[0])
            if site != "embed":
                with pytest.raises(AssertionError):
                    tell(tokens, site, (layer + 1) % LAYERS, "raw", at, rows)


@pytest.mark.soak  # test_speculation.py has the short form
def test_drafts(reader: StoreReader) -> None:
    """Accepted and rejected drafts, with preemption, stops and clients that leave; then random requests."""
    with engine(DRAFTING) as llm:
        requests = [whole(prompt(of, 30 + 11 * of), {"max_tokens": 60}) for of in range(1, 8)]
        tokens = prompt(21, 40)
        future = list(islice(greedy(tokens), 12))
        requests += [whole(tokens, {"stop": [text(future[7])]}), whole(tokens, {"stop_token_ids": [future[9]]}),
                     whole(prompt(22, 50), abort=12)]
        prove(llm, reader, requests, DRAFTING.circumstances(requests))
        for draw in (0, 1, 2):
            requests = mix(2, draw, DRAFTING)
            prove(llm, reader, requests, DRAFTING.circumstances(requests))
        accepted, drafted = (counted(llm, f"vllm:spec_decode_num_{what}_tokens") for what in ("accepted", "draft"))
        assert 0 < accepted < drafted, "no draft was accepted, or none rejected: the test shows little"
