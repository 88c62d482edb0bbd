"""The writer on a failing disk: fs.py is the seam, and FAULT says what fails in which kind of file.

FAULT = OP:PATTERN:FROM:COUNT:ERRNO, such as ``datasync:.open:2:1:EIO``: calls FROM … FROM+COUNT-1 of OP on files whose
path contains PATTERN fail. FAULT_WHILE=PATH: they fail for as long as that file exists instead.
ERRNO ``die`` ends the process as SIGKILL does, before the call or in the midst of a write. FAULT_FIRED=PATH: that file
is made when a fault happens.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from pathlib import Path
from typing import Any

from writer_service import fs
from writer_service.__main__ import main


def path_of(argument: Any) -> str:
    return str(Path(f"/proc/self/fd/{argument}").readlink()) if isinstance(argument, int) else str(argument)


def break_disk(op: str, pattern: str, first: int, count: int, code: int) -> None:
    real = getattr(fs, op)
    calls = 0

    def broken(target: Any, *args: Any, **options: Any) -> Any:
        nonlocal calls
        if pattern in path_of(target):
            calls += 1
            switch = os.environ.get("FAULT_WHILE")
            if Path(switch).exists() if switch else first <= calls < first + count:
                if fired := os.environ.get("FAULT_FIRED"):
                    Path(fired).touch()
                if op == "write_at" and args:  # a full disk takes some of it, and so does a crash
                    real(target, [bytes(args[0][0])[:100]], *args[1:])
                if op == "write_blocks":
                    real(target, [args[0][0][: fs.direct_align]], *args[1:])
                if code == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise OSError(code, os.strerror(code), path_of(target))
        return real(target, *args, **options)

    setattr(fs, op, broken)


def break_as_asked(faults: str) -> None:
    for fault in faults.split(","):
        op, pattern, first, count, name = fault.split(":")
        break_disk(op, pattern, int(first), int(count), 0 if name == "die" else getattr(errno, name))


if __name__ == "__main__":
    break_as_asked(os.environ["FAULT"])
    sys.exit(main())
