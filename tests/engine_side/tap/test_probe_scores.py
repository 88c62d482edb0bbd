"""Probes as files, in specs and on a recorder: every refusal, and scores against NumPy's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.numpy import save_file

from engine_side.config import EngineConfig
from engine_side.front.ticket import Ticket
from engine_side.step.block import layout_of
from engine_side.step.recorder import Recorder
from engine_side.step.selection import Step
from engine_side.tap.probe_scores import Scorer, scorer
from engine_side.tap.staging import Staging
from engine_side.transport.device_copies import DeviceToHost
from engine_side.transport.events import Counted, Entry, Opened, Run
from engine_side.transport.ring import Ring, view
from schemas import limits
from schemas.errors import SpecError, StartError
from schemas.ids import new_ulid
from schemas.probes import Probe, Registered, load_probe, parse_probes, place_of, probes_text
from schemas.sites import is_site, parse_site, site_named
from schemas.spec import Armed, parse_spec, resolve

WIDTH = 40
RNG = np.random.default_rng(3)
DIRECTIONS = RNG.standard_normal((3, WIDTH)).astype(np.float32)
BIAS = RNG.standard_normal(3).astype(np.float32)
MEAN = RNG.standard_normal(WIDTH).astype(np.float32)


def saved(folder: Path, tensors: dict[str, npt.NDArray[Any]] | None = None, place: str = "", **metadata: str
          ) -> Registered:
    """A file of a probe that is good but for what a test makes of it."""
    save_file({"directions": DIRECTIONS} if tensors is None else tensors, folder / "p.safetensors",
              {"site": "resid_post", "layer": "1"} | metadata)
    return Registered("tone", folder / "p.safetensors", place)


# ── files ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_bias_and_mean_become_one_bias(tmp_path: Path, dtype: str) -> None:
    tensors = {name: array.astype(dtype) for name, array in
               (("directions", DIRECTIONS), ("bias", BIAS), ("mean", MEAN))}
    found = load_probe(saved(tmp_path, tensors, names='["a, b", "c", "d"]', activation="sigmoid"))
    directions, bias, mean = (tensors[name].astype(np.float64) for name in ("directions", "bias", "mean"))
    assert found.directions.dtype == found.bias.dtype == np.float32
    assert np.allclose(found.directions, directions) and np.allclose(found.bias, bias - directions @ mean, atol=1e-5)
    assert (found.about.site, found.about.layer, found.about.names) == ("resid_post", 1, ["a, b", "c", "d"])
    assert "sigmoid(directions @ (x - mean) + bias) of the rows x of resid_post.1" in found.about.meaning


def test_one_direction_needs_no_list(tmp_path: Path) -> None:
    found = load_probe(saved(tmp_path, {"directions": DIRECTIONS[0], "bias": np.array(BIAS[0])}))
    assert found.directions.shape == (1, WIDTH) and found.bias.tolist() == [BIAS[0]] and found.about.names == ["tone"]
    other = load_probe(saved(tmp_path, {"directions": DIRECTIONS[1]}))
    assert other.about.fingerprint != found.about.fingerprint
    assert load_probe(saved(tmp_path)).about.names == ["0", "1", "2"]


@pytest.mark.parametrize(("place", "metadata", "found"), [
    ("", {}, ("resid_post", 1)), ("mlp_out.3", {}, ("mlp_out", 3)), ("blocks.7.hook_resid_mid", {}, ("resid_mid", 7)),
    ("", {"site": "blocks.1.hook_out"}, ("resid_post", 1)), ("final_norm", {}, ("final_norm", 0)),
    ("", {"site": "embed"}, ("embed", 0)),
])
def test_where_a_probe_reads(tmp_path: Path, place: str, metadata: dict[str, str], found: tuple[str, int]) -> None:
    registered = saved(tmp_path, None, place, **metadata)
    assert place_of(registered) == found
    about = load_probe(registered).about
    assert (about.site, about.layer) == found


def nan_at(array: npt.NDArray[np.float32], *at: int) -> npt.NDArray[np.float32]:
    changed = array.copy()
    changed[at] = np.nan
    return changed


@pytest.mark.parametrize(("tensors", "metadata", "says"), [
    ({"direction": DIRECTIONS}, {}, "tensors = ['direction']"),
    ({"directions": DIRECTIONS, "weight": BIAS}, {}, "no others"),
    ({"directions": DIRECTIONS[None]}, {}, "directions = [1, 3, 40]: valid: [k, width] or [width]"),
    ({"directions": DIRECTIONS[:0]}, {}, "directions = [0, 40]"),
    ({"directions": np.zeros((limits.probe_scores_max + 1, 2), np.float32)}, {}, "at most 1024"),
    ({"directions": DIRECTIONS.astype(np.int32)}, {}, "directions = 'I32': valid: one of F16, F32, F64"),
    ({"directions": nan_at(DIRECTIONS, 1, 5)}, {}, "directions[1, 5] = nan: valid: finite numbers"),
    ({"directions": DIRECTIONS, "bias": nan_at(BIAS, 2)}, {}, "bias[2] = nan"),
    ({"directions": DIRECTIONS.astype(np.float64) * 1e300}, {}, "numbers that float32 can hold"),
    ({"directions": DIRECTIONS, "bias": BIAS[:2]}, {}, "bias = [2]: valid: [3]"),
    ({"directions": DIRECTIONS, "mean": MEAN[:9]}, {}, "mean = [9]: valid: [40]"),
    ({"directions": DIRECTIONS[:, :1], "mean": np.array(MEAN[0])}, {}, "mean = []: valid: [1]"),
    ({"directions": DIRECTIONS, "bias": np.array(BIAS[0])}, {}, "bias = []: valid: [3]"),
    (None, {"names": "a, b"}, "names = 'a, b': valid: 3 different names"),
    (None, {"names": "a, b, a"}, "3 different names"),
    (None, {"names": "[1, 2, 3]"}, "3 different names"),
    (None, {"names": "[\"a\""}, "3 different names"),
    (None, {"activation": "relu"}, "activation = 'relu': valid: none or sigmoid"),
    (None, {"site": "residual"}, "site = 'residual': unknown site"),
    (None, {"site": ""}, "in its metadata"),
    (None, {"site": "experts"}, "a site whose rows are numbers of the model"),
    (None, {"site": "probe.other"}, "a site whose rows are numbers of the model"),
    (None, {"layer": "two"}, "layer = 'two': valid: a 0-based layer"),
    (None, {"site": "resid_post.3"}, "layer = '1': valid: the layer that 'resid_post.3' fixes"),
])
def test_files_that_are_refused(
    tmp_path: Path, tensors: dict[str, npt.NDArray[Any]] | None, metadata: dict[str, str], says: str
) -> None:
    with pytest.raises(StartError) as refused:
        load_probe(saved(tmp_path, tensors, **metadata))
    assert says in str(refused.value) and "'tone'" in str(refused.value) and "p.safetensors" in str(refused.value)


def test_a_file_without_a_layer_a_file_that_is_none_and_no_file(tmp_path: Path) -> None:
    save_file({"directions": DIRECTIONS}, tmp_path / "bare.safetensors", {"site": "resid_post"})
    (tmp_path / "text").write_text("no numbers here")
    for name, says in (("bare.safetensors", "which layer? resid_post.12 says so"), ("text", "no safetensors file"),
                       ("nothing", "No such file"), (".", "")):
        with pytest.raises(StartError, match="probe 'tone'") as refused:
            load_probe(Registered("tone", tmp_path / name))
        assert says in str(refused.value)


def test_a_file_that_is_too_large_is_not_opened(tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate(limits.probe_file_bytes_max + 1)
    with pytest.raises(StartError, match=f"at most {limits.probe_file_bytes_max}"):
        load_probe(Registered("tone", tmp_path / "large"))


def test_texts_that_name_probes(tmp_path: Path) -> None:
    found = parse_probes(["a=x.safetensors", " b-2=/y@z/p.safetensors@resid_post.12 ", "", "c=odd@name"])
    assert found == (Registered("a", Path("x.safetensors")),
                     Registered("b-2", Path("/y@z/p.safetensors"), "resid_post.12"), Registered("c", Path("odd@name")))
    assert parse_probes(probes_text(found[1:2]).split(",")) == found[1:2]
    assert Path(probes_text(found[:1]).partition("=")[2]).is_absolute()


@pytest.mark.parametrize(("texts", "says"), [
    (["a"], "valid: NAME=FILE"), (["=x"], "a probe's name"), (["a.b=x"], "a probe's name"),
    (["-a=x"], "does not begin with _ or -"),
    (["a" * 65 + "=x"], "a probe's name"), (["a="], "valid: NAME=FILE"), (["a=x", "a=y"], "'a' is named twice"),
    (["a=x,y"], "must have no comma"), ([f"p{number}=x" for number in range(65)], "65 probes, limit 64"),
])
def test_texts_that_are_refused(texts: list[str], says: str) -> None:
    with pytest.raises(StartError, match=r"^--probe: ") as refused:
        parse_probes(texts, "--probe")
    assert says in str(refused.value)


def test_a_relative_path_is_refused_where_an_engine_would_refuse_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a,b"
    folder.mkdir()
    monkeypatch.chdir(folder)
    with pytest.raises(StartError, match=r"a,b.*must have no comma"):
        parse_probes(["tone=tone.safetensors"], "--probe")
    assert parse_probes([f"tone={tmp_path}/tone.safetensors"])


def test_only_taps_that_are_new_change_the_compiled_graph(tmp_path: Path) -> None:
    plain = EngineConfig("ipc://x")
    assert EngineConfig("ipc://x", probes=(saved(tmp_path),)).salt() == plain.salt()
    other = EngineConfig("ipc://x", probes=(saved(tmp_path, None, "mlp_out.3"),)).salt()
    assert other != plain.salt() and "mlp_out.3" in other


# ── specs ───────────────────────────────────────────────────────────────────────────────────────────────────────

ARMED = Armed({"resid_post": [0, 1]}, 2, probes={
    "tone": Probe("resid_post", 1, ["a", "b", "c"], "none", "f"), "lie": Probe("mlp_out", 0, ["lie"], "sigmoid", "g")})


@pytest.mark.parametrize(("spec", "layers", "codecs"), [
    ({"probe": ["tone"]}, {"probe.tone": [1]}, {"probe.tone": "raw"}),
    ({"probe": ["lie", "tone", "lie"], "codec": "raw16"}, {"probe.lie": [0], "probe.tone": [1]},
     {"probe.lie": "raw", "probe.tone": "raw"}),
    ({"probe": ["tone"], "sites": ["resid_post"], "layers": [0], "codec": {"resid_post": "raw16"}},
     {"resid_post": [0], "probe.tone": [1]}, {"resid_post": "raw16", "probe.tone": "raw"}),
    ({"probe": []}, {"resid_post": [0, 1]}, {"resid_post": "int8b64"}),
])
def test_a_probe_without_sites_takes_scores_alone(
    spec: dict[str, Any], layers: dict[str, list[int]], codecs: dict[str, str]
) -> None:
    found = resolve(parse_spec(spec), ARMED)
    assert (found.layers, found.codec, found.prefix_cache) == (layers, codecs, "recompute") and not found.empty


@pytest.mark.parametrize(("spec", "field", "says"), [
    ({"probe": ["mood"]}, "probe", "registered: tone, lie"),
    ({"probe": ["tone"], "codec": {"probe.tone": "raw16"}}, "codec", "names sites that are not captured"),
    ({"probe": ["lie"], "sites": ["mlp_out"]}, "sites", "not armed"),
])
def test_specs_that_are_refused(spec: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(SpecError, match=says) as refused:
        resolve(parse_spec(spec), ARMED)
    assert refused.value.field == field
    with pytest.raises(SpecError, match="registered: none"):
        resolve(parse_spec({"probe": ["tone"]}), Armed({}, 2))


def test_a_probe_is_a_site() -> None:
    assert parse_site("probe.tone") == ("probe.tone", None) and parse_site("probe.tone.12") == ("probe.tone", 12)
    assert is_site("probe.tone") and not is_site("probe.tone.12") and not is_site("probe.") and not is_site("probe.a/b")
    assert site_named("probe.tone").lens == () and not site_named("probe.tone").ids


# ── on the device ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_scores_of_rows_of_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    probe = load_probe(saved(tmp_path, {"directions": DIRECTIONS, "bias": BIAS, "mean": MEAN}))
    rows = torch.randn(1, 50, WIDTH).to(dtype)
    got = scorer(probe, torch.device("cpu")).encode(rows)["x"]
    want = (rows.double().numpy() - MEAN) @ DIRECTIONS.T.astype(np.float64) + BIAS
    assert got.shape == (1, 50, 3) and got.dtype == torch.float32
    assert np.abs(got.numpy() - want).max() < 1e-3 * np.abs(want).max()


def staged(make: Callable[[], Scorer]) -> Staging:
    return Staging({"resid_post": torch.randn(2, 64, WIDTH)}, {"resid_post": [0, 1]}, probes={"probe.tone": make()})


def test_wide_rows_are_scored_in_blocks(tmp_path: Path) -> None:
    staging = staged(lambda: scorer(load_probe(saved(tmp_path)), torch.device("cpu")))
    layout = layout_of(Entry("probe.tone", "raw", (1,)), staging, "bfloat16", 1 << 30, compiled=False)
    assert layout.stream_bytes == [12] and layout.dtypes == [torch.float32] and layout.layers == [1]
    assert layout.rows_max == limits.encode_bytes_max // (4 * WIDTH)


def test_a_recorder_with_and_without_the_probe(tmp_path: Path) -> None:
    """A batch of three requests (rows, scores, neither), then steps of decode, which make a burst."""
    staging = staged(lambda: scorer(load_probe(saved(tmp_path, {"directions": DIRECTIONS, "bias": BIAS})),
                                    torch.device("cpu")))
    ring = Ring(4 << 20, pinned=False)
    recorder = Recorder(staging, "float32", "drop", DeviceToHost(torch.device("cpu"), ring))
    specs: list[dict[str, Any]] = [{"sites": ["resid_post"], "layers": [1], "codec": "raw"}, {"probe": ["tone"]}, {}]
    for number, spec in enumerate(specs[:2]):
        parsed = parse_spec({**spec, "id": new_ulid()})
        recorder.open(str(number), Ticket(str(parsed.id), parsed.to_json(), resolve(parsed, ARMED), 0, 1, 1),
                      [1] * 4, 0)
    want: dict[int, npt.NDArray[np.float64]] = {}
    for number in range(6):
        rows, first = (4, 0) if number == 0 else (1, 3 + number)
        staging.buffers["resid_post"].copy_(torch.randn(2, 64, WIDTH))
        positions = torch.arange(first, first + rows).repeat(3)
        x = staging.buffers["resid_post"][1, rows : 2 * rows].double().numpy()
        want |= dict(zip(range(first, first + rows), x @ DIRECTIONS.T.astype(np.float64) + BIAS, strict=True))
        recorder.before_step(3 * rows)
        recorder.after_step(Step(["0", "1", "2"], np.arange(4) * rows, np.full(3, first), positions,
                                 positions.to(torch.int32)))
    recorder.flush()
    got: dict[int, npt.NDArray[np.float32]] = {}
    entries = set()
    for event in recorder.outbox:
        if isinstance(event, Opened | Counted):
            continue
        assert isinstance(event, Run), event
        entries.add((event.entry.site, event.entry.layers))
        if event.entry.site == "probe.tone":
            assert (event.slot == 1).all()
            for k in range(event.steps):
                at = event.extents["x"][0] + k * event.stride
                x = view(ring.memory, at, (len(event.slot), 3), torch.float32).numpy()
                got |= dict(zip((event.position + k).tolist(), x.copy(), strict=True))
    assert entries == {("resid_post", (1,)), ("probe.tone", (1,))} and recorder.counters.failures == 0
    assert sorted(got) == sorted(want) == list(range(9))
    for position, scores in want.items():
        assert np.allclose(got[position], scores, rtol=1e-4, atol=1e-4), position
    ring.close()
