"""The survey of a loaded model before it is tapped: which sites it has, in which layers, and which of them are here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from engine_side.tap.architectures import TapPoint
from engine_side.tap.stages import Has
from schemas.errors import StartError
from schemas.probes import LoadedProbe, Registered
from schemas.sites import edited_place

__all__ = ["Survey", "armed_layers", "edited_places", "probe_places"]

Places = Iterable[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Survey:
    """Points that this rank has, what its engine has of their sites, and why it has none of others."""

    points: Sequence[TapPoint]
    has: Mapping[str, Has]
    refused: Mapping[str, str]

    def layers(self, site: str) -> list[int]:
        """Layers in which the engine has a site; StartError where it has none."""
        if site not in self.has:
            raise StartError(self.refused[site])
        return list(self.has[site].layers)

    def here(self, places: Places) -> list[TapPoint]:
        """The places among these that this rank has, each once."""
        own = {(point.site, point.layer): point for point in self.points}
        return [own[place] for place in dict.fromkeys(places) if place in own]


def armed_layers(asked: Mapping[str, list[int] | None], survey: Survey) -> dict[str, list[int]]:
    """The layers of every site that were asked for (None: all that have it); StartError where one has it not."""
    found = {}
    for site, layers in asked.items():
        has = survey.layers(site)
        if absent := sorted(set(layers or ()) - set(has)):
            raise StartError(f"vllm-tap: cannot arm {site}.{absent[0]}: this model has {site} in layers {has}; name "
                             "one of these")
        found[site] = [layer for layer in has if layers is None or layer in layers]
    return found


def probe_places(probes: Mapping[Registered, LoadedProbe], survey: Survey) -> list[tuple[str, int]]:
    """The places that probes read; StartError where the model lacks one, or has other widths."""
    found = []
    for probe, loaded in probes.items():
        site, layer, (k, width) = loaded.about.site, loaded.about.layer, loaded.directions.shape
        which = f"vllm-tap: probe {probe.name!r}: {probe.path}:"
        try:
            layers = survey.layers(site)
        except StartError as error:
            raise StartError(f"{which} site = {site!r}: {error}") from None
        if layer not in layers:
            raise StartError(f"{which} layer = {layer}: this model has {site} in layers {layers}; name one of these")
        if width != (has := survey.has[site].width):
            raise StartError(f"{which} directions = [{k}, {width}]: rows of {site} have {has} numbers in this model; "
                             f"make it with [{k}, {has}]")
        found.append((site, layer))
    return found


def edited_places(layers: Mapping[str, Sequence[int]]) -> list[tuple[str, int]]:
    """The places of sites and their layers, each once: a stream between two blocks counts as the output of the first
    one.
    """
    return list(dict.fromkeys(edited_place(site, layer) for site, chosen in layers.items() for layer in chosen))
