"""Configuration of the plugin: environment variables, because vLLM's processes inherit nothing else of ours."""

from __future__ import annotations

import os
import re
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from engine_side.tap.budget import STAGING_BYTES_MAX
from schemas import legacy, limits
from schemas.checks import OnFull, Setting, Writers, check_name, check_one_of, parse_arm
from schemas.edits.arms import parse_edit_places
from schemas.errors import StartError
from schemas.probes import Registered, parse_probes, place_of
from schemas.sites import layers_by_site
from schemas.wire.curve import check_sender

TAP_VERSION: Final = "8"  # part of the compile-cache salt: change it when traced code changes

DRAWN: Final = "."  # begins a group that nobody named: engines that one process starts one after the other share it
GROUP: Final = "VLLM_TAP_GROUP"  # the same in all processes of an engine; drawn by the process that starts it
ENGINE: Final = "VLLM_TAP_ENGINE"  # its name, where a gateway has several engines behind it

# Read in all processes of an engine; docs/reference/settings.md has them in this order.
SETTINGS: Final[dict[str, Setting]] = {
    "VLLM_TAP_ENDPOINT": Setting(
        "", "`ipc://PATH` or `tcp://HOST:PORT`", "The writer's address. Without it the plugin does nothing. An "
        "engine on several hosts takes both, with `|` between them: a process uses the socket if a writer listens "
        "there."),
    "VLLM_TAP_CURVE": Setting(
        "", "folder", "The keys for a writer on another host, made by `vllm-tap curve-keys`. `tcp://` needs them."),
    "VLLM_TAP_ARM": Setting(
        "resid_post", "sites, by commas", "What to arm: a site in every layer, or in one layer (`resid_post.12`, "
        "`blocks.12.hook_out`).", "--arm"),
    "VLLM_TAP_RING_BYTES": Setting(
        "the engine's own", "bytes", "Memory for encoded rows that wait for the writer, of all ranks of a host "
        "together. On a CPU: 256 MiB. On a GPU: by [what the store takes]"
        "(../explain/tap.md#what-it-costs-when-it-cannot-keep-up), 2 to 4.2 full steps of `raw16`, 256 MiB to 16 GiB, "
        "at most a quarter of the free memory. If it is full, `VLLM_TAP_ON_FULL` decides.", "--ring-bytes"),
    "VLLM_TAP_SCRATCH_BYTES": Setting(
        "the engine's own", "bytes", "Memory on a GPU for encoded rows that wait for their copy to the CPU. Default: "
        "9/16 of the largest site's staging, 16 MiB to 4 GiB: a full step in the default codec."),
    "VLLM_TAP_ON_FULL": Setting(
        "drop", "`drop` or `wait`", "What a full ring means. `drop` loses rows, and manifests name them; `wait` makes "
        "generation wait.", "--on-full"),
    "VLLM_TAP_STAGING_BYTES_MAX": Setting(
        "8 GiB", "bytes", "Budget of staging and scratch together. An engine that would need more does not start.",
        "--staging-bytes-max"),
    "VLLM_TAP_PROBES": Setting(
        "", "`NAME=FILE` or `NAME=FILE@resid_post.12`, by commas", "Probes to register.", "--probe"),
    "VLLM_TAP_OWN_GROUP": Setting(
        "0", "0 or 1", "1: vLLM's processes leave the process group of whoever started them, so that Ctrl-C does not "
        "reach them. `vllm-tap capture` sets it."),
    "VLLM_TAP_EDIT": Setting(
        "", "sites, by commas", "Places that requests may edit: a site in every layer, or in one layer.", "--edit"),
    "VLLM_TAP_EDIT_DEPTH": Setting("2", "edits, 1 to 8", "Edits that one row may have at one site and layer.",
                                   "--edit-depth"),
    "VLLM_TAP_EDIT_ROWS": Setting(
        "256", "rows", "Rows that edits with one row for each position may hold at once, of all requests together.",
        "--edit-rows"),
    "VLLM_TAP_VECTORS": Setting("", "`NAME=FILE`, by commas", "Vectors that edits may name.", "--vector"),
    "VLLM_TAP_GROUP": Setting(
        "drawn at the start", "text", "Name of an engine on several ranks, the same in all of its processes. Set it if "
        "they do not inherit it, as on several hosts, and choose a new one for every start."),
    "VLLM_TAP_WRITERS": Setting(
        "one", "`one` or `several`", "`several`: ranks of an engine on several hosts may send to a writer of their own "
        "host. Each store then has [some layers](../howto/several-writers.md#one-engine-several-writers)."),
    "VLLM_TAP_ENGINE": Setting("", "name", "Name of the engine, if a gateway has several; the name in `--upstream`."),
}
VARIABLES: Final = tuple(SETTINGS)

TESTED_VERSIONS: Final = ((0, 26), (0, 32))  # of vLLM, first and last
TESTED_ON_GPU: Final = ((0, 26), (0, 26))  # and what `pip install vllm-tap[gpu]` brings

_MIB: Final = 1 << 20
_SOCKET_PATH_MAX: Final = 100
_PROBE_S: Final = 5.0
_VERSION: Final = re.compile(r"([0-9]+)\.([0-9]+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of the engine's processes; every default is visible here."""

    endpoint: str
    curve: Path | None = None  # the folder of keys for a writer on another host
    arm: tuple[str, ...] = ("resid_post",)  # sites, or site.layer
    ring_bytes: int = 0  # 0: budget.ring_bytes
    scratch_bytes: int = 0  # on the device; 0: budget.scratch_bytes
    on_full: str = "drop"  # "drop": generation never waits; "wait": nothing is lost
    staging_bytes_max: int = STAGING_BYTES_MAX
    capture_all: str = ""  # the spec, as JSON, of requests that bring none
    probes: tuple[Registered, ...] = ()
    edit: tuple[str, ...] = ()  # sites, or site.layer, whose rows requests may have changed
    edit_depth: int = 2  # edits of one row at one site and layer
    edit_rows: int = 256  # of all requests at once, that edits set rows to
    vectors: tuple[Registered, ...] = ()  # that edits name
    name: str = ""  # by which a gateway knows the engine; "" where it is the only one
    writers: str = "one"  # "several": ranks of an engine may send to different ones
    own_group: bool = False  # each of vLLM's processes in a process group of its own: Ctrl-C is for their starter only

    def __post_init__(self) -> None:
        if not self.endpoint.startswith(("ipc://", "tcp://")):
            raise StartError(f"VLLM_TAP_ENDPOINT={self.endpoint!r}: must be ipc://PATH, or tcp://HOST:PORT of a writer "
                             "on another host, or both in this order with | between them")
        if self.endpoint.startswith("tcp://") and self.endpoint.count(":") > 2 and "[" not in self.endpoint:
            raise StartError(f"VLLM_TAP_ENDPOINT={self.endpoint!r}: put an IPv6 address in brackets, as in "
                             "tcp://[2001:db8::1]:5570")
        if self.endpoint.startswith("tcp://") != (self.curve is not None):
            raise StartError(f"VLLM_TAP_ENDPOINT={self.endpoint!r}, VLLM_TAP_CURVE={str(self.curve or '')!r}: set "
                             "VLLM_TAP_CURVE to a folder of keys for a writer on another host (tcp://), and to nothing "
                             "for one on this host (ipc://); `vllm-tap curve-keys NAME` on the writer's host makes "
                             "keys")
        if self.curve is not None:
            try:
                check_sender(self.curve)
            except StartError as error:
                raise StartError(f"VLLM_TAP_CURVE={str(self.curve)!r}: {error}") from None
        if (folder := _no_folder(self.endpoint)) is not None:
            raise StartError(f"VLLM_TAP_ENDPOINT={self.endpoint!r}: no writer can listen there, because {folder} is "
                             "not a folder; name another path")
        if len(self.endpoint) - len("ipc://") > _SOCKET_PATH_MAX:
            raise StartError(f"VLLM_TAP_ENDPOINT={self.endpoint!r}: a socket's path has at most {_SOCKET_PATH_MAX} "
                             "characters; name a shorter one")
        check_one_of("VLLM_TAP_ON_FULL", self.on_full, OnFull)
        check_one_of("VLLM_TAP_WRITERS", self.writers, Writers)
        if self.name:
            check_name(ENGINE, self.name)
        if self.capture_all and legacy.SITE not in layers_by_site(self.arm):
            raise StartError(f"VLLM_TAP_ARM={','.join(self.arm)!r}: VLLM_ACT_CAPTURE=1 captures {legacy.SITE}; add it "
                             "to VLLM_TAP_ARM")
        if not 1 <= self.edit_depth <= limits.edit_depth_max:
            raise StartError(f"VLLM_TAP_EDIT_DEPTH={self.edit_depth}: must be 1 to {limits.edit_depth_max}")
        if not 0 <= self.edit_rows <= limits.edit_rows_max:
            raise StartError(f"VLLM_TAP_EDIT_ROWS={self.edit_rows}: must be 0 to {limits.edit_rows_max}")
        if self.vectors and not self.edit:
            raise StartError(f"VLLM_TAP_VECTORS={self.vectors[0]}: no site is armed for edits, so no request could use "
                             "this vector; set VLLM_TAP_EDIT (--edit)")
        for name, value in (("RING", self.ring_bytes), ("SCRATCH", self.scratch_bytes)):
            if value != 0 and value < 4 * _MIB:
                raise StartError(f"VLLM_TAP_{name}_BYTES={value}: must be at least {4 * _MIB}, or 0, which lets the "
                                 "engine choose")

    def salt(self) -> str:
        """Text that tells one traced graph from another in vLLM's compile caches."""
        # In their order, as taps are made in it: what a graph of a cache writes first is the first that was registered.
        more = dict.fromkeys(f"{site}.{layer}" for site, layer in map(place_of, self.probes)
                             if not {site, f"{site}.{layer}"} & set(self.arm))
        edits = [f"edit={','.join(self.edit)}:{self.edit_depth}"] if self.edit else []
        return " ".join(["vllm-tap", TAP_VERSION, ",".join(self.arm), *more, *edits])


def from_environment(environment: Mapping[str, str] = os.environ) -> EngineConfig | None:
    """The configuration, or None where the plugin stays inert (no endpoint is set)."""
    endpoint = environment.get("VLLM_TAP_ENDPOINT", "")
    capture_all = legacy.capture_all(environment)
    if not endpoint and capture_all:
        raise StartError("VLLM_ACT_CAPTURE=1: captures need a writer, and VLLM_TAP_ENDPOINT is not set; set it to the "
                         "writer's address, or use `vllm-tap serve`, which starts one")
    if not endpoint:
        return None
    endpoint, curve = nearest(endpoint, environment.get("VLLM_TAP_CURVE", ""))
    return EngineConfig(
        endpoint=endpoint,
        curve=Path(curve) if curve else None,
        arm=parse_arm("VLLM_TAP_ARM", environment.get("VLLM_TAP_ARM", "resid_post")),
        ring_bytes=_number(environment, "VLLM_TAP_RING_BYTES", 0),
        scratch_bytes=_number(environment, "VLLM_TAP_SCRATCH_BYTES", 0),
        on_full=environment.get("VLLM_TAP_ON_FULL", "drop"),
        staging_bytes_max=_number(environment, "VLLM_TAP_STAGING_BYTES_MAX", STAGING_BYTES_MAX),
        capture_all=capture_all or "",
        probes=parse_probes(environment.get("VLLM_TAP_PROBES", "").split(","), "VLLM_TAP_PROBES"),
        edit=parse_edit_places("VLLM_TAP_EDIT", environment.get("VLLM_TAP_EDIT", "")),
        edit_depth=_number(environment, "VLLM_TAP_EDIT_DEPTH", 2),
        edit_rows=_number(environment, "VLLM_TAP_EDIT_ROWS", 256),
        vectors=parse_probes(environment.get("VLLM_TAP_VECTORS", "").split(","), "VLLM_TAP_VECTORS", "vector"),
        name=environment.get(ENGINE, ""),
        writers=environment.get("VLLM_TAP_WRITERS", "one"),
        own_group=environment.get("VLLM_TAP_OWN_GROUP", "") == "1",
    )


def nearest(endpoint: str, curve: str = "") -> tuple[str, str]:
    """One endpoint and its keys, of ``ipc://PATH|tcp://HOST:PORT``: the socket where a writer listens at it now.

    One setting serves every host of an engine: those beside the writer use shared memory, others the network.
    StartError where it reads otherwise.
    """
    here, both, there = endpoint.partition("|")
    if not both:
        return endpoint, curve
    if not (here.startswith("ipc:///") and there.startswith("tcp://")) or {"|", " "} & set(there + here) or (
            len(here) - len("ipc://") > _SOCKET_PATH_MAX):
        raise StartError(f"VLLM_TAP_ENDPOINT={endpoint!r}: two addresses must be ipc:///PATH|tcp://HOST:PORT of the "
                         f"same writer, with a PATH of at most {_SOCKET_PATH_MAX} characters")
    if _listens(here.removeprefix("ipc://")):
        return here, ""
    try:
        check_sender(Path(curve))
    except StartError as error:
        raise StartError(f"VLLM_TAP_ENDPOINT={endpoint!r}: no writer listens at {here}. On the writer's host, start "
                         f"the writer first. On another host, set VLLM_TAP_CURVE={curve!r} to a folder of keys: {error}"
                         ) from None
    return there, curve


def _listens(path: str) -> bool:
    """Whether a process of this user listens at a socket; StartError where another user's does, or it cannot be told.
    """
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            _connect(probe, path)
        except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError):  # none, or one that a dead writer left
            return False
        except OSError as error:
            raise StartError(f"VLLM_TAP_ENDPOINT: the socket {path} cannot be opened: {error.strerror or error}"
                             ) from None
        owner = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
    if owner not in (os.geteuid(), 0):
        raise StartError(f"VLLM_TAP_ENDPOINT: the socket {path} belongs to user {owner}, and the engine runs as user "
                         f"{os.geteuid()}; name a path that no other user has")
    return True


def _connect(probe: socket.socket, path: str) -> None:
    """Connect, without waiting for ever where a writer lets nobody in; OSError."""
    probe.setblocking(False)
    deadline = time.monotonic() + _PROBE_S
    while True:
        try:
            return probe.connect(path)
        except BlockingIOError:  # as many wait as may
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def untested(vllm_version: str, on_gpu: bool) -> str:
    """Warning of a version of vLLM that the tests were not run on, or not on a GPU; "" for one that they were."""
    match = _VERSION.match(vllm_version)
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    if not TESTED_VERSIONS[0] <= version <= TESTED_VERSIONS[1]:
        return (f"vLLM {vllm_version} is outside the tested range {_range(TESTED_VERSIONS)}; the start-up self-test "
                "decides whether the engine starts")
    if on_gpu and not TESTED_ON_GPU[0] <= version <= TESTED_ON_GPU[1]:
        return (f"vLLM {vllm_version} is tested on a CPU only, and {_range(TESTED_ON_GPU)} on a GPU; the start-up "
                "self-test decides whether the engine starts")
    return ""


def _range(versions: tuple[tuple[int, int], tuple[int, int]]) -> str:
    return " to ".join(dict.fromkeys(".".join(map(str, version)) for version in versions))


def _no_folder(endpoint: str) -> Path | None:
    """The file in the way of a socket's folder, which the writer makes where there is none yet."""
    if not endpoint.startswith("ipc:///"):  # nothing, or a name that is no path
        return None
    there = next(each for each in Path(endpoint.removeprefix("ipc://")).parents if os.path.lexists(each))
    return None if there.is_dir() else there


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, "")
    try:
        return int(text) if text else default
    except ValueError:
        raise StartError(f"{name}={text!r}: must be a whole number") from None
