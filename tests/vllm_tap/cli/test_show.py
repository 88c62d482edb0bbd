"""Lines of `vllm-tap show` about edits, and about a capture that failed."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_tap.cli.show import edit_line

ABLATE = {"site": "resid_post", "layers": [12], "op": "ablate", "vector": "refusal"}


@pytest.mark.parametrize(("edit", "line"), [
    ({**ABLATE, "when": {"probe": "deception", "above": 0.8}},
     "ablate resid_post.12 all vector=refusal when deception ≥ 0.8"),
    ({**ABLATE, "when": {"probe": "deception", "score": "sad", "above": 0.8, "below": 0.3}},
     "ablate resid_post.12 all vector=refusal when deception.sad ≥ 0.8, until < 0.3"),
    ({**ABLATE, "when": {"probe": "deception", "score": 0, "above": 0, "below": 0}},
     "ablate resid_post.12 all vector=refusal when deception.0 ≥ 0, until < 0"),
    ({"op": "stop", "when": {"probe": "deception", "above": 0.9}, "switched": [7]},
     "stop when deception ≥ 0.9: ended at position 7"),
    ({"site": "z", "layers": [1, 2], "op": "set", "positions": [3], "digest": "ab",
      "from": {"capture": "01HX", "site": "z", "layer": 4, "positions": [5], "decoded": True}},
     "set z.1–2 [3] digest=ab from 01HX z.4 [5] decoded"),
    ({"site": "z", "layers": [1], "op": "set", "positions": [3], "from": {"capture": "01HX", "site": "z", "layer": 1}},
     "set z.1 [3] from 01HX z.1"),
])
def test_an_edit_is_told_in_words(edit: dict[str, Any], line: str) -> None:
    assert edit_line(edit) == line
