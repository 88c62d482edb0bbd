"""docs/evidence/models.md is what docs/evidence/models.json says, and that is what the README promises."""

from __future__ import annotations

import json

from tests.survey.configs import WRAPPERS
from tests.survey.page import BAR, JSON, PAGE, page, worst

# vLLM's own: another form of an activation or a scan.
OWN = {"ApertusForCausalLM": 5e-3, "BloomForCausalLM": 1e-3, "NemotronHForCausalLM": 1e-3}


def test_the_page_follows_from_its_figures() -> None:
    assert PAGE.read_text() == page(json.loads(JSON.read_text()))


def test_nothing_was_admitted_and_is_wrong() -> None:
    rows = json.loads(JSON.read_text())
    admitted = {name: row for name, row in rows.items() if row["result"] == "admitted"}
    assert len(rows) >= 100 and len(admitted) >= 60
    held = {name: off for name, row in admitted.items() if (off := worst(row)) is not None}
    assert len(held) >= 25
    assert {name: off for name, off in held.items() if off > OWN.get(name, BAR[admitted[name]["dtype"]])} == {}
    for name in OWN:  # the stream itself is off there, and it is what the final norm makes the model's output of
        assert admitted[name]["held"]["resid_pre"]["error"] > held[name] / 4, name
    assert all(held[name] <= BAR["float32"] for name in WRAPPERS)
    assert all({"resid_pre", "resid_post"} <= row["sites"].keys() for row in admitted.values())
