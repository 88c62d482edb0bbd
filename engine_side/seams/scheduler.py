"""The scheduler and the engine core: requests taken in, finishes, prefix-cache reads, the end of an orphaned engine.

``Scheduler._free_request`` sees each finish with its reason and final tokens; the workers hold the rows. The finish
rides to them as an attribute of the next scheduler output, so one ordered stream leaves the engine.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import types
from collections.abc import Callable
from typing import Any, Final

from engine_side import worker
from engine_side.front.ticket import find
from engine_side.seams.patching import wrap_when_imported
from engine_side.step.capture_lifecycle import End

logger = logging.getLogger("vllm.tap")

FINISHED: Final = "vllm_tap_finished"
STOPPED: Final = "vllm_tap_stopped"  # by request: the probe that ends it; on what a runner returns
_PR_SET_PDEATHSIG: Final = 1


def connect() -> None:
    """Install the wrappers."""
    wrap_when_imported("vllm.v1.core.sched.scheduler", {
        "Scheduler._free_request": _free_request,
        "Scheduler.update_from_output": _update_from_output,
        "Scheduler._update_request_with_output": _update_request,
        "Scheduler.schedule": _schedule,
    })
    wrap_when_imported("vllm.v1.request", {"Request.get_skip_reading_prefix_cache": _skip_prefix_cache})
    wrap_when_imported("vllm.v1.engine.core", {
        "EngineCore.preprocess_add_request": _preprocess_add_request,
        "EngineCoreProc.run_busy_loop": _run_busy_loop,
        "DPEngineCoreProc.run_busy_loop": _run_busy_loop,  # its own, of experts
        "EngineCoreProc.has_work": _has_work,
    })
    wrap_when_imported("vllm.v1.engine.core_client", {
        "InprocClient.get_output": _delivering,
        "InprocClient.abort_requests": _delivering,
    })


def _preprocess_add_request(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make what a capture needs where an engine takes requests in: in its own process by a thread beside the steps."""

    def preprocess_add_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            ticket, current = find(request.sampling_params), worker.CURRENT
            if ticket is not None and current is not None:
                current.recorder.layouts.matrices.prepare(ticket.resolved)
        except Exception:
            logger.exception("vllm-tap: preparing a capture beside the steps failed; its first step prepares it and "
                             "takes longer")
        return original(self, request, *args, **kwargs)

    return preprocess_add_request


def _free_request(original: Callable[..., Any]) -> Callable[..., Any]:
    def free_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        self.__dict__.get(STOPPED, {}).pop(request.request_id, None)
        try:
            ticket = find(request.sampling_params)
            if ticket is not None:
                self.__dict__.setdefault(FINISHED, []).append(End(
                    request=request.request_id, ticket=ticket, reason=str(request.get_finished_reason()),
                    stop_reason=request.stop_reason, prompt_token_ids=list(request.prompt_token_ids or ()),
                    output_token_ids=list(request.output_token_ids),
                    computed=min(request.num_computed_tokens, request.num_tokens),
                ))
        except Exception:
            logger.exception("vllm-tap: the end of a request was not recorded; its capture will end as incomplete")
        return original(self, request, *args, **kwargs)

    return free_request


def _update_from_output(original: Callable[..., Any]) -> Callable[..., Any]:
    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any, *args: Any, **kwargs: Any
                           ) -> Any:
        if (stopped := getattr(model_runner_output, STOPPED, None)) is not None:
            self.__dict__.setdefault(STOPPED, {}).update(stopped)
        return original(self, scheduler_output, model_runner_output, *args, **kwargs)

    return update_from_output


def _update_request(original: Callable[..., Any]) -> Callable[..., Any]:
    """End a request whose probe has said so, as if a stop token had come."""

    def update_request_with_output(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        tokens, stopped = original(self, request, *args, **kwargs)
        if not stopped and (ending := self.__dict__.get(STOPPED)) and request.request_id in ending:
            request.status = type(request.status).FINISHED_STOPPED
            request.stop_reason = f"probe:{ending[request.request_id]}"
            stopped = True
        return tokens, stopped

    return update_request_with_output


def _schedule(original: Callable[..., Any]) -> Callable[..., Any]:
    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        ended = self.__dict__.get(FINISHED)
        if ended:
            setattr(output, FINISHED, ended[:])
            ended.clear()
        return output

    return schedule


def _skip_prefix_cache(original: Callable[..., bool]) -> Callable[..., bool]:
    def get_skip_reading_prefix_cache(self: Any) -> bool:
        ticket = find(self.sampling_params)
        if ticket is not None and ticket.resolved.prefix_cache == "recompute" and not ticket.resolved.empty:
            return True
        return original(self)

    return get_skip_reading_prefix_cache


def _run_busy_loop(original: Callable[..., Any]) -> Callable[..., Any]:
    def run_busy_loop(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            _die_with_parent()
        except Exception:
            logger.exception("vllm-tap: watching the parent process failed; this engine will not end if its parent "
                             "dies")
        return original(self, *args, **kwargs)

    return run_busy_loop


def _has_work(original: Callable[..., bool]) -> Callable[..., bool]:
    """Flush the worker in this process before the engine rests: it may be paused in the middle of a request."""

    def has_work(self: Any, *args: Any, **kwargs: Any) -> bool:
        found = original(self, *args, **kwargs)
        current = worker.CURRENT
        if not found and current is not None:
            try:
                current.recorder.flush()
            except Exception:
                logger.exception("vllm-tap: sending rows between steps failed; they are sent with the next step")
        return found

    return has_work


def _die_with_parent() -> None:
    """End with the parent: else an engine whose API server is killed goes on generating for no client, and then idles
    forever.

    The kernel sends the signal when the *thread* that started this process ends. That need not be the end of the parent
    process: a user may make an ``LLM`` in a thread of his own.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid()

    def parent_thread_ended(signum: int, frame: types.FrameType | None) -> None:
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGUSR2, parent_thread_ended)
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGUSR2) != 0:
        logger.warning("vllm-tap: prctl(PR_SET_PDEATHSIG) failed; this engine will not end if its parent dies")
    elif os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


def _delivering(original: Callable[..., Any]) -> Callable[..., Any]:
    """Deliver the last finish by an empty step: an engine in the caller's own process stops stepping after it."""

    def delivering(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        scheduler = self.engine_core.scheduler
        if scheduler.__dict__.get(FINISHED) and not scheduler.has_unfinished_requests():
            self.engine_core.step_fn()
        return result

    return delivering
