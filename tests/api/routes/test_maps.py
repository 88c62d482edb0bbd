"""Maps over HTTP: each number is the one that the true rows give, and what is missing is never a number."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save

from api.page_files import FILES
from schemas import limits
from tests.support.api_stack import Stack, running
from tests.support.engines.engine_player import WIDTH, rows

PROMPT, G = "What is inside?", 6
END = len(PROMPT) + G - 1
SPEC = {"sites": ["resid_post", "attn_out"], "codec": "raw"}
F64 = npt.NDArray[np.float64]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running(tmp_path_factory.mktemp("maps")) as stack:
        yield stack


def captured(stack: Stack, **fields: Any) -> str:
    body = stack.complete(PROMPT, **{"max_tokens": G, "capture": SPEC, **fields}).json()
    return str(body["capture"]["id"])


@pytest.fixture(scope="module")
def capture(stack: Stack) -> str:
    return captured(stack)


@pytest.fixture(scope="module")
def holed(stack: Stack) -> str:
    return captured(stack, play={"drop": ["resid_post", [1, 2], 8, 11], "cached": 4}, max_tokens=9,
                    capture={"sites": ["resid_post"], "codec": "raw", "prefix_cache": "allow"})


def truth(site: str = "resid_post", end: int = END) -> F64:
    """The rows that were sent, ``[layers, positions, width]``."""
    return np.stack([rows(0, site, layer, list(range(end)), "bfloat16") for layer in range(4)]).astype(np.float64)


def map_of(stack: Stack, ref: str, query: str = "", body: bytes | None = None) -> dict[str, Any]:
    url = f"/v1/captures/{ref}/map?{query}"
    answer = stack.http.get(url) if body is None else stack.http.post(url, content=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def numbers(found: dict[str, Any]) -> F64:
    return np.array(found["values"], np.float64)  # None becomes NaN


def npy(array: npt.NDArray[Any]) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def test_norm(stack: Stack, capture: str) -> None:
    found = map_of(stack, capture)
    assert (found["site"], found["measure"], found["layers"], found["prompt_len"]) == (
        "resid_post", "norm", [0, 1, 2, 3], len(PROMPT))
    assert (found["start"], found["stop"], found["missing"]) == (0, END, [])
    np.testing.assert_allclose(numbers(found), np.linalg.norm(truth(), axis=-1), rtol=1e-5)
    assert found["token_ids"] == [*PROMPT.encode(), *b"abcde"]
    part = map_of(stack, capture, "site=blocks.2.hook_attn_out&start=3&stop=7")
    np.testing.assert_allclose(numbers(part), np.linalg.norm(truth("attn_out"), axis=-1)[2:3, 3:7], rtol=1e-5)
    assert (part["start"], part["stop"], part["token_ids"]) == (3, 7, list(PROMPT.encode()[3:7]))


def test_cosine_to_a_position(stack: Stack, capture: str) -> None:
    x = truth()
    x /= np.linalg.norm(x, axis=-1, keepdims=True)
    np.testing.assert_allclose(numbers(map_of(stack, capture, "measure=cosine&position=5")),
                               np.einsum("lnw,lw->ln", x, x[:, 5]), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", [(WIDTH,), (4, WIDTH)])
@pytest.mark.parametrize("form", ["npy", "safetensors"])
def test_projection_on_an_uploaded_direction(stack: Stack, capture: str, shape: tuple[int, ...], form: str) -> None:
    direction = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    unit = direction / np.linalg.norm(direction, axis=-1, keepdims=True)
    want = np.einsum("lnw,lw->ln", truth(), np.broadcast_to(unit, (4, WIDTH)))
    found = map_of(stack, capture, body=npy(direction) if form == "npy" else save({"direction": direction}))
    np.testing.assert_allclose(numbers(found), want, rtol=1e-4, atol=1e-5)
    assert found["measure"] == "projection"


def test_missing_rows_have_no_number_and_a_reason(stack: Stack, holed: str) -> None:
    found = map_of(stack, holed)
    end = found["end"]
    there = np.ones((4, end), bool)
    there[:, :4] = there[1:3, 8:11] = False
    np.testing.assert_array_equal(np.isfinite(numbers(found)), there)
    np.testing.assert_allclose(numbers(found)[there], np.linalg.norm(truth(end=end), axis=-1)[there], rtol=1e-5)
    assert {(gap["layer"], gap["start"], gap["stop"], gap["reason"]) for gap in found["missing"]} == {
        *((layer, 0, 4, "prefix_cached") for layer in range(4)), (1, 8, 11, "dropped"), (2, 8, 11, "dropped")}


def test_what_was_not_asked_for_is_named(stack: Stack) -> None:
    chosen = captured(stack, capture={"sites": ["resid_post"], "positions": [[2, 5], [7, 8]]})
    found = map_of(stack, chosen)
    np.testing.assert_array_equal(np.isfinite(numbers(found))[0], np.isin(np.arange(END), [2, 3, 4, 7]))
    assert [(gap["start"], gap["stop"], gap["reason"]) for gap in found["missing"] if gap["layer"] == 0] == [
        (0, 2, "not_asked"), (5, 7, "not_asked"), (8, END, "not_asked")]


@pytest.mark.parametrize("measure", ["distance", "cosine"])
def test_against_another_capture(stack: Stack, capture: str, holed: str, measure: str) -> None:
    found = map_of(stack, capture, f"site=resid_post&measure={measure}&against={holed}")
    assert (found["against"], found["stop"]) == (holed, END + 3)  # as far as the longer one
    values, both = numbers(found), np.ones((4, END + 3), bool)
    both[:, :4] = both[1:3, 8:11] = both[:, END:] = False
    np.testing.assert_array_equal(np.isfinite(values), both)
    np.testing.assert_allclose(values[both], 0.0 if measure == "distance" else 1.0, atol=1e-6)  # the same rows
    assert {(gap["capture"], gap["reason"]) for gap in found["missing"]} == {
        (capture, "past_the_end"), (holed, "prefix_cached"), (holed, "dropped")}


@pytest.mark.parametrize(("query", "status", "said"), [
    ("measure=length", 400, "norm, cosine"),
    ("measure=cosine", 400, "either position or against"),
    ("measure=cosine&position=2&against=x", 400, "either position or against"),
    ("measure=norm&position=2", 400, "norm and projection take neither"),
    ("measure=cosine&position=999", 400, "not a position"),
    ("measure=cosine&position=-1", 400, "position = '-1'"),
    ("measure=projection", 400, "POST it"),
    ("measure=distance&against=none", 404, "none"),
    ("start=9999", 416, "the capture has"),
    ("site=mlp_out", 404, "mlp_out"),
    ("site=resid_post&site=attn_out", 400, "more than once"),
    ("layer=9", 404, "layer = 9"),
    ("dtype=float32", 400, "unknown parameter"),
])
def test_wrong_questions(stack: Stack, capture: str, query: str, status: int, said: str) -> None:
    answer = stack.http.get(f"/v1/captures/{capture}/map?{query}")
    assert (answer.status_code, said in answer.json()["error"]["message"]) == (status, True), answer.text


def crafted(header: str) -> bytes:
    """An npy file of nothing but this header."""
    return b"\x93NUMPY\x02\x00" + len(header).to_bytes(4, "little") + header.encode()


def shaped(shape: str, descr: str = "<f8") -> bytes:
    return crafted(f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}}}\n")


@pytest.mark.parametrize(("body", "said"), [
    (b"", "a direction as npy"), (b"\x93NUMPY broken", "a direction as npy"), (npy(np.zeros(WIDTH)), "other than 0"),
    (npy(np.full(WIDTH, np.nan)), "finite"), (npy(np.ones(WIDTH + 1)), f"rows of {WIDTH} numbers"),
    (npy(np.ones((3, WIDTH))), "each of the 4 layers"), (npy(np.array(["a"])), "numbers"),
    (npy(np.array([{}], object)), "a direction as npy"),
    (save({"a": np.ones(WIDTH), "b": np.ones(WIDTH)}), "one tensor"),
    (shaped(f"({1 << 45},)"), "does not fit"), (shaped(f"({1 << 40}, {1 << 40})"), "does not fit"),
    (shaped("(1,)", "|V2147483647"), "does not fit"), (shaped("(-1,)"), "does not fit"),
    (shaped(f"({1 << 45},)", "|S0"), "numbers [width]"), (crafted("(" * 9000 + "\n"), "a direction as npy"),
    (crafted("-" * 9000 + "1\n"), "a direction as npy"), (crafted("[1]" * 3000), "a direction as npy"),
])
def test_wrong_directions(stack: Stack, capture: str, body: bytes, said: str) -> None:
    answer = stack.http.post(f"/v1/captures/{capture}/map", content=body)
    assert (answer.status_code, said in answer.json()["error"]["message"]) == (400, True), answer.text


def test_a_projected_row_takes_no_direction(stack: Stack) -> None:
    reduced = captured(stack, capture={"sites": ["resid_post"], "codec": "rp8:k=16"})
    assert map_of(stack, reduced)["width"] == 16
    answer = stack.http.post(f"/v1/captures/{reduced}/map", content=npy(np.ones(WIDTH)))
    assert answer.status_code == 400 and "rp8" in answer.json()["error"]["message"]


def test_a_map_is_bounded(stack: Stack) -> None:
    long = stack.complete([65] * (limits.map_positions_max + 1), max_tokens=2,
                          capture={"sites": ["resid_post"], "layers": [0]}).json()["capture"]["id"]
    answer = stack.http.get(f"/v1/captures/{long}/map")
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")
    found = map_of(stack, long, f"stop={limits.map_positions_max}")
    assert np.isfinite(numbers(found)).all()


def test_tokens_have_their_text(stack: Stack, capture: str) -> None:
    answer = stack.http.get(f"/v1/captures/{capture}/tokens?start=2&stop=99").json()
    assert answer["texts"] == [*PROMPT[2:], *"abcdef"] and answer["stop"] == len(PROMPT) + G
    assert stack.http.get(f"/v1/captures/{capture}/tokens?format=json").status_code == 400
    past = stack.http.get(f"/v1/captures/{capture}/tokens?start=99999")
    assert past.status_code == 416 and past.json()["error"]["param"] == "start"
    assert past.headers["content-range"].startswith("positions */")


def test_tokens_of_a_capture_that_is_being_made_are_those_of_its_rows(stack: Stack) -> None:
    """As far as there is no gap in them; the newest token has no row yet."""
    some = [[0, 5], [len(PROMPT) + 1, len(PROMPT) + 3]]
    for positions, asked in (("all", [(0, 99, [*PROMPT, *"abcde"]), (len(PROMPT) + 2, len(PROMPT) + 4, ["c", "d"])]),
                             (some, [(0, 99, [*PROMPT]), (len(PROMPT) + 1, 99, ["b", "c"])])):
        running = stack.complete(PROMPT, max_tokens=G, stream=True, play={"unfinished": True, "live": True},
                                 capture={**SPEC, "positions": positions})
        for start, stop, texts in asked:
            answer = stack.http.get(
                f"/v1/captures/{running.headers['x-tap-capture']}/tokens?start={start}&stop={stop}").json()
            assert answer["texts"] == texts and answer["token_ids"] == [ord(text) for text in texts]
            assert (answer["start"], answer["stop"]) == (start, start + len(texts))


@pytest.mark.parametrize("path", sorted(FILES))
def test_the_page_loads_nothing_from_elsewhere(stack: Stack, path: str) -> None:
    answer = stack.http.get(path)
    policy = answer.headers["Content-Security-Policy"]
    assert answer.status_code == 200 and policy.startswith("default-src 'none'") and "unsafe" not in policy
    assert stack.http.get(path, headers={"If-None-Match": answer.headers["ETag"]}).status_code == 304
    assert stack.http.get(path + "x").status_code == 404
