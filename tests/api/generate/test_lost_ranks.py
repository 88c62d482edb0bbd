"""What is refused and what is served while a rank of an engine has no sender: real writer and API, played ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from api.errors import PartLost
from api.generate.rank_checks import check_ranks
from schemas.ids import new_ulid
from schemas.read.reader import StoreReader
from schemas.spec import parse_spec, resolve
from tests.support.api_stack import Stack, stack_in
from tests.support.consistency import assert_consistent
from tests.support.ranks import LivingRanks, info_of, values
from tests.support.store_helpers import assert_adds_up, until

RANKS, PROMPT, END, LOST_S = 4, 5, 8, 4
Q, WHOLE = {"sites": ["q"], "layers": [0, 2]}, {"sites": ["resid_post"], "layers": [0, 2]}


class Case:
    """A service of whose engine a test plays the ranks."""

    def __init__(self, stack: Stack, ranks: LivingRanks) -> None:
        self.stack, self.ranks = stack, ranks

    def comes(self, lost: list[int]) -> bool:
        """Whether the service comes to say that these ranks are lost."""
        return until(lambda: self.stack.http.get("/v1/capabilities").json()["lost_ranks"] == lost)

    def refused(self, capture: dict[str, Any], **fields: Any) -> str:
        """The words of a refusal: upstream was not asked and no capture was made."""
        asked, made = len(self.stack.seen()), self.stack.http.get("/v1/captures").json()
        answer = self.stack.complete("hello", capture=capture, **fields)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (503, "part_lost", "capture"), answer.text
        assert len(self.stack.seen()) == asked and self.stack.http.get("/v1/captures").json() == made
        return str(error["message"])

    def served(self, capture: dict[str, Any]) -> None:
        """A generation whose rows come: complete, and the right ones."""
        answers, before = list[httpx.Response](), len(self.stack.seen())

        def ask() -> None:
            with httpx.Client(base_url=self.stack.url) as http:
                answers.append(http.post("/v1/completions", json={
                    "model": "played", "prompt": "hello", "capture": capture, "play": {"delay_s": 1}}))

        client = threading.Thread(target=ask)
        client.start()
        assert until(lambda: answers or len(self.stack.seen()) > before)
        assert not answers, answers[0].text
        ulid = str(self.stack.seen()[-1]["headers"]["x-request-id"])  # type: ignore[index]
        (site,), layers = capture["sites"], capture["layers"]
        self.ranks.send(ulid, site, layers, PROMPT, END)
        client.join()
        assert answers[0].status_code == 200, answers[0].text
        with StoreReader(self.stack.store) as reader:
            assert until(lambda: reader.capture(ulid).status == "complete")
            assert_adds_up(reader.manifest(ulid))
            got = reader.slice(ulid, site, layers)
            np.testing.assert_array_equal(got.values(), values(RANKS, 1, site, range(END), layers))


@contextmanager
def playing(folder: Path, *api: str) -> Iterator[Case]:
    with stack_in(folder) as stack:
        stack.start_writer("writer_service", "--engine-lost-s", str(LOST_S))
        stack.processes["writer"].wait_ready()
        stack.start_upstream("float32", "--endpoint", "")
        with LivingRanks(stack.endpoint, RANKS) as ranks:
            stack.start_api(None, *api)
            assert until(lambda: stack.http.get("/v1/capabilities").json()["engine"])
            yield Case(stack, ranks)


def test_what_needs_a_dead_rank_is_refused_until_it_is_back(tmp_path: Path) -> None:
    with playing(tmp_path) as case:
        assert case.comes([])
        case.served(Q)
        case.ranks.kill(1)
        assert case.comes([1])
        said = case.refused(Q)
        assert "rank 1 of the engine" in said and "q.0 and 1 more" in said and "such as resid_post.0" in said
        assert "rank 1" in case.refused({"sites": ["resid_post"]}) and "rank 1" in case.refused({**Q, "codec": "raw"})
        case.served(WHOLE)
        case.served({"sites": ["k"], "layers": [1]})  # ranks 0 and 2 have it
        assert case.stack.complete("hello").status_code == 200
        assert case.stack.http.get("/readyz").status_code == 200
        # A writer that starts again knows it at once, before it has heard anybody.
        case.stack.processes["writer"].kill()
        case.stack.start_writer("writer_service", "--engine-lost-s", str(LOST_S))
        case.stack.processes["writer"].wait_ready()
        assert "rank 1" in case.refused(Q)
        case.ranks.kill(2)
        assert case.comes([1, 2])
        assert "ranks 1, 2 of the engine have" in case.refused(Q) and "rank 2" in case.refused(WHOLE)
        for number in (1, 2):
            case.ranks.start(number)
        assert case.comes([])
        case.served(Q)


def test_an_engine_that_starts_anew_is_accepted_and_one_that_ended_loses_no_rank(tmp_path: Path) -> None:
    """The first rank begins every capture: without its sender none is taken on, until the engine starts again."""
    with playing(tmp_path) as case:
        case.ranks.kill(0)
        assert case.comes([0])
        for capture in (Q, WHOLE, {"sites": []}):
            assert "rank 0" in case.refused(capture)
        for number in (1, 2, 3):
            case.ranks.kill(number)
        with LivingRanks(case.stack.endpoint, RANKS) as again:
            case.ranks = again
            assert case.comes([])
            case.served(Q)
            for number in range(RANKS):  # all at once: the engine ended
                again.kill(number)
            assert not until(lambda: case.stack.http.get("/v1/capabilities").json()["lost_ranks"], 3 * LOST_S)


def test_requests_that_did_not_ask_are_served_without_a_capture(tmp_path: Path) -> None:
    with playing(tmp_path, "--capture-all", '{"sites": ["q"]}') as case:
        case.ranks.kill(3)
        assert case.comes([3])
        assert "capture" not in case.stack.complete("hello").json()
        assert "rank 3" in case.refused(Q)
        group = case.ranks.info.group
    assert_consistent(tmp_path / "store")
    with StoreReader(tmp_path / "store") as reader:
        assert reader.lost_ranks(group) == [3] and reader.lost_ranks("another") == []


def test_a_rank_that_never_greeted_is_lost_too(tmp_path: Path) -> None:
    with playing(tmp_path) as case:
        lame = LivingRanks(case.stack.endpoint, RANKS)
        lame.dead = {lame.all[2]}
        for rank in (lame.all[0], lame.all[1], lame.all[3]):
            rank.hello()
        lame.heart.start()
        case.ranks = lame
        assert case.comes([2]) and "rank 2" in case.refused(WHOLE)
        lame.__exit__()


def test_a_request_may_go_to_any_engine_of_a_data_parallel_group(tmp_path: Path) -> None:
    """What needs a dead rank of one of them is refused, whichever came last."""
    with playing(tmp_path) as case, LivingRanks(case.stack.endpoint, RANKS, "01S-abc-0") as one, \
            LivingRanks(case.stack.endpoint, RANKS, "01S-abc-1") as other:
        one.kill(1)
        assert case.comes([1]) and "rank 1" in case.refused(Q)
        other.kill(3)
        assert case.comes([1, 3])
        case.ranks = other
        case.served(WHOLE)
        one.start(1)
        other.start(3)
        assert case.comes([])


def test_a_data_parallel_engine_of_one_rank_is_named(tmp_path: Path) -> None:
    """Its capture under way ends with the reason, and none is begun until its sender is back."""
    with playing(tmp_path) as case, LivingRanks(case.stack.endpoint, 1, "01S-abc-0") as one, \
            LivingRanks(case.stack.endpoint, 1, "01S-abc-1"):
        assert case.comes([])
        capture = new_ulid()
        with one.lock:
            one.leader.open(capture, PROMPT, {"q": [0]})
            one.leader.rows(capture, 1, "q", range(3), 1, layers=[0])
            one.leader.wait()
        one.kill(0)
        assert case.comes([0])
        for spec in (Q, WHOLE, {"sites": []}):
            assert "rank 0 of data-parallel engine 0 has no sender any more" in case.refused(spec)
        assert "rank 0 of data-parallel engine 0" in case.stack.http.get("/readyz").text
        assert case.stack.complete("hello").status_code == 200
        with StoreReader(tmp_path / "store") as reader:
            assert until(lambda: reader.capture(capture).status == "incomplete")
            (entry,) = reader.manifest(capture).rows
            assert [(gap.start, gap.stop, gap.reason) for gap in entry.missing] == [(3, PROMPT, "engine_lost")]
        one.start(0)
        assert case.comes([])


def test_of_several_engines_another_takes_what_needs_the_dead_rank(tmp_path: Path) -> None:
    """And none does where it has lost one too, or where the request names the first."""
    with stack_in(tmp_path) as stack:
        stack.start_writer("writer_service", "--engine-lost-s", str(LOST_S))
        stack.processes["writer"].wait_ready()
        for name in ("a", "b"):
            stack.start_engine(name, "--endpoint", "")
        with LivingRanks(stack.endpoint, RANKS, name="a") as a, LivingRanks(stack.endpoint, RANKS, name="b") as b:
            stack.start_api(f"a={stack.engines['a']}", "--upstream", f"b={stack.engines['b']}")

            def lost(name: str) -> object:
                return stack.http.get("/v1/capabilities").json()["engines"][name].get("lost_ranks")

            def ask(engine: str = "") -> httpx.Response:
                pinned = {"X-VLLM-Tap-Engine": engine} if engine else {}
                return stack.http.post("/v1/completions", headers=pinned, json={
                    "model": "played", "prompt": "hello", "capture": Q, "play": {"unopened": True}})

            assert until(lambda: all(lost(name) == [] and ask(name).status_code == 200 for name in "ab"))
            a.kill(1)
            assert until(lambda: lost("a") == [1]) and lost("b") == []
            refused = ask("a")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "part_lost")
            assert "engine a: rank 1" in refused.json()["error"]["message"]
            assert {ask().headers["x-vllm-tap-engine"] for _ in range(4)} == {"b"}
            b.kill(3)
            assert until(lambda: lost("b") == [3])
            error = ask().json()["error"]
            assert error["code"] == "part_lost" and "engine a: rank 1" in error["message"]
            assert "engine b: rank 3" in error["message"]


@pytest.mark.parametrize(("spec", "lost", "words"), [
    ({"sites": ["resid_post"], "layers": [0, 2]}, [1, 3], None),
    ({"sites": ["resid_post"], "layers": [1]}, [1], "rank 1 .* resid_post.1 need it.* such as resid_post.0"),
    ({"sites": ["resid_post"]}, [1, 3], "ranks 1, 3 .* resid_post.1 and 1 more"),
    ({"sites": ["q"], "layers": [2]}, [3], "rank 3 .* q.2 need it"),
    ({"sites": ["k"]}, [1, 3], None),
    ({"sites": []}, [1, 2, 3], None),
    ({"sites": []}, [0], "rank 0 .* begins captures"),
    ({"sites": ["q"]}, [], None),
])
def test_which_ranks_a_capture_needs(spec: dict[str, Any], lost: list[int], words: str | None) -> None:
    engine = info_of(RANKS)
    resolved = resolve(parse_spec(spec), engine.armed, engine.widths)
    if words is None:
        check_ranks(resolved, engine, {"the engine": lost})
    else:
        with pytest.raises(PartLost, match=words) as refused:
            check_ranks(resolved, engine, {"the engine": lost})
        assert (refused.value.status, refused.value.code) == (503, "part_lost")


def test_ranks_of_several_engines_are_named_by_engine() -> None:
    engine = info_of(RANKS)
    resolved = resolve(parse_spec({"sites": ["q"]}), engine.armed, engine.widths)
    with pytest.raises(PartLost, match="rank 1 of data-parallel engine 0 and ranks 2, 3 of data-parallel engine 2 ha"):
        check_ranks(resolved, engine, {"data-parallel engine 0": [1], "data-parallel engine 2": [2, 3]})
