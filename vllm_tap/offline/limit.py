"""The stage that held generation up, told at the end of a run, and what would lift it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from schemas.codecs import parse_codec, row_bytes
from schemas.wire.line_times import LineTimes
from vllm_tap.offline.job import CaptureJob, read_numbers
from vllm_tap.sizes import size_text

__all__ = ["limit_lines", "recording_limit_lines"]

_LIGHTER: Final = ("int8b64", "nf4b64")  # codecs of every site, by how much they keep
_WIDTH: Final = 4096  # codecs are compared by rows of so many numbers
_PROCESSORS: Final = "more processors"


@dataclass(frozen=True, slots=True)
class _Words:
    """Remedies as whoever reads them says it."""

    disk: str
    os: str
    ring: str


_COMMAND: Final = _Words("another disk for --store", "--durability os", "a larger ring (VLLM_TAP_RING_BYTES)")
_SCRIPT: Final = _Words("another disk for store", 'durability="os"', "a larger ring (ring_bytes)")


def limit_lines(times: LineTimes | None, generated_s: float, job: CaptureJob) -> list[str]:
    """Two lines: how long of ``generated_s`` seconds generation waited and for what, and what would lift it; none where
    it never waited.
    """
    share = 0.0 if times is None else min(times.waited / max(generated_s, 1e-9), 1.0)
    return _lines(times, f" of {generated_s:.2f} s ({share:.0%})", job.durability, _COMMAND, _fewer_bytes(job))


def recording_limit_lines(times: LineTimes | None, durability: str) -> list[str]:
    """The same of a recording, which does not know when generation began, nor what each request asked for."""
    return _lines(times, "", durability, _SCRIPT, ["a codec of fewer bytes", "fewer sites, layers or positions"])


def _lines(times: LineTimes | None, share: str, durability: str, words: _Words, fewer: Iterable[str]) -> list[str]:
    if times is None:
        return ["the writer did not end in order: whether generation waited for it is not known"]
    if not times.waited:
        return []
    stage, remedies = _limit(times, durability, words)
    return [f"generation waited {times.waited:.2f} s{share} for room for its rows "
            f"({size_text(times.payload_bytes)}); the limit: {stage}",
            f"what would lift it: {', or '.join([*remedies, *fewer])}"]


def _limit(times: LineTimes, durability: str, words: _Words) -> tuple[str, list[str]]:
    """The stage that was waited for longest, and what makes it faster."""
    if times.copies > max(times.sender, times.writer):
        return f"copies from the device ({times.copies:.2f} s)", []
    if times.sender > times.writer:
        return f"the sender, which hashes rows and gives them to the writer ({times.sender:.2f} s)", [_PROCESSORS]
    by_stage = {"appending": times.appending, "held": times.held}
    if durability == "fsync":  # else room is made before anything is synced
        by_stage["syncing"] = times.syncing
    longest = max(by_stage, key=lambda name: by_stage[name])
    seconds = by_stage[longest]
    if seconds < times.writer / 2:
        return (f"the writer ({times.writer:.2f} s), of whose stages none was at work for half of that time: the ring "
                "has room for little at once, or processors are busy"), [words.ring, _PROCESSORS]
    match longest:
        case "syncing":
            return f"the disk, which the writer synced for {seconds:.2f} s", [words.disk, words.os]
        case "held":
            return f"the disk, for which the writer received nothing for {seconds:.2f} s", [words.disk]
        case _:
            return f"the writer, which checked and wrote rows for {seconds:.2f} s", [words.disk, _PROCESSORS]


def _fewer_bytes(job: CaptureJob) -> Iterator[str]:
    """Arguments that make fewer bytes of rows than the job's."""
    if job.sites is None and job.probes:
        yield "fewer probes"
    else:
        size = row_bytes(parse_codec(job.codec).identity, _WIDTH, "bfloat16")
        lighter = next((name for name in _LIGHTER if row_bytes(name, _WIDTH, "bfloat16") < size), None)
        if lighter is not None:
            yield f"--codec {lighter}"
        layers = read_numbers("--layers", job.layers)
        flags = [flag for flag, is_many in (
            ("--layers", not isinstance(layers, list) or len(layers) > 1), ("--sites", len(job.sites_asked) > 1),
        ) if is_many]
        if flags:
            yield f"fewer {' or '.join(flags)}"
    if job.positions == "all":
        yield "fewer --positions"
