"""Edits and names of vectors as the client sends them: objects of its own become what JSON has."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from schemas.errors import ArgumentError
from vllm_tap.client.answers import Generation
from vllm_tap.client.captures import Capture
from vllm_tap.client.http import Asked, generate_request, vector_path

SET = {"site": "resid_post.1", "op": "set", "positions": [3]}


def sent(edit: list[dict[str, Any]]) -> Any:
    """The edits of a request's body, through JSON."""
    body = generate_request("x", 1, Asked(None, edit), "m", {}).body
    return json.loads(json.dumps(body))["edit"]


@pytest.mark.parametrize("capture", ["01J", Generation({"id": "01J"}), Capture(None, "01J")])  # type: ignore[arg-type]
def test_a_capture_is_named_by_its_id_or_by_what_has_one(capture: object) -> None:
    assert sent([{**SET, "from": {"capture": capture, "positions": np.arange(2)}}]) == [
        {**SET, "from": {"capture": "01J", "positions": [0, 1]}}]


@pytest.mark.parametrize("capture", [7, None, {"id": "01J"}, object()])
def test_what_names_no_capture_is_refused_before_it_is_sent(capture: object) -> None:
    with pytest.raises(ArgumentError, match=r"^edit\[1\]\.from\.capture = .*: valid: a capture's id, or what"):
        sent([SET, {**SET, "from": {"capture": capture}}])


def test_names_of_vectors_are_those_that_the_service_takes() -> None:
    for name in ("a", "A_-9", "a" * 64):
        assert vector_path(name) == f"/v1/vectors/{name}"
    for name in ("", "_a", "-a", "a" * 65, "é", "a/b", "a\n"):
        with pytest.raises(ArgumentError, match=r"is 1 to 64 of A-Z a-z 0-9 _ -, and does not begin with _ or -"):
            vector_path(name)
