"""A bounded mapping: what was used least recently goes first, by weight."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from schemas.lru import Lru

CALLS = st.lists(st.tuples(st.sampled_from(["get", "put", "pop"]), st.integers(0, 6), st.integers(1, 5)), max_size=60)


@given(CALLS, st.integers(1, 12))
def test_the_least_recently_used_goes_first(calls: list[tuple[str, int, int]], limit: int) -> None:
    lru, model = Lru[int, bytes](limit, len), OrderedDict[int, bytes]()
    for call, key, size in calls:
        if call == "put":
            gone = lru.put(key, bytes(size))
            model.pop(key, None)
            model[key] = bytes(size)
            wanted = []
            while sum(map(len, model.values())) > limit and len(model) > 1:
                wanted.append(model.popitem(last=False))
            assert gone == wanted
        elif call == "get":
            assert lru.get(key) == model.get(key)
            if key in model:
                model.move_to_end(key)
        else:
            assert lru.pop(key) == model.pop(key, None)
        assert lru.items() == list(model.items()) and lru.total == sum(map(len, model.values()))
        assert len(lru) == len(model) and (key in lru) == (key in model)
    lru.clear()
    assert not lru.items() and lru.total == 0
