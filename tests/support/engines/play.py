"""Requests played on a real engine, step by step: they arrive while others run, and some are given up."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from schemas.errors import NotFoundError
from schemas.ids import new_ulid
from schemas.read.reader import StoreReader
from tests.support.engines.accounts import Circumstances, Request, Rows, Seen, check, tell
from tests.support.engines.draws import Setting
from tests.support.engines.engines import DTYPE, ON_GPU, SHARED, in_this_process, model, shut_down
from tests.support.models.coded_model import coded_model
from tests.support.processes import PATIENCE_S


@dataclass
class Played:
    """A request that has ended, with its samples and, where it has a capture, their capture ids."""

    request: Request
    seen: list[Seen]
    captures: list[str]

    @property
    def tokens(self) -> list[tuple[int, ...]]:
        """What each sample generated."""
        return [seen.tokens for seen in self.seen]


def prove(llm: Any, reader: StoreReader, requests: Sequence[Request], under: Circumstances, rows: Rows = tell,
          frozen: int | None = None) -> list[Played]:
    """Play the requests and hold every capture and every row of it against what must be there.

    ``frozen``: the process id of a writer that stands still meanwhile.
    """
    before = counted(llm, "vllm:num_preemptions")
    if frozen is not None:
        os.kill(frozen, signal.SIGSTOP)
    try:
        played = play(llm, requests)
    finally:
        if frozen is not None:
            os.kill(frozen, signal.SIGCONT)
    settle(reader, played)
    under = replace(under, preemptions=under.preemptions and counted(llm, "vllm:num_preemptions") > before)
    for one in played:
        for capture, seen in zip(one.captures, one.seen, strict=bool(one.captures)):
            try:
                check(reader, capture, one.request, seen, under, rows)
            except AssertionError as error:
                error.add_note(f"of {one.request}; its client saw {seen}; {under}; {reader.manifest(capture)}")
                raise
    return played


@contextmanager
def engine(setting: Setting) -> Iterator[Any]:
    """An ``LLM`` in this process: each of its steps happens when it is asked for, and nothing depends on the clock."""
    from vllm import LLM

    before = dict(os.environ)
    os.environ |= setting.environment
    path = coded_model(DTYPE) if setting.family == "coded" else model(setting.family)
    try:
        with in_this_process(not ON_GPU):
            llm = LLM(str(path), dtype=DTYPE, **setting.options, **SHARED)
    finally:
        os.environ.clear()
        os.environ |= before
    try:
        yield llm
    finally:
        shut_down(llm)


def play(llm: Any, requests: Sequence[Request]) -> list[Played]:
    """Run all requests to their end; the captures may still be on their way to the store."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    played, waiting = [], list(enumerate(requests))
    for request in requests:
        ulid = new_ulid()
        ids = [] if request.spec is None else [ulid] if request.n == 1 else [f"{ulid}.{k}" for k in range(request.n)]
        played.append(Played(request, [Seen() for _ in range(request.n)], ids))
    step = 0
    while waiting or engine.has_unfinished_requests():
        for number, request in [pair for pair in waiting if pair[1].arrival <= step]:
            waiting.remove((number, request))
            ids = played[number].captures
            extra = {} if request.spec is None else {"capture": {**request.spec, "id": ids[0].split(".")[0]}}
            extra |= {} if request.edits is None else {"edit": request.edits}
            params = SamplingParams(**{"temperature": 0.0, **request.params}, extra_args=extra or None)
            engine.add_request(str(number), {"prompt_token_ids": list(request.prompt)}, params,
                               priority=request.priority)
        for number, request in enumerate(requests):
            if request.abort is not None and step == request.arrival + request.abort:
                engine.abort_request([str(number)])
        if engine.has_unfinished_requests():
            for output in engine.step():
                _note(played[int(output.request_id)].seen, output)
        step += 1
    return played


def _note(samples: list[Seen], output: Any) -> None:
    for part in output.outputs:
        seen = samples[part.index]
        seen.tokens, seen.cached = tuple(part.token_ids), output.num_cached_tokens
        seen.reason, seen.stop_reason = part.finish_reason, part.stop_reason


def counted(llm: Any, name: str) -> int:
    """A counter of vLLM's, such as vllm:num_preemptions."""
    return sum(int(metric.value) for metric in llm.get_metrics() if metric.name == name)


def settle(reader: StoreReader, played: Sequence[Played], timeout_s: float = PATIENCE_S) -> None:
    """Wait until the store knows the end of every capture, as the engine and, if it saw it, as the client."""
    deadline = time.monotonic() + timeout_s
    for one in played:
        for capture, seen in zip(one.captures, one.seen, strict=False):
            while not _ended(reader, capture, seen):
                assert time.monotonic() < deadline, f"{capture} did not end: {one.request}"
                time.sleep(0.01)


def _ended(reader: StoreReader, capture: str, seen: Seen) -> bool:
    try:
        row = reader.capture(capture)
        if row.status in ("pending", "running"):
            return False
        return seen.reason is None or reader.manifest(capture).client_finish_reason is not None
    except NotFoundError:
        return False
