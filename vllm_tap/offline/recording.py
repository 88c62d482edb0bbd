"""Capturing in a script of one's own: ``LLM`` and ``generate`` as ever, inside ``with recording(…)``.

>>> with recording("captures", arm="resid_post") as tape:                         # doctest: +SKIP
...     llm = LLM("Qwen/Qwen3-0.6B")
...     outputs = llm.generate(prompts, SamplingParams(extra_args=capture_args(sites=["resid_post"], layers=[12])))
...     tape.capture(outputs[0])["resid_post", 12].shape
(20, 1024)
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from schemas.checks import Durability, OnFull, check_one_of, parse_arm
from schemas.edits.arms import EditArms
from schemas.errors import NotFoundError, StartError, TapError
from schemas.manifest import Manifest
from schemas.probes import load_probe, parse_probes, probes_text
from schemas.read.reader import StoreReader
from schemas.spec import parse_spec
from schemas.wire.engine_info import EngineInfo
from vllm_tap.client.captures import Capture
from vllm_tap.client.listing import Filters
from vllm_tap.offline.limit import recording_limit_lines
from vllm_tap.serve.services import check_store, make_socket_dir
from vllm_tap.serve.writer_process import WriterProcess
from vllm_tap.store import Store, open_store

__all__ = ["Recording", "capture_args", "manifest", "recording"]

_ENDPOINT: Final = "VLLM_TAP_ENDPOINT"
_MANIFEST: Final = "activation_manifest"  # where the engine's front end leaves the ids of an output's captures
_WAIT_S: Final = 30.0
_KNOWN_S: Final = 60.0
logger = logging.getLogger("vllm_tap.recording")
logger.setLevel(logging.WARNING)  # vLLM's API server has a library set the root logger to ERROR
_lock = threading.Lock()
_newest: Recording | None = None


@dataclass(frozen=True, slots=True)
class Recording:
    """A store that the engines of this process write to; ``store`` is readable while they do."""

    path: Path
    store: Store

    def captures(self, output: Any) -> list[Capture]:
        """The captures of a ``RequestOutput``, one a sample; TapError where it was made without any."""
        return [Capture(self.store, capture, _WAIT_S) for capture in _ids(output)]

    def capture(self, output: Any, sample: int = 0) -> Capture:
        """The capture of one sample of a ``RequestOutput``."""
        return self.captures(output)[sample]


@contextmanager
def recording(store: str | Path = "captures", arm: str | Sequence[str] = "resid_post", *, on_full: str = "wait",
              durability: str = "fsync", ring_bytes: int | None = None, wait_s: float = 60.0,
              probes: Mapping[str, str | Path] | None = None, edit: str | Sequence[str] = (),
              vectors: Mapping[str, str | Path] | None = None) -> Iterator[Recording]:
    """Start a writer beside this process and arm every ``LLM`` that is created in the block.

    On exit, wait for open captures, and log which stage held generation up, if any did. Afterwards such an engine
    refuses captures and serves other requests.

    Args:
        store: the folder of captures.
        arm: sites to tap, each in every layer (``resid_post``) or in one (``resid_post.12``).
        on_full: "wait": generation waits for the disk; "drop": rows are dropped, and named in the manifest.
        durability: "fsync": a row is acknowledged once it is on the disk; "os": once the operating system has it.
        ring_bytes: bytes of encoded rows that may wait for the writer.
        wait_s: seconds to wait for open captures on exit.
        probes: files of probes by name.
        edit: sites whose rows requests may have edited, with ``SamplingParams(extra_args={"edit": […]})``.
        vectors: files of vectors that edits may name.

    Raises:
        StartError: the setup is invalid; nothing was started.
    """
    global _newest
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # as multiprocessing itself tells it
        raise StartError("recording() is called while a process that vLLM starts imports this script: put what the "
                         "script does under `if __name__ == \"__main__\":`")
    armed = ",".join(parse_arm("arm", arm if isinstance(arm, str) else ",".join(arm)))
    path = check_store(Path(store)).absolute()
    registered = parse_probes((f"{name}={file}" for name, file in (probes or {}).items()))
    for probe in registered:
        load_probe(probe)
    edits = EditArms(edit if isinstance(edit, str) else ",".join(edit), None, None, parse_probes(
        (f"{name}={file}" for name, file in (vectors or {}).items()), "vectors", "vector"))
    edits.check("edit", "edit_depth", "vectors")
    check_one_of("on_full", on_full, OnFull)
    check_one_of("durability", durability, Durability)
    with ExitStack() as stack:
        if not _lock.acquire(blocking=False):
            raise StartError("a recording is running in this process already; one at a time")
        stack.callback(_lock.release)
        if os.environ.get(_ENDPOINT):
            raise StartError(f"{_ENDPOINT}={os.environ[_ENDPOINT]!r}: this process is set up for another writer; unset "
                             "it, or make the LLM without recording()")
        sockets = make_socket_dir()
        stack.callback(shutil.rmtree, sockets, ignore_errors=True)
        endpoint = f"ipc://{sockets / 'writer.sock'}"
        writer = WriterProcess(path, endpoint, durability)
        stack.callback(_say_limit, writer, durability)
        stack.enter_context(writer)
        with StoreReader(path) as reader:
            strangers = _open_captures(reader)  # of engines that were killed before they began or ended them
        settings = {_ENDPOINT: endpoint, "VLLM_TAP_ARM": armed, "VLLM_TAP_ON_FULL": on_full, "VLLM_ACT_CAPTURE": "0",
                    "VLLM_TAP_PROBES": probes_text(registered), **edits.environment()}
        if ring_bytes is not None:
            settings["VLLM_TAP_RING_BYTES"] = str(ring_bytes)
        stack.callback(_restore, {name: os.environ.get(name) for name in settings})
        os.environ |= settings
        # vLLM loads its plugins once a process: one that had an engine before would not ask again.
        from engine_side import plugin
        from engine_side.front import admission

        plugin.register()
        stack.callback(admission.retire, endpoint)
        made = Recording(path, stack.enter_context(open_store(path)))
        _newest = made
        try:
            yield made
        except KeyboardInterrupt:
            if writer.failed is None:
                raise
            raise TapError(f"the writer failed: {writer.failed}") from None
        admission.retire(endpoint)
        _await_ends(path, strangers, wait_s)


def capture_args(**spec: Any) -> dict[str, str]:
    """``extra_args`` for ``SamplingParams`` that capture a request as the fields of ``spec`` say.

    Examples:
        >>> capture_args(sites=["resid_post"], layers=[12], positions="last_prompt")         # doctest: +SKIP
        {'capture': '{"sites":["resid_post"],"layers":[12],"positions":"last_prompt"}'}

    SpecError on a field that cannot be had; TapError where no recording is running, since nothing would be captured.
    """
    asked = parse_spec(spec)
    if not os.environ.get(_ENDPOINT):
        raise TapError("capture_args(): no recording is running, so nothing would be captured; make the LLM and "
                       "generate inside `with vllm_tap.recording(…)`")
    return {"capture": asked.to_json()}


def manifest(output: Any, sample: int = 0, store: str | Path | None = None) -> Manifest:
    """The manifest of a captured ``RequestOutput``, once it is final (at most 30 s).

    ``store`` is that of the newest recording of this process where it is not named.
    """
    capture = _ids(output)[sample]
    if store is None and _newest is None:
        raise TapError("manifest(): there was no recording in this process; name the store")
    with open_store(_newest.path if store is None and _newest else store or "") as opened:
        return Capture(opened, capture).wait(_WAIT_S)


def _ids(output: Any) -> list[str]:
    for place in (getattr(output, "metrics", None), output):
        reference = getattr(place, _MANIFEST, None)
        if reference is not None:
            return list(reference["captures"])
    raise NotFoundError(f"request {getattr(output, 'request_id', '?')} was generated without a capture; give its "
                        "SamplingParams extra_args=capture_args(…)")


def _say_limit(writer: WriterProcess, durability: str) -> None:
    """Log for what generation waited, however the block ended; nothing where the writer never began."""
    if writer.began:
        for said in recording_limit_lines(writer.times, durability):
            logger.warning("vllm-tap: %s", said)


def known_engine(tape: Recording) -> EngineInfo:
    """Description of the recording's engine, as soon as the store has it: a busy writer hears of it after its start.
    StartError where it does not within a minute.
    """
    deadline = time.monotonic() + _KNOWN_S
    while (info := tape.store.engine()) is None:
        if time.monotonic() > deadline:
            raise StartError(f"the engine did not make itself known to the store within {_KNOWN_S:g} s")
        time.sleep(0.02)
    return info


def _restore(before: dict[str, str | None]) -> None:
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _open_captures(reader: StoreReader) -> set[str]:
    """The captures that have not ended."""
    return {row.id for status in ("pending", "running") for row in Filters(status).of(reader)}


def _await_ends(path: Path, strangers: set[str], wait_s: float) -> None:
    """Wait until every capture that a client saw the end of has ended in the store too: its rows may be on their way.
    """
    end_s = time.monotonic() + wait_s
    with StoreReader(path) as reader:
        while left := _open_captures(reader) - strangers:
            if time.monotonic() > end_s:
                raise TapError(f"{len(left)} captures have not ended within {wait_s:g} s, such as {min(left)}: is the "
                               "engine still generating?")
            time.sleep(0.05)
