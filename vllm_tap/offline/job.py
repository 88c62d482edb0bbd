"""The job of ``vllm-tap capture``, checked before anything is started."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from schemas.checks import parse_arm
from schemas.edits.arms import Arms, EditArms
from schemas.edits.resolve import resolve_edits
from schemas.edits.spec import parse_edits
from schemas.edits.vectors import digest_of, load_vector
from schemas.errors import ArgumentError, EditError, SpecError, TapError
from schemas.probes import Registered, load_probe
from schemas.sites import SITES, parse_site
from schemas.spec import CaptureSpec, parse_spec
from vllm_tap.offline.prompt_file import Prompt
from vllm_tap.offline.prompt_source import PromptSource
from vllm_tap.serve.model_config import check_arguments, read_config
from vllm_tap.serve.services import check_model, check_store, check_writable

__all__ = ["CaptureJob"]

_EVERYWHERE: Final = ("hidden", "q_heads", "kv_heads")  # sites of such rows are in every block of a model


@dataclass(frozen=True, slots=True)
class CaptureJob:
    """The arguments of ``vllm-tap capture``; TapError where they cannot be met."""

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
    arms: EditArms = field(default_factory=EditArms)  # what edits may change
    edit: list[dict[str, Any]] = field(default_factory=list)  # of every prompt that brings none of its own

    def __post_init__(self) -> None:
        check_model(self.model)
        check_arguments(self.model, self.engine_args)
        check_store(self.store)
        spec = self.spec()
        for probe in self.probes:
            load_probe(probe)
        edited = self.arms.check("--edit", "--edit-depth", "--vector", "--edit-rows")
        flag, places = ("--sites", self.sites_asked) if self.arm is None else ("--arm", parse_arm("--arm", self.arm))
        if (config := read_config(self.model, self.engine_args)) is not None:
            config.check_taps(flag, places, self.probes)
            config.check_spec(spec, places, self.probes)
            config.check_taps("--edit", edited, ())
        if self.arm is None:
            parse_arm("--layers", self.armed)
        try:
            self.check_edits(self.edit)
        except SpecError as error:
            raise TapError(f"--edits: {error}") from None
        if self.output is not None:
            if self.output.is_dir():
                raise TapError(f"--output = {str(self.output)!r}: is a folder; name a file")
            check_writable(self.output.absolute().parent, f"--output = {str(self.output)!r}")

    @property
    def armed(self) -> str:
        """Sites to tap: ``arm``, else the sites asked for; where layers are listed, in no others, as nobody else asks
        this engine. What only some blocks of some models have is tapped wherever it is.
        """
        if self.arm is not None:
            return self.arm
        layers = read_numbers("--layers", self.layers)
        numbers = layers if isinstance(layers, list) and layers else [None]
        places = [(site, number if fixed is None and SITES[site].per_layer and SITES[site].width in _EVERYWHERE
                   else fixed) for site, fixed in self._named() for number in numbers]
        return ",".join(dict.fromkeys(site if layer is None else f"{site}.{layer}" for site, layer in places))

    def edits_of(self, prompt: Prompt) -> list[dict[str, Any]]:
        """The edits of a prompt: its own where it brings any, be they none."""
        return self.edit if prompt.edit is None else prompt.edit

    def check_edits(self, edit: list[dict[str, Any]] | None) -> None:
        """EditError where the engine could not make them, as far as that is known before it starts."""
        if not edit:
            return
        specs = parse_edits(edit)
        if not self.arms.places and any(spec.op != "stop" for spec in specs):
            raise EditError("", edit, "nothing is armed for edits; name sites with --edit")
        if (armed := _armed_for_edits(self.model, self.engine_args, self.arms, self.probes)) is not None:
            resolve_edits(specs, armed)

    @property
    def own_tokenizer(self) -> bool:
        """Whether vLLM is told of the tokenizer, or how to load it: only an engine knows it then."""
        return any(word in flag for flag in self.engine_args for word in ("tokenizer", "revision", "trust"))

    @property
    def sites_asked(self) -> tuple[str, ...]:
        """The sites asked for, in canonical names; resid_post where none is named."""
        return tuple(dict.fromkeys(site for site, _ in self._named()))

    def _named(self) -> list[tuple[str, int | None]]:
        names = ["resid_post"] if self.sites is None else self.sites.split(",")
        return [parse_site(name.strip(), "--sites", ArgumentError) for name in names]

    def settings(self) -> dict[str, Any]:
        """Settings that tell one run from another, beside the prompts themselves."""
        known = {probe.name: load_probe(probe).about.fingerprint for probe in self.probes}
        edits = {"places": self.arms.places, "edit": self.edit,
                 "vectors": {vector.name: digest_of(load_vector(vector)) for vector in self.arms.vectors}}
        return {"source": self.prompts.name, "model": self.model,
                "armed": ",".join(self.sites_asked) if self.arm is None else self.arm,
                "spec": self.spec().to_json(), "max_tokens": self.max_tokens, "temperature": self.temperature,
                **({"probes": known} if known else {}), **({"edits": edits} if self.arms.places else {})}

    def spec(self) -> CaptureSpec:
        """The spec that every prompt gets; ArgumentError that names the flag where it is malformed."""
        asked: dict[str, Any] = {"codec": self.codec, "layers": read_numbers("--layers", self.layers),
                                 "positions": read_numbers("--positions", self.positions)}
        if self.sites is not None:
            asked["sites"] = [name.strip() for name in self.sites.split(",")]
        if self.probes:
            asked["probe"] = [probe.name for probe in self.probes]
        try:
            return parse_spec(asked)
        except SpecError as error:
            raise ArgumentError(f"--{error.field}", error.value, error.reason) from None


@lru_cache(maxsize=1)  # it is asked for every prompt
def _armed_for_edits(model: str, engine_args: tuple[str, ...], arms: EditArms, probes: tuple[Registered, ...]
                     ) -> Arms | None:
    config = read_config(model, engine_args)
    return None if config is None else config.armed_for_edits(arms, probes)


def read_numbers(flag: str, text: str) -> object:
    """Layers or positions of a flag: ``[0, 5]`` of "0,5", the value of JSON text, else the text itself (a name
    or a slice).
    """
    if text.strip().startswith("["):
        try:
            return json.loads(text)
        except ValueError:
            raise ArgumentError(flag, text, "malformed list; as in [[0, 8], [12, 16]]") from None
    if all(part.strip().isdecimal() for part in text.split(",")):
        return [int(part) for part in text.split(",")]
    return text.strip()
