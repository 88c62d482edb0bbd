"""The model runners: which rows of a step are whose. Wraps ``execute_model`` of both runners' classes.

The finishes that the scheduler saw ride on its output and are taken first: all rows of a finished request were
computed in earlier calls.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from copy import copy
from functools import partial
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine_side import worker
from engine_side.edits.conditions import Conditions
from engine_side.edits.edited import Edited
from engine_side.edits.editor import Editor
from engine_side.front.ticket import find, find_edits, unread
from engine_side.seams.kept.finite import keep_logits
from engine_side.seams.patching import is_wrapped, wrap_when_imported
from engine_side.seams.scheduler import FINISHED, STOPPED
from engine_side.step.selection import Step
from schemas.errors import StartError

logger = logging.getLogger("vllm.tap")

# Of a runner's last step: its batch, the position of each request's first row and the offsets of their rows (behind
# them numbers that mean nothing), token ids and positions on the device, and how much too high positions may be.
Batch = tuple[Any, npt.NDArray[Any], npt.NDArray[Any], torch.Tensor, torch.Tensor, int]
ReadBatch = Callable[[Any], Batch]
_failed = False
_unread = False


def connect() -> None:
    """Install the wrappers."""
    wrap_when_imported("vllm.v1.worker.gpu_model_runner", {
        "GPUModelRunner.execute_model": partial(_execute_model, layout=_layout_v1),
        "GPUModelRunner._prepare_inputs": partial(_prepare_inputs, layout=_rows_v1),
        "GPUModelRunner.sample_tokens": _sample_tokens,
    })
    wrap_when_imported("vllm.v1.worker.gpu.model_runner", {
        "GPUModelRunner.execute_model": partial(_execute_model, layout=_layout_v2),
        "GPUModelRunner.prepare_inputs": partial(_prepare_inputs, layout=_rows_v2),
        "GPUModelRunner.sample_tokens": _sample_tokens,
    })
    wrap_when_imported("vllm.model_executor.layers.logits_processor", {"LogitsProcessor.forward": keep_logits})


def check_wrapped(runner: type) -> None:
    """StartError for a runner of another kind than the two known ones: its steps would not be seen."""
    if not any(is_wrapped(cls.__dict__.get("execute_model")) for cls in runner.__mro__):
        known = "vllm.v1.worker.gpu_model_runner.GPUModelRunner and vllm.v1.worker.gpu.model_runner.GPUModelRunner"
        raise StartError(f"vllm-tap: this engine uses the runner {runner.__module__}.{runner.__qualname__}, and "
                         f"vllm-tap captures steps of {known} only; start without the plugin that brings this runner")


def check_fills(runner: Any) -> None:
    """StartError for a runner that takes up requests, lays out a step's rows or hands on its tokens in a way of its
    own. Called where edits may be asked for. Such a way beside vLLM's own would run rows unedited, edit the rows of
    others, or keep from the scheduler that a probe ended a request.
    """
    lays_out = "_prepare_inputs" if hasattr(runner, "_prepare_inputs") else "prepare_inputs"
    for name in ("execute_model", lays_out, "sample_tokens"):
        if not is_wrapped(getattr(runner, name, None)):
            kind = type(runner)
            raise StartError(f"vllm-tap: edits and probes cannot be used with {kind.__module__}.{kind.__qualname__}: "
                             f"its {name} is not that of vLLM's GPUModelRunner, so rows could not be assigned to "
                             "requests; leave out --edit (VLLM_TAP_EDIT) and --probe (VLLM_TAP_PROBES), or use vLLM's "
                             "own runner")


def input_ids(runner: Any) -> torch.Tensor:
    """The token ids of the last step, on the device, from the buffer that the model reads: [max tokens]."""
    if hasattr(runner, "input_buffers"):
        return runner.input_buffers.input_ids
    return runner.input_ids.gpu


def _execute_model(original: Callable[..., Any], layout: ReadBatch) -> Callable[..., Any]:
    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        # Every function that a step enters costs it some microseconds: its caches hold other things by then. So
        # what is asked in every step is asked here.
        current = worker.CURRENT
        ended: dict[str, Edited] = {}
        if current is not None and current.editor is not None:
            ended = _see_edited(current.editor, scheduler_output)
        if current is None:
            return original(self, scheduler_output, *args, **kwargs)
        recorder = current.recorder
        recorder.number += 1  # on every rank alike, whatever one of them takes
        if (recorder.idle and not scheduler_output.scheduled_new_reqs
                and not hasattr(scheduler_output, FINISHED)):
            return original(self, scheduler_output, *args, **kwargs)
        if kwargs.get("dummy_run"):
            _guarded(recorder, recorder.end_burst)  # whose steps are counted one after the other
            return original(self, scheduler_output, *args, **kwargs)
        for end in getattr(scheduler_output, FINISHED, ()):
            _guarded(recorder, recorder.finish, end, ended.get(end.request))
        if scheduler_output.scheduled_cached_reqs.resumed_req_ids:
            _guarded(recorder, _resume, recorder, scheduler_output.scheduled_cached_reqs)
        tokens = scheduler_output.total_num_scheduled_tokens
        try:
            prompts = tokens > len(scheduler_output.num_scheduled_tokens)
            if prompts:  # there is nothing to take before the first of them
                _look_at(recorder, self)
            recorder.before_step(tokens, prompts and recorder.defer_to_next_call)
        except Exception:
            _note(recorder)
        result = original(self, scheduler_output, *args, **kwargs)
        if tokens and (scheduler_output.scheduled_new_reqs or recorder.captures.slot_of):
            try:
                _after(recorder, self, scheduler_output, layout)
            except Exception:
                _note(recorder)
                _guarded(recorder, recorder.miss_step)
        return result

    return execute_model


def _see_edited(editor: Editor, scheduler_output: Any) -> dict[str, Edited]:
    """Take up requests with edits; returns those that have ended, with what was made of their edits."""
    ended = editor.close(scheduler_output.finished_req_ids) if editor.requests else {}
    for request in scheduler_output.scheduled_new_reqs:
        if (edits := find_edits(request.sampling_params)) is not None:
            editor.open(request.req_id, edits, len(request.prompt_token_ids or ()))
    return ended


def _prepare_inputs(original: Callable[..., Any], layout: Callable[[Any, Any], tuple[Any, Any, torch.Tensor]]
                    ) -> Callable[..., Any]:
    """Edits are filled in where the batch has its order and its positions, before the forward."""
    def prepare_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        editor = None if worker.CURRENT is None else worker.CURRENT.editor
        if editor is not None and editor.busy:
            editor.before_forward(*layout(self, result))
        return result

    return prepare_inputs


def _sample_tokens(original: Callable[..., Any]) -> Callable[..., Any]:
    """Requests that a probe ends are told with a step's tokens: the scheduler may be another process."""
    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        editor = None if worker.CURRENT is None else worker.CURRENT.editor
        if editor is None or editor.conditions is None or not editor.conditions.telling:
            return output
        if not hasattr(output, "get_output"):
            return _with_stopped(output, editor.conditions)
        get_output, conditions = output.get_output, editor.conditions
        output.get_output = lambda: _with_stopped(get_output(), conditions)
        return output

    return sample_tokens


def _with_stopped(output: Any, conditions: Conditions) -> Any:
    if not (stopped := conditions.stopped()):
        return output
    output = copy(output)  # some are the same for all steps
    setattr(output, STOPPED, stopped)
    return output


def rows_of_step(runner: Any, prepared: Any) -> tuple[Any, Any, torch.Tensor]:
    """The requests of a step that either runner has laid out, from what that returned, the offsets of their rows and
    the positions of these, on the device.
    """
    return (_rows_v1 if hasattr(runner, "_prepare_inputs") else _rows_v2)(runner, prepared)


def _rows_v1(runner: Any, _: Any) -> tuple[Any, Any, torch.Tensor]:
    batch = runner.input_batch
    return batch.req_ids[: batch.num_reqs], runner.query_start_loc.np, getattr(runner.positions, "gpu",
                                                                               runner.positions)


def _rows_v2(_: Any, batch: Any) -> tuple[Any, Any, torch.Tensor]:
    return batch.req_ids[: batch.num_reqs], batch.query_start_loc_np, batch.positions


def _guarded(recorder: Any, body: Callable[..., None], *args: Any) -> None:
    """Run ``body``; no exception of ours may end the engine."""
    try:
        body(*args)
    except Exception:
        _note(recorder)


def _note(recorder: Any) -> None:
    """Count the exception at hand; log the first."""
    global _failed
    recorder.counters.failures += 1
    recorder.idle = False  # there is something to tell
    if not _failed:
        _failed = True
        logger.exception("vllm-tap: capture failed in a step; generation goes on (logged once)")


def _look_at(recorder: Any, runner: Any) -> None:
    """Set what may be deferred: between two steps comes nothing, but for a drafter or a data-parallel group's steps."""
    recorder.defer_to_next_call = (recorder.to_host.scratch is not None and runner.speculative_config is None
                                   and runner.parallel_config.data_parallel_size == 1)
    recorder.async_scheduling = recorder.defer_to_next_call and runner.scheduler_config.async_scheduling


def _open_all(recorder: Any, requests: list[Any]) -> None:
    for request in requests:
        _guarded(recorder, _open, recorder, request)


def _asks(request: Any) -> bool:
    """Whether a request has a ticket; logs the first that has a spec or edits that nobody has read."""
    global _unread
    if find(request.sampling_params) is not None:
        return True
    if not _unread and unread(request.sampling_params):
        _unread = True
        logger.error("vllm-tap: request %s asks for a capture or edits, and nothing is captured or edited: its process "
                     "had loaded vLLM's plugins before VLLM_TAP_ENDPOINT was set. Set it before the first engine of "
                     "the process, or use vllm_tap.recording() (logged once)", request.req_id)
    return False


def _open(recorder: Any, request: Any) -> None:
    ticket = find(request.sampling_params)
    if ticket is not None:
        recorder.open(request.req_id, ticket, request.prompt_token_ids or [], request.num_computed_tokens)


def _resume(recorder: Any, requests: Any) -> None:
    for request, cached in zip(requests.req_ids, requests.num_computed_tokens, strict=True):
        if request in requests.resumed_req_ids:
            recorder.resume(request, cached)


def _after(recorder: Any, runner: Any, scheduler_output: Any, layout: ReadBatch) -> None:
    batch, first, starts, token_ids, positions, slack = layout(runner)
    new, guesses = scheduler_output.scheduled_new_reqs, scheduler_output.scheduled_spec_decode_tokens
    if not (new or guesses) and recorder.bursts.take_next(
            batch.req_ids, first, scheduler_output.total_num_scheduled_tokens, token_ids, positions, recorder.number):
        return
    n = batch.num_reqs
    requests, starts = batch.req_ids[:n], starts[: n + 1]
    drafts = _drafts(guesses, requests, starts) if guesses else None
    asking = [request for request in new if _asks(request)]
    begin = partial(_open_all, recorder, asking) if asking else None
    recorder.after_step(Step(requests, starts, first[:n], positions, token_ids, drafts, slack, begin,
                             recorder.number))


def _drafts(guesses: dict[str, Any], requests: list[str], starts: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Number of rows of each request that are guesses. Some drafters run fewer than were planned: of the rows that a
    request has at least one is its own.
    """
    planned = np.fromiter(map(len, map(guesses.get, requests, repeat(()))), np.int64, len(requests))
    ran: npt.NDArray[np.int64] = np.minimum(planned, np.diff(starts) - 1)
    return ran


def _layout_v1(runner: Any) -> Batch:
    batch = runner.input_batch
    positions = getattr(runner.positions, "gpu", runner.positions)
    # What is computed was corrected for drafts when execute_model returns.
    return batch, batch.num_computed_tokens_cpu, runner.query_start_loc.np, runner.input_ids.gpu, positions, 0


def _layout_v2(runner: Any) -> Batch:
    batch = runner.execute_model_state.input_batch
    guessing = runner.num_speculative_steps if runner.scheduler_config.async_scheduling else 0
    return (batch, batch.num_computed_tokens_np, batch.query_start_loc_np, batch.input_ids, batch.positions,
            guessing)
