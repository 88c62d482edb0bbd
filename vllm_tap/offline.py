"""``vllm-tap capture``: a file of prompts through vLLM in this process, every prompt a capture of its own.

The writer runs beside it as in the service. Generation waits for the disk where it must (nothing is dropped), and the
command ends when the store says that every capture has ended. Started again, after whatever end, it goes on where it
was.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from schemas.channel import ControlChannel
from schemas.codecs import parse_codec
from schemas.control import Abandon, Delete, Own
from schemas.errors import ConflictError, SpecError, StartError, TapError
from schemas.manifest import Manifest
from schemas.probes import Registered, load_probe, probes_text
from schemas.reader import StoreReader
from schemas.sites import parse_site
from schemas.spec import CaptureSpec, Resolved, intervals, parse_spec, resolve
from vllm_tap.prompt_file import Prompt
from vllm_tap.prompt_source import PromptSource
from vllm_tap.resume import WORK, Resume, look
from vllm_tap.services import check_arm, check_model, check_store, check_writable, make_socket_dir
from vllm_tap.writer_process import WriterProcess

if TYPE_CHECKING:
    from vllm import LLMEngine

__all__ = ["CaptureJob", "run"]

_IN_FLIGHT_MAX: Final = 1024  # requests handed to the engine and not finished: bounds memory, keeps batches full
_BATCH: Final = 64  # prompts announced to the writer in one commit
_ANNOUNCE_S: Final = 60.0
_FINISHES_S: Final = 60.0
_SHUTDOWN_S: Final = 20.0
_LET_GO_S: Final = 30.0
_REFUSED_SHOWN: Final = 20


@dataclass(frozen=True, slots=True)
class CaptureJob:
    """What ``vllm-tap capture`` was asked for; TapError where it cannot be."""

    prompts: PromptSource
    model: str
    store: Path
    sites: str | None = None
    layers: str = "all"
    positions: str = "all"
    codec: str = "int8b64"
    max_tokens: int = 16
    temperature: float = 0.0
    arm: str | None = None
    output: Path | None = None
    durability: str = "fsync"
    engine_args: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    probes: tuple[Registered, ...] = ()  # whose scores every prompt gets; without ``sites`` nothing else

    def __post_init__(self) -> None:
        check_model(self.model)
        check_store(self.store)
        check_arm(self.armed)
        parse_codec(self.codec)
        self.spec()
        for probe in self.probes:
            load_probe(probe)
        if self.output is not None:
            if self.output.is_dir():
                raise TapError(f"--output = {str(self.output)!r}: is a folder; name a file")
            check_writable(self.output.absolute().parent, f"--output = {str(self.output)!r}")

    @property
    def armed(self) -> str:
        """The sites to tap: those of ``arm``, else those asked for, else resid_post."""
        if self.arm is not None:
            return self.arm
        if self.sites is None:
            return "resid_post"
        return ",".join(dict.fromkeys(parse_site(name.strip())[0] for name in self.sites.split(",")))

    def settings(self) -> dict[str, Any]:
        """What makes one run another than the next, beside the prompts themselves."""
        known = {probe.name: load_probe(probe).about.fingerprint for probe in self.probes}
        return {"source": self.prompts.name, "model": self.model, "armed": self.armed,
                "spec": self.spec().to_json(), "max_tokens": self.max_tokens, "temperature": self.temperature,
                **({"probes": known} if known else {})}

    def spec(self) -> CaptureSpec:
        """The spec that every prompt gets; SpecError where it is malformed."""
        asked: dict[str, Any] = {"codec": self.codec, "layers": _numbers(self.layers),
                                 "positions": _numbers(self.positions)}
        if self.sites is not None:
            asked["sites"] = [name.strip() for name in self.sites.split(",")]
        if self.probes:
            asked["probe"] = [probe.name for probe in self.probes]
        return parse_spec(asked)


def _numbers(text: str) -> object:
    """``[0, 5]`` of "0,5", the value of JSON text, else the text itself (a name or a slice)."""
    if text.strip().startswith("["):
        try:
            return json.loads(text)
        except ValueError:
            raise TapError(f"{text!r}: malformed list") from None
    if all(part.strip().isdecimal() for part in text.split(",")):
        return [int(part) for part in text.split(",")]
    return text.strip()


@dataclass(slots=True)
class _Tally:
    """What came of the prompts."""

    captures: dict[str, int] = field(default_factory=dict)  # capture id → line
    refused: list[tuple[int, str]] = field(default_factory=list)
    prompt_tokens: int = 0
    generated_tokens: int = 0
    rows: int = 0


def run(job: CaptureJob) -> int:
    """Captures every prompt; 0 where all are complete, 1 where some were refused or are not complete.

    Raises TapError (exit code 2) on malformed input, before anything is started.
    """
    total = _count(job.prompts)
    if total == 0:
        raise TapError(f"PROMPTS = {job.prompts.given!r}: holds no prompt")
    console = Console(stderr=True, highlight=False)
    tally = _Tally()
    began = time.monotonic()
    with ExitStack() as stack:
        socket_dir = make_socket_dir()
        stack.callback(shutil.rmtree, socket_dir, ignore_errors=True)
        endpoint = f"ipc://{socket_dir / 'writer.sock'}"
        writer = _start_writer(stack, job, endpoint)
        try:
            with StoreReader(job.store) as reader:
                resume = look(iter(job.prompts), job.settings(), reader)
        except TapError as error:
            raise TapError(f"{job.prompts.given}, {error}") from None
        if resume.done:
            console.print(f"{len(resume.done)} of {total} prompts are captured already", soft_wrap=True)
        if len(resume.done) == total and job.output is None:
            return 0
        channel = ControlChannel(endpoint, "cli")
        stack.callback(channel.close)
        for stale in resume.stale:  # left half done: never beside what takes its place
            channel.post(partial(Delete, capture=stale))
        _say_codec(console, job)
        console.print(f"{total - len(resume.done)} prompts; starting vLLM with {job.model} (a minute)", soft_wrap=True)
        _set_environment(job, endpoint)
        engine = _start_engine(job)
        stack.callback(engine.engine_core.shutdown, timeout=_SHUTDOWN_S)
        output = stack.enter_context(job.output.open("w", encoding="utf-8")) if job.output is not None else None
        if output is not None:
            output.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in _lines_of(job, resume, engine))
        started = time.monotonic()
        progress = stack.enter_context(Progress(
            TextColumn("capturing"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(), console=console))
        task = progress.add_task("", total=total - len(resume.done), rate="")
        try:
            for line in _generate(engine, job, resume, tally, channel):
                seconds = time.monotonic() - started
                rates = f"{tally.rows / seconds:,.0f} rows/s, {tally.generated_tokens / seconds:.0f} tokens/s"
                progress.update(task, advance=1, rate=rates)
                if output is not None and line is not None:
                    output.write(json.dumps(line, ensure_ascii=False) + "\n")
        except KeyboardInterrupt:
            if writer.failed is None:
                raise
            raise TapError(f"the writer failed: {writer.failed}") from None
        finally:
            progress.stop()
        generated = time.monotonic() - started
        statuses = _await_ends(job.store, tally)
    _print_summary(console, job, tally, statuses, time.monotonic() - began, generated)
    return 0 if not tally.refused and set(statuses) <= {"complete"} else 1


def _count(prompts: PromptSource) -> int:
    """How many prompts there are; TapError on a malformed one or an id used twice."""
    total = 0
    ids: dict[str, int] = {}
    for prompt in prompts:
        total += 1
        if prompt.id is not None and ids.setdefault(prompt.id, prompt.line) != prompt.line:
            raise TapError(f"{prompts.given}, line {prompt.line}: id = {prompt.id!r} is that of line {ids[prompt.id]} "
                           "already")
    return total


def _start_writer(stack: ExitStack, job: CaptureJob, endpoint: str) -> WriterProcess:
    """A writer; that of a run which was just killed may need a moment to let go of the store."""
    deadline = time.monotonic() + _LET_GO_S
    while True:
        try:
            return stack.enter_context(WriterProcess(job.store.absolute(), endpoint, job.durability))
        except StartError as error:
            if "another writer" not in str(error) or time.monotonic() > deadline:
                raise
        time.sleep(0.5)


def _lines_of(job: CaptureJob, resume: Resume, engine: LLMEngine) -> Iterator[dict[str, Any]]:
    """The output lines of what earlier runs captured."""
    tokenizer = engine.get_tokenizer()
    with StoreReader(job.store) as reader:
        for line, capture in resume.done.items():
            found = reader.manifest(capture)
            text = tokenizer.decode(found.output_token_ids, skip_special_tokens=True)
            yield {"line": line, "capture": capture, "text": text, "finish_reason": _reason(found),
                   "prompt_tokens": found.prompt_len, "generated_tokens": found.total_len - found.prompt_len}


def _reason(manifest: Manifest) -> str | None:
    return manifest.client_finish_reason or manifest.finish_reason


def _say_codec(console: Console, job: CaptureJob) -> None:
    """What a legacy codec loses, before anybody relies on it."""
    codec = parse_codec(job.codec)
    if codec.family.legacy:
        console.print(f"rows are stored as {codec.identity}; error: {codec.family.error}", soft_wrap=True, markup=False)


def _set_environment(job: CaptureJob, endpoint: str) -> None:
    os.environ |= {**job.environment, "VLLM_TAP_ENDPOINT": endpoint, "VLLM_TAP_ARM": job.armed,
                   "VLLM_TAP_PROBES": probes_text(job.probes),
                   "VLLM_TAP_ON_FULL": "wait", "VLLM_NO_USAGE_STATS": "1",
                   "VLLM_ACT_CAPTURE": "0"}  # every prompt has a spec of its own
    # A progress bar is no place for vLLM's log; VLLM_LOGGING_LEVEL=INFO and PYTHONWARNINGS=default bring it back.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")


def _start_engine(job: CaptureJob) -> LLMEngine:
    from vllm import EngineArgs, LLMEngine
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="vllm-tap capture … --")
    EngineArgs.add_cli_args(parser)

    def refuse(message: str) -> None:
        raise TapError(f"after --: {message}")

    parser.error = refuse
    return LLMEngine.from_engine_args(
        EngineArgs.from_cli_args(parser.parse_args(
            ["--model", job.model, "--no-use-tqdm-on-load", *job.engine_args])))


def _generate(engine: LLMEngine, job: CaptureJob, resume: Resume, tally: _Tally,
              channel: ControlChannel) -> Iterator[dict[str, Any] | None]:
    """Runs every prompt; yields the output line of each as it ends, None for one that the engine refused."""
    waiting = (prompt for prompt in job.prompts if prompt.line not in resume.done)
    resolved: Resolved | None = None
    running: dict[str, tuple[Prompt, str]] = {}
    exhausted = False
    while running or not exhausted:
        while not exhausted and len(running) <= _IN_FLIGHT_MAX - _BATCH:
            batch = list(islice(waiting, _BATCH))
            exhausted = not batch
            for prompt, capture, asked in _announce(channel, job, resume, batch):
                try:
                    _add(engine, prompt, asked, job)
                except SpecError:
                    raise  # the spec is the same for all
                except Exception as error:
                    if not _is_refusal(error):
                        raise
                    tally.refused.append((prompt.line, str(error)))
                    channel.post(partial(Abandon, capture=capture, reason=str(error)[:500]))
                    yield None
                    continue
                running[str(prompt.line)] = (prompt, capture)
                tally.captures[capture] = prompt.line
        if not running:
            continue
        for output in engine.step():
            if not output.finished:
                continue
            prompt, capture = running.pop(output.request_id)
            done = output.outputs[0]
            tally.prompt_tokens += len(output.prompt_token_ids or ())
            tally.generated_tokens += len(done.token_ids)
            resolved = resolved or _resolved(job)
            tally.rows += _rows(resolved, len(output.prompt_token_ids or ()), len(done.token_ids))
            yield {"line": prompt.line, "capture": capture, "text": done.text, "finish_reason": done.finish_reason,
                   "prompt_tokens": len(output.prompt_token_ids or ()), "generated_tokens": len(done.token_ids)}


def _resolved(job: CaptureJob) -> Resolved | None:
    """What the engine takes of the spec, once the store knows the engine."""
    with StoreReader(job.store) as reader:
        info = reader.engine()
    return None if info is None else resolve(job.spec(), info.armed, info.widths)


def _rows(resolved: Resolved | None, prompt_len: int, generated: int) -> int:
    """How many rows a prompt made."""
    if resolved is None:
        return 0
    end = prompt_len + generated - 1
    positions = sum(max(min(stop, end) - start, 0) for start, stop in intervals(resolved.positions, prompt_len))
    return positions * sum(map(len, resolved.layers.values()))


def _announce(channel: ControlChannel, job: CaptureJob, resume: Resume,
              batch: list[Prompt]) -> list[tuple[Prompt, str, CaptureSpec]]:
    """Tells the writer of the captures to come (their tags, that their ids are taken), in one commit for all."""
    spec = job.spec()
    announced = []
    for prompt in batch:
        capture = resume.capture_of(prompt)
        tags = {"line": str(prompt.line), **prompt.tags, WORK: resume.work_of(prompt)}
        own = partial(Own, capture=capture, count=1, owner="", aliases=[], tags=tags,
                      created_ms=time.time_ns() // 1_000_000)
        if prompt.id is None:
            channel.post(own)
        else:
            try:
                channel.submit(own)  # an id of the caller's may be taken
            except ConflictError as error:
                raise TapError(f"{job.prompts.given}, line {prompt.line}: id = {prompt.id!r}: {error}") from None
        announced.append((prompt, capture, spec.model_copy(update={"id": capture, "tags": tags})))
    deadline = time.monotonic() + _ANNOUNCE_S
    while channel.pending:
        if time.monotonic() > deadline:
            raise TapError(f"the writer took no record for {_ANNOUNCE_S:.0f} s; is its disk full?")
        time.sleep(0.002)
    return announced


def _is_refusal(error: Exception) -> bool:
    """Whether the engine says that the prompt is at fault: a ValueError, since vLLM 0.32 a class of its own."""
    return isinstance(error, ValueError) or any(kind.__name__ == "VLLMClientError" for kind in type(error).__mro__)


def _add(engine: LLMEngine, prompt: Prompt, asked: CaptureSpec, job: CaptureJob) -> None:
    """Hands one prompt over as token ids, so that every vLLM version takes it."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=job.max_tokens, temperature=job.temperature,
                            extra_args={"capture": asked.to_json()})
    ids = prompt.token_ids
    if ids is None:
        tokenizer = engine.get_tokenizer()
        if prompt.messages is not None:
            text = tokenizer.apply_chat_template(prompt.messages, add_generation_prompt=True, tokenize=False)
            ids = tokenizer.encode(text, add_special_tokens=False)
        else:
            ids = tokenizer.encode(prompt.text)
    engine.add_request(str(prompt.line), {"prompt_token_ids": ids}, params)


def _await_ends(store: Path, tally: _Tally) -> Counter[str]:
    """How many captures have each status, once none is open (or after a bounded wait)."""
    deadline = time.monotonic() + _FINISHES_S
    with StoreReader(store) as reader:
        left = set(tally.captures)
        statuses: Counter[str] = Counter()
        while left:
            for capture in sorted(left):
                status = "pending"
                with suppress(TapError):
                    status = reader.capture(capture).status
                if status not in ("pending", "running") or time.monotonic() > deadline:
                    statuses[status] += 1
                    left.discard(capture)
            if left:
                time.sleep(0.1)
    return statuses


def _print_summary(console: Console, job: CaptureJob, tally: _Tally, statuses: Counter[str], seconds: float,
                   generated: float) -> None:
    nbytes = sum(path.stat().st_size for path in job.store.rglob("*") if path.is_file())
    tokens = tally.prompt_tokens + tally.generated_tokens
    counts = ", ".join(f"{count} {status}" for status, count in statuses.most_common()) or "none"
    console.print(f"captures: {counts}; {tally.prompt_tokens} prompt and {tally.generated_tokens} generated tokens "
                  f"({tokens / max(generated, 1e-9):.0f} tokens/s), {seconds:.0f} s in all")
    console.print(f"store {job.store}: {nbytes / 1e6:.1f} MB; look at it with: vllm-tap ls --store {job.store}",
                  soft_wrap=True)
    for line, reason in tally.refused[:_REFUSED_SHOWN]:
        console.print(f"line {line} was refused: {' '.join(reason.split())}", markup=False, soft_wrap=True)
    if len(tally.refused) > _REFUSED_SHOWN:
        console.print(f"and {len(tally.refused) - _REFUSED_SHOWN} more lines were refused")

