"""``vllm-tap capture``: a file of prompts through vLLM in this process, every prompt a capture of its own.

The writer runs beside it as in the service. Generation waits for the disk where it must (nothing is dropped), and the
command ends when the store says that every capture has ended. Started again, after whatever end, it goes on where it
was.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from schemas.codecs import parse_codec
from schemas.errors import SpecError, StartError, TapError
from schemas.legacy import error_text
from schemas.read.reader import StoreReader
from schemas.wire.control_channel import ControlChannel
from schemas.wire.records import Delete
from vllm_tap.exit import Ending
from vllm_tap.offline.engine import Tally, generate, load_tokenizer, start_engine
from vllm_tap.offline.job import CaptureJob
from vllm_tap.offline.limit import limit_lines
from vllm_tap.offline.resume import Resume, is_whole, read_resume
from vllm_tap.serve.services import make_socket_dir
from vllm_tap.serve.writer_process import WriterProcess

__all__ = ["run"]

_FINISHES_S: Final = 60.0
_SHUTDOWN_S: Final = 20.0
_LET_GO_S: Final = 30.0
_PATIENCE_S: Final = 20  # from the first signal on, for what is in flight
_ABORTS_S: Final = 10.0  # of that, for the store
_REFUSED_SHOWN: Final = 20


def run(job: CaptureJob) -> int:
    """Captures every prompt; 0 where all are complete, 1 where some were refused or are not complete, 128 and the
    signal's number where one ended it.

    Raises TapError (exit code 2) on malformed input, before anything is started.
    """
    total = _count(job)
    if total == 0:
        raise TapError(f"PROMPTS = {job.prompts.given!r}: holds no prompt")
    console = Console(stderr=True, highlight=False)
    writers: list[WriterProcess] = []

    def failed() -> str | None:
        return next((writer.failed for writer in writers if writer.failed is not None), None)

    tally = Tally()
    with Ending(_PATIENCE_S, lambda: failed() is not None) as ending:
        try:
            return _run(job, total, ending, writers, tally, console)
        except SystemExit:
            if (why := failed()) is not None:
                raise TapError(f"the writer failed: {why}") from None
            if ending.at_once:
                console.print("interrupted")
                _print_limit(console, writers, tally, job)
            raise


def _run(job: CaptureJob, total: int, ending: Ending, writers: list[WriterProcess], tally: Tally, console: Console
         ) -> int:
    began = time.monotonic()
    with ExitStack() as stack:
        socket_dir = make_socket_dir()
        stack.callback(shutil.rmtree, socket_dir, ignore_errors=True)
        endpoint = f"ipc://{socket_dir / 'writer.sock'}"
        writers.append(_start_writer(stack, job, endpoint))
        resume = _look(job)
        tally.refused.extend(resume.refused.items())
        left = total - len(resume.done) - len(resume.refused)
        if resume.done:
            console.print(f"{len(resume.done)} of {total} prompts are captured already", soft_wrap=True)
        if not left and (job.output is None or not job.own_tokenizer):
            if job.output is not None:
                with _opened(job.output) as file:
                    _write(file, _lines_of(job, resume, load_tokenizer(job)))
            _print_refused(console, tally)
            return 1 if tally.refused else 0
        channel = ControlChannel(endpoint, "cli")
        stack.callback(channel.close)
        for stale in resume.stale:  # left half done: never beside what takes its place
            channel.post(partial(Delete, capture=stale))
        _say_codec(console, job)
        console.print(f"{left} prompts; starting vLLM with {job.model} (a minute)", soft_wrap=True)
        engine = start_engine(job, endpoint)
        stack.callback(engine.engine_core.shutdown, timeout=_SHUTDOWN_S)
        output = None if job.output is None else stack.enter_context(_opened(job.output))
        _write(output, _lines_of(job, resume, engine.get_tokenizer()) if output is not None else ())
        ending.patient = True
        with _bar(console) as bar:
            task = bar.add_task("", total=left, rate="")
            for line in tally.timed(generate(engine, job, resume, tally, channel, lambda: ending.number != 0)):
                bar.update(task, advance=1, rate=tally.rates(tally.generated_s))
                _write(output, [line] if line is not None else ())
        statuses = _await_ends(job.store, tally, _ABORTS_S if ending.number else _FINISHES_S)
        ending.patient = False
    if ending.number:
        whole = len(resume.done) + statuses["complete"] + statuses["empty"]
        console.print(f"interrupted: {whole} of {total} prompts are captured; the same command goes on from there",
                      soft_wrap=True)
        _print_limit(console, writers, tally, job)
        return 128 + ending.number
    _print_summary(console, job, tally, statuses, time.monotonic() - began)
    _print_limit(console, writers, tally, job)
    _print_refused(console, tally)
    return 0 if not tally.refused and set(statuses) <= {"complete", "empty"} else 1


def _count(job: CaptureJob) -> int:
    """The number of prompts; TapError on a malformed one, an id used twice or edits that cannot be made."""
    prompts, total = job.prompts, 0
    ids: dict[str, int] = {}
    for prompt in prompts:
        total += 1
        if prompt.id is not None and ids.setdefault(prompt.id, prompt.line) != prompt.line:
            raise TapError(f"{prompts.given}, line {prompt.line}: id = {prompt.id!r} is that of line {ids[prompt.id]} "
                           "already")
        try:
            job.check_edits(prompt.edit)
        except SpecError as error:
            raise TapError(f"{prompts.given}, line {prompt.line}: {error}") from None
    return total


def _look(job: CaptureJob) -> Resume:
    """The state that earlier runs have left."""
    try:
        with StoreReader(job.store) as reader:
            return read_resume(iter(job.prompts), job.settings(), reader)
    except TapError as error:
        raise TapError(f"{job.prompts.given}, {error}") from None


def _bar(console: Console) -> Progress:
    return Progress(TextColumn("capturing"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"),
                    TimeRemainingColumn(), console=console)


def _opened(output: Path) -> TextIO:
    output.parent.mkdir(parents=True, exist_ok=True)
    return output.open("w", encoding="utf-8")


def _write(output: TextIO | None, lines: Iterable[dict[str, Any]]) -> None:
    """JSON lines, where anybody wants them."""
    if output is not None:
        output.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def _start_writer(stack: ExitStack, job: CaptureJob, endpoint: str) -> WriterProcess:
    """A writer; that of a run which was just killed may need a moment to let go of the store."""
    deadline = time.monotonic() + _LET_GO_S
    while True:
        try:
            return stack.enter_context(WriterProcess(
                job.store.absolute(), endpoint, job.durability, lambda: os.kill(os.getpid(), signal.SIGTERM)))
        except StartError as error:
            if "another writer" not in str(error) or time.monotonic() > deadline:
                raise
        time.sleep(0.5)


def _lines_of(job: CaptureJob, resume: Resume, tokenizer: Any) -> Iterator[dict[str, Any]]:
    """The output lines of what earlier runs captured."""
    with StoreReader(job.store) as reader:
        for line, capture in resume.done.items():
            found = reader.manifest(capture)
            text = tokenizer.decode(found.output_token_ids, skip_special_tokens=True)
            yield {"line": line, "capture": capture, "text": text, "finish_reason": found.finish_reason,
                   "prompt_tokens": found.prompt_len, "generated_tokens": found.total_len - found.prompt_len}


def _say_codec(console: Console, job: CaptureJob) -> None:
    """Print the error of a legacy codec, before anybody relies on it."""
    codec = parse_codec(job.codec)
    if codec.family.legacy:
        console.print(f"rows are stored as {codec.identity}; error: {error_text(codec)}", soft_wrap=True, markup=False)


def _await_ends(store: Path, tally: Tally, timeout_s: float) -> Counter[str]:
    """The number of captures by status, once none is open (or after a bounded wait); ``aborted``: complete, but of a
    generation that did not come to its own end.
    """
    deadline = time.monotonic() + timeout_s
    with StoreReader(store) as reader:
        left = set(tally.captures)
        statuses: Counter[str] = Counter()
        while left:
            for capture in sorted(left):
                status = "pending"
                with suppress(TapError):
                    row = reader.capture(capture)
                    status = "aborted" if row.status in ("complete", "empty") and not is_whole(row) else row.status
                if status not in ("pending", "running") or time.monotonic() > deadline:
                    statuses[status] += 1
                    left.discard(capture)
            if left:
                time.sleep(0.1)
    return statuses


def _print_limit(console: Console, writers: list[WriterProcess], tally: Tally, job: CaptureJob) -> None:
    """Print for what generation waited, however it ended; nothing where it never began."""
    if writers and tally.began_s:
        for said in limit_lines(writers[0].times, tally.generated_s, job):
            console.print(said, markup=False, soft_wrap=True)


def _print_summary(console: Console, job: CaptureJob, tally: Tally, statuses: Counter[str], seconds: float) -> None:
    nbytes = sum(path.stat().st_size for path in job.store.rglob("*") if path.is_file())
    tokens = tally.prompt_tokens + tally.generated_tokens
    counts = ", ".join(f"{count} {status}" for status, count in statuses.most_common()) or "none"
    console.print(f"captures: {counts}; {tally.prompt_tokens} prompt and {tally.generated_tokens} generated tokens "
                  f"({tokens / max(tally.generated_s, 1e-9):.0f} tokens/s), {seconds:.0f} s in all", soft_wrap=True)
    console.print(f"store {job.store}: {nbytes / 1e6:.1f} MB; look at it with: vllm-tap ls --store {job.store}",
                  soft_wrap=True)


def _print_refused(console: Console, tally: Tally) -> None:
    for line, reason in tally.refused[:_REFUSED_SHOWN]:
        console.print(f"line {line} was refused: {' '.join(reason.split())}", markup=False, soft_wrap=True)
    if len(tally.refused) > _REFUSED_SHOWN:
        console.print(f"and {len(tally.refused) - _REFUSED_SHOWN} more lines were refused")

