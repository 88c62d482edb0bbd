"""Checks of what records say, whatever is known of their captures: lengths, ranges and names."""

from __future__ import annotations

import json
from itertools import pairwise

from schemas import codecs, limits
from schemas.ids import is_ulid, split_capture_id
from schemas.sites import is_site
from schemas.spec import NAMED_POSITIONS
from schemas.wire.records import Open, Own

__all__ = ["RefusedError", "are_layers", "check_open", "check_own", "need", "number_max"]

aliases_max = 16
number_max = 2**63 - 1  # what SQLite can hold


class RefusedError(Exception):
    """The record is not stored; ``code`` is one of conflict, malformed, stale, not_found, held."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason


def need(condition: bool, field: str, valid: str) -> None:
    """RefusedError where a field is not what is valid."""
    if not condition:
        raise RefusedError("malformed", f"{field}: must be {valid}")


def are_layers(layers: list[int]) -> bool:
    """Whether they are layers, ascending."""
    return (0 < len(layers) <= limits.layers_max and all(0 <= layer < limits.layers_max for layer in layers)
            and all(a < b for a, b in pairwise(layers)))


def _are_ranges(ranges: list[tuple[int, int]]) -> bool:
    flat = [edge for pair in ranges for edge in pair]
    return (len(ranges) <= limits.spec_intervals_max and flat == sorted(set(flat))
            and all(0 <= edge <= limits.position_max for edge in flat))


def check_open(opened: Open) -> None:
    """RefusedError where an Open is malformed."""
    resolved = opened.resolved
    need(split_capture_id(opened.capture) is not None, "capture", "a capture id")
    need(len(opened.request) <= limits.alias_chars_max, "request", f"at most {limits.alias_chars_max} characters")
    need(len(opened.asked) <= limits.spec_json_bytes_max, "asked", f"at most {limits.spec_json_bytes_max} characters")
    need(all(map(is_site, resolved.layers)), "resolved.layers", "known sites")
    need(all(not layers or are_layers(layers) for layers in resolved.layers.values()), "resolved.layers", "ascending")
    need(set(resolved.codec) == set(resolved.layers) and all(map(codecs.is_identity, resolved.codec.values())),
          "resolved.codec", "a known codec for every site")
    need(all(are_layers(layers) and {*layers} <= {*resolved.layers.get(site, ())}
             for site, layers in resolved.elsewhere.items()), "resolved.elsewhere", "layers of resolved.layers")
    need(0 <= resolved.writer < limits.parts_max, "resolved.writer", f"0 to {limits.parts_max - 1}")
    positions = resolved.positions
    if isinstance(positions, str):
        need(positions in NAMED_POSITIONS, "resolved.positions", "a known name or ranges")
    else:
        need(_are_ranges(positions), "resolved.positions", "sorted, disjoint ranges")
    need(_are_ranges(resolved.images), "resolved.images", "sorted, disjoint ranges")
    need(0 <= opened.prompt_len <= limits.position_max, "prompt_len", f"0 to {limits.position_max}")
    need(len(opened.prompt_token_ids) in (0, 4 * opened.prompt_len), "prompt_token_ids", "4 bytes a prompt token")
    need(0 <= opened.created_ms <= number_max, "created_ms", f"0 to {number_max}")
    need(0 <= opened.cached <= opened.prompt_len, "cached", "0 to prompt_len")
    try:
        need(isinstance(json.loads(opened.asked), dict), "asked", "a JSON object")
    except (ValueError, RecursionError):
        raise RefusedError("malformed", "asked: must be a JSON object") from None


def check_own(own: Own) -> None:
    """RefusedError where an Own is malformed."""
    need(is_ulid(own.capture), "capture", "a ULID")
    need(0 < own.count <= limits.capture_samples_max, "count", f"1 to {limits.capture_samples_max}")
    need(len(own.owner) <= limits.alias_chars_max, "owner", f"at most {limits.alias_chars_max} characters")
    need(len(own.aliases) <= aliases_max, "aliases", f"at most {aliases_max}")
    need(all(0 < len(a) <= limits.alias_chars_max and split_capture_id(a) is None for a in own.aliases),
          "aliases", f"1 to {limits.alias_chars_max} characters, and no capture id")
    need(0 <= own.created_ms <= number_max, "created_ms", f"0 to {number_max}")
    need(len(own.tags) <= limits.spec_tags_max, "tags", f"at most {limits.spec_tags_max}")
    need(all(len(k) <= limits.tag_key_chars_max and len(v) <= limits.tag_value_chars_max
              for k, v in own.tags.items()), "tags", "keys and values within the limits")
