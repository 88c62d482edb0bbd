"""What the front end makes of specs, and tells of captures' ends while the writer is away, and when it is back."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
from pathlib import Path

import numpy as np
import pytest

from engine_side.front import admission
from engine_side.front.rows_in_use import RowsInUse
from engine_side.tap.shares import layout_of
from schemas import limits
from schemas.errors import EditError, LimitError, SpecError
from schemas.ids import new_ulid
from schemas.read.reader import StoreReader
from schemas.spec import Armed, parse_spec, resolve
from tests.support.store_helpers import WriterProcess, until


def said_of(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Records of admission alone: a sender of a test before may still be ending beside it."""
    return [record for record in caplog.records if record.module == "admission"]


def test_ends_beyond_what_may_wait_are_counted_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    captures = [new_ulid() for _ in range(limits.control_records_pending_max)]
    with WriterProcess(tmp_path / "store") as writer, caplog.at_level(logging.WARNING, "vllm.tap"):
        writer.kill()
        admission.use(writer.endpoint, None)
        for capture in captures:
            admission.report_finish(capture, "stop", None, [1])
        assert not said_of(caplog)
        for _ in range(3):
            admission.report_finish(new_ulid(), "stop", None, [1])
        (said,) = said_of(caplog)
        assert "records wait already" in said.getMessage() and said.exc_info is None
        writer.start()
        with StoreReader(tmp_path / "store") as reader:
            assert until(lambda: reader.capture(captures[-1]))
        admission.report_finish(new_ulid(), "stop", None, [1])
        assert len(said_of(caplog)) == 2 and "how 3 captures ended" in said_of(caplog)[-1].getMessage()
        admission.retire(writer.endpoint)


def test_a_codec_of_whole_rows_is_refused_where_ranks_share_them_out() -> None:
    armed = Armed({"resid_post": [0, 1], "q": [0, 1], "k": [0, 1]}, 2, {"q": 4})
    layout = layout_of(armed.sites, {"resid_post": 64, "q": 64, "k": 32}, {"resid_post": 64, "q": 128, "k": 32}, 2)
    shape = admission.Shape(armed, {}, layout)
    for sites in (["resid_post"], ["k"], []):
        admission.resolve_spec({"codec": "topk:k=8", "sites": sites}, shape)
    for _ in range(2):  # not remembered as one that can be had
        with pytest.raises(SpecError, match=r"codec = 'topk:k=8': .*ranks share out the columns of q; valid: "):
            admission.resolve_spec({"codec": "topk:k=8"}, shape)
    admission.resolve_spec({"codec": "int8b64"}, shape)


def test_a_spec_that_is_known_but_for_its_id_gives_what_it_gave() -> None:
    armed = Armed({"resid_post": [0, 1, 2], "q": [0, 1, 2]}, 3, {"q": 4})
    shape = admission.Shape(armed, {"resid_post": 64, "q": 16})
    asked: list[dict[str, object]] = [
        {}, {"layers": [1]}, {"layers": [True]}, {"layers": "::2", "codec": "int8b64"},
        {"layers": [1], "tags": {"a": "b"}}, {"tags": {"0" * 26: "id"}}, {"tags": {"id": new_ulid()}},
        {"layers": [1], "tags": {"a": "c"}}, {"layers": [1.0]}, {"positions": [[0, 2], [1, 5]]}, {"positions": [0, 2]},
        {"codec": {"q": "qk8", "resid_post": "raw16"}}, {"sites": []}, {"sites": ["nothing"]}, {"layers": [7]},
        {"tags": {"1": "x"}}, {"tags": {1: "x"}}, {"tags": {"a": "YWJj"}}, {"tags": {"a": b"abc"}},
        {"layers": [0], "sites": None}, {"layers": [0], "sites": float("nan")}, {"positions": ((0, 2), (1, 5))},
        {"return": "inline"}, {"unknown": 1}, {"positions": list(range(1500))},
    ]

    def fresh(value: object) -> object:
        try:
            spec = parse_spec(value)
            return spec.to_json(), resolve(spec, armed, shape.widths)
        except (SpecError, LimitError) as error:
            return str(error)

    def found(value: object) -> object:
        try:
            return admission.resolve_spec(value, shape)[1:]
        except SpecError as error:
            return str(error)

    for _ in range(3):
        for value in asked:
            for named in (value, {**value, "id": new_ulid()}, {"id": new_ulid(), **value}, {**value, "id": None},
                          {**value, "id": "no ULID"}, {**value, "id": 7}, {**value, "id": np.str_(new_ulid())}):
                assert str(fresh(named)) in str(found(named)), named
                with contextlib.suppress(TypeError):  # bytes have no JSON
                    text = json.dumps(named)
                    assert str(fresh(text)) in str(found(text)), text
    assert len(shape.known) >= 9
    for text in ("", "{", "[]", "null", "7", '"{}"', ' {"layers": [1]} ', '{"layers": [1], "layers": [2]}',
                 "[" * 100_000, '{"id": "a", "id": null}', '{"tags": {"a": "\\ud800"}}',
                 '{"layers": [' + "1" * 5000 + "]}"):
        for _ in range(2):
            assert str(fresh(text)) in str(found(text)), text
    for at in range(1000):
        admission.resolve_spec({"positions": [at]}, shape)
    assert len(shape.known) <= 64 and sum(len(key) for key, _ in shape.known.items()) < 1 << 18


def test_a_known_spec_that_comes_as_text_is_parsed_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``vllm_xargs`` carries it: what a server's clients send costs what a mapping does."""
    shape = admission.Shape(Armed({"resid_post": [0, 1, 2]}, 3, {}), {"resid_post": 64})
    asked = [json.dumps({"layers": [0], "id": new_ulid()}), json.dumps({"id": new_ulid(), "layers": [0]})]
    first = admission.resolve_spec(asked[0], shape)
    monkeypatch.delattr(admission, "parse_spec")
    assert admission.resolve_spec(asked[1], shape).resolved is first.resolved


def test_a_spec_that_is_changed_while_it_is_looked_at_changes_nothing_for_others(monkeypatch: pytest.MonkeyPatch
                                                                                 ) -> None:
    """Callers of an asynchronous engine may be in another thread."""
    shape = admission.Shape(Armed({"resid_post": [0, 1, 2]}, 3, {}), {"resid_post": 64})
    asked: dict[str, list[int]] = {"layers": [0]}

    def parse_changed(value: object) -> object:
        asked["layers"][0] = 2
        return parse_spec(value)

    monkeypatch.setattr(admission, "parse_spec", parse_changed)
    admission.resolve_spec(asked, shape)
    assert admission.resolve_spec({"layers": [0]}, shape).resolved.layers == {"resid_post": [0]}


def test_a_spec_under_another_name_is_not_passed_over() -> None:
    admission.check_names({"mine": {}, "kv_transfer_params": {}, "captured_at": "now", "screen_capture": 1,
                       "capture_device": {"name": "x"}, "capture_note": "{", "captures": None})
    for name, value in (("captures", 1), ("Capture", "all"), ("cpature", {}), ("capture_count", 2), ("my_capture", {}),
                        ("activation_capture", {"layers": [0]}), ("capture_spec", '{"layers": [0]}')):
        with pytest.raises(SpecError, match=name):
            admission.check_names({"mine": 1, name: value})


def test_edits_under_another_name_are_not_passed_over() -> None:
    edits = [{"site": "resid_post.1", "op": "scale", "by": 0}]
    admission.check_names({"edit": edits, "edits": "the text", "edited": [{"line": 1}], "mine": edits})
    for name, value in (("edits", edits), ("Edit", json.dumps(edits)), ("eidt", edits[0]), ("my_edit_list", edits)):
        with pytest.raises(EditError, match=rf"the edits are in extra_args\['{name}'\]"):
            admission.check_names({"mine": 1, name: value})


def test_rows_that_never_fit_are_told_so_and_others_to_wait() -> None:
    class Request:
        pass

    rows, one = RowsInUse(256), Request()
    with pytest.raises(EditError, match=r"^edit = '258 rows': .*room for 256, .*sample \(n\) of each prompt"):
        rows.check(258)
    with pytest.raises(EditError, match=r"^edit = '258 rows, 86 for each of n = 3': the engine has room for 256"):
        rows.check(86, 3)
    rows.check(256)
    rows.check(64, 4)
    rows.hold(one, 200)
    with pytest.raises(EditError, match=r"^edit = '57 rows': .* requests use 200; .*again .*, or raise VLLM_TAP_E"):
        rows.check(57)
    rows.check(56)
    del one
    gc.collect()
    rows.check(256)
