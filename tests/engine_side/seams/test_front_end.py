"""What the front end finds in a request before it takes its edits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine_side.front import admission
from engine_side.seams.front_end import _hand_on
from schemas.edits.resolved import Edits
from schemas.errors import EditError
from schemas.spec import Armed


def test_a_prompt_with_images_is_not_edited_and_gives_its_id_back() -> None:
    shape = admission.Shape(Armed({}, 2), {})
    spec = {"sites": [], "id": "01JZZZZZZZZZZZZZZZZZZZZZZZ"}

    def request(features: list[object]) -> Any:
        ticket = admission.admit(spec, None, n=1, prompt_number=0, shape=shape)
        return SimpleNamespace(sampling_params=SimpleNamespace(n=1, extra_args={"capture": ticket}), cache_salt=None,
                               prompt_token_ids=[1, 2], mm_features=features)

    edits: Any = Edits([], {}, "[]")
    with pytest.raises(EditError, match="a prompt with images, sound or video cannot be edited"):
        _hand_on(request([object()]), edits)
    _hand_on(taken := request([]), edits)
    assert "vllm-tap-edit" in taken.cache_salt
