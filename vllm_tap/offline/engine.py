"""The engine of ``vllm-tap capture``, in this process: every prompt is announced to the writer, then generated."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, TypeVar

from schemas.errors import ConflictError, EditError, SpecError, StartError, TapError
from schemas.probes import probes_text
from schemas.read.reader import StoreReader
from schemas.spec import CaptureSpec, Resolved, intervals, resolve
from schemas.wire.control_channel import ControlChannel
from schemas.wire.records import Abandon, Own
from vllm_tap.offline.job import CaptureJob
from vllm_tap.offline.prompt_file import Prompt
from vllm_tap.offline.resume import WORK, Resume
from vllm_tap.serve.causes import advice_for, output_heard

if TYPE_CHECKING:
    from vllm import EngineArgs, LLMEngine

__all__ = ["Tally", "engine_args", "generate", "load_tokenizer", "start_engine", "started", "token_ids"]

T = TypeVar("T")

_IN_FLIGHT_MAX: Final = 1024  # requests handed to the engine and not finished: bounds memory, keeps batches full
_BATCH: Final = 64  # prompts announced to the writer in one commit
_ANNOUNCE_S: Final = 60.0


@dataclass(slots=True)
class Tally:
    """The outcome of the prompts."""

    captures: dict[str, int] = field(default_factory=dict)  # capture id → line
    refused: list[tuple[int, str]] = field(default_factory=list)
    prompt_tokens: int = 0
    generated_tokens: int = 0
    rows: int = 0
    began_s: float = 0.0  # when generation did, by the monotonic clock; 0.0: not yet
    ended_s: float = 0.0  # and when it ended

    @property
    def generated_s(self) -> float:
        """Seconds since generation began, or that it took."""
        return (self.ended_s or time.monotonic()) - self.began_s

    def timed(self, lines: Iterator[T]) -> Iterator[T]:
        """The same, with the times noted between which they are made, however that ends."""
        self.began_s = time.monotonic()
        try:
            yield from lines
        finally:
            self.ended_s = time.monotonic()

    def rates(self, seconds: float) -> str:
        """Rows and tokens made per second of ``seconds``."""
        return f"{self.rows / seconds:,.0f} rows/s, {self.generated_tokens / seconds:.0f} tokens/s"


def start_engine(job: CaptureJob, endpoint: str) -> LLMEngine:
    """An engine as the job wants it, whose rows go to the writer at ``endpoint``."""
    _set_environment(job, endpoint)
    return started(job.model, job.engine_args)


def started(model: str, words: Sequence[str]) -> LLMEngine:
    """An engine of ``model`` with vLLM's arguments ``words``; StartError that says why vLLM did not start."""
    from vllm import LLMEngine

    try:
        with output_heard() as causes:  # the engine is a process of its own, whose log alone has why it ended
            return LLMEngine.from_engine_args(engine_args(model, words))
    except (ValueError, RuntimeError, OSError) as error:
        for line in f"{type(error).__name__}: {error}".splitlines():
            causes.hear(line)
        if isinstance(error, TapError) or (cause := causes.cause) is None:
            raise
        helping = "" if (advice := advice_for(cause)) is None else f"; what helps: {advice}"
        raise StartError(f"vLLM did not start: {cause}{helping}") from None


def engine_args(model: str, words: Sequence[str]) -> EngineArgs:
    """vLLM's arguments of an engine for ``model``, with the ``words`` after --; TapError where it knows one not."""
    from vllm import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="vllm-tap … --")
    EngineArgs.add_cli_args(parser)

    def refuse(message: str) -> None:
        raise TapError(f"after --: {message}")

    parser.error = refuse
    return EngineArgs.from_cli_args(parser.parse_args(["--model", model, "--no-use-tqdm-on-load", *words]))


def _set_environment(job: CaptureJob, endpoint: str) -> None:
    os.environ |= {**job.environment, "VLLM_TAP_ENDPOINT": endpoint, "VLLM_TAP_ARM": job.armed,
                   "VLLM_TAP_PROBES": probes_text(job.probes), **job.arms.environment(),
                   "VLLM_TAP_ON_FULL": "wait", "VLLM_TAP_OWN_GROUP": "1", "VLLM_NO_USAGE_STATS": "1",
                   "VLLM_ACT_CAPTURE": "0"}  # every prompt has a spec of its own
    # A progress bar is no place for vLLM's log; VLLM_LOGGING_LEVEL=INFO and PYTHONWARNINGS=default bring it back.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")


def generate(engine: LLMEngine, job: CaptureJob, resume: Resume, tally: Tally, channel: ControlChannel,
             is_ending: Callable[[], bool]) -> Iterator[dict[str, Any] | None]:
    """Runs every prompt; yields the output line of each as it ends, None for one that the engine refused.

    Once ``is_ending``, asked between steps, what is in flight is aborted, and no more is begun.
    """
    waiting = (prompt for prompt in job.prompts if resume.is_left(prompt))
    ready: deque[tuple[Prompt, str, CaptureSpec]] = deque()  # announced, and not yet with the engine
    resolved: Resolved | None = None
    running: dict[str, tuple[Prompt, str]] = {}
    exhausted = False
    while running or ready or not exhausted:
        if is_ending():
            engine.abort_request(list(running))
            return
        while not exhausted and len(running) + len(ready) <= _IN_FLIGHT_MAX - _BATCH:
            batch = list(islice(waiting, _BATCH))
            exhausted = not batch
            ready.extend(_announce(channel, job, resume, batch))
        while ready:
            prompt, capture, asked = ready[0]
            if (refusal := _add(engine, prompt, asked, job)) is not None:
                if _has_rows(job, prompt) and any(_has_rows(job, other) for other, _ in running.values()):
                    break  # there may be room for its rows once theirs are let go
                tally.refused.append((prompt.line, refusal))
                channel.post(partial(Abandon, capture=capture, reason=refusal[:500]))
                yield None
            else:
                running[str(prompt.line)] = (prompt, capture)
                tally.captures[capture] = prompt.line
            ready.popleft()
        if not running:
            continue
        for output in engine.step():
            if not output.finished:
                continue
            prompt, capture = running.pop(output.request_id)
            done = output.outputs[0]
            prompt_len, generated = len(output.prompt_token_ids or ()), len(done.token_ids)
            resolved = resolved or _resolved(job)
            tally.prompt_tokens += prompt_len
            tally.generated_tokens += generated
            tally.rows += _rows(resolved, prompt_len, generated)
            yield {"line": prompt.line, "capture": capture, "text": done.text, "finish_reason": done.finish_reason,
                   "prompt_tokens": prompt_len, "generated_tokens": generated}


def _has_rows(job: CaptureJob, prompt: Prompt) -> bool:
    """Whether the engine keeps rows of a prompt's edits while it runs, of which there is room for so many."""
    return any("rows" in each for each in job.edits_of(prompt))


def _resolved(job: CaptureJob) -> Resolved | None:
    """The spec as the engine resolves it, once the store knows the engine."""
    with StoreReader(job.store) as reader:
        info = reader.engine()
    return None if info is None else resolve(job.spec(), info.armed, info.widths)


def _rows(resolved: Resolved | None, prompt_len: int, generated: int) -> int:
    """The number of rows that a prompt made."""
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
    if not channel.flush(_ANNOUNCE_S):
        raise TapError(f"the writer took no record for {_ANNOUNCE_S:.0f} s; is its disk full?")
    return announced


def _add(engine: LLMEngine, prompt: Prompt, asked: CaptureSpec, job: CaptureJob) -> str | None:
    """Hands one prompt over as token ids, so that every vLLM version takes it; why it refuses it, where it does."""
    from vllm import SamplingParams

    edit = job.edits_of(prompt)
    params = SamplingParams(max_tokens=job.max_tokens, temperature=job.temperature,
                            extra_args={"capture": asked.to_json(), **({"edit": edit} if edit else {})})
    try:
        engine.add_request(str(prompt.line), {"prompt_token_ids": token_ids(engine.get_tokenizer(), prompt)}, params)
    except SpecError as error:
        if not isinstance(error, EditError):
            raise  # the spec is the same for all
        return str(error)
    except Exception as error:
        if not _is_refusal(error):
            raise
        return str(error)
    return None


def load_tokenizer(job: CaptureJob) -> Any:
    """The tokenizer of the model, without its engine; for a job without one of its own."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(job.model)
    except Exception as error:
        raise TapError(f"the tokenizer of {job.model}: {type(error).__name__}: {error}") from None


def token_ids(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Tokens that the model reads; ValueError where the tokenizer or its chat template raises at the prompt."""
    if prompt.token_ids is not None:
        return prompt.token_ids
    try:
        if prompt.messages is None:
            return list(tokenizer.encode(prompt.text))
        text = tokenizer.apply_chat_template(prompt.messages, add_generation_prompt=True, tokenize=False)
        if any(isinstance(said := message["content"], list) and said and str(said) in text
               for message in prompt.messages):
            raise ValueError("the model's chat template takes content as a text, not as a list of parts")
        return list(tokenizer.encode(text, add_special_tokens=False))
    except Exception as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _is_refusal(error: Exception) -> bool:
    """Whether the engine says that the prompt is at fault: a ValueError, since vLLM 0.32 a class of its own."""
    return isinstance(error, ValueError) or any(kind.__name__ == "VLLMClientError" for kind in type(error).__mro__)
