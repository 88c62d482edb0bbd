"""Captures and manifests as tables for people, or as JSON for programs."""

from __future__ import annotations

import sys
from datetime import datetime
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from schemas.bucket.places import is_url, places_of
from schemas.bucket.reader import Cataloged, Source, open_reader, shown
from schemas.bucket.several import SeveralReader
from schemas.catalog.filters import CaptureFilter
from schemas.errors import ArgumentError
from schemas.ids import split_capture_id
from schemas.manifest import STATUSES, Manifest, SiteLayer
from vllm_tap.client.listing import filtered

__all__ = ["console", "homes", "print_captures", "print_json", "print_manifest", "progress_bar", "ranges", "when"]

_STATUS_STYLES = {"complete": "green", "running": "cyan", "pending": "dim", "empty": "dim", "incomplete": "yellow",
                  "failed": "red"}


def print_json(*values: object, indent: int = -1) -> None:
    """A value a line, or over several lines with an ``indent``."""
    for value in values:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(value), indent=indent) + b"\n")
    sys.stdout.buffer.flush()


def print_captures(store: Source, status: str | None, chosen: CaptureFilter, limit: int, before: str | None,
                   as_json: bool) -> None:
    """The captures of a store that pass, newest first."""
    if status is not None and status not in STATUSES:
        raise ArgumentError("--status", status, f"valid: {', '.join(STATUSES)}")
    if before is not None and split_capture_id(before) is None:
        raise ArgumentError("--before", before, "must be a capture id")
    with open_reader(store) as reader:
        rows = list(filtered(reader, status, chosen, limit, before))
    if as_json:
        print_json(*rows)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("capture", "status", "made", "sites", "tags"):
        table.add_column(name, no_wrap=name == "capture")
    table.add_column("prompt", justify="right")
    table.add_column("total", justify="right")
    table.add_column("ended")
    for row in rows:
        table.add_row(row.id, Text(row.status, _STATUS_STYLES.get(row.status, "")), when(row.created_ms),
                      " ".join(row.sites), Text(" ".join(f"{k}={v}" for k, v in row.tags.items())),
                      str(row.prompt_len), str(row.total_len), Text(row.finish_reason or ""))
    narrowed = status is not None or before is not None or chosen != CaptureFilter()
    console().print(table if rows else f"no captures in {shown(store)}"
                    + (" that pass the filters" if narrowed else ""))


def print_manifest(store: Source, ref: str, as_json: bool) -> None:
    """One capture; every sample of it where ``ref`` names several."""
    with open_reader(store) as reader:
        manifests = [reader.manifest(sample) for sample in reader.samples(ref)]
        place = ", ".join(reader.places_of(ref)) if isinstance(reader, SeveralReader) else ""
    if as_json:
        print_json(*manifests, indent=2)
        return
    out = console()
    for manifest in manifests:
        out.print(_facts(manifest, place))
        out.print(_rows(manifest))


def homes(store: Source, refs: list[str]) -> dict[str, list[str]]:
    """The captures' names, by the places of the stores that have them. NotFoundError where none of several has one."""
    places, found = places_of(store.stores if isinstance(store, Cataloged) else store), dict[str, list[str]]()
    if len(places) == 1 and not is_url(places[0]):
        return {str(places[0]): refs}
    with open_reader(store) as reader:
        for ref in refs:
            there = reader.places_of(ref) if isinstance(reader, SeveralReader) else [str(places[0])]
            name = ref if len(there) == 1 else reader.target(ref)[0]  # other writers hear of no response ids
            for place in there:
                found.setdefault(place, []).append(name)
    return found


def left_elsewhere(store: Source, refs: list[str]) -> list[str]:
    """The captures among these that have layers in stores beside those that are named."""
    with open_reader(store) as reader:
        return [sample for ref in refs for sample in reader.samples(ref)
                if reader.manifest(sample).resolved.get("elsewhere")]


def _facts(manifest: Manifest, place: str) -> Table:
    """``place``: the store, where several are read."""
    facts = Table(box=None, show_header=False, pad_edge=False)
    facts.add_column(style="bold")
    facts.add_column()
    ended = manifest.finish_reason or manifest.failed or "not yet"
    if manifest.stop_reason is not None:
        ended += f" ({manifest.stop_reason!r})"
    for name, value in (
        ("capture", Text(manifest.id)),
        ("status", Text(manifest.status, _STATUS_STYLES.get(manifest.status, ""))),
        *([("store", Text(place))] if place else []),
        ("also called", Text(", ".join(manifest.aliases) or "–")),
        ("model", Text(f"{manifest.engine.get('model', '?')}, {manifest.engine.get('model_dtype', '?')}"
                       + (f", adapter {manifest.adapter}" if manifest.adapter else ""))),
        ("edits", Text("\n".join(map(edit_line, manifest.edits)) or "–")),
        ("made", Text(when(manifest.created_ms))),
        ("tokens", Text(f"{manifest.prompt_len} prompt + {manifest.total_len - manifest.prompt_len} generated"
                        + (f", {manifest.cached} from the prefix cache" if manifest.cached else ""))),
        ("ended", Text(ended)),
        ("tags", Text(" ".join(f"{k}={v}" for k, v in manifest.tags.items()) or "–")),
        ("rows", Text(f"{manifest.captured} of {manifest.expected} expected")),
        ("hold", Text("neither deleted nor expired until released" if manifest.hold else "–")),
    ):
        facts.add_row(name, value)
    return facts


def edit_line(edit: dict[str, Any]) -> str:
    """An edit in a line: ``add resid_post.12 generated vector=refusal scale=4: 21 of 21 rows``."""
    if edit["op"] == "stop":
        ended = "".join(f": ended at position {at}" for at in edit.get("switched", ()))
        return f"stop {_condition(edit['when'])}{ended}"
    layers = ranges(edit["layers"])
    where = edit.get("positions", "all")
    rest = {name: value for name, value in edit.items() if name not in ("site", "layers", "op", "positions", "rows")}
    made = "; ".join(f"{rows['applied']} of {rows['expected']} rows"
                     + "".join(f", {rows[why]} {why}" for why in ("cached", "missing") if rows[why])
                     for rows in edit.get("rows", ()))
    told = {"when": _condition, "from": _source}
    asked = [edit["op"], f"{edit['site']}.{layers}", str(where), *(
        told[name](value) if name in told else f"{name}={value}" for name, value in rest.items())]
    return " ".join(asked) + (f": {made}" if made else "")


def _source(source: dict[str, Any]) -> str:
    """Whose rows are set: ``from 01HX… resid_post.3 [4]``, with the positions where they are not those of the edit."""
    where = [f"{source['site']}.{source['layer']}"] if "layer" in source else []
    return " ".join(["from", source["capture"], *where, *([str(source["positions"])] if "positions" in source else []),
                     *(["decoded"] if source.get("decoded") else [])])


def _condition(when: dict[str, Any]) -> str:
    """A condition in words: ``when deception.sad ≥ 0.8, until < 0.3``, of the score ``sad``."""
    score = "" if when.get("score") is None else f".{when['score']}"
    until = "" if when.get("below") is None else f", until < {when['below']}"
    return f"when {when['probe']}{score} ≥ {when['above']}{until}"


def _rows(manifest: Manifest) -> Table:
    """A line for layers of a site that were captured alike."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("site")
    table.add_column("layers")
    table.add_column("codec")
    for name in ("width", "expected", "captured"):
        table.add_column(name, justify="right")
    table.add_column("missing")
    widths = {info.site: info.width for info in manifest.sites}
    for group in _alike(manifest.rows):
        first = group[0]
        gaps = ", ".join(f"{gap.start}–{gap.stop - 1} {gap.reason}" for gap in first.missing[:8])
        if len(first.missing) > 8:
            gaps += f", and {len(first.missing) - 8} more ranges"
        table.add_row(first.site, ranges([row.layer for row in group]), first.codec, str(widths.get(first.site, 0)),
                      str(first.expected), str(first.captured), Text(gaps or "–"))
    return table


def _alike(rows: list[SiteLayer]) -> list[list[SiteLayer]]:
    """Rows that differ in their layer alone, together."""
    groups: dict[tuple[object, ...], list[SiteLayer]] = {}
    for row in rows:
        groups.setdefault((row.site, row.codec, row.expected, row.captured, tuple(row.missing)), []).append(row)
    return list(groups.values())


def ranges(numbers: list[int]) -> str:
    """Numbers in order as text: ``0–3, 7`` for 0, 1, 2, 3, 7."""
    parts: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][1] == number - 1:
            parts[-1] = (parts[-1][0], number)
        else:
            parts.append((number, number))
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in parts)


def when(ms: int) -> str:
    """A moment in milliseconds since 1970, in local time."""
    try:
        return datetime.fromtimestamp(ms / 1000).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):  # whoever sent it may say anything
        return f"{ms} ms"


def console() -> Console:
    """The console that tables are printed on."""
    # A pipe gets whole lines: a program that reads them has no width.
    return Console(highlight=False, width=None if sys.stdout.isatty() else 200)


def progress_bar(what: str) -> Progress:
    """A bar of bytes on stderr, where that is a terminal."""
    return Progress(TextColumn(what), BarColumn(), DownloadColumn(), TimeRemainingColumn(),
                    console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
