"""Configuration of the plugin: environment variables, because vLLM's processes inherit nothing else of ours."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from engine_side.tap.budget import STAGING_BYTES_MAX
from schemas import legacy, limits
from schemas.checks import OnFull, check_one_of, parse_arm
from schemas.edits.arms import parse_edit_places
from schemas.errors import StartError
from schemas.probes import Registered, parse_probes, place_of
from schemas.sites import layers_by_site
from schemas.wire.curve import check_sender

TAP_VERSION: Final = "7"  # part of the compile-cache salt: change it when traced code changes

GROUP: Final = "VLLM_TAP_GROUP"  # the same in all processes of an engine: who starts it draws it

VARIABLES: Final = (
    "VLLM_TAP_ENDPOINT", "VLLM_TAP_CURVE", "VLLM_TAP_ARM", "VLLM_TAP_RING_BYTES", "VLLM_TAP_SCRATCH_BYTES",
    "VLLM_TAP_ON_FULL", "VLLM_TAP_STAGING_BYTES_MAX", "VLLM_TAP_PROBES", "VLLM_TAP_OWN_GROUP",
    "VLLM_TAP_EDIT", "VLLM_TAP_EDIT_DEPTH", "VLLM_TAP_EDIT_ROWS", "VLLM_TAP_VECTORS", GROUP,
)

TESTED_VERSIONS: Final = ((0, 26), (0, 32))  # of vLLM, first and last
TESTED_ON_GPU: Final = ((0, 26), (0, 26))  # and what `pip install vllm-tap[gpu]` brings

_MIB: Final = 1 << 20
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
    own_group: bool = False  # each of vLLM's processes in a process group of its own: Ctrl-C is for who started them

    def __post_init__(self) -> None:
        if not self.endpoint.startswith(("ipc://", "tcp://")):
            raise StartError(f"VLLM_TAP_ENDPOINT={self.endpoint!r}: must be ipc://PATH, or tcp://HOST:PORT of a writer "
                             "on another host")
        if self.endpoint.startswith("tcp://") and self.endpoint.count(":") > 2 and "[" not in self.endpoint:
            raise StartError(f"VLLM_TAP_ENDPOINT={self.endpoint!r}: an address of IPv6 stands in brackets, as in "
                             "tcp://[2001:db8::1]:5570")
        if self.endpoint.startswith("tcp://") != (self.curve is not None):
            raise StartError(f"VLLM_TAP_ENDPOINT={self.endpoint!r}, VLLM_TAP_CURVE={str(self.curve or '')!r}: a writer "
                             "on another host (tcp://) needs a folder of keys, and no other does; `vllm-tap curve-keys "
                             "NAME` makes it there")
        if self.curve is not None:
            try:
                check_sender(self.curve)
            except StartError as error:
                raise StartError(f"VLLM_TAP_CURVE={str(self.curve)!r}: {error}") from None
        if (folder := _no_folder(self.endpoint)) is not None:
            raise StartError(f"VLLM_TAP_ENDPOINT={self.endpoint!r}: {folder} is not a folder, so no writer can listen "
                             "there")
        if len(self.endpoint) - len("ipc://") > 100:
            raise StartError(f"VLLM_TAP_ENDPOINT={self.endpoint!r}: a socket path has at most 100 characters")
        check_one_of("VLLM_TAP_ON_FULL", self.on_full, OnFull)
        if self.capture_all and legacy.SITE not in layers_by_site(self.arm):
            raise StartError(f"VLLM_TAP_ARM={','.join(self.arm)!r}: must have {legacy.SITE}, which VLLM_ACT_CAPTURE=1 "
                             "captures")
        if not 1 <= self.edit_depth <= limits.edit_depth_max:
            raise StartError(f"VLLM_TAP_EDIT_DEPTH={self.edit_depth}: must be 1 to {limits.edit_depth_max}")
        if not 0 <= self.edit_rows <= limits.edit_rows_max:
            raise StartError(f"VLLM_TAP_EDIT_ROWS={self.edit_rows}: must be 0 to {limits.edit_rows_max}")
        if self.vectors and not self.edit:
            raise StartError(f"VLLM_TAP_VECTORS={self.vectors[0]}: nothing is armed that an edit could use it at; set "
                             "VLLM_TAP_EDIT (--edit)")
        for name, value in (("RING", self.ring_bytes), ("SCRATCH", self.scratch_bytes)):
            if value != 0 and value < 4 * _MIB:
                raise StartError(f"VLLM_TAP_{name}_BYTES={value}: at least {4 * _MIB}, or 0: what the model needs")

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
        raise StartError("VLLM_ACT_CAPTURE=1: captures need a writer, and VLLM_TAP_ENDPOINT names none; "
                         "`vllm-tap serve` starts one beside the engine")
    if not endpoint:
        return None
    return EngineConfig(
        endpoint=endpoint,
        curve=Path(environment["VLLM_TAP_CURVE"]) if environment.get("VLLM_TAP_CURVE") else None,
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
        own_group=environment.get("VLLM_TAP_OWN_GROUP", "") == "1",
    )


def untested(vllm_version: str, on_gpu: bool) -> str:
    """Warning of a version of vLLM that the tests were not run on, or not on a GPU; "" for one that they were."""
    match = _VERSION.match(vllm_version)
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    if not TESTED_VERSIONS[0] <= version <= TESTED_VERSIONS[1]:
        return f"vLLM {vllm_version} is outside the tested range {_range(TESTED_VERSIONS)}; the self-test decides"
    if on_gpu and not TESTED_ON_GPU[0] <= version <= TESTED_ON_GPU[1]:
        return (f"vLLM {vllm_version} is tested on the CPU alone; tested on a GPU: {_range(TESTED_ON_GPU)}; "
                "the self-test decides")
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
        raise StartError(f"{name}={text!r}: must be a number of bytes") from None
