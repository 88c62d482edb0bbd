"""Two hosts on one machine: network namespaces joined by a cable, with shared memory and sockets of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# vLLM's command, which needs a distribution of the name vllm: the build for CPUs has another.
SERVE = """
from vllm.entrypoints.cli.serve import ServeSubcommand, make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
if __name__ == "__main__":
    words = make_arg_parser(FlexibleArgumentParser()).parse_args()
    words.model_tag = words.model_tag or words.model
    ServeSubcommand.cmd(words)
"""


@dataclass(frozen=True)
class Host:
    """A namespace, its network device and its address."""

    name: str
    device: str
    address: str
    hidden: Path | None  # a folder that is empty here, as its files are the other host's

    def start(self, words: list[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        """A process of this host, in a session of its own; what it says goes to ``log``."""
        shell = "mount -t tmpfs tmpfs /dev/shm" + (f" && mount -t tmpfs tmpfs {self.hidden}" if self.hidden else "")
        own = {"VLLM_HOST_IP": self.address, "GLOO_SOCKET_IFNAME": self.device}
        with open(log, "wb") as said:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.name, "unshare", "--mount", "sh", "-c", f'{shell} && exec "$@"', "sh",
                 *words], env={**environment, **own}, stdout=said, stderr=said, start_new_session=True)

    def run(self, code: str, *arguments: str, timeout_s: float = 600) -> str:
        """What Python prints for ``code`` on this host."""
        done = subprocess.run(["ip", "netns", "exec", self.name, sys.executable, "-c", code, *arguments],
                              capture_output=True, text=True, timeout=timeout_s)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    def pids(self) -> list[int]:
        """Its processes."""
        return [int(pid) for pid in subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True
                                                   ).stdout.split()]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def possible() -> bool:
    """Whether this user may make hosts here."""
    name = f"tap-try-{os.getpid()}"
    try:
        _ip("netns", "add", name)
        _ip("netns", "del", name)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


@contextmanager
def two_hosts(sockets: Path) -> Iterator[tuple[Host, Host]]:
    """Joined by a cable; the second does not see what is in the folder ``sockets``. Their processes end with them."""
    own = f"{os.getpid() % 100_000}"
    hosts = (Host(f"tap-a-{own}", f"tapa{own}", "10.77.0.1", None),
             Host(f"tap-b-{own}", f"tapb{own}", "10.77.0.2", sockets))
    try:
        for host in hosts:
            _ip("netns", "add", host.name)
        _ip("link", "add", hosts[0].device, "netns", hosts[0].name, "type", "veth", "peer", "name", hosts[1].device,
            "netns", hosts[1].name)
        for host in hosts:
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.device)
            for device in ("lo", host.device):
                _ip("-n", host.name, "link", "set", device, "up")
        yield hosts
    finally:
        for host in hosts:
            for pid in host.pids():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True)


def connections(pid: int, port: int) -> int:
    """TCP connections to a port that stand on the host of a process."""
    rows: list[Any] = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return sum(row[2].endswith(f":{port:04X}") and row[3] == "01" for row in rows)
