"""The commands of the laboratory, as far as they go without an engine: bad input is refused in one line, by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.vllm_tap.fidelity.test_reports import PLAIN, PLANTED, load_copy
from vllm_tap.cli.main import main
from vllm_tap.fidelity.reports.report import load_report
from vllm_tap.tiny_model import tiny_model


@pytest.fixture
def reports(tmp_path: Path) -> dict[str, str]:
    worse = load_copy(PLAIN)
    worse.places[0].patched[2].prompts["kl"] = [9 * value for value in worse.places[0].patched[2].prompts["kl"]]
    found = {}
    for name, one in {"plain": PLAIN, "planted": PLANTED, "worse": worse}.items():
        (tmp_path / f"{name}.json").write_text(one.to_json())
        found[name] = str(tmp_path / f"{name}.json")
    return found


def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, str, str]:
    """Exit code, output and errors of a command."""
    monkeypatch.setattr(sys, "argv", ["vllm-tap", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    code = ended.value.code
    return code if isinstance(code, int) else 0, out, err


@pytest.mark.parametrize(("words", "match"), [
    (["fidelity"], "name one model"), (["fidelity", "m", "--pilot"], "name one model"),
    (["fidelity", "compare", "a.json"], "compare takes two reports"),
    (["fidelity", "compare", "no.json", "none.json"], "OLD = 'no.json': cannot be read"),
    (["fidelity", "MODEL", "--layers", "1,x"], "--layers = 'x'"), (["fidelity", "MODEL", "--sae", "folder"], "--sae"),
    (["fidelity", "MODEL", "--size", "huge"], "--size = 'huge'"),
    (["fidelity", "MODEL", "--prompts", "15"], "at least 16"),
    (["fidelity", "MODEL", "--bar", "0"], "--bar = 0"),
    (["fidelity", "MODEL", "--sites", "final_norm"], "cannot be set"),
    (["fidelity", "MODEL", "--codecs", "rp8"], "a projection"), (["fidelity", "MODEL", "--codecs", "zip"], "--codecs"),
    (["fidelity", "MODEL", "--layers", "9"], "has 4 layers"),
    (["fidelity", "MODEL", "--prompts", "9000"], "are needed"),
    (["fidelity", "MODEL", "--", "--max-model-len", "9"], "is set by this command"),
    (["fidelity", "--pilot", "--sae", "a@resid_post.1"], "the pilots take none"),
    (["fidelity", "kv"], "name one model"), (["fidelity", "kv", "m", "--pilot"], "name one model"),
    (["fidelity", "kv", "MODEL", "--sites", "k_rot"], "--sites = 'k_rot': does not go with kv"),
    (["fidelity", "kv", "MODEL", "--sae", "a@k.1"], "--sae = 'a@k.1': does not go with kv"),
    (["fidelity", "MODEL", "--modes", "snapshot"], "--modes = 'snapshot': goes with kv"),
    (["fidelity", "MODEL", "--codec", "mine=a:B"], "--codec = 'mine=a:B': goes with kv"),
    (["fidelity", "kv", "MODEL", "--modes", "turning"], "--modes = 'turning'"),
    (["fidelity", "kv", "MODEL", "--parts", "q"], "--parts = 'q'"),
    (["fidelity", "kv", "MODEL", "--codecs", "zip"], "--codecs = 'zip': valid: kv8"),
    (["fidelity", "kv", "MODEL", "--codec", "mine=none.such:C"], "--codec = 'mine=none.such:C': cannot be had"),
    (["fidelity", "kv", "MODEL", "--prompts", "9000"], "are needed"),
    (["fidelity", "kv", "MODEL", "--layers", "9"], "has 4 layers"),
    (["fidelity", "kv", "MODEL", "--", "--kv-cache-dtype", "fp8"], "leave it out"),
    (["recommend", "no.json"], "REPORT = 'no.json': cannot be read")])
def test_bad_input_is_one_line_that_says_what_would_do(words: list[str], match: str, tmp_path: Path,
                                                       capsys: pytest.CaptureFixture[str],
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = [str(tiny_model()) if word == "MODEL" else word for word in words]
    code, out, err = said(capsys, monkeypatch, *words)
    last = err.strip().splitlines()[-1]
    assert code == 2 and match in last and out == "" and last.startswith("vllm-tap: ")
    assert not list(tmp_path.iterdir())  # nothing was begun


@pytest.mark.parametrize("given", [True, False])
def test_the_working_directory_is_looked_in_for_a_codec_of_ones_own_alone(
        given: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    said(capsys, monkeypatch, "fidelity", "kv", str(tiny_model()), "--layers", "9",
         *(["--codec", "mine=none_such:C"] if given else []))
    assert (str(tmp_path) in sys.path) == given


def test_recommend_takes_all_reports_into_account(reports: dict[str, str], capsys: pytest.CaptureFixture[str],
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = said(capsys, monkeypatch, "recommend", reports["plain"])
    assert code == 0 and '"codec": "full8"' in out
    code, out, _ = said(capsys, monkeypatch, "recommend", reports["plain"], reports["planted"])
    assert code == 0 and '"codec": "fp8row"' in out
    code, out, _ = said(capsys, monkeypatch, "recommend", reports["planted"], "--bytes-per-token", "518")
    assert code == 1 and "nothing that fits holds" in out and "one layer in 2" in out


def test_compare_ends_with_1_where_a_codec_has_become_worse(reports: dict[str, str], capsys: pytest.CaptureFixture[str],
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    assert said(capsys, monkeypatch, "fidelity", "compare", reports["plain"], reports["plain"])[0] == 0
    code, out, _ = said(capsys, monkeypatch, "fidelity", "compare", reports["plain"], reports["worse"])
    assert code == 1 and out.count("worse") == 1 and "worse   mlp_post.1 fp8row" in out


@pytest.mark.soak
def test_the_pilots_are_trained_and_measured_and_full8_holds_for_the_plain_one_alone(tmp_path: Path) -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "vllm_tap", *words], cwd=tmp_path, text=True, capture_output=True)

    done = run("fidelity", "--pilot", "--out", "out", "--sites", "mlp_post", "--layers", "1", "--codecs",
               "full8,fp8row", "--prompts", "16", "--tokens", "64")
    assert done.returncode == 0, done.stderr[-2000:]
    costs = {name: {one.name: sum(one.prompts["kl"]) for one in load_report(tmp_path / "out" / name / "report.json")
                    .places[0].patched if one.kind == "codec"} for name in ("plain", "planted")}
    assert costs["plain"]["full8"] < costs["plain"]["fp8row"] < costs["planted"]["full8"] / 20
    taken = [run("recommend", *(f"out/{name}/report.json" for name in names)).stdout
             for names in (("plain",), ("plain", "planted"))]
    assert "take fp8row" in taken[1] and "full8                 " in taken[1] and "misses" in taken[1]
    assert "misses" not in taken[0]
    assert "<svg" in (tmp_path / "out" / "planted" / "report.html").read_text()
