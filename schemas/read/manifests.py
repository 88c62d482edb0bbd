"""The manifest of a capture, made from the catalog."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from schemas import codecs
from schemas import manifest as manifests
from schemas.catalog.database import Database
from schemas.catalog.records import Capture, engine_json
from schemas.errors import SpecError
from schemas.manifest import Manifest
from schemas.read.coverage import Coverage
from schemas.read.coverage_cache import CoveredCapture
from schemas.sites import is_probe, lens_name, names_of, site_named
from schemas.store.paths import block_name, open_name
from schemas.wire.layout import LEADER

__all__ = ["aliases_by_ulid", "aliases_of", "manifest_of", "rows_of", "shape_of"]


def manifest_of(db: Database, covered: CoveredCapture) -> Manifest:
    """The manifest of a capture whose coverage is known at all its sites."""
    capture, coverage = covered.capture, covered.coverage
    resolved = json.loads(capture.resolved) if capture.resolved else {}
    engine = engine_json(db, capture.stream)
    sites = []
    for site in coverage.sites:
        codec = resolved["codec"][site]
        dtype, width = shape_of(db, covered, site)
        extents = []
        for extent in coverage.extents[site]:
            segment = covered.segments[extent.segment]
            sealed = segment is not None and segment.sealed
            block = block_name(extent.segment) if sealed else open_name(extent.segment)
            positions = extent.rows[:, 0]
            extents.append(manifests.Extent(block, extent.offset, len(positions), int(positions.min()),
                                            int(positions.max())))
        meaning = engine.get("meaning", {}).get(site) or site_named(site).meaning
        known, shared = codecs.identified(codec), covered.parts.shares_out(site)
        sites.append(manifests.SiteInfo(
            site=site, width=width, decoded_width=known.decoded_width(width), codec=codec, family=known.family.name,
            parameters=known.parameters, decoded=known.family.decoded, formula=known.family.formula, dtype=dtype,
            streams=[] if shared else _declared(known, width, dtype), shared_out=shared,
            error_bound=known.family.error, meaning=meaning,
            transformer_lens=lens_name(site, names_of(engine)), extents=extents,
        ))
    return Manifest(
        id=capture.id, aliases=aliases_of(db, capture), status=capture.status,
        asked=json.loads(capture.asked) if capture.asked else {}, resolved=resolved, tags=capture.tags,
        created_ms=capture.created_ms, engine={key: value for key, value in engine.items()
                                               if key not in ("layout", "proved")},
        adapter=capture.adapter,
        edits=covered.parts.edited(capture),
        prompt_len=capture.prompt_len, total_len=capture.total_len,
        end=coverage.end if capture.end is None else capture.end,
        prompt_token_ids=np.frombuffer(capture.prompt_tokens, "<u4").tolist(),
        output_token_ids=np.frombuffer(capture.output_tokens, "<u4").tolist(),
        finish_reason=capture.ended, client_finish_reason=capture.client_reason,
        engine_finish_reason=capture.finish_reason, stop_reason=capture.stop_reason, cached=capture.cached,
        recomputed=capture.recomputed, sites=sites, rows=rows_of(coverage, resolved.get("codec", {})),
        hold=capture.hold, failed=capture.failed,
        parts=_parts(covered),
    )


def rows_of(coverage: Coverage, codecs_of: Mapping[str, str]) -> list[manifests.SiteLayer]:
    """A line for each site and layer, in the order of the sites; ``codecs_of``: by site, the codec's identity."""
    return [manifests.SiteLayer(site, layer, codecs_of[site], group.expected, len(group.rows.positions), group.missing,
                                len(group.rejected.positions))
            for site, groups in coverage.sites.items()
            for layer, group in sorted(((layer, group) for group in groups for layer in group.layers),
                                       key=lambda each: each[0])]


def _parts(covered: CoveredCapture) -> list[manifests.PartInfo]:
    """The progress of each rank; none of an engine of one rank."""
    parts, capture = covered.parts, covered.capture
    if not (parts.places or parts.editing) or covered.resolved is None:
        return []
    leader = "finished" if capture.finish_seq is not None else "lost" if capture.lost else "running"
    states = {LEADER: leader, **{rank: parts.state(rank) for rank in sorted(parts.needed(covered.resolved))}}
    return [manifests.PartInfo(rank, state) for rank, state in states.items()]


def aliases_of(db: Database, capture: Capture) -> list[str]:
    """The names that a capture was given beside its id, oldest first."""
    return aliases_by_ulid(db, [capture.ulid]).get(capture.ulid, [])


def aliases_by_ulid(db: Database, ulids: Collection[str]) -> dict[str, list[str]]:
    """The same of several requests."""
    found: dict[str, list[str]] = {}
    query = f"SELECT ulid, alias FROM aliases WHERE ulid IN ({','.join('?' * len(ulids))}) ORDER BY n"
    for row in db.execute(query, list(ulids)) if ulids else ():
        found.setdefault(row["ulid"], []).append(row["alias"])
    return found


def shape_of(db: Database, covered: CoveredCapture, site: str) -> tuple[str, int]:
    """dtype and width of a site: what was stored, else what the engine said it would be."""
    engine: dict[str, Any] = {}
    if covered.parts.shares_out(site):  # what was stored is a share of a row
        engine = engine_json(db, covered.capture.stream)
    for extent in () if engine else covered.coverage.extents.get(site, ()):
        segment = covered.segments[extent.segment]
        if segment is not None:
            return segment.dtype, segment.width
    engine = engine or engine_json(db, covered.capture.stream)
    dtype = "float32" if is_probe(site) else str(engine.get("model_dtype", "float32"))
    return dtype, int(engine.get("widths", {}).get(site, 0))


def _declared(codec: codecs.Codec, width: int, dtype: str) -> list[dict[str, Any]]:
    """The streams as manifests show them; none where the codec does not fit the width, so that no row was stored."""
    try:
        streams = codec.streams(width, dtype) if width else ()
    except SpecError:
        return []
    return [stream.about() for stream in streams]
