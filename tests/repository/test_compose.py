"""docker/compose.yml for real: three containers, a published port, and a writer that dies in mid-generation.

`make compose-test` builds the images and runs it (an engine starts in a container: minutes); elsewhere it is skipped.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import yaml
from safetensors.numpy import load

from api.config import Config
from tests.support.api_stack import ROOT
from tests.support.compose import SERVICES, Compose, engine
from tests.support.processes import free_port
from vllm_tap.tiny_model import tiny_model

TWO_ENGINES = ("writer", "engine-a", "engine-b", "gateway")
needs_containers = pytest.mark.skipif("TAP_COMPOSE" not in os.environ, reason="the compose file was not run: "
                                                                             "make compose-test")


@contextmanager
def standing(services: tuple[str, ...]) -> Iterator[tuple[Compose, httpx.Client]]:
    """These services up, and a client with a key."""
    compose = engine()
    assert compose is not None
    port = str(free_port())
    compose.environment |= {
        "MODEL_DIR": str(tiny_model()), "MODEL_NAME": "tiny", "DTYPE": "float32", "PORT": port,
        "CPU_CI": "1", "CPU_KVCACHE_GB": "1", "RING_BYTES": str(64 << 20), "ENGINE_MEMORY": "8g",
        "ENGINE_CPUS": "2", "ARM": "resid_post,mlp_out",
    }
    every = ("--profile", "two-engines", "--profile", "tools")
    compose.compose(*every, "down", "-v", check=False)
    try:
        with compose.health_checks(services):
            made = compose.compose("--profile", "tools", "run", "--rm", "-T", "keys", "make", "alice")
            key = next(line for line in made.split() if line.startswith("tap_"))
            compose.compose("--profile", "two-engines", "up", "-d", *services, timeout_s=300)
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120,
                              headers={"Authorization": f"Bearer {key}"}) as client:
                wait_ready(client, compose, services)
                yield compose, client
    finally:
        compose.compose(*every, "down", "-v", check=False)


@pytest.fixture(scope="module")
def service() -> Iterator[tuple[Compose, httpx.Client]]:
    with standing(SERVICES) as both:
        yield both


def wait_ready(client: httpx.Client, compose: Compose, services: tuple[str, ...], timeout_s: float = 400) -> None:
    end_s = time.monotonic() + timeout_s
    said = ""
    while time.monotonic() < end_s:
        try:
            answer = client.get("/readyz")
            if answer.status_code == 200:
                return
            said = answer.text
        except httpx.HTTPError as error:
            said = repr(error)
        time.sleep(1)
    logs = {name: compose.tool("logs", "--tail", "20", compose.container(name), check=False) for name in services}
    raise AssertionError(f"not ready: {said}\n{logs}")


def complete(client: httpx.Client, tokens: int, **capture: Any) -> dict[str, Any]:
    answer = client.post("/v1/completions", json={
        "model": "tiny", "prompt": "Everything that is", "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
        "capture": {"sites": ["resid_post"], **capture}})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


@needs_containers
def test_a_generation_is_captured_and_read_through_the_published_port(
        service: tuple[Compose, httpx.Client]) -> None:
    _, client = service
    body = complete(client, 8, codec="raw")
    assert body["capture"]["status"] == "complete"
    answer = client.get(f"{body['capture']['activations_url']}?site=resid_post&layer=3&format=json").json()
    assert len(answer["arrays"]["resid_post.3"]) == body["usage"]["total_tokens"] - 1
    found = client.get(f"{body['capture']['manifest_url']}/map?site=resid_post").json()
    assert all(value > 0 for row in found["values"] for value in row)
    assert client.get("/", headers={"Authorization": ""}).status_code == 200  # the page
    assert client.get("/v1/captures", headers={"Authorization": ""}).status_code == 401


@needs_containers
def test_a_writer_that_dies_loses_nothing(service: tuple[Compose, httpx.Client]) -> None:
    compose, client = service
    before = complete(client, 8, codec="raw")["capture"]
    url = f"{before['activations_url']}?site=resid_post"
    rows = client.get(url).content
    told: list[dict[str, Any]] = []
    generating = threading.Thread(target=lambda: told.append(complete(client, 400, codec="raw")))
    generating.start()
    time.sleep(0.5)
    assert generating.is_alive()
    compose.tool("kill", "-s", "KILL", compose.container("writer"))
    compose.tool("start", compose.container("writer"), check=False)  # the restart policy may have been faster
    generating.join()
    manifest = client.get(told[0]["capture"]["manifest_url"], params={"wait": "complete", "timeout": "60"}).json()
    assert (manifest["status"], manifest["missing"]) == ("complete", 0)
    assert manifest["captured"] == manifest["expected"] == 4 * (told[0]["usage"]["total_tokens"] - 1)
    assert client.get(url).content == rows
    wait_ready(client, compose, SERVICES, 60)
    assert complete(client, 4)["capture"]["status"] == "complete"


@needs_containers
@pytest.mark.parametrize("name", SERVICES)
def test_containers_may_do_little(service: tuple[Compose, httpx.Client], name: str) -> None:
    compose, _ = service
    inside = (compose.container(name), "python3", "-c")
    assert compose.tool("exec", *inside, "import os; print(os.getuid(), os.getgid())").split() == ["10001", "10001"]
    tried = compose.tool("exec", *inside, "open('/app/touched', 'w')", check=False)
    assert tried == ""
    status = compose.tool("exec", *inside, "print(open('/proc/1/status').read())")
    assert re.search(r"^CapEff:\s+0+$", status, re.MULTILINE) and re.search(r"^NoNewPrivs:\s+1$", status, re.MULTILINE)
    info = json.loads(compose.tool("inspect", compose.container(name)))[0]
    assert info["HostConfig"]["ReadonlyRootfs"] and info["HostConfig"]["Memory"] > 0


@needs_containers
def test_only_the_api_can_be_reached(service: tuple[Compose, httpx.Client]) -> None:
    compose, _ = service
    for name in ("writer", "engine"):
        info = json.loads(compose.tool("inspect", compose.container(name)))[0]
        assert not any(info["NetworkSettings"].get("Ports", {}).values())


def test_the_gateway_names_its_engines_as_they_name_themselves() -> None:
    services = yaml.safe_load((ROOT / "docker" / "compose.yml").read_text())["services"]
    words = services["gateway"]["command"]
    given = dict(words[i + 1].split("=", 1) for i, word in enumerate(words) if word == "--upstream")
    engines = {name: each for name, each in services.items() if "VLLM_TAP_ENGINE" in (each.get("environment") or {})}
    assert given == {each["environment"]["VLLM_TAP_ENGINE"]: f"http://{name}:8101" for name, each in engines.items()}
    assert set(services["gateway"]["depends_on"]) == {"writer", *engines}
    for each in (*engines.values(), services["gateway"]):
        assert each["profiles"] == ["two-engines"]
    for mine, usual in (("engine-a", "engine"), ("engine-b", "engine"), ("gateway", "api")):
        differ = {key for key in {**services[mine], **services[usual]}
                  if services[mine].get(key) != services[usual].get(key)}
        assert differ <= {"profiles", "environment", "command", "depends_on"}
    config = Config(Path("/nowhere"), "ipc:///tmp/x", [f"{name}={url}" for name, url in given.items()])
    assert config.engines == given


def asked() -> set[str]:
    """The metrics of ours that the dashboard asks for."""
    board = json.loads((ROOT / "docker" / "grafana" / "dashboards" / "vllm-tap.json").read_text())
    return {name for panel in board["panels"] for target in panel["targets"]
            for name in re.findall(r"vllm_tap_[a-z_]+", target["expr"])}


@needs_containers
def test_the_scraper_finds_what_the_dashboard_asks_for(service: tuple[Compose, httpx.Client]) -> None:
    compose, client = service
    complete(client, 2)
    writer = compose.tool("exec", compose.container("api"), "python3", "-c",  # from inside, as Prometheus does
                          "import urllib.request as r; print(r.urlopen('http://writer:9100/metrics').read().decode())")
    told = set(re.findall(r"^# TYPE (\w+)", writer + client.get("/metrics").text, re.MULTILINE))
    assert {re.sub("_bucket$", "", name) for name in asked()} <= told | {f"{name}_total" for name in told}


def test_the_dashboard_and_the_scraper_name_what_exists() -> None:
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    for name in asked():
        assert f"`{re.sub('_bucket$', '', name)}`" in page, name
    compose_file = (ROOT / "docker" / "compose.yml").read_text()
    targets = re.findall(r'targets: \["([a-z]+):[0-9]+"\]', (ROOT / "docker" / "prometheus.yml").read_text())
    assert sorted(targets) == ["api", "engine", "writer"]
    assert all(re.search(rf"\n  {target}:( &\w+)?\n", compose_file) for target in targets)


def test_every_variable_is_described_with_its_default() -> None:
    page = (ROOT / "docs" / "howto" / "containers.md").read_text()
    named = dict(re.findall(r"\$\{([A-Z_]+):([-?][^}]*)\}", (ROOT / "docker" / "compose.yml").read_text()))
    assert len(named) > 10
    for name in named:
        assert f"`{name}`" in page, name


def test_the_images_take_what_is_installed() -> None:
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert all((ROOT / name).exists() for name in kept)
    assert {"api", "engine_side", "schemas", "vllm_tap", "writer_service", "pyproject.toml"} <= set(kept)


def engines_of(client: httpx.Client) -> dict[str, Any]:
    found: dict[str, Any] = client.get("/v1/capabilities").json()["engines"]
    return found


@needs_containers
def test_two_engines_stand_behind_one_gateway() -> None:
    """Last of those that need containers: it takes the place of the others."""
    with standing(TWO_ENGINES) as (compose, client):
        end_s = time.monotonic() + 400
        while not all(each["up"] for each in engines_of(client).values()):
            assert time.monotonic() < end_s, engines_of(client)
            time.sleep(1)
        assert set(engines_of(client)) == {"a", "b"}
        rows = {}
        for name in ("a", "b"):
            client.headers["X-VLLM-Tap-Engine"] = name
            capture = complete(client, 8, codec="raw")["capture"]
            assert (capture["engine"], capture["status"]) == (name, "complete")
            assert client.get(capture["manifest_url"]).json()["engine"]["name"] == name
            rows[name] = load(client.get(f"{capture['activations_url']}?site=resid_post").content)
        del client.headers["X-VLLM-Tap-Engine"]
        assert rows["a"].keys() == rows["b"].keys() and all(  # one model, one prompt, greedy, one store
            np.array_equal(array, rows["b"][stream]) for stream, array in rows["a"].items())
        compose.tool("kill", "-s", "KILL", compose.container("engine-a"))
        for _ in range(4):  # its own prompts have another home then
            answer = client.post("/v1/completions", json={"model": "tiny", "prompt": "Everything that is",
                                                          "max_tokens": 4, "capture": {"sites": ["resid_post"]}})
            if answer.status_code == 200:
                break
            time.sleep(1)
        assert answer.status_code == 200 and answer.json()["capture"]["engine"] == "b", answer.text
