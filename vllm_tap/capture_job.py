"""What ``vllm-tap capture`` is asked for, checked before anything is started."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from schemas.checks import parse_arm
from schemas.errors import ArgumentError, SpecError, TapError
from schemas.probes import Registered, load_probe
from schemas.sites import parse_site
from schemas.spec import CaptureSpec, parse_spec
from vllm_tap.model_config import read_config
from vllm_tap.prompt_source import PromptSource
from vllm_tap.services import check_model, check_store, check_writable

__all__ = ["CaptureJob"]


@dataclass(frozen=True, slots=True)
class CaptureJob:
    """What ``vllm-tap capture`` was asked for; TapError where it cannot be."""

    prompts: PromptSource
    model: str
    store: Path
    sites: str | None = None
    layers: str = "all"
    positions: str = "all"
    codec: str = "int8b64"
    max_tokens: int = 16
    temperature: float = 0.0
    arm: str | None = None
    output: Path | None = None
    durability: str = "fsync"
    engine_args: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    probes: tuple[Registered, ...] = ()  # whose scores every prompt gets; without ``sites`` nothing else

    def __post_init__(self) -> None:
        check_model(self.model)
        check_store(self.store)
        armed, spec = parse_arm("--arm", self.armed), self.spec()
        for probe in self.probes:
            load_probe(probe)
        if (config := read_config(self.model, self.engine_args)) is not None:
            config.check_taps("--sites" if self.arm is None else "--arm", armed, self.probes)
            config.check_spec(spec, armed, self.probes)
        if self.output is not None:
            if self.output.is_dir():
                raise TapError(f"--output = {str(self.output)!r}: is a folder; name a file")
            check_writable(self.output.absolute().parent, f"--output = {str(self.output)!r}")

    @property
    def armed(self) -> str:
        """The sites to tap: those of ``arm``, else those asked for, else resid_post."""
        if self.arm is not None:
            return self.arm
        if self.sites is None:
            return "resid_post"
        named = (parse_site(name.strip(), "--sites", ArgumentError)[0] for name in self.sites.split(","))
        return ",".join(dict.fromkeys(named))

    def settings(self) -> dict[str, Any]:
        """What makes one run another than the next, beside the prompts themselves."""
        known = {probe.name: load_probe(probe).about.fingerprint for probe in self.probes}
        return {"source": self.prompts.name, "model": self.model, "armed": self.armed,
                "spec": self.spec().to_json(), "max_tokens": self.max_tokens, "temperature": self.temperature,
                **({"probes": known} if known else {})}

    def spec(self) -> CaptureSpec:
        """The spec that every prompt gets; ArgumentError that names the flag where it is malformed."""
        asked: dict[str, Any] = {"codec": self.codec, "layers": _numbers("--layers", self.layers),
                                 "positions": _numbers("--positions", self.positions)}
        if self.sites is not None:
            asked["sites"] = [name.strip() for name in self.sites.split(",")]
        if self.probes:
            asked["probe"] = [probe.name for probe in self.probes]
        try:
            return parse_spec(asked)
        except SpecError as error:
            raise ArgumentError(f"--{error.field}", error.value, error.reason) from None


def _numbers(flag: str, text: str) -> object:
    """``[0, 5]`` of "0,5", the value of JSON text, else the text itself (a name or a slice)."""
    if text.strip().startswith("["):
        try:
            return json.loads(text)
        except ValueError:
            raise ArgumentError(flag, text, "malformed list; as in [[0, 8], [12, 16]]") from None
    if all(part.strip().isdecimal() for part in text.split(",")):
        return [int(part) for part in text.split(",")]
    return text.strip()
