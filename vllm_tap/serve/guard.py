"""Guard against processes that outlive ``vllm-tap serve``: two small programs in one file, standard library alone.

``guard.py guard``  reads "+PID" and "-PID" lines from its standard input, one for each session that the supervisor
                    starts or has seen end. When the input closes, the supervisor is gone, however it died. The
                    sessions then get SIGTERM, and what is left of them after a grace period SIGKILL.
``guard.py start``  becomes a child of the supervisor: own session, and a death signal from the kernel. It tells the
                    guard its id *before* the real program runs, so that the guard knows of it at every moment.

Both are needed. The death signal (PR_SET_PDEATHSIG) needs no other process. But it reaches direct children only,
follows the thread that forked, and can be ignored. The guard kills whole sessions, grandchildren included. But it can
be killed itself; the supervisor then starts another. If both supervisor and guard die in the same instant, only the
death signal is left.

Run by path with ``python -I -S``: it starts in a few milliseconds and imports nothing of ours.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import sys
import time

GRACE_S = 9.0
RUN = (sys.executable, "-I", "-S", __file__)  # how others start this file
_PR_SET_PDEATHSIG = 1


def session_members(session: int) -> list[int]:
    """Ids of the processes of a session that still run (zombies are not running)."""
    members = []
    for entry in os.listdir("/proc"):  # noqa: PTH208  (no pathlib here: start-up time)
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] not in (b"Z", b"X"):
            members.append(int(entry))
    return members


def signal_session(session: int, number: int) -> bool:
    """Sends a signal to every running process of a session; False where there is none left."""
    members = session_members(session)
    for pid in members:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
    return bool(members)


def guard(sessions: set[int], socket_dir: str, grace_s: float) -> None:
    """Reads the supervisor's lines until the input ends, then ends every session that is left."""
    buffer = b""
    while True:
        data = os.read(0, 4096)
        if not data:
            break
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            pid = int(line[1:])
            if line.startswith(b"+"):
                sessions.add(pid)
            else:
                sessions.discard(pid)
    deadline = time.monotonic() + grace_s
    for session in sessions:
        # The leader alone: an engine's workers are ended by their own parent, in order.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(session, signal.SIGTERM)
    while time.monotonic() < deadline and any(session_members(session) for session in sessions):
        time.sleep(0.1)
    for _ in range(50):
        if not any([signal_session(session, signal.SIGKILL) for session in sessions]):
            break
        time.sleep(0.05)
    if socket_dir:
        shutil.rmtree(socket_dir, ignore_errors=True)


def start(guard_fd: int, parent: int, command: list[str]) -> None:
    """Becomes ``command`` in a session of its own, known to the guard and tied to the life of ``parent``."""
    os.setsid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before the line above
        sys.exit(1)
    if guard_fd >= 0:
        os.write(guard_fd, b"+%d\n" % os.getpid())
        os.close(guard_fd)
    os.execvp(command[0], command)


def main() -> None:
    """``guard SOCKET_DIR GRACE_S`` or ``start GUARD_FD PARENT COMMAND…``."""
    if sys.argv[1] == "guard":
        # A terminal's Ctrl-C, or a TERM to the whole group, is for the supervisor; this one waits for its end.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        os.setsid()
        select.select([0], [], [])
        guard(set(), sys.argv[2], float(sys.argv[3]))
    else:
        start(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])


if __name__ == "__main__":
    main()
