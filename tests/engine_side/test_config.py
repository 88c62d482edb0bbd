"""The engine's settings: defaults, and refusals that name the variable, its value and what is valid."""

from __future__ import annotations

import os
import re
import signal
import socket
import tempfile
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from engine_side.config import from_environment, untested
from engine_side.tap.staging import allocate
from schemas.errors import StartError
from schemas.sites import layers_by_site
from schemas.spec import armed_at
from schemas.wire.curve import make_sender
from tests.support.store_helpers import until

ENDPOINT = {"VLLM_TAP_ENDPOINT": "ipc:///tmp/t/writer.sock"}


def test_without_an_endpoint_the_plugin_is_inert() -> None:
    assert from_environment({"VLLM_TAP_ARM": "nonsense"}) is None


def test_defaults_and_spellings() -> None:
    config = from_environment(ENDPOINT)
    assert config is not None and config.arm == ("resid_post",) and config.on_full == "drop"
    armed = from_environment({**ENDPOINT, "VLLM_TAP_ARM": " mlp_out, resid_post,mlp_out "})
    assert armed is not None and armed.arm == ("mlp_out", "resid_post")
    assert config.salt() != armed.salt()
    places = "blocks.3.hook_out,mlp_out.2,resid_post.0,mlp_out,resid_post.3"
    some = from_environment({**ENDPOINT, "VLLM_TAP_ARM": places})
    assert some is not None and some.arm == ("resid_post.3", "resid_post.0", "mlp_out")
    assert layers_by_site(some.arm) == {"resid_post": [0, 3], "mlp_out": None}
    assert len({config.salt(), armed.salt(), some.salt()}) == 3
    assert armed_at(some.arm, 4, 8, {}).sites == {"resid_post": [0, 3], "mlp_out": [0, 1, 2, 3]}


def test_one_setting_for_hosts_beside_the_writer_and_others(tmp_path: Path) -> None:
    """The socket where somebody listens at it; TCP where it is not there, and where a dead writer left it."""
    keys, path = str(make_sender(tmp_path / "keys", "gpu")), tmp_path / "w"
    settings = {"VLLM_TAP_ENDPOINT": f"ipc://{path}|tcp://store:5570", "VLLM_TAP_CURVE": keys}

    def chosen() -> tuple[str, Path | None]:
        config = from_environment(settings)
        assert config is not None
        return config.endpoint, config.curve

    assert chosen() == ("tcp://store:5570", Path(keys))
    with socket.socket(socket.AF_UNIX) as writer:
        writer.bind(str(path))
        writer.listen()
        assert chosen() == (f"ipc://{path}", None)
    assert path.exists() and chosen() == ("tcp://store:5570", Path(keys))


def test_a_writer_that_does_not_answer_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its socket is full: neither waited for without end, nor taken for none."""
    monkeypatch.setattr("engine_side.config._PROBE_S", 0.2)
    settings = {"VLLM_TAP_ENDPOINT": f"ipc://{tmp_path}/w|tcp://store:5570",
                "VLLM_TAP_CURVE": str(make_sender(tmp_path / "keys", "gpu"))}
    with socket.socket(socket.AF_UNIX) as writer, ExitStack() as waiting:
        writer.bind(str(tmp_path / "w"))
        writer.listen(0)
        waiting.enter_context(socket.socket(socket.AF_UNIX)).connect(str(tmp_path / "w"))
        with pytest.raises(StartError, match=r"the socket .*/w cannot be opened: Resource temp"):
            from_environment(settings)


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone starts a process of another user")
def test_another_users_socket_is_refused() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        if not (child := os.fork()):
            os.setuid(65534)
            other = socket.socket(socket.AF_UNIX)
            other.bind(f"{folder}/w")
            other.listen()
            signal.pause()
        try:
            assert until(lambda: Path(folder, "w").exists())
            with pytest.raises(StartError, match=r"belongs to user 65534, and the engine runs as user 0"):
                from_environment({"VLLM_TAP_ENDPOINT": f"ipc://{folder}/w|tcp://store:5570"})
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_probes_in_another_order_are_another_graph(tmp_path: Path) -> None:
    """Taps are made in their order: a cached graph of the other order would write each one's rows into the other's."""
    save_file({"directions": np.ones(8, np.float32)}, tmp_path / "p")
    names = [f"{name}={tmp_path}/p@{name}.1" for name in ("k", "v")]
    salts = [config.salt() for some in (names, names[::-1], names[:1])
             if (config := from_environment({**ENDPOINT, "VLLM_TAP_PROBES": ",".join(some)})) is not None]
    assert len(set(salts)) == 3


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"VLLM_TAP_ENDPOINT": "http://127.0.0.1:5555"}, "must be ipc://PATH"),
        ({"VLLM_TAP_ENDPOINT": "tcp://::1:5570"}, "IPv6 address in brackets"),
        ({"VLLM_TAP_ENDPOINT": "tcp://0.0.0.0:5555"}, "folder of keys for a writer on another host"),
        ({"VLLM_TAP_ENDPOINT": "ipc:///tmp/x", "VLLM_TAP_CURVE": "keys"}, "to nothing for one on this host"),
        ({"VLLM_TAP_ENDPOINT": "tcp://h:5555|ipc:///tmp/x"}, "two addresses must be ipc:///PATH"),
        ({"VLLM_TAP_ENDPOINT": "ipc:///tmp/x|ipc:///tmp/y"}, "ipc:///PATH|tcp://HOST:PORT"),
        ({"VLLM_TAP_ENDPOINT": "ipc:///tmp/x |tcp://h:1"}, "two addresses must be ipc:///PATH"),
        ({"VLLM_TAP_ENDPOINT": "ipc:///tmp/x|tcp://h:1|tcp://h:2"}, "two addresses must be ipc:///PATH"),
        ({"VLLM_TAP_ENDPOINT": f"ipc:///{'x' * 120}|tcp://h:1"}, "at most 100 characters"),
        ({"VLLM_TAP_ENDPOINT": "ipc:///nobody/here|tcp://h:5555"}, "no writer listens at ipc:///nobody/here"),
        ({"VLLM_TAP_CURVE": "/x", "VLLM_TAP_ENDPOINT": "tcp://0.0.0.0:5555"}, "/x/sender.key_secret: no key"),
        ({"VLLM_TAP_ENDPOINT": "ipc://" + "x" * 120}, "at most 100 characters"),
        ({"VLLM_TAP_ENDPOINT": "ipc:///dev/null/tap/writer.sock"}, "/dev/null is not a folder"),
        ({"VLLM_TAP_ARM": "nope"}, "unknown site"),
        ({"VLLM_TAP_ARM": "embed.0"}, "unknown site"),
        ({"VLLM_TAP_ARM": " , "}, "names no site"),
        ({"VLLM_TAP_ARM": "probe.tone"}, "a probe is registered by --probe NAME=FILE (VLLM_TAP_PROBES)"),
        ({"VLLM_TAP_PROBES": "tone"}, "valid: NAME=FILE, or NAME=FILE@resid_post.12"),
        ({"VLLM_TAP_PROBES": "tone=a, tone=b"}, "named twice"),
        ({"VLLM_TAP_ENGINE": "a b"}, "a name is 1 to 64 of"),
        ({"VLLM_TAP_ON_FULL": "maybe"}, "valid: drop, wait"),
        ({"VLLM_TAP_RING_BYTES": "1GB"}, "must be a whole number"),
        ({"VLLM_TAP_RING_BYTES": "100"}, "at least"),
    ],
)
def test_refusals(settings: dict[str, str], says: str) -> None:
    with pytest.raises(StartError) as raised:
        from_environment({**ENDPOINT, **settings})
    name, *_ = settings
    assert name in str(raised.value) and says in str(raised.value)


@pytest.mark.parametrize(
    ("version", "on_gpu", "says"),
    [("0.26.0", True, ""), ("0.26.0", False, ""), ("0.32.0", False, ""), ("0.30.1rc2+cpu", False, ""),
     ("0.27.1", True, "vLLM 0.27.1 is tested on a CPU only, and 0.26 on a GPU; the start-up "),
     ("0.32.0", True, "0.26 on a GPU"), ("0.25.9", True, "outside the tested range 0.26 to 0.32;"),
     ("0.33.0", False, "outside"), ("1.0", True, "outside"), ("dev", False, "vLLM dev is outside")],
)
def test_the_range_of_tested_versions(version: str, on_gpu: bool, says: str) -> None:
    assert says in untested(version, on_gpu) and bool(says) is bool(untested(version, on_gpu))


def test_what_is_installed_for_a_gpu_is_what_was_tested_on_one() -> None:
    root = Path(__file__).parents[2]
    locked, = re.findall(r"^vllm==(\S+)$", (root / "requirements/gpu.lock").read_text(), re.M)
    named, = re.findall(r'^gpu = \["vllm==(\S+)"\]$', (root / "pyproject.toml").read_text(), re.M)
    assert locked == named and not untested(locked, on_gpu=True)


def test_staging_over_its_budget_is_refused_before_memory_is_taken() -> None:
    widths = {"resid_post": 1 << 12, "q": 512, "k": 64, "v": 64}
    layers = {site: [0, 1] for site in widths}
    with pytest.raises(StartError, match=r"staging needs 9,033,203\.1 MiB \(resid_post 2×500000000×4096") as refused:
        allocate(widths, layers, 500_000_000, torch.bfloat16, torch.device("cpu"), 8 << 30)
    assert "VLLM_TAP_STAGING_BYTES_MAX" in str(refused.value)


def test_q_k_and_v_of_the_same_layers_are_parts_of_one_buffer() -> None:
    widths = {"q": 8, "k": 4, "v": 4}
    staging, _ = allocate(widths, {site: [0, 1] for site in widths}, 3, torch.float32, torch.device("cpu"), 1 << 20)
    assert staging.joint is not None
    staging.joint.copy_(torch.arange(16.0).expand(2, 3, 16))
    assert [staging.buffers[site][1, 2].tolist() for site in "qkv"] == [
        list(map(float, range(8))), [8.0, 9.0, 10.0, 11.0], [12.0, 13.0, 14.0, 15.0]]
    apart, _ = allocate(widths, {"q": [0, 1], "k": [0], "v": [0, 1]}, 3, torch.float32, torch.device("cpu"), 1 << 20)
    assert apart.joint is None
