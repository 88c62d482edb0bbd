"""Vectors as they come in a body, and in an edit: numbers, or a refusal that names field, value and fix."""

from __future__ import annotations

import base64
import json
import re
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save

from schemas import limits
from schemas.edits.arms import Arms
from schemas.edits.resolve import resolve_edits
from schemas.edits.spec import parse_edits
from schemas.edits.vectors import digest_of, read_vector
from schemas.errors import LimitError, SpecError, TapError

JSON, FILE = "application/json; charset=utf-8", "application/octet-stream"
NUMBERS = np.array([1.5, -2.25, 3e-30], np.float32)


def text(numbers: npt.ArrayLike) -> str:
    """float32, little-endian, in base64."""
    return base64.b64encode(np.asarray(numbers, "<f4").tobytes()).decode()


def as_json(vector: Any) -> bytes:
    return json.dumps({"vector": vector}).encode()


@pytest.mark.parametrize(("data", "kind"), [
    (as_json(NUMBERS.tolist()), JSON), (as_json({"base64": text(NUMBERS)}), JSON), (save({"vector": NUMBERS}), FILE),
    (save({"vector": NUMBERS.astype(np.float64)}), "application/vnd.safetensors")])
def test_every_form_holds_the_same_numbers(data: bytes, kind: str) -> None:
    found = read_vector(data, kind)
    assert found.dtype == np.float32 and np.array_equal(found, NUMBERS)


@pytest.mark.parametrize(("data", "kind", "says"), [
    (b"", JSON, "body = .*malformed JSON"), (b"[1, 2]", JSON, "body = .*one field"),
    (as_json("x"), JSON, "vector = 'x'"),
    (b'{"vector": [1], "name": "x"}', JSON, "body = ['name', 'vector']: must be"),
    (as_json([]), JSON, "vector = '[]': has no numbers"), (as_json([1, True]), JSON, "vector[1] = True"),
    (as_json([1, None]), JSON, "vector[1] = None"), (as_json([1, float("nan")]), JSON, "vector[1] = nan"),
    (as_json([1e39]), JSON, "vector[0] = 1e+39"), (as_json([10**400]), JSON, "vector = '…': valid: finite"),
    (as_json({"base64": "*"}), JSON, "vector.base64 = '*': no base64"),
    (as_json({"base64": text([0, float("inf")])}), JSON, "vector.base64[1] = inf"),
    (as_json({"base64": ""}), JSON, "vector.base64 = '0 bytes'"),
    (as_json({"base64": 7}), JSON, "vector = {'base64': 7}"),
    (b"\xff" * 64, FILE, "body = .*no safetensors file"), (b"abc", FILE, "body = b'abc': no safetensors file"),
    (save({"direction": NUMBERS}), FILE, "tensors = ['direction']: valid: vector"),
    (save({"vector": NUMBERS, "more": NUMBERS}), FILE, "tensors = ['more', 'vector']"),
    (save({"vector": np.ones(3, np.int8)}), FILE, "vector = 'I8'"), (save({"vector": np.ones((1, 3))}), FILE, "[1, 3]"),
    (save({"vector": np.ones(0)}), FILE, "has no numbers"),
    (save({"vector": np.array([1, 1e300])}), FILE, "vector[1] ="),
    (as_json([1]), "text/plain", "Content-Type = 'text/plain'"), (as_json([1]), "", "Content-Type = ''"),
])
def test_what_is_no_vector_is_refused_by_name(data: bytes, kind: str, says: str) -> None:
    with pytest.raises(SpecError, match=re.escape(says).replace(r"\.\*", ".*")):
        read_vector(data, kind)


def test_a_number_that_is_none_is_told_as_one() -> None:
    with pytest.raises(SpecError, match=re.escape("vector[1] = [1, 2]: valid: a number") + "$"):
        read_vector(as_json([0, [1, 2]]), JSON)


@pytest.mark.parametrize("data", [as_json([0] * (limits.vector_width_max + 1)), as_json({"base64": text(
    np.zeros(limits.vector_width_max + 1))}), save({"vector": np.zeros(limits.vector_width_max + 1, np.float16)})])
def test_a_vector_is_not_wider_than_any_row(data: bytes) -> None:
    with pytest.raises(LimitError, match="numbers in vector: 524289 asked, limit 524288"):
        read_vector(data, JSON if data.startswith(b"{") else FILE)


ARMS = Arms({"resid_post": [0, 1]}, {"resid_post": 3}, 2, 2, {"tone": NUMBERS}, {}, 16, 256)
ADD = {"site": "resid_post.1", "op": "add"}


def test_base64_is_the_numbers_that_a_list_has() -> None:
    listed, encoded = (resolve_edits(parse_edits([{**ADD, "vector": vector}]), ARMS)
                       for vector in (NUMBERS.tolist(), {"base64": text(NUMBERS)}))
    assert listed == encoded and list(encoded.vectors) == [digest_of(NUMBERS)]


def test_a_name_that_comes_with_numbers_is_told_and_no_other_vectors() -> None:
    named = resolve_edits(parse_edits([{**ADD, "vector": {"base64": text(NUMBERS * 2), "name": "calm"}}]), ARMS)
    assert json.loads(named.told)[0] == {"site": "resid_post", "layers": [1], "op": "add", "vector": "calm",
                                         "digest": digest_of(NUMBERS * 2)}
    with pytest.raises(SpecError, match=re.escape("edit[0].vector.name = 'tone': the engine was started with other")):
        resolve_edits(parse_edits([{**ADD, "vector": {"base64": text(NUMBERS * 2), "name": "tone"}}]), ARMS)


SET = {"site": "resid_post.1", "op": "set"}


def test_text_that_is_no_json_is_shown() -> None:
    with pytest.raises(SpecError, match=re.escape("edit = '[{]': malformed JSON")):
        parse_edits("[{]")
    with pytest.raises(SpecError, match=r"^edit = '\[{2}.{100,120}: malformed JSON: nested too deeply$"):
        parse_edits("[" * 100_000)


def test_what_raises_the_depth_is_named_as_flag_and_variable() -> None:
    with pytest.raises(SpecError, match=re.escape("(--edit-depth, VLLM_TAP_EDIT_DEPTH)")):
        resolve_edits(parse_edits([{**ADD, "vector": "tone"}] * 3), ARMS)


@pytest.mark.parametrize(("edit", "says"), [
    ({**ADD, "vector": {"base64": text([1, float("nan")])}}, "edit[0].vector.base64[1] = nan"),
    ({**ADD, "vector": {"base64": "AAA="}}, "edit[0].vector.base64 = '2 bytes'"),
    ({**ADD, "vector": {"base64": text([1]), "dtype": "f4"}}, "edit[0].vector.dtype = 'f4': unknown field"),
    ({**ADD, "from": {"capture": "x"}}, "edit[0].from = "),
    ({**SET, "from": {"capture": "x"}}, "edit[0].positions = 'all'"),
    ({**SET, "from": {"capture": "x", "layers": [1]}, "positions": [1]}, "edit[0].from.layers = [1]: unknown field"),
    ({**SET, "from": {"positions": [1]}, "positions": [1]}, "edit[0].from.capture: missing; valid: the"),
    ({**SET, "op": "cap", "vector": "tone"}, "edit[0].high: missing; cap needs low or high"),
    ({"site": "resid_post"}, "edit[0].op: missing; valid: add, scale, ablate, cap, set or stop"),
    ({**SET, "vector": "tone", "positions": []}, "edit[0].positions = []: names no position: leave the edit out"),
    ({**SET, "rows": [], "positions": []}, "edit[0].positions = []: names no position: leave the edit out"),
    ({**SET, "vector": "tone", "positions": [*range(65)]},
     "edit[0].positions: 65 asked, limit 64; use ranges, as in [[0, 65]]"),
    ({**SET, "vector": "tone", "site": "residual"}, "edit[0].site = 'residual': unknown site; valid: resid_pre, "
     "resid_mid, resid_post, attn_out, mlp_out, mlp_post, q, k, v, q_rot, k_rot, z, those of blocks"),
    ({**SET, "from": {"capture": "x", "positions": [[1, 3]]}, "positions": [1]}, "from.positions = '2 of them'"),
    ({**SET, "from": {"capture": "x", "positions": [[3, 1]]}, "positions": [1]}, "edit[0].from.positions = [3, 1]"),
    ({**SET, "from": {"capture": "x", "decoded": 1}, "positions": [1]}, "edit[0].from.decoded = 1"),
    ({**SET, "from": {"capture": "x"}, "vector": [1], "positions": [1]}, "edit[0].rows = '…': set takes vector"),
    ({"op": "stop", "vector": [1]}, "edit[0].vector = [1]: stop has when, and no vector"),
    ({**SET, "op": "swap"}, "edit[0].op = 'swap': valid: add, scale, ablate, cap, set or stop"),
    ({**SET, "from": {"capture": "x"}, "positions": [1]}, "edit[0].from = 'x': rows of a capture are looked up by the"),
])
def test_an_edit_that_cannot_be_made_is_refused_by_name(edit: dict[str, Any], says: str) -> None:
    with pytest.raises(TapError, match=re.escape(says)):
        resolve_edits(parse_edits([edit]), ARMS)
