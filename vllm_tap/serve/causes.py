"""The cause of an engine that did not start: of hundreds of lines the one that says it, and the cure."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

__all__ = ["Causes", "advice_for", "output_heard"]

_LAST_WORDS_S: Final = 2.0
_LINE_BYTES_MAX: Final = 16 * 1024
_OURS: Final = "StartError: "  # what our own parts raise; vLLM prints hundreds of lines after it
# Of a traceback the line that says what was raised, perhaps behind the name of a process and the head of a log's line;
# pydantic's has a line of its own for what is wrong.
_RAISED: Final = re.compile(r"(?:\(.*?pid=[0-9]+\)\s*)?(?:[A-Z]+ [^\]]*\] ?)?([\w.]*(?:Error|Exception): .+)")
_INVALID: Final = re.compile(r".*\bValue error, (.+?)(?: \[type=.*)?")
# It was raised elsewhere, earlier: by a worker, whose engine says so, or by an engine, whose server does.
_CAUSED: Final = re.compile(r"root cause|stack trace|Worker failed with error")
_HELPS: Final = (
    (re.compile(r"KV cache is needed|No available memory for the cache|max_model_len.* KV cache"),
     "a smaller --max-model-len; more memory for the cache (on a GPU `-- --gpu-memory-utilization 0.95`, on a CPU "
     "VLLM_CPU_KVCACHE_SPACE=GIB in the environment); or fewer sites or layers armed, whose staging takes memory too"),
    (re.compile(r"desired GPU memory utilization"),
     "`-- --gpu-memory-utilization 0.5`, or whatever is free; or end what else uses this GPU"),
    (re.compile(r"OutOfMemoryError|out of memory|Cannot allocate memory"),
     "`-- --gpu-memory-utilization 0.8`, `-- --max-num-batched-tokens 2048`, a smaller --max-model-len; fewer sites or "
     "layers armed, whose staging takes memory too; or end what else uses this device"),
)


class Causes:
    """Causes of a program's end heard in its output: of our own parts, and the last exception of any part."""

    def __init__(self) -> None:
        self.ours: str | None = None
        self.raised: str | None = None

    def hear(self, line: str) -> None:
        """Takes a line of its output."""
        if _OURS in line:
            self.ours = line.partition(_OURS)[2].removeprefix("vllm-tap: ")
        elif (match := _RAISED.fullmatch(line) or _INVALID.fullmatch(line)) and not _CAUSED.search(line):
            self.raised = match[1]

    @property
    def cause(self) -> str | None:
        """The cause in a line; None where nothing was said."""
        return self.ours or self.raised


def advice_for(cause: str) -> str | None:
    """The arguments of vllm-tap against a cause that vLLM names flags of its own for."""
    return next((advice for pattern, advice in _HELPS if pattern.search(cause)), None)


@contextmanager
def output_heard() -> Iterator[Causes]:
    """Hears what this process, and whoever it starts inside, says on both its streams; all of it is passed on.

    What is started inside may live on: it is listened to until it ends. Where the block raises, its last words are
    waited for.
    """
    causes, kept, threads = Causes(), dict[int, int](), list[threading.Thread]()
    _flush()
    for fd in (1, 2):
        kept[fd] = os.dup(fd)
        read, write = os.pipe()
        os.dup2(write, fd)
        os.close(write)
        threads.append(threading.Thread(target=_pass_on, args=(read, os.dup(kept[fd]), causes), daemon=True))
        threads[-1].start()
    failed = False
    try:
        yield causes
    except Exception:
        failed = True
        raise
    finally:
        _flush()
        for fd, own in kept.items():
            os.dup2(own, fd)
            os.close(own)
        for thread in threads if failed else ():
            thread.join(_LAST_WORDS_S)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def _pass_on(read: int, to: int, causes: Causes) -> None:
    """Write on at once what is read, progress bars too, which end no line; hear it line by line."""
    begun = b""
    while said := os.read(read, _LINE_BYTES_MAX):
        with suppress(OSError):  # nobody reads it any more; whoever speaks must not wait for that
            os.write(to, said)
        *lines, begun = re.split(rb"[\r\n]", begun + said)
        for line in lines:
            causes.hear(line.decode("utf-8", "replace").rstrip())
        begun = begun[-_LINE_BYTES_MAX:]
    os.close(read)
    os.close(to)
