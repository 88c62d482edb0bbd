"""Positions of a prompt whose rows were made of an image and not of the token that stands there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any, Final

from schemas.errors import SpecError
from schemas.limits import spec_intervals_max

SHOWN: Final = ("image",)  # kinds of media that were held against Hugging Face


def image_positions(features: Iterable[Any]) -> list[tuple[int, int]]:
    """Ranges ``[start, stop)`` of the positions that images fill, rising and apart. They are the places of vLLM's
    features, less those among them that keep their token's row (a break between lines of an image).

    SpecError for other media, and for more ranges than a spec may name.
    """
    found: list[tuple[int, int]] = []
    for feature in sorted(features, key=lambda each: each.mm_position.offset):
        if feature.modality not in SHOWN:
            raise SpecError("", "…", f"a prompt with {feature.modality} cannot be captured, because its rows are "
                                     "not tested; send text or images")
        for start, stop in _filled(feature.mm_position):
            if found and found[-1][1] == start:
                found[-1] = (found[-1][0], stop)
            else:
                found.append((start, stop))
    if len(found) > spec_intervals_max:
        raise SpecError("", "…", f"images fill {len(found):,} ranges of the prompt's positions, the limit is "
                                 f"{spec_intervals_max:,}; send fewer or smaller images")
    return found


def resend(processor: Any, prompt: Any) -> None:
    """Let vLLM's front end send the images of a refused prompt again. The engine never got them, but a front end
    assumes that the engine keeps what it was sent once.
    """
    cache = getattr(getattr(processor, "renderer", None), "mm_processor_cache", None)
    by_kind = prompt.get("mm_hashes") if isinstance(prompt, dict) else None
    if cache is None or not by_kind:
        return
    forget = getattr(cache, "invalidate", None)  # not in vLLM 0.26
    for each in (each for hashes in by_kind.values() for each in hashes if each is not None):
        if forget is not None:
            forget(each)
        elif hasattr(cache, "_cache"):
            cache._cache.pop(each, None)


def _filled(place: Any) -> Iterator[tuple[int, int]]:
    if place.is_embed is None:
        yield place.offset, place.offset + place.length
        return
    at = place.offset
    for filled, run in groupby(place.is_embed.tolist()):
        length = sum(1 for _ in run)
        if filled:
            yield at, at + length
        at += length
