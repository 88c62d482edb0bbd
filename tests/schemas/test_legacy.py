"""The names, flags and files of earlier designs: what they ask for, what is refused, what an export of them holds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig

from engine_side.config import from_environment
from engine_side.front.admission import admit
from schemas import codecs
from schemas.codecs import parse_codec
from schemas.errors import SpecError, StartError
from schemas.legacy import act_codec, capture_all, error_text
from schemas.read.reader import StoreReader
from tests.support.api_stack import Stack, running
from tests.support.engines.engine_player import LAYERS, WIDTH
from tests.support.store_helpers import until
from vllm_tap.export.command import export
from vllm_tap.serve.services import ServeConfig, services
from vllm_tap.tiny_model import tiny_model

ON = {"VLLM_ACT_CAPTURE": "1"}
PROMPT, GENERATED = "hello", 4
ROWS = len(PROMPT) + GENERATED - 1
SPEC = json.dumps({"sites": ["resid_post"], "codec": "rp8:k=16,seed=3"})


# ── variables ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("variables", "codec"), [
    ({}, "int8b64"),
    ({"VLLM_ACT_MODE": "rp8"}, "rp8:k=512,seed=0"),
    ({"VLLM_ACT_MODE": "rp8", "VLLM_ACT_RP_K": "256", "VLLM_ACT_RP_SEED": "7"}, "rp8:k=256,seed=7"),
    ({"VLLM_ACT_MODE": "full8", "VLLM_ACT_RP_K": "256", "VLLM_ACT_BITS": "8"}, "full8"),
    ({"VLLM_ACT_MODE": "topk8", "VLLM_ACT_TOPK_K": "64"}, "topk8:k=64"),
    ({"VLLM_ACT_MODE": "topk8"}, "topk8:density=0.04"),
    ({"VLLM_ACT_PER_DIM": "0", "VLLM_ACT_RETURN": "sharded"}, "int8b64"),
])
def test_what_the_variables_ask_for(variables: dict[str, str], codec: str) -> None:
    assert act_codec(variables) == codec
    assert json.loads(capture_all({**ON, **variables}) or "") == {"sites": ["resid_post"], "codec": codec}
    assert capture_all({**variables, "VLLM_ACT_CAPTURE": "0"}) is None and capture_all(variables) is None


@pytest.mark.parametrize(("variables", "says"), [
    ({"VLLM_ACT_CAPTURE": "yes"}, "valid: 0, 1"),
    ({"VLLM_ACT_MODE": "int4"}, "(--act-mode)='int4': valid: rp8, full8, topk8"),
    ({"VLLM_ACT_MODE": "rp8", "VLLM_ACT_RP_K": "0"}, "VLLM_ACT_RP_K (--rp-k)='0': k = '0': valid: a whole number"),
    ({"VLLM_ACT_MODE": "rp8", "VLLM_ACT_RP_SEED": "x"}, "VLLM_ACT_RP_SEED (--rp-seed)='x'"),
    ({"VLLM_ACT_MODE": "topk8", "VLLM_ACT_TOPK_K": "-3"}, "VLLM_ACT_TOPK_K (--topk-k)='-3'"),
    ({"VLLM_ACT_BITS": "4"}, "valid: 8"),
    ({"VLLM_ACT_PER_DIM": "1"}, "cannot be known while rows stream past"),
    ({"VLLM_ACT_ATTNM": "16"}, "compute attention when reading"),
    ({"VLLM_ACT_RETURN": "gathered"}, "gathered when it is read"),
])
def test_what_cannot_be_had_is_refused_with_the_reason(variables: dict[str, str], says: str) -> None:
    with pytest.raises(StartError) as raised:
        capture_all({**ON, **variables})
    assert says in str(raised.value)


def test_the_error_is_that_of_the_codec_asked_for() -> None:
    assert "±1/√k (0.062 at k = 256)" in error_text(parse_codec("rp8:k=256"))
    assert "±1/√k (0.044 at k = 512)" in error_text(parse_codec("rp8"))
    assert error_text(parse_codec("full8")) == parse_codec("full8").family.error


def test_the_plugin_reads_them_and_is_not_blind() -> None:
    endpoint = {"VLLM_TAP_ENDPOINT": "ipc:///tmp/t/writer.sock"}
    config = from_environment({**endpoint, **ON, "VLLM_ACT_MODE": "full8"})
    assert config is not None and json.loads(config.capture_all)["codec"] == "full8"
    with pytest.raises(StartError, match="VLLM_TAP_ENDPOINT is not set"):
        from_environment(ON)
    with pytest.raises(StartError, match="add it to VLLM_TAP_ARM"):
        from_environment({**endpoint, **ON, "VLLM_TAP_ARM": "q"})


def test_serve_hands_them_to_engine_and_api(tmp_path: Path) -> None:
    config = ServeConfig(str(tiny_model()), tmp_path, port=8190, engine_port=8191, capture_all=SPEC,
                         environment={**ON, "VLLM_ACT_MODE": "rp8"})
    _, engine, api = services(config, tmp_path)
    assert api.command[-2:] == ("--capture-all", SPEC) and engine.environment["VLLM_ACT_MODE"] == "rp8"
    with pytest.raises(StartError, match="--activation-capture captures resid_post"):
        ServeConfig(str(tiny_model()), tmp_path, arm="attn_out", capture_all=SPEC)


# ── every request is captured ───────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running(tmp_path_factory.mktemp("legacy")) as stack:
        stack.processes["api"].stop()
        stack.start_api(None, "--capture-all", SPEC)
        stack.wait_ready()
        yield stack


def test_a_request_without_a_spec_is_captured_as_the_service_says(stack: Stack) -> None:
    for more in ({}, {"capture": None}):
        body = stack.complete(PROMPT, max_tokens=GENERATED, **more).json()
        manifest = stack.http.get(f"/v1/captures/{body['id']}").json()
        assert manifest["resolved"]["codec"] == {"resid_post": "rp8:k=16,seed=3"}
        assert manifest["resolved"]["layers"] == {"resid_post": list(range(LAYERS))}
        assert {row["captured"] for row in manifest["rows"]} == {ROWS}


def test_a_spec_of_its_own_wins_and_what_cannot_be_captured_is_answered_all_the_same(stack: Stack) -> None:
    own = stack.complete(PROMPT, max_tokens=2, capture={"sites": []}).json()
    assert stack.http.get(f"/v1/captures/{own['id']}").json()["rows"] == []
    beams = stack.complete(PROMPT, max_tokens=2, use_beam_search=True)
    assert beams.status_code == 200 and "capture" not in beams.json()
    assert 'captures_total{outcome="impossible"} 1.0' in stack.http.get("/metrics").text


def outcomes(stack: Stack) -> dict[str, float]:
    return {name: float(count) for name, count in re.findall(
        r'captures_total\{outcome="(\w+)"\} (\S+)', stack.http.get("/metrics").text)}


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_alone_finds_uncapturable_is_answered_all_the_same(stack: Stack, stream: bool) -> None:
    """A prompt with a video, say: who did not ask for a capture is not refused for one, and it is counted."""
    why = "capture = …: a prompt with video cannot be captured, because its rows are not tested; send text or images"
    before, seen = outcomes(stack), len(stack.seen())
    answer = stack.complete(PROMPT, max_tokens=2, stream=stream, play={"uncapturable": why})
    assert answer.status_code == 200 and '"capture"' not in answer.text, answer.text
    first, second = stack.seen()[seen:]
    assert "vllm_xargs" in first["body"] and "vllm_xargs" not in second["body"]  # type: ignore[operator]
    after = outcomes(stack)
    assert after["impossible"] == before.get("impossible", 0) + 1
    assert until(lambda: all(row["status"] != "pending" for row in stack.http.get("/v1/captures").json()["data"]))
    own = stack.complete(PROMPT, max_tokens=2, stream=stream, capture={}, play={"uncapturable": why})
    assert own.status_code == 400 and "a prompt with video" in own.json()["error"]["message"]
    seen = len(stack.seen())
    other = stack.complete(PROMPT, max_tokens=2, stream=stream, play={"status": 400})
    assert other.status_code == 400 and len(stack.seen()) == seen + 1, "another error is the request's own"
    assert outcomes(stack)["impossible"] == after["impossible"]


# ── exports ─────────────────────────────────────────────────────────────────────────────────────────────────────


def captured(stack: Stack, spec: dict[str, Any]) -> tuple[str, str]:
    body = stack.complete(PROMPT, max_tokens=GENERATED, capture=spec).json()
    return body["capture"]["id"], body["id"]


@pytest.mark.parametrize(("codec", "dims", "named"), [
    ("rp8:k=16,seed=3", 16, {"rp_k": 16, "rp_seed": 3}), ("full8", WIDTH, {}), ("topk8:k=12", 12, {"topk_k": 12}),
])
def test_an_npz_export_has_the_earlier_layout(
    stack: Stack, codec: str, dims: int, named: dict[str, int], tmp_path: Path
) -> None:
    capture, response = captured(stack, {"sites": ["resid_post"], "codec": codec, "layers": [0, 3]})
    paths = export(stack.store, capture, out=tmp_path / "out")
    assert sorted(path.name for path in paths) == ["manifest.json", "seq0_layer0_rank0.npz", "seq0_layer3_rank0.npz"]
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    mode = codec.partition(":")[0]
    assert {key: manifest[key] for key in ("request_id", "capture", "tp_rank", "tp_world_size", "mode")} == {
        "request_id": response, "capture": capture, "tp_rank": 0, "tp_world_size": 1, "mode": mode}
    assert manifest["compression"] == {"rp_k": None, "quant_bits": 8, **named}
    sequence = manifest["sequences"]["0"]
    assert (sequence["prompt_len"], sequence["total_len"]) == (len(PROMPT), len(PROMPT) + GENERATED)
    with StoreReader(stack.store) as reader:
        for layer in (0, 3):
            assert sequence["layers"][str(layer)] == {"path": f"seq0_layer{layer}_rank0.npz", "shape": [ROWS, dims]}
            npz = np.load(tmp_path / "out" / f"seq0_layer{layer}_rank0.npz", allow_pickle=False)
            assert npz["q"].dtype == np.uint8 and npz["q"].shape == (ROWS, dims)
            values = (npz["q"] - npz["zero"].astype(np.float32)) * npz["scale"]
            if mode == "topk8":
                whole = np.zeros((ROWS, WIDTH), np.float32)
                np.put_along_axis(whole, npz["index"].astype(np.int64), values, -1)
                values = whole
            assert np.array_equal(values, reader.slice(capture, "resid_post", [layer]).values()[0])
            assert npz["positions"].tolist() == list(range(ROWS)) and len(npz["token_ids"]) == ROWS
            assert str(npz["mode"]) == mode and int(npz["width"]) == WIDTH and int(npz["layer"]) == layer
            assert {name: int(npz[name]) for name in named} == named


def test_other_formats_and_codecs_keep_their_own_layout(stack: Stack, tmp_path: Path) -> None:
    capture, _ = captured(stack, {"codec": {"resid_post": "rp8:k=16", "attn_out": "raw"}})
    (path,) = export(stack.store, capture, out=tmp_path / "both.npz")
    both = np.load(path, allow_pickle=False)
    assert both["resid_post.1"].shape == (ROWS, 16) and both["attn_out.1"].shape == (ROWS, WIDTH)
    about = {info["site"]: info for info in json.loads(str(both["manifest"]))["sites"]}
    assert about["resid_post"]["parameters"] == {"k": 16, "seed": 0} and "undone" in about["resid_post"]["decoded"]
    assert len(export(stack.store, capture, out=tmp_path / "one", sites="resid_post")) == LAYERS + 1
    assert export(stack.store, capture, "safetensors", tmp_path / "a.safetensors", "resid_post")


def test_two_sites_have_no_place_in_the_earlier_layout(stack: Stack, tmp_path: Path) -> None:
    capture, _ = captured(stack, {"codec": "full8"})
    with pytest.raises(SpecError, match="one at a time"):
        export(stack.store, capture, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_legacy_codecs_say_what_they_lose() -> None:
    legacy = {name: family.error for name, family in codecs.CODECS.items() if family.legacy}
    assert set(legacy) == {"rp8", "full8", "topk8"} and "0.044 at k = 512" in legacy["rp8"]


def test_an_export_that_replaces_another_leaves_nothing_of_it(stack: Stack, tmp_path: Path) -> None:
    """rp8 beside it: a projection has no more columns than the row, and the export says how many there are."""
    capture, _ = captured(stack, {"sites": ["resid_post"], "codec": "rp8:k=512", "layers": [0, 3]})
    export(stack.store, capture, out=tmp_path / "out")
    export(stack.store, capture, out=tmp_path / "out", layers="3", force=True)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["manifest.json", "seq0_layer3_rank0.npz"]
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    npz = np.load(tmp_path / "out" / "seq0_layer3_rank0.npz", allow_pickle=False)
    assert npz["q"].shape == (ROWS, WIDTH) and manifest["compression"]["rp_k"] == npz["rp_k"] == WIDTH


def test_what_the_engine_cannot_do_is_said_before_the_first_request(tmp_path: Path) -> None:
    with running(tmp_path) as stack:
        stack.processes["api"].stop()
        stack.start_api(None, "--capture-all", '{"sites": ["mlp_out"]}')
        ready = stack.http.get("/readyz")
        assert ready.status_code == 503 and "mlp_out" in ready.json()["checks"]["capture_all"]
        answer = stack.complete("hello")  # it did not ask for it: it is answered, and counted
        assert answer.status_code == 200 and "capture" not in answer.json()
        assert 'captures_total{outcome="impossible"} 1.0' in stack.http.get("/metrics").text
        assert stack.complete("hello", capture={"sites": ["mlp_out"]}).status_code == 400


def test_the_front_end_knows_the_widths_of_its_model() -> None:
    """What `vllm serve` without a gateway in front of it refuses."""
    from vllm.config import ModelConfig

    from engine_side.config import EngineConfig
    from engine_side.seams.front_end import _check_capture_all, _shape

    sites = ("resid_post", "q", "k", "v", "z", "mlp_post")
    shape = _shape(ModelConfig(model=str(tiny_model()), dtype="float32"), EngineConfig("ipc:///tmp/x", arm=sites))
    config = AutoConfig.from_pretrained(tiny_model())
    assert shape.widths == {"resid_post": config.hidden_size, "mlp_post": config.intermediate_size} | {
        site: heads * config.head_dim for site, heads in (
            ("q", config.num_attention_heads), ("z", config.num_attention_heads), ("k", config.num_key_value_heads),
            ("v", config.num_key_value_heads))}
    wide = replace(shape, widths=dict.fromkeys(sites, 1 << 14))  # a projection of it to 2^14 has too large a matrix
    for site in sites:
        asked = {"sites": [site], "codec": "rp8:k=16384"}
        admit(asked, None, n=1, prompt_number=0, shape=shape)
        with pytest.raises(SpecError, match="valid at width 16384"):
            admit(asked, None, n=1, prompt_number=0, shape=wide)
    _check_capture_all(SPEC, shape)
    with pytest.raises(StartError, match="VLLM_ACT_CAPTURE"):
        _check_capture_all('{"sites": ["resid_post"], "codec": "rp8:k=16384"}', wide)
