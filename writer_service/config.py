"""The writer's settings, all defaults visible."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from schemas import limits
from schemas.checks import Durability, LogFormat, check_one_of, check_port, check_positive
from schemas.errors import StartError
from schemas.store.paths import NOT_A_FOLDER, url_of

lanes_max = 8  # threads that write, and files of one site side by side
ipc_path_bytes_max = 105  # sun_path of Linux, less its final zero and what names the socket behind it


def lanes_of(cores: int) -> int:
    """Lanes on a machine: all of few cores, a third of many, which an engine and a service need as well."""
    return min(lanes_max, max(min(cores, 4), cores // 3))


@dataclass(frozen=True, slots=True)
class Config:
    """``durability``: an Ack means on the disk ("fsync") or in the page cache ("os")."""

    store: Path
    endpoint: str
    listen: str = ""  # tcp://HOST:PORT for engines on other hosts
    curve: Path | None = None  # the folder of their keys (schemas/wire/curve.py)
    durability: str = "fsync"
    segment_bytes: int = limits.segment_bytes_target
    seal_idle_s: float = 5.0
    engine_lost_s: float = limits.engine_lost_after_ms / 1000
    retain_days: float | None = None  # captures older than that are deleted
    retain_bytes: int | None = None  # the oldest are deleted while the store takes more than that
    quota_bytes: int | None = None  # no rows of new captures are taken while the store takes more than that
    metrics_port: int = 0  # for Prometheus; 0 for none
    metrics_host: str = "127.0.0.1"  # they need no key: beyond loopback only in a network that is closed to others
    log_format: str = "text"
    keep_s: float = 1.0  # between two rounds of erasing and whatever else is done to what is stored
    commit_bytes: int = limits.commit_bytes_target
    commit_delay_s: float = limits.commit_delay_ms / 1000
    lanes: int = lanes_of(os.cpu_count() or 1)

    def __post_init__(self) -> None:
        if (url := url_of(self.store)) is not None:
            raise StartError(f"--store = {url!r}: {NOT_A_FOLDER}")
        check_one_of("--durability", self.durability, Durability)
        if self.segment_bytes < limits.section_align_bytes:
            raise StartError(f"--segment-bytes = {self.segment_bytes}: must be at least {limits.section_align_bytes}")
        check_positive("--seal-idle-s", self.seal_idle_s)
        check_positive("--engine-lost-s", self.engine_lost_s)
        check_positive("--keep-s", self.keep_s)
        check_positive("--retain-days", self.retain_days)
        check_positive("--retain-bytes", self.retain_bytes)
        check_positive("--quota-bytes", self.quota_bytes)
        check_port("--metrics-port", self.metrics_port, zero="none")
        check_one_of("--log-format", self.log_format, LogFormat)
        scheme, _, rest = self.endpoint.partition("://")
        if scheme != "ipc" or not rest:
            raise StartError(f"--endpoint = {self.endpoint!r}: must be ipc://PATH; --listen is for other hosts")
        if self.listen and not self.listen.startswith("tcp://"):
            raise StartError(f"--listen = {self.listen!r}: must be tcp://HOST:PORT")
        if bool(self.listen) != (self.curve is not None):
            # Without keys anybody on the network could write into the store.
            raise StartError("--listen and --curve go together: give an address, and the folder with the keys of "
                             "engines that may connect (`vllm-tap curve-keys NAME` makes them)")
        if len(rest.encode()) > ipc_path_bytes_max:
            raise StartError(f"--endpoint = {self.endpoint!r}: the path has {len(rest.encode())} bytes, the limit "
                             f"is {ipc_path_bytes_max}; name a shorter path, such as one below /tmp")
