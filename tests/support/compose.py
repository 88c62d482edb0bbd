"""The compose file run for real: by Docker where an engine runs, else by podman with an image made on the spot.

`python -m tests.support.compose` builds the images. Podman works as root without systemd and without a registry: its
settings and images live in build/compose, Debian's base comes from debootstrap, and somebody has to run the health
checks.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.api_stack import ROOT

__all__ = ["Compose", "engine", "main"]

FOLDER = ROOT / "build" / "compose"
BASE = "localhost/vllm-tap-base:bookworm"
SERVICES = ("writer", "engine", "api")
PROJECT = "vllm-tap-test"
# Without the last one containers do not find each other by name, and nothing says why.
NEEDED = ("podman", "podman-compose", "buildah", "runc", "debootstrap", "iptables", "netavark", "aardvark-dns")
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/lib/podman:/usr/libexec/podman"


@dataclass
class Compose:
    """A container engine; ``environment`` is what the compose file's variables are."""

    podman: bool
    environment: dict[str, str] = field(default_factory=dict)

    def run(self, *args: str, timeout_s: float = 120, check: bool = True, **environment: str) -> str:
        """A command; its output. AssertionError with the end of both streams where it fails."""
        done = subprocess.run(args, cwd=ROOT, env={**os.environ, **self.environment, **environment},
                              capture_output=True, text=True, timeout=timeout_s)
        if check and done.returncode:
            raise AssertionError(f"{' '.join(args)}: status {done.returncode}\n{(done.stdout + done.stderr)[-4000:]}")
        return done.stdout

    def compose(self, *args: str, timeout_s: float = 120, check: bool = True) -> str:
        """A compose command of the test's own project."""
        tool = ["podman-compose"] if self.podman else ["docker", "compose"]
        return self.run(*tool, "-p", PROJECT, "-f", "docker/compose.yml", *args, timeout_s=timeout_s, check=check)

    def container(self, service: str) -> str:
        """The name of a service's container."""
        return f"{PROJECT}_{service}_1" if self.podman else f"{PROJECT}-{service}-1"

    def tool(self, *args: str, timeout_s: float = 60, check: bool = True) -> str:
        """A command of podman or docker itself."""
        return self.run("podman" if self.podman else "docker", *args, timeout_s=timeout_s, check=check)

    @contextmanager
    def health_checks(self, services: tuple[str, ...] = SERVICES) -> Iterator[None]:
        """Runs those of the services again and again: podman leaves that to systemd."""
        ended = threading.Event()

        def check() -> None:
            while not ended.wait(2):
                for service in services:
                    self.tool("healthcheck", "run", self.container(service), check=False)

        checking = threading.Thread(target=check)
        if self.podman:
            checking.start()
        try:
            yield
        finally:
            ended.set()
            if self.podman:
                checking.join()


def engine(environment: Mapping[str, str] = os.environ) -> Compose | None:
    """What can run containers here; None where nothing can."""
    if shutil.which("docker") and subprocess.run(["docker", "info"], capture_output=True).returncode == 0:
        return Compose(podman=False)
    if os.geteuid() == 0 and all(shutil.which(name, path=_PATH) for name in NEEDED):
        return Compose(podman=True, environment=_podman_settings())
    return None


def _podman_settings() -> dict[str, str]:
    """Files of our own, so that nothing of the machine's is touched."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "storage.conf").write_text(
        f'[storage]\ndriver = "overlay"\nrunroot = "{FOLDER / "run"}"\ngraphroot = "{FOLDER / "graph"}"\n')
    # crun refuses hybrid cgroups, and limits above this process's own cannot be set.
    (FOLDER / "containers.conf").write_text(
        '[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
        '[containers]\ndefault_ulimits = ["nofile=20000:20000", "nproc=4096:4096"]\n')
    return {"CONTAINERS_STORAGE_CONF": str(FOLDER / "storage.conf"), "LOG_DRIVER": "k8s-file",
            "CONTAINERS_CONF": str(FOLDER / "containers.conf"), "SERVICE_IMAGE": "localhost/vllm-tap",
            "ENGINE_IMAGE": "localhost/vllm-tap-engine"}


def _base(compose: Compose) -> str:
    """An image to build from: the usual one, else Debian with its own Python 3.11."""
    usual = "docker.io/library/python:3.11-slim-bookworm"
    if subprocess.run(["podman", "pull", "-q", usual], env={**os.environ, **compose.environment},
                      capture_output=True).returncode == 0:
        return usual
    root, archive = FOLDER / "rootfs", FOLDER / "rootfs.tar"
    print("base image: debootstrap", flush=True)
    try:
        compose.run("debootstrap", "--variant=minbase", "--include=python3,python3-venv,ca-certificates", "bookworm",
                    str(root), timeout_s=600)
        compose.run("tar", "-C", str(root), "-cf", str(archive), ".", timeout_s=300)
        compose.tool("import", str(archive), BASE, timeout_s=300)
    finally:
        shutil.rmtree(root, ignore_errors=True)
        archive.unlink(missing_ok=True)
    return BASE


def main() -> int:
    """Builds both images; 2 where there is no engine for containers."""
    compose = engine()
    if compose is None:
        print(f"neither a Docker engine, nor root with {', '.join(NEEDED)}; see docs/howto/containers.md")
        return 2
    if not compose.podman:
        compose.compose("build", "writer", timeout_s=1800)
        compose.run("docker", "build", "-f", "docker/Dockerfile", "--target", "engine", "-t", "vllm-tap-engine", ".",
                    timeout_s=3600)
        return 0
    base = BASE if compose.tool("images", "-q", BASE).strip() else _base(compose)
    arguments = ["--layers", "--isolation", "chroot", "--network", "host", "--build-arg", f"BASE={base}",
                 "-v", "/etc/ssl/certs:/etc/ssl/certs:ro"]
    wheels = os.environ.get("UV_FIND_LINKS", "")
    if Path(wheels).is_dir() and wheels:
        arguments += ["-v", f"{wheels}:/wheels:ro", "--build-arg", "UV_FIND_LINKS=/wheels",
                      "--build-arg", "TORCH_INDEX="]
    for target, image in (("service", "vllm-tap"), ("engine", "vllm-tap-engine")):
        print(f"image {image}", flush=True)
        compose.run("buildah", "bud", *arguments, "--target", target, "-f", "docker/Dockerfile", "-t", image, ".",
                    timeout_s=3600)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
