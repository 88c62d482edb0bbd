"""Requests at the front end: those with edits, and those that cannot be captured."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine_side.front import admission
from engine_side.front.edit_admission import Admitted
from engine_side.front.rows_in_use import OF_ENGINE
from engine_side.seams.front_end import _hand_on, _process_inputs
from schemas.edits.resolved import REPLACED, Edits, Placed
from schemas.errors import EditError, SpecError
from schemas.limits import capture_samples_max
from schemas.spec import Armed
from tests.support.processes import free_port
from tests.support.store_helpers import WriterProcess, until
from tests.writer_service.test_metrics import scrape


def test_a_request_whose_edits_have_no_room_gives_its_id_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OF_ENGINE, "limit", 0)
    shape = admission.Shape(Armed({}, 2), {})
    spec = {"sites": [], "id": "01JZZZZZZZZZZZZZZZZZZZZZZZ"}

    def request() -> Any:
        ticket = admission.admit(spec, None, n=1, prompt_number=0, shape=shape)
        return SimpleNamespace(sampling_params=SimpleNamespace(n=1, extra_args={"capture": ticket}), cache_salt=None,
                               prompt_token_ids=[1, 2])

    row = Placed("resid_post", [0], [(0, 1)], REPLACED, "digest", rows=1)
    with pytest.raises(EditError, match="'1 rows': the engine has room for 0"):
        _hand_on(request(), Admitted(Edits([row], {"digest": bytes(8)}, "[]")))
    _hand_on(taken := request(), Admitted(Edits([], {}, "[]")))
    assert "vllm-tap-edit" in taken.cache_salt


class Params(SimpleNamespace):
    """vLLM's, as far as the front end looks at it."""

    def clone(self) -> Params:
        return Params(**vars(self))


def feature(kind: str) -> Any:
    return SimpleNamespace(modality=kind, mm_position=SimpleNamespace(offset=0, length=2, is_embed=None))


def test_what_cannot_be_captured_though_all_is_to_be_is_served_logged_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A prompt with a video, of embeddings, in parts, for a pooled vector, for too many samples: in the writer's
    metric, in the log once.
    """
    port = free_port()
    served = {"video": ([1, 2], [feature("video")]), "embeds": (None, []), "text": ([1, 2], []),
              "image": ([1, 2], [feature("image")])}

    def of_vllm(self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        tokens, features = served[prompt["kind"]]
        return SimpleNamespace(sampling_params=params, prompt_token_ids=tokens, mm_features=features)

    def ask(kind: str, params: Any, **more: Any) -> Any:
        return process(front, "r-1", {"kind": kind}, params, **more)

    with WriterProcess(tmp_path / "store", "--metrics-port", str(port)) as writer:
        front = SimpleNamespace(
            vllm_tap=SimpleNamespace(capture_all='{"sites": ["resid_post"]}', endpoint=writer.endpoint, curve=None),
            vllm_tap_shape=admission.Shape(Armed({"resid_post": [0, 1]}, 2), {"resid_post": 64}))
        process = _process_inputs(of_vllm)
        before = admission._endpoint, admission._curve
        admission.use(writer.endpoint, None)
        try:
            with caplog.at_level(logging.WARNING, "vllm.tap"):
                for kind in ("video", "video", "embeds", "text", "image"):
                    extra = ask(kind, Params(n=1, extra_args=None)).sampling_params.extra_args or {}
                    assert ("capture" in extra) is (kind in ("text", "image"))
                request = ask("text", Params(n=capture_samples_max + 1, extra_args=None))
                assert request.sampling_params.extra_args is None, "as it came"
                ask("text", Params(n=1, extra_args=None), resumable=True)
                ask("text", SimpleNamespace())
            for words, times in (("a prompt with video", 1), ("a prompt of embeddings", 1), ("streamed", 1),
                                 ("a pooled vector", 1), ("the captures of the whole request", 1),
                                 ("not captured, though all are to be", 5)):
                assert caplog.text.count(words) == times, (words, caplog.text)
            for kind, says in (("video", "a prompt with video"), ("embeds", "a prompt of embeddings")):
                with pytest.raises(SpecError, match=says):
                    ask(kind, Params(n=1, extra_args={"capture": {}}))
            with pytest.raises(SpecError, match="the captures of the whole request"):
                ask("text", Params(n=capture_samples_max + 1, extra_args={"capture": {}}))
            assert until(lambda: scrape(port)["vllm_tap_writer_requests_uncaptured_total"] == 6)
        finally:
            admission.use(*before)
        writer.stop()
