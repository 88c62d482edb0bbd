"""Which engine a request goes to first: the prompt's home, unless others are much idler."""

from __future__ import annotations

from collections import Counter
from typing import Any

import httpx
import pytest

from api.engines.choice import SLACK, in_turn, prefix_of
from api.engines.upstreams import Upstream
from api.protocols import CHAT, COMPLETION, MESSAGES, RESPONSES, Protocol

CLIENT = httpx.AsyncClient()  # nothing is sent


def engines(*in_flight: int) -> list[Upstream]:
    return [Upstream(chr(ord("a") + i), f"http://{i}", CLIENT, in_flight=count) for i, count in enumerate(in_flight)]


PREFIXES = [f"prompt {number}".encode() for number in range(3000)]


def test_each_engine_is_home_to_its_share() -> None:
    homes = Counter(in_turn(engines(0, 0, 0), prefix)[0].name for prefix in PREFIXES)
    assert all(800 < homes[name] < 1200 for name in "abc"), homes


def test_an_engine_that_goes_changes_the_homes_of_its_own_share_alone() -> None:
    before, after = engines(0, 0, 0), engines(0, 0)
    for prefix in PREFIXES:
        home = in_turn(before, prefix)[0].name
        assert home == "c" or in_turn(after, prefix)[0].name == home


@pytest.mark.parametrize("least", [0, 3, 16, 100])
def test_home_may_be_busier_than_the_idlest_but_not_by_much(least: int) -> None:
    prefix = next(each for each in PREFIXES if in_turn(engines(0, 0), each)[0].name == "a")
    slack = max(SLACK, least // 4)
    assert in_turn(engines(least + slack, least), prefix)[0].name == "a"
    assert [each.name for each in in_turn(engines(least + slack + 1, least), prefix)] == ["b", "a"]


def test_the_idlest_is_the_second_and_without_a_prefix_the_first() -> None:
    prefix = next(each for each in PREFIXES if in_turn(engines(0, 0, 0), each)[0].name == "a")
    assert [each.name for each in in_turn(engines(3, 2, 1), prefix)] == ["a", "c", "b"]
    assert [each.name for each in in_turn(engines(3, 2, 1), b"")] == ["c", "b", "a"]


LONG = "word " * 400
CHATS = {"messages": [{"role": "system", "content": LONG}, {"role": "user", "content": "one"}]}


@pytest.mark.parametrize(("protocol", "body", "other"), [
    (COMPLETION, {"prompt": LONG + "one"}, {"prompt": LONG + "two"}),
    (COMPLETION, {"prompt": [LONG + "one", "x"]}, {"prompt": LONG}),
    (COMPLETION, {"prompt": [[5] * 300, [1]]}, {"prompt": [5] * 256}),
    (CHAT, CHATS, {"messages": [CHATS["messages"][0], {"role": "user", "content": "two"}]}),
    (MESSAGES, {"system": LONG, **CHATS}, {"system": LONG, "messages": []}),
    (RESPONSES, {"instructions": LONG, "input": "one"}, {"instructions": LONG, "input": "two"}),
])
def test_prompts_that_begin_alike_have_one_prefix(protocol: Protocol, body: dict[str, Any], other: dict[str, Any]
                                                  ) -> None:
    found = prefix_of(body, protocol, "")
    assert found and found == prefix_of(other, protocol, "")
    assert len(found) < 2048


def test_what_divides_an_engines_cache_divides_prefixes() -> None:
    body = {"model": "m", "prompt": "x"}
    others = [({**body, "model": "n"}, ""), ({**body, "cache_salt": "s"}, ""), (body, "alice"),
              ({**body, "prompt": "y"}, "")]
    found = [prefix_of(body, COMPLETION, ""), *(prefix_of(other, COMPLETION, owner) for other, owner in others)]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("prompt", [None, "", [], {}, 7, [7, "x"], [["x"]], [[]], [None]])
def test_whatever_stands_in_a_prompt_has_a_prefix_or_none(prompt: object) -> None:
    for protocol in (COMPLETION, CHAT, RESPONSES, MESSAGES):
        assert isinstance(prefix_of({"prompt": prompt, "messages": prompt, "input": prompt}, protocol, ""), bytes)
