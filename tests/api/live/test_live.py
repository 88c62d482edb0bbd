"""What can be had of a capture while it is made: events, rows as they come, and rows in the answer itself."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load

from api.generate.generation import capture_request, plan
from api.protocols import COMPLETION
from schemas import limits
from schemas.errors import LimitError
from schemas.ids import new_ulid
from schemas.read.reader import StoreReader
from schemas.spec import parse_spec
from schemas.wire.records import Own
from tests.support.api_stack import Stack, running
from tests.support.engines.engine_player import WIDTH, EnginePlayer, decoded, engine_info
from tests.support.processes import PATIENCE_S

SPEC = {"sites": ["resid_post"], "layers": [0, 2]}
PROMPT = list(range(10, 16))


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running(tmp_path_factory.mktemp("live")) as stack:
        yield stack


@pytest.fixture(scope="module")
def engine(stack: Stack) -> Iterator[EnginePlayer]:
    """A second engine, that a test plays by hand."""
    player = EnginePlayer(stack.endpoint)
    yield player
    player.close()


@dataclass
class Listener:
    """A stream of events being read in a thread; each with the moment it came."""

    stack: Stack
    path: str
    headers: dict[str, str] = field(default_factory=dict)
    events: list[tuple[str, dict[str, Any], str | None, float]] = field(default_factory=list)
    ended: bool = False

    def __post_init__(self) -> None:
        self.opened = threading.Event()
        self.thread = threading.Thread(target=self._listen, daemon=True)
        self.thread.start()
        assert self.opened.wait(PATIENCE_S)

    def _listen(self) -> None:
        with httpx.Client(base_url=self.stack.url, headers=self.headers) as http, \
                http.stream("GET", self.path) as answer:
            assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
            self.opened.set()
            event: dict[str, str] = {}
            for line in answer.iter_lines():
                if line:
                    name, _, value = line.partition(": ")
                    event[name] = value
                elif event:
                    if "event" in event:
                        self.events.append((event["event"], json.loads(event["data"]), event.get("id"),
                                            time.monotonic()))
                    event = {}
        self.ended = True

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [data for name, data, _, _ in self.events if name == kind]

    def wait(self, kind: str, count: int = 1, timeout_s: float = 10.0) -> list[dict[str, Any]]:
        end_s = time.monotonic() + timeout_s
        while len(found := self.of(kind)) < count:
            assert time.monotonic() < end_s, self.events
            time.sleep(0.002)
        return found


def begin(stack: Stack, engine: EnginePlayer, spec: dict[str, Any] = SPEC) -> tuple[str, Any]:
    """A capture that has been opened and got no rows."""
    ulid = new_ulid()
    engine.record(Own, capture=ulid, count=1, owner="", aliases=[], tags={}, created_ms=time.time_ns() // 1_000_000)
    return ulid, engine.open(ulid, parse_spec({**spec, "id": ulid}), PROMPT)


def array(event: dict[str, Any]) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.frombuffer(base64.b64decode(event["values"]), event["dtype"]).reshape(event["shape"])


def test_events_tell_how_far_it_is(stack: Stack, engine: EnginePlayer) -> None:
    ulid, resolved = begin(stack, engine)
    listener = Listener(stack, f"/v1/captures/{ulid}/events")
    first, = listener.wait("progress")
    assert first == {"id": ulid, "status": "running", "expected": 12, "captured": 0, "missing": 12, "prompt_len": 6,
                     "total_len": 6, "finish_reason": None}
    engine.send_rows(ulid, 0, resolved, 6, [*PROMPT, 20, 21], list(range(6)))
    assert listener.wait("progress", 2)[1]["captured"] == 12
    engine.send_rows(ulid, 0, resolved, 6, [*PROMPT, 20, 21], [6])
    engine.finish(ulid, "length", [20, 21], 7)
    last, = listener.wait("finish")
    assert last == {**first, "status": "complete", "expected": 14, "captured": 14, "missing": 0, "total_len": 8,
                    "finish_reason": "length"}
    listener.thread.join(5)
    assert listener.ended
    again = stack.http.get(f"/v1/captures/{ulid}/events").text
    assert again.startswith("event: finish\n") and again.count("event:") == 1


def test_events_of_several_captures(stack: Stack) -> None:
    capture = stack.complete("hello", n=3, capture=SPEC).json()["capture"]
    listener = Listener(stack, f"/v1/captures/{capture['id']}/events")
    assert [event["id"] for event in listener.wait("finish", 3)] == capture["ids"]
    refused = stack.http.get(f"/v1/captures/{capture['id']}/live")
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "several_captures"


def test_one_stream_tells_of_several_captures_and_their_rows(stack: Stack, engine: EnginePlayer) -> None:
    (one, resolved), (two, _) = begin(stack, engine), begin(stack, engine)
    other = stack.complete("hello", capture={"sites": ["attn_out"]}).json()["capture"]["id"]  # has none of the rows
    listener = Listener(stack, f"/v1/captures/{one}/events?also={two}&also={other}&also={one}"
                               "&site=blocks.2.hook_resid_post&site=mlp_out")
    assert [event["id"] for event in listener.wait("progress", 2)] == [one, two]
    assert [event["id"] for event in listener.wait("finish")] == [other]
    for capture, positions in ((one, [0, 1, 2, 3, 4, 5]), (two, [0, 1, 2, 3, 4, 5]), (one, [6]), (one, [7])):
        engine.send_rows(capture, 0, resolved, 6, [*PROMPT, 20, 21, 22], positions)
    engine.finish(two, "length", [], 6)
    engine.finish(one, "length", [20, 21, 22], 8)
    assert {event["id"] for event in listener.wait("finish", 3)} == {other, two, one}
    listener.thread.join(5)
    assert listener.ended
    for capture, last in ((one, 8), (two, 6)):
        rows = [event for event in listener.of("rows") if event["id"] == capture]
        assert all((event["site"], event["layers"], event["dtype"]) == ("resid_post", [2], "float32") for event in rows)
        assert [position for event in rows for position in event["positions"]] == list(range(last))
        want = decoded("int8b64", 0, "resid_post", 2, list(range(last)), "bfloat16")
        assert np.array_equal(np.concatenate([array(event)[0] for event in rows]), want)
        told = [name for name, data, _, _ in listener.events if data["id"] == capture]
        assert told[-1] == "finish" and told.count("finish") == 1  # no row comes after it


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_rows_come_as_they_are_made(stack: Stack, engine: EnginePlayer, dtype: str) -> None:
    ulid, resolved = begin(stack, engine)
    listener = Listener(stack, f"/v1/captures/{ulid}/live?site=resid_post&layer=2&dtype={dtype}")
    for positions in ([0, 1, 2, 3, 4, 5], [6], [7]):
        engine.send_rows(ulid, 0, resolved, 6, [*PROMPT, 20, 21, 22], positions)
    engine.finish(ulid, "length", [20, 21, 22], 8)
    listener.wait("finish")
    rows = listener.of("rows")
    assert [position for event in rows for position in event["positions"]] == list(range(8))
    assert [token for event in rows for token in event["token_ids"]] == [*PROMPT, 20, 21]
    assert [flag for event in rows for flag in event["flags"]] == [0] * 6 + [1] * 2
    assert all(event["layers"] == [2] and event["site"] == "resid_post" for event in rows)
    got = np.concatenate([array(event)[0] for event in rows])
    want = decoded("int8b64", 0, "resid_post", 2, list(range(8)), "bfloat16").astype(dtype)
    assert got.tobytes() == want.tobytes()
    # What was shown before it was durable is said to be so afterwards.
    last = max(int(number) for name, _, number, _ in listener.events if name == "rows" and number)
    assert all(event["durable"] for event in rows) or listener.of("durable")[-1]["through"] == last


def test_a_row_is_visible_before_it_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a sync takes more than a second, rows are there long before, and marked."""
    monkeypatch.setenv("SLOW_S", "1.2")
    with running(tmp_path, writer="tests.support.writers.slow_writer") as stack:
        engine = EnginePlayer(stack.endpoint)
        ulid, resolved = begin(stack, engine)
        listener = Listener(stack, f"/v1/captures/{ulid}/live")
        time.sleep(0.2)
        sent_s = time.monotonic()
        engine.send_rows(ulid, 0, resolved, 6, PROMPT, list(range(6)))  # returns when durable
        durable_s = time.monotonic()
        listener.wait("durable")
        (kind, event, number, came_s), (_, through, _, _) = listener.events[:2]
        assert kind == "rows" and event["durable"] is False and through["through"] == int(number or 0)
        assert durable_s - sent_s > 1.0 and came_s < durable_s
        assert stack.http.get(f"/v1/captures/{ulid}/activations?layer=0").headers["x-tap-rows"] == "6"
        engine.close()


def test_a_stream_goes_on_where_it_was_left(stack: Stack, engine: EnginePlayer) -> None:
    ulid, resolved = begin(stack, engine)
    for positions in ([0, 1, 2, 3, 4, 5], [6], [7]):
        engine.send_rows(ulid, 0, resolved, 6, [*PROMPT, 20, 21, 22], positions)
    engine.finish(ulid, "length", [20, 21, 22], 8)
    whole = Listener(stack, f"/v1/captures/{ulid}/live")
    whole.wait("finish")
    ids = [number for name, _, number, _ in whole.events if name == "rows"]
    assert len(ids) == 3 and all(ids)
    rest = Listener(stack, f"/v1/captures/{ulid}/live", {"Last-Event-ID": str(ids[0])})
    rest.wait("finish")
    assert [event["positions"] for event in rest.of("rows")] == [[6], [7]]
    same = Listener(stack, f"/v1/captures/{ulid}/live?after={ids[1]}")
    same.wait("finish")
    assert [event["positions"] for event in same.of("rows")] == [[7]]


def test_a_large_frame_comes_in_pieces(stack: Stack, engine: EnginePlayer) -> None:
    """None of which is larger than an event may be, in memory too: many may follow, and take what they get slowly."""
    prompt = [token % 256 for token in range(3000)]
    ulid = new_ulid()
    engine.record(Own, capture=ulid, count=1, owner="", aliases=[], tags={}, created_ms=time.time_ns() // 1_000_000)
    resolved = engine.open(ulid, parse_spec({**SPEC, "id": ulid}), prompt)
    engine.send_rows(ulid, 0, resolved, len(prompt), prompt, list(range(len(prompt))))
    with StoreReader(stack.store) as reader:
        while not (frames := reader.frames(ulid, "resid_post", 0)):
            time.sleep(0.01)
        first, sizes = 0, []
        while (rows := reader.live_rows(frames[0], ulid, [0, 2], first)) is not None:
            sizes.append(rows.values.nbytes)
            first += len(rows.positions)
            assert rows.more == (first < len(prompt))
    assert first == len(prompt) and max(sizes) <= limits.live_event_bytes_max and len(sizes) == 3
    engine.finish(ulid, "stop", [], len(prompt))
    listener = Listener(stack, f"/v1/captures/{ulid}/live")
    listener.wait("finish")
    pieces = listener.of("rows")
    assert [array(event).nbytes for event in pieces] == sizes
    assert [number is not None for name, _, number, _ in listener.events if name == "rows"] == [False, False, True]
    got = np.concatenate([array(event) for event in pieces], axis=1)
    for index, layer in enumerate((0, 2)):
        want = decoded("int8b64", 0, "resid_post", layer, list(range(len(prompt))), "bfloat16")
        assert np.array_equal(got[index], want)


def test_what_the_store_has_is_what_was_live(stack: Stack) -> None:
    """Of a generation through the service: the stream is opened while it runs, by the header of the answer."""
    body = {"model": "played", "prompt": "hello", "stream": True, "max_tokens": 6, "capture": SPEC,
            "play": {"delay_s": 0.05}}
    with stack.http.stream("POST", "/v1/completions", json=body) as answer:
        ulid = answer.headers["x-tap-capture"]
        listener = Listener(stack, f"/v1/captures/{ulid}/live?layer=0")
        answer.read()
    listener.wait("finish")
    got = np.concatenate([array(event)[0] for event in listener.of("rows")])
    stored = load(stack.http.get(f"/v1/captures/{ulid}/activations?layer=0").content)
    assert np.array_equal(got, stored["resid_post.0"])


def test_deleted_while_followed(stack: Stack, engine: EnginePlayer) -> None:
    ulid, _ = begin(stack, engine)
    listeners = [Listener(stack, f"/v1/captures/{ulid}/{of}") for of in ("events", "live", "events?site=resid_post")]
    assert stack.http.delete(f"/v1/captures/{ulid}").status_code == 204
    for listener in listeners:
        assert listener.wait("finish")[0]["status"] == "deleted"


@pytest.mark.parametrize(("path", "status", "param"), [
    ("live?site=nothing", 400, "site"), ("live?site=attn_out", 404, "site"), ("live?layer=1", 404, "layer"),
    ("live?layer=x", 400, "layer"), ("live?dtype=int8", 400, "dtype"), ("live?after=x", 400, "after"),
    ("live?after=-1", 400, "after"), ("live?what=1", 400, "what"), ("live?site=resid_post&site=attn_out", 400, "site"),
    ("events?what=1", 400, "what"), ("events?site=nothing", 400, "site"), ("events?also=a/b", 404, "also"),
    ("events?also=nobody", 404, None), ("events?" + "also=a&" * limits.watched_max, 400, "also"),
    ("events?" + "site=q&" * (limits.watched_max + 1), 400, "site"),
])
def test_bad_streams_are_refused_before_they_begin(stack: Stack, path: str, status: int, param: str | None) -> None:
    ulid = stack.complete("hello", capture=SPEC).json()["capture"]["id"]
    answer = stack.http.get(f"/v1/captures/{ulid}/{path}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
    assert stack.http.get(f"/v1/captures/{new_ulid()}/{path.partition('?')[0]}").status_code == 404


def test_many_follow_at_once(stack: Stack, engine: EnginePlayer) -> None:
    ulid, resolved = begin(stack, engine)
    listeners = [Listener(stack, f"/v1/captures/{ulid}/live?layer=0") for _ in range(40)]
    engine.send_rows(ulid, 0, resolved, 6, PROMPT, list(range(6)))
    engine.finish(ulid, "stop", [], 6)
    for listener in listeners:
        listener.wait("finish")
        assert [event["positions"] for event in listener.of("rows")] == [[0, 1, 2, 3, 4, 5]]


# ── rows in the answer ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stream", [False, True])
def test_rows_in_the_answer(stack: Stack, stream: bool) -> None:
    spec = {**SPEC, "return": "inline"}
    if stream:
        text = stack.complete("hello", stream=True, capture=spec).text
        field = json.loads(text.split("data: ")[-2])["capture"]
    else:
        field = stack.complete("hello", capture=spec).json()["capture"]
    got = field["inline"]["captures"][field["id"]]
    arrays = load(base64.b64decode(got["data"]))
    assert (got["rows"], got["start"], got["stop"], got["missing"]) == (8, 0, 8, [])
    for layer in (0, 2):
        want = decoded("int8b64", 0, "resid_post", layer, list(range(8)), "bfloat16")
        assert arrays[f"resid_post.{layer}"].shape == (8, WIDTH) and np.array_equal(arrays[f"resid_post.{layer}"], want)
    assert "return" not in stack.http.get(f"/v1/captures/{field['id']}").json()["asked"]


def test_rows_of_samples_in_the_answer(stack: Stack) -> None:
    field = stack.complete("hello", n=2, capture={**SPEC, "return": "inline"}).json()["capture"]
    assert list(field["inline"]["captures"]) == field["ids"]


def test_too_much_for_an_answer(stack: Stack) -> None:
    spec = {"return": "inline", "codec": "raw"}
    refused = stack.complete(list(range(6000)), capture=spec)  # known before it is generated
    assert refused.status_code == 413 and str(16 << 20) in refused.json()["error"]["message"]
    answer = stack.complete("x" * 6000, max_tokens=1, capture=spec)  # known only afterwards
    field = answer.json()["capture"]
    assert answer.status_code == 200 and field["inline"]["error"]["code"] == "too_large"
    assert field["status"] == "complete" and stack.http.get(field["activations_url"]).status_code == 200


@pytest.mark.parametrize("lengths", [[1] * 4096, [*range(1, 2049)]], ids=["alike", "all_different"])
def test_many_prompts_and_ranges_are_soon_counted(lengths: list[int]) -> None:
    """The service does nothing else meanwhile."""
    spec = {**SPEC, "return": "inline", "positions": [[2 * at, 2 * at + 1] for at in range(4000)]}
    asked = capture_request({"prompt": [[1] * length for length in lengths], "capture": spec}, COMPLETION, None)
    began_s = time.process_time()
    if lengths[-1] == 1:
        assert plan(asked, engine_info("bfloat16")).count == 4096
    else:
        rows = sum((length + 1) // 2 for length in lengths)
        with pytest.raises(LimitError, match=f"{rows * 2 * WIDTH * 4} asked"):
            plan(asked, engine_info("bfloat16"))
    assert time.process_time() - began_s < 1.0  # a quarter of it on a calm machine
