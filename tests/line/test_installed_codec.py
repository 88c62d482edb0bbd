"""A codec of another package (tests/support/toy_codec) from the encoder to a slice over HTTP, and stores of its rows
where that package is missing.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from engine_side.codecs import check_encoders, encode, kernel_name
from engine_side.step.block import layout_of
from engine_side.tap.staging import Staging
from engine_side.transport.events import Entry
from schemas import codecs
from schemas.read.reader import StoreReader
from schemas.store.paths import journal_folder
from tests.support.api_stack import Stack, running, stack_in
from tests.support.engines.engine_player import LAYERS, decoded
from tests.support.packages import TOY_CODEC, environment, install, install_entry_points
from tests.support.store_helpers import until
from vllm_tap.export.command import export

CODEC = "toy8:top=100"
HERE = "toy8" in codecs.CODECS
there = pytest.mark.skipif(not HERE, reason="test_with_the_package_installed runs it")
PROMPT, GENERATED = "hello", 4
POSITIONS = list(range(len(PROMPT) + GENERATED - 1))


@pytest.mark.skipif(HERE, reason="the tests below run in this process")
def test_with_the_package_installed(tmp_path: Path) -> None:
    install(TOY_CODEC, tmp_path)
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__],
                          env=environment(tmp_path), capture_output=True, text=True)
    assert done.returncode == 0 and "passed" in done.stdout, done.stdout[-6000:] + done.stderr[-1000:]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running(tmp_path_factory.mktemp("toy")) as stack:
        yield stack


def captured(stack: Stack, codec: str) -> str:
    body = stack.complete(PROMPT, max_tokens=GENERATED, capture={"sites": ["resid_post"], "codec": codec}).json()
    assert body["capture"]["status"] == "complete", body
    return str(body["capture"]["id"])


def wanted(sample: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.stack([decoded(CODEC, sample, "resid_post", layer, POSITIONS, "bfloat16") for layer in range(LAYERS)])


def without(*command: str) -> subprocess.CompletedProcess[str]:
    """A command of this project in an environment without the package."""
    return subprocess.run([sys.executable, *command], env=environment(), capture_output=True, text=True)


@there
def test_rows_from_the_encoder_to_a_slice(stack: Stack, tmp_path: Path) -> None:
    capture = captured(stack, CODEC)
    assert stack.http.get("/v1/capabilities").json()["codecs"]["toy8"]["parameters"]["top"]["default"] == 127
    site, = stack.http.get(f"/v1/captures/{capture}").json()["sites"]
    assert (site["codec"], site["parameters"], site["formula"]) == (CODEC, {"top": 100}, "x = q * scale")
    for path in ("activations?site=resid_post&format=npz", "activations?site=resid_post&format=npz&dtype=float16"):
        answer = stack.http.get(f"/v1/captures/{capture}/{path}")
        assert answer.status_code == 200, answer.text
    with StoreReader(stack.store) as reader:
        rows = reader.slice(capture, "resid_post", range(LAYERS))
        assert np.array_equal(rows.values(), wanted(0)) and rows.codec == CODEC
    (exported,) = export(stack.store, capture, out=tmp_path / "rows.npz")
    with np.load(exported, allow_pickle=False) as arrays:
        assert np.array_equal(arrays["resid_post.2"], wanted(0)[2])
    refused = stack.complete(PROMPT, capture={"codec": "toy8:top=200"})
    assert refused.status_code == 400 and "from 1 to 127 (largest code)" in refused.text


@there
def test_the_engine_encodes_with_the_package() -> None:
    check_encoders()
    assert kernel_name(codecs.CODECS["toy8"]) == ""
    rows = torch.randn(1, 5, 8)
    layout = layout_of(Entry("resid_post", CODEC, (0,)), Staging({"resid_post": rows}, {"resid_post": [0]}), "float32",
                       1 << 20, False)
    assert layout.names == ["q", "scale"] and torch.equal(layout.encode(rows)["q"], encode(CODEC, rows)["q"])


@there
@pytest.mark.parametrize("sealed", [False, True], ids=["journal", "sealed"])
def test_a_store_of_its_rows_where_the_package_is_missing(sealed: bool, tmp_path: Path) -> None:
    """Whoever needs the codec says which it is; nothing of the store is lost by it, and other captures are read."""
    flags = ("--seal-idle-s", "0.1") if sealed else ()
    with stack_in(tmp_path) as stack:
        stack.start_writer("writer_service", *flags)
        stack.processes["writer"].wait_ready()
        stack.start_upstream()
        stack.start_api()
        stack.wait_ready()
        toy, raw = captured(stack, CODEC), captured(stack, "raw")
        if sealed:
            assert until(lambda: len(list((stack.store / "blocks").glob("*.zarr"))) == 2)
        for process in reversed(stack.processes.values()):
            process.kill()
        before = {path.name: path.read_bytes() for path in (stack.store / journal_folder()).glob("*.open")}
        assert bool(before) != sealed

        read = without("-c", f"""
from schemas.errors import StoreError
from schemas.read.reader import StoreReader
with StoreReader({str(stack.store)!r}) as reader:
    print(reader.slice({raw!r}, "resid_post", [1]).values().shape)
    for ask in (lambda: reader.slice({toy!r}, "resid_post", [1]), lambda: reader.manifest({toy!r})):
        try:
            print("READ", ask())
        except StoreError as error:
            print(error)
""")
        told = "look up codec toy8: no codec of that name is installed here"
        assert read.stdout.splitlines()[0] == f"(1, {len(POSITIONS)}, 96)", read.stderr
        assert [line.startswith(told) for line in read.stdout.splitlines()[1:]] == [True, True], read.stdout
        assert "vllm_tap.codecs" in read.stdout

        if not sealed:  # frames that cannot be understood are not cut off as damaged ones would be
            writer = without("-m", "writer_service", "--store", str(stack.store), "--endpoint", stack.endpoint)
            assert writer.returncode == 2 and told in writer.stderr, writer.stderr
            assert before == {path.name: path.read_bytes() for path in (stack.store / journal_folder()).glob("*.open")}
        stack.start_writer("writer_service", *flags)
        stack.processes["writer"].wait_ready()
        with StoreReader(stack.store) as reader:
            assert np.array_equal(reader.slice(toy, "resid_post", range(LAYERS)).values(), wanted(0))


@pytest.mark.parametrize(("point", "says"), [
    ({"raw": "toy_codec.declared"}, "impostor brings a codec of a name that is taken; rename it"),
    ({"other": "toy_codec.declared"}, "FAMILY.name = 'toy8': valid: the entry point's name"),
    ({"toy8": "toy_codec"}, "the module has no FAMILY"),
    ({"toy8": "toy_codec.nowhere"}, "No module named 'toy_codec.nowhere'"),
])
@pytest.mark.skipif(HERE, reason="without the package's own entry point")
def test_a_process_does_not_start_with_a_codec_that_cannot_be(point: dict[str, str], says: str, tmp_path: Path) -> None:
    install(TOY_CODEC, tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "toy_codec-0.1.dist-info").rename(tmp_path / "no-dist-info")
    install_entry_points(tmp_path / "elsewhere", "impostor", {"vllm_tap.codecs": point})
    done = subprocess.run([sys.executable, "-m", "writer_service", "--store", str(tmp_path / "store"), "--endpoint",
                           f"ipc://{tmp_path}/w.sock"], env=environment(tmp_path / "elsewhere"), capture_output=True,
                          text=True)
    (name,) = point
    assert done.returncode == 2 and says in done.stderr and f"vllm_tap.codecs: {name} = " in done.stderr, done.stderr
    assert not (tmp_path / "store").exists()


@pytest.mark.skipif(HERE, reason="without the package's own entry point")
def test_two_packages_with_one_name_and_an_encoder_that_is_missing(tmp_path: Path) -> None:
    install(TOY_CODEC, tmp_path)
    (tmp_path / "toy_codec" / "encoder.py").write_text("")
    program = "from engine_side.codecs import check_encoders; check_encoders()"
    lacking = subprocess.run([sys.executable, "-c", program], env=environment(tmp_path), capture_output=True, text=True)
    assert "StartError: codec toy8: its encoder toy_codec.encoder cannot be imported" in lacking.stderr
    install_entry_points(tmp_path, "second", {"vllm_tap.codecs": {"toy8": "toy_codec.declared"}})
    asked = json.dumps({"codec": "toy8"})
    program = f"from schemas.spec import parse_spec; parse_spec({asked!r})"
    twice = subprocess.run([sys.executable, "-c", program], env=environment(tmp_path), capture_output=True, text=True)
    assert "and" in twice.stderr and "bring a codec of a name that is taken; uninstall one" in twice.stderr
