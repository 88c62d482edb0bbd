"""Sites of a model, as its config.json and the table of architectures have them: nothing is loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from engine_side.discovery.outcome import Outcome
from schemas.errors import ArgumentError, StartError, json_fault
from schemas.sites import SITES, lens_names
from vllm_tap.serve.model_config import ModelConfig, config_of, fetched, takes_more_than_text

__all__ = ["SiteEntry", "SiteList", "as_found", "describe", "load_config"]

_FOUND: Final = " (found by structure)"


@dataclass(frozen=True, slots=True)
class SiteEntry:
    """One site of a model.

    ``width``: numbers in a row. ``layers``: those that have it, [0] of a site that is there once. Both are None where
    config.json does not say. ``source``: "table", or "structure" of what is looked for as an engine starts.
    """

    site: str
    transformer_lens: tuple[str, ...]  # {l} for the layer
    width: int | None
    layers: list[int] | None
    meaning: str
    source: str


@dataclass(frozen=True, slots=True)
class SiteList:
    """The sites that a model has, or that are looked for; ``refused`` says why it lacks the others."""

    model: str
    architectures: tuple[str, ...]
    known: bool  # whether the table has one of the architectures
    n_layers: int | None
    sites: tuple[SiteEntry, ...]
    refused: Mapping[str, str]


def load_config(model: str) -> ModelConfig:
    """The configuration of a folder or of a name on the Hugging Face hub; ArgumentError says what is wrong with it."""
    path = _config_file(model)
    try:
        whole = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ArgumentError("MODEL", model, f"{path}: is not JSON: {json_fault(error)}") from None
    except OSError as error:
        raise ArgumentError("MODEL", model, f"{path}: cannot be read: {error.strerror}") from None
    names = whole.get("architectures") if isinstance(whole, dict) else None
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ArgumentError("MODEL", model, f"{path}: architectures = {json.dumps(names)}: must name the model's "
                                            'class, such as ["Qwen3ForCausalLM"]')
    if not isinstance(whole.get("text_config", {}), dict):
        raise ArgumentError("MODEL", model, f"{path}: text_config must be an object")
    return config_of(whole)


def _config_file(model: str) -> Path:
    """Its config.json: in the folder, in this machine's cache of the hub, or from the hub."""
    folder = Path(model).expanduser()
    if (own := folder / "config.json").is_file():
        return own
    if folder.is_dir():
        raise ArgumentError("MODEL", model, "this folder has no config.json; name the one that has it, beside the "
                                            "weights")
    if folder.exists():
        raise ArgumentError("MODEL", model, "is a file; name the folder that it is in")
    if model.count("/") > 1 or model.startswith((".", "~", "/")) or not model:
        raise ArgumentError("MODEL", model, "no such folder; name a folder with a config.json, or a model of the "
                                            "Hugging Face hub such as Qwen/Qwen3-0.6B")
    try:
        return fetched(model, ()) or _download(model)
    except Exception as error:  # the hub's client raises as many kinds as there are ways to fail
        first = next(iter(str(error).splitlines()), "")
        raise ArgumentError("MODEL", model, "no folder of that name, its config.json is not in this machine's Hugging "
                                            f"Face cache, and the hub did not give it ({type(error).__name__}: "
                                            f"{first}); name a folder, or check the name and the way to the hub"
                            ) from None


def _download(model: str) -> Path:
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(model, "config.json"))


def describe(model: str, config: ModelConfig) -> SiteList:
    """The sites of a model with this configuration; StartError where no tap can be in it."""
    from engine_side.front.media import DECODER_READS, EMBEDDED_OUTSIDE, EXPERTS_APART
    from engine_side.tap.architectures import BY_STRUCTURE, family_of, is_known

    names = config.architectures
    if not is_known(names):
        media = takes_more_than_text(names)
        if media and config.encoder_decoder:
            raise StartError(f"MODEL = {model!r}: architectures = {', '.join(names)}: {DECODER_READS}")
        absent = {"embed": EMBEDDED_OUTSIDE, "router_logits": EXPERTS_APART, "experts": EXPERTS_APART} if media else {}
        entries = [_entry(config, site, SITES[site].meaning, {}, "structure") for site in BY_STRUCTURE
                   if site not in absent]
        return SiteList(model, names, False, config.n_layers or None, tuple(entries), absent)
    family = family_of(names, config.said)
    places = {**family.block, **family.model}
    entries = [_entry(config, site, place.meaning, family.names, "table") for site, place in places.items()
               if config.layers_of(site) != []]
    absent = {site: family.refused.get(site, "no layer of this model has it" if site in places else
                                       "this architecture has no such site")
              for site in SITES if site not in {entry.site for entry in entries}}
    return SiteList(model, names, True, config.n_layers or None, tuple(entries), absent)


def as_found(sites: SiteList, outcome: Outcome) -> SiteList:
    """The same with what a loaded model was found to have: widths and layers, and of a model in no table the names,
    the meanings and what it lacks.
    """
    before = {entry.site: entry for entry in sites.sites}
    entries = [SiteEntry(site, lens_names(site, outcome.names), found.width, [place.layer for place in found.places],
                         before[site].meaning if sites.known and site in before else found.meaning.removesuffix(_FOUND),
                         "table" if sites.known else "structure")
               for site, found in outcome.sites.items()]
    lacking = dict.fromkeys((site for site in before if site not in outcome.sites), "was not found in this model")
    entries.sort(key=lambda entry: list(SITES).index(entry.site))
    refused = {site: why for site, why in {**sites.refused, **lacking, **outcome.refused}.items()
               if site not in outcome.sites}
    return replace(sites, n_layers=outcome.n_layers, sites=tuple(entries), refused=refused)


def _entry(config: ModelConfig, site: str, meaning: str, names: Mapping[str, str], source: str) -> SiteEntry:
    layers = config.layers_of(site) if source == "table" else None if SITES[site].per_layer else [0]
    return SiteEntry(site, lens_names(site, names), config.widths.get(site), layers, meaning, source)
