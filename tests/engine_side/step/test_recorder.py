"""The recorder where a model's site is missing in some of its blocks, as the MLP activation is in sparse ones."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from engine_side.codecs import matrices
from engine_side.edits.edited import Edited
from engine_side.front.ticket import Ticket
from engine_side.step.capture_lifecycle import End
from engine_side.step.recorder import Recorder
from engine_side.step.selection import Step
from engine_side.tap.staging import Staging
from engine_side.transport.device_copies import DeviceToHost
from engine_side.transport.events import Counted, Joined, Lost, Opened, PartFinished, Run
from engine_side.transport.ring import Ring
from schemas.codecs import projection
from schemas.edits.resolved import Edits
from schemas.ids import new_ulid
from schemas.spec import Armed, parse_spec, resolve
from schemas.wire.layout import Part, Share

ASKED = Armed({"mlp_post": [0, 1, 2, 3]}, n_layers=4)  # what the front end believes
HAS = [0, 2]


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    ring = Ring(4 << 20, pinned=False)
    staging = Staging({"mlp_post": torch.zeros(len(HAS), 8, 16)}, {"mlp_post": HAS})
    yield Recorder(staging, "float32", "drop", DeviceToHost(torch.device("cpu"), ring))
    ring.close()


@pytest.mark.parametrize(
    ("layers", "expected", "absent"),
    [("all", [0, 2], {}), ([0], [0], {}), ([0, 1], [0, 1], {"mlp_post": [1]}), ("1::2", [1, 3], {"mlp_post": [1, 3]}),
     (["blocks.1.mlp.hook_post"], [1], {"mlp_post": [1]}), (["mlp_post.2"], [2], {}),
     (["mlp_post.2", "mlp_post.3"], [2, 3], {"mlp_post": [3]})],
)
def test_layers_that_the_model_lacks(
    recorder: Recorder, layers: Any, expected: list[int], absent: dict[str, list[int]]
) -> None:
    ulid = new_ulid()
    named = isinstance(layers, list) and isinstance(layers[0], str)
    spec = parse_spec({"sites" if named else "layers": layers, "id": ulid})
    recorder.open("r", Ticket(ulid, spec.to_json(), resolve(spec, ASKED), 0, 1, 1), [1, 2, 3], 0)
    (opened,) = recorder.outbox
    assert isinstance(opened, Opened)
    assert opened.resolved.layers == {"mlp_post": expected} and opened.absent == absent
    taken = [entry.layers for entry in recorder.captures.plans[0]]
    assert taken == ([tuple(layer for layer in expected if layer in HAS)] if set(expected) & set(HAS) else [])


@pytest.mark.parametrize(("rank", "mine", "said"), [
    (0, [0], ("Opened", "Finished")), (0, [], ("Opened", "Finished")), (1, [2], ("Joined", "PartFinished")),
    (1, [], ()),
])
@pytest.mark.parametrize("ran", [True, False])
def test_a_rank_takes_its_share_and_says_so(rank: int, mine: list[int], said: tuple[str, ...], ran: bool) -> None:
    """The one that leads opens what others have alone; of a capture without a share another rank says nothing."""
    ring = Ring(4 << 20, pinned=False)
    staging = Staging({"mlp_post": torch.zeros(len(HAS), 8, 16)}, {"mlp_post": HAS})
    part = Part(rank, {"mlp_post": [Share(mine, 0, 16)]} if mine else {})
    recorder = Recorder(staging, "float32", "drop", DeviceToHost(torch.device("cpu"), ring), part=part)
    spec = parse_spec({"id": new_ulid(), "codec": "raw"})
    wanted = Ticket(str(spec.id), spec.to_json(), resolve(spec, ASKED), 0, 1, 1)
    if ran:
        recorder.open("r", wanted, [1, 2], 0)
        recorder.resume("r", 0)
        recorder.after_step(step(0, 2, 0))
    recorder.finish(End("r", wanted, "length", None, [1, 2], [3], 2))
    events = list(recorder.outbox)
    assert tuple(type(event).__name__ for event in events if not isinstance(event, Run)) == said
    assert [event.entry.layers for event in events if isinstance(event, Run)] == ([tuple(mine)] if mine and ran else [])
    for event in events:
        if isinstance(event, Opened):
            assert event.resolved.layers == {"mlp_post": HAS}
        elif isinstance(event, Joined):
            assert (event.capture, event.layers) == (spec.id, {"mlp_post": mine})
        elif isinstance(event, PartFinished):
            assert event.capture == spec.id
    assert not recorder.captures.slot_of and recorder.counters.captures_refused == 0
    recorder.open("r", wanted, [1, 2], 0)  # of the same name again
    ring.close()


@pytest.mark.parametrize(("counted", "said"), [
    ({"resid_post": [1]}, ["Joined", "EditsCounted", "PartFinished"]), ({"resid_post": [2]}, []), ({}, []),
])
@pytest.mark.parametrize("ran", [True, False])
def test_a_rank_that_counts_edits_says_so_without_rows(counted: dict[str, list[int]], said: list[str], ran: bool
                                                       ) -> None:
    """What enters block 2 is what block 1 hands on."""
    ring = Ring(4 << 20, pinned=False)
    staging = Staging({"mlp_post": torch.zeros(len(HAS), 8, 16)}, {"mlp_post": HAS})
    recorder = Recorder(staging, "float32", "drop", DeviceToHost(torch.device("cpu"), ring), part=Part(1, {}),
                        counted=counted)
    spec = parse_spec({"id": new_ulid(), "codec": "raw"})
    told = json.dumps([{"op": "stop"}, {"site": "resid_pre", "layers": [2], "op": "scale", "by": 2}])
    wanted = Ticket(str(spec.id), spec.to_json(), resolve(spec, ASKED), 0, 1, 1, edits=told)
    if ran:
        recorder.open("r", wanted, [1, 2], 0)
        recorder.after_step(step(0, 2, 0))
    made = Edited(Edits([], {}, told), [0], [()], [0], [()])
    recorder.finish(End("r", wanted, "length", None, [1, 2], [3], 2), made)
    events = list(recorder.outbox)
    assert [type(event).__name__ for event in events] == said
    for event in events:
        if isinstance(event, Joined):
            assert (event.prompt_len, event.edits) == (2, told)
        elif isinstance(event, PartFinished):
            assert event.end == 2
    assert not recorder.captures.slot_of
    ring.close()


def ticket() -> Ticket:
    ulid = new_ulid()
    spec = parse_spec({"layers": [0], "id": ulid, "codec": "raw"})
    return Ticket(ulid, spec.to_json(), resolve(spec, ASKED), 0, 1, 1)


def opened(recorder: Recorder, prompt_len: int) -> None:
    recorder.open("r", ticket(), [1] * prompt_len, 0)


def step(first: int, rows: int, drafts: int, slack: int = 0) -> Step:
    positions = torch.arange(first, first + rows)
    return Step(["r"], np.array([0, rows]), np.array([first]), positions, positions.to(torch.int32),
                np.array([drafts]), slack)


def lost(recorder: Recorder) -> set[int]:
    return {int(p) for event in recorder.outbox if isinstance(event, Lost) for p in event.position}


def test_rows_that_find_no_room_are_lost_at_every_position_that_they_may_have_had() -> None:
    ring = Ring(1 << 16, pinned=False)
    staging = Staging({"mlp_post": torch.zeros(1, 8, 4096)}, {"mlp_post": [0]})
    recorder = Recorder(staging, "float32", "drop", DeviceToHost(torch.device("cpu"), ring))
    opened(recorder, 3)
    recorder.after_step(step(0, 3, 0))
    assert lost(recorder) == set()
    recorder.after_step(step(9, 3, 2, slack=2))
    assert lost(recorder) == {7, 8, 9, 10, 11}
    ring.close()


def test_a_step_that_could_not_be_looked_at_takes_the_drafts_before_it_along(recorder: Recorder) -> None:
    opened(recorder, 2)
    recorder.miss_step()
    assert lost(recorder) == set()  # nobody has guessed yet: no older row can stand for a missing one
    recorder.after_step(step(0, 2, 0))
    recorder.after_step(step(2, 4, 3))
    recorder.miss_step()
    assert lost(recorder) == {3, 4, 5}


def test_a_codec_that_does_not_fit_loses_its_own_rows_alone() -> None:
    """The front end may not know how wide a site is; what cannot be encoded is told of, and the rest is taken."""
    ring = Ring(4 << 20, pinned=False)
    staging = Staging({"mlp_post": torch.ones(1, 8, 1 << 15), "router_logits": torch.ones(1, 8, 4)},
                      {"mlp_post": [0], "router_logits": [0]})
    recorder = Recorder(staging, "float32", "drop", DeviceToHost(torch.device("cpu"), ring))
    spec = parse_spec({"codec": {"mlp_post": "rp8:k=16384", "router_logits": "sketch"}, "id": new_ulid()})
    resolved = resolve(spec, Armed({"mlp_post": [0], "router_logits": [0]}, 1))
    recorder.open("r", Ticket(str(spec.id), spec.to_json(), resolved, 0, 1, 1), [1, 2, 3], 0)
    recorder.after_step(step(0, 3, 0))
    begun, missed, run = recorder.outbox
    assert isinstance(begun, Opened) and begun.resolved.codec["router_logits"] == "sketch:k=512,bits=2,seed=0"
    assert isinstance(missed, Lost) and missed.entry.site == "mlp_post" and missed.position.tolist() == [0, 1, 2]
    assert isinstance(run, Run) and run.entry.site == "router_logits" and len(run.slot) == 3
    assert recorder.counters.dropped == 3
    ring.close()


def test_what_the_prefix_cache_has_when_a_preempted_request_goes_on_is_named(recorder: Recorder) -> None:
    def named() -> list[tuple[str, list[int]]]:
        return [(event.reason, event.position.tolist()) for event in recorder.outbox if isinstance(event, Lost)]

    opened(recorder, 20)
    recorder.after_step(step(0, 8, 0))
    recorder.resume("r", 5)  # less than it had computed itself
    recorder.resume("nobody", 9)
    assert named() == []
    recorder.resume("r", 12)
    assert named() == [("prefix_cached", [8, 9, 10, 11])]
    recorder.after_step(step(12, 8, 0))
    recorder.open("r", Ticket(new_ulid(), "{}", resolve(parse_spec({}), ASKED), 0, 1, 1), [1] * 20, 20)  # some runners
    assert len(named()) == 1 and len(recorder.captures) == 1
    recorder.after_step(step(4, 4, 0))
    assert int(recorder.captures.recomputed[0]) == 4


def test_a_step_that_fails_after_its_rows_were_chosen_takes_the_drafts_before_it_along(recorder: Recorder) -> None:
    opened(recorder, 2)
    recorder.after_step(step(0, 2, 0))
    recorder.after_step(step(2, 4, 3))
    recorder.staging.buffers.clear()  # whatever it is that fails
    recorder.layouts.clear()
    with pytest.raises(KeyError):
        recorder.after_step(step(3, 4, 3))
    recorder.miss_step()
    assert lost(recorder) == {3, 4, 5}


CALLS: dict[str, Callable[[Recorder], None]] = {
    "open": lambda recorder: recorder.open("s", ticket(), [1], 0),
    "resume": lambda recorder: recorder.resume("r", 2),
    "finish": lambda recorder: recorder.finish(End("r", ticket(), "abort", None, [1] * 4, [], 2)),
    "before_step": lambda recorder: recorder.before_step(1),
    "after_step": lambda recorder: recorder.after_step(step(2, 1, 0)),
    "miss_step": lambda recorder: recorder.miss_step(),
    "take_deferred": lambda recorder: recorder.take_deferred(),
    "flush": lambda recorder: recorder.flush(),
}


@pytest.mark.parametrize("has_prompt", [True, False])
@pytest.mark.parametrize("call", list(CALLS))
def test_rows_of_a_step_may_be_taken_with_the_next_call_of_any_kind(recorder: Recorder, call: str, has_prompt: bool
                                                                    ) -> None:
    def runs() -> list[list[int]]:
        return [event.position.tolist() for event in recorder.outbox if isinstance(event, Run)]

    opened(recorder, 4)
    recorder.defer_to_next_call, recorder.async_scheduling = True, not has_prompt
    recorder.before_step(2, has_prompt)
    recorder.after_step(step(0, 2, 0))
    assert runs() == []
    CALLS[call](recorder)
    assert runs()[:1] == [[0, 1]]
    later = [type(event).__name__ for event in recorder.outbox]
    assert later[:2] == ["Opened", "Run"], "what the call says comes after the rows"


@pytest.mark.parametrize(("mebibytes", "sent"), [
    (1, [0, 0, 1, 1, 0, 0, 1, 0]),  # after two steps at most
    (100, [0, 1, 1, 1, 0, 1, 1, 1]),  # with the next step, whatever it is
])
def test_what_is_sent_on_goes_behind_steps_that_do_not_wait_for_the_host(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, mebibytes: int, sent: list[int]
) -> None:
    """Little waits until first tokens are out; much would fill scratch, and is begun behind the next prompt."""
    to_host, found = recorder.to_host, list[int]()
    monkeypatch.setattr(to_host, "before_step", lambda *_: found.append(1))
    for has_prompt in (True, False, False, False, True, True, True, False):
        to_host.waiting.clear()
        to_host.waiting.append((Counted(recorder.counters), 0, 0, mebibytes << 20, 0))
        before = len(found)
        recorder.before_step(8, has_prompt)
        sent.append(len(found) - before)
    to_host.waiting.clear()
    assert sent[:8] == sent[8:]


PROJECTED = Armed({"mlp_post": [0]}, 1)
WIDTH, K = 4096, 64  # a matrix of 1 MiB


@pytest.fixture
def projecting() -> Iterator[Recorder]:
    matrices.forget()
    ring = Ring(4 << 20, pinned=False)
    staging = Staging({"mlp_post": torch.ones(1, 8, WIDTH)}, {"mlp_post": [0]})
    yield Recorder(staging, "float32", "drop", DeviceToHost(torch.device("cpu"), ring))
    ring.close()
    matrices.forget()


def of_seed(seed: int, codec: str = "rp8") -> Ticket:
    ulid = new_ulid()
    spec = parse_spec({"id": ulid, "codec": f"{codec}:k={K},seed={seed}"})
    return Ticket(ulid, spec.to_json(), resolve(spec, PROJECTED), 0, 1, 1)


def several(requests: list[str], first: int, rows: int) -> Step:
    n = len(requests)
    positions = torch.arange(first, first + rows).repeat(n)
    return Step(requests, np.arange(n + 1) * rows, np.full(n, first), positions, positions.to(torch.int32))


def test_matrices_of_running_captures_are_made_once(projecting: Recorder) -> None:
    """Made again, each would take the steps' thread up to a second, every step."""
    seeds = [f"{seed}" for seed in range(12)]  # more than NumPy's are kept of
    before = projection.gaussian.cache_info().misses
    for seed in seeds:
        projecting.open(seed, of_seed(1000 + int(seed)), [1, 2], 0)
    assert projection.gaussian.cache_info().misses == before + 12
    projecting.after_step(several(seeds[:4], 0, 2))
    projecting.after_step(several(seeds[4:8], 0, 2))
    projecting.after_step(several(seeds[8:], 0, 2))
    for position in range(2, 6):
        projecting.after_step(several(seeds[:8], position, 1))
    assert projection.gaussian.cache_info().misses == before + 12
    assert lost(projecting) == set() and projecting.counters.failures == 0


def test_as_many_as_fit_are_made_before_their_captures_begin(projecting: Recorder) -> None:
    waiting = [of_seed(2000 + number) for number in range(20)]
    for taken_in in waiting:
        projecting.layouts.matrices.prepare(taken_in.resolved)
    before = projection.gaussian.cache_info().misses
    for number, taken_in in enumerate(waiting):
        projecting.open(str(number), taken_in, [1, 2], 0)
    assert projection.gaussian.cache_info().misses == before


def test_a_matrix_is_made_by_whoever_takes_the_request_in(projecting: Recorder) -> None:
    for codec, make in (("rp8", projection.gaussian), ("sketch", projection.hadamard)):
        taken_in = of_seed(77, codec)
        maker = threading.Thread(target=projecting.layouts.matrices.prepare, args=(taken_in.resolved,))
        maker.start()
        maker.join()
        before = make.cache_info().misses
        projecting.open(codec, taken_in, [1, 2], 0)
        assert make.cache_info().misses == before
        assert projecting.layouts.matrices.has(taken_in.resolved.codec["mlp_post"], "mlp_post")


def test_matrices_beyond_their_room_are_not_made_again_and_again(projecting: Recorder,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """What has no room beside running captures loses its rows by name; when one ends, the next gets its room."""
    monkeypatch.setattr(matrices, "KEPT_BYTES_MAX", 2 << 20)
    for seed in "123":
        projecting.open(seed, of_seed(int(seed)), [1, 2], 0)
    before = projection.gaussian.cache_info().misses
    for first in (0, 2):
        projecting.after_step(several(["1", "2", "3"], first, 2))
    losses = [event for event in projecting.outbox if isinstance(event, Lost)]
    assert {event.entry.codec for event in losses} == {f"rp8:k={K},seed=3"}
    assert [event.position.tolist() for event in losses] == [[0, 1], [2, 3]]
    assert projecting.counters.dropped == 4
    assert projection.gaussian.cache_info().misses == before
    projecting.finish(End("1", of_seed(1), "length", None, [1, 2], [5, 6, 7], 4))
    projecting.open("4", of_seed(3), [1, 2], 0)
    projecting.after_step(several(["2", "4"], 4, 1))
    assert len([event for event in projecting.outbox if isinstance(event, Lost)]) == 2
    assert projecting.counters.dropped == 4


def test_a_matrix_that_gave_its_room_away_is_made_again_before_the_steps(projecting: Recorder,
                                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrices, "KEPT_BYTES_MAX", 1 << 20)
    for turn, seed in enumerate((21, 22, 21)):
        request = f"r{turn}"
        taken = of_seed(seed)
        projecting.open(request, taken, [1, 2], 0)
        assert projecting.layouts.matrices.has(taken.resolved.codec["mlp_post"], "mlp_post")
        projecting.after_step(several([request], 0, 2))
        projecting.finish(End(request, taken, "length", None, [1, 2], [5], 2))
    assert lost(projecting) == set()
    assert sum(isinstance(event, Run) for event in projecting.outbox) == 3
