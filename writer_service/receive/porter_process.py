"""The writer's side of the porter: its listening sockets, its share of the descriptors, its life."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from schemas import limits
from schemas.errors import StartError
from writer_service import log
from writer_service.receive import porter
from writer_service.receive.porter import BEAT, COUNTS, SHARED_BYTES

__all__ = ["CURVE_GREETING", "NULL_GREETING", "PorterProcess", "Shares", "Threshold", "shares_of"]

NULL_GREETING: Final = 64
CURVE_GREETING: Final = NULL_GREETING + 170  # with the WELCOME
_AGAIN_S: Final = 1.0
_BETWEEN_LOOKS_S: Final = 2.0  # that count as silence: longer ones are this process's own, or the machine's
_LEAVES_S: Final = 2.0
_PEER_MIN: Final = 8  # connections that one address may have, however little room there is


@dataclass(frozen=True, slots=True)
class Shares:
    """The numbers of connections that each socket may hold, and of rings that may be mapped."""

    local: int
    remote: int
    rings: int

    @property
    def remote_peer(self) -> int:
        """The remote connections that one address may hold."""
        return min(limits.connections_peer_max, max(_PEER_MIN, self.remote // 4))


def shares_of(descriptors: int) -> Shares:
    """The shares of what is left beside the reserve for files: a connection takes one, a ring two.

    StartError where it is too little to begin with.
    """
    room = descriptors - limits.descriptors_reserved
    if room < limits.descriptors_reserved:
        raise StartError(f"RLIMIT_NOFILE = {descriptors}: the writer needs at least {2 * limits.descriptors_reserved} "
                         "open files; raise it with `ulimit -n`")
    local = min(limits.connections_local_max, room // 4)
    return Shares(local, min(limits.connections_remote_max, room // 4), local)


@dataclass(frozen=True, slots=True)
class Threshold:
    """A listening socket of ours and the writer's socket behind it."""

    listener: socket.socket
    inner: Path
    greeting: int
    most: int
    peer_most: int  # of them, of one peer that has shown its key


class PorterProcess:
    """Started anew where it ends or stands still; connections are lost then, and made again by who had them."""

    silent_s_max: ClassVar[float] = 15.0  # without a round of its loop; then it is killed

    def __init__(self, thresholds: Sequence[Threshold]) -> None:
        self._thresholds = thresholds
        self._counts_fd = os.memfd_create("porter")
        os.ftruncate(self._counts_fd, SHARED_BYTES)
        self._counts = mmap.mmap(self._counts_fd, SHARED_BYTES)
        self._process: subprocess.Popen[bytes] | None = None
        self._control: int | None = None
        self._looked = 0.0
        self._beat, self._silent_s = 0, 0.0
        self._patience_s = self.silent_s_max
        self._start()

    @property
    def refused(self) -> dict[str, int]:
        """Connections that were refused, by reason."""
        return dict(zip(COUNTS, struct.unpack_from(f"<{len(COUNTS)}Q", self._counts), strict=True))

    def look(self, now: float) -> float:
        """Start it again where it has ended, kill it where it stands still.

        Seconds of silence since the last look, for which no sender is to blame: nobody was heard.
        """
        if now - self._looked < _AGAIN_S:
            return 0.0
        since_s, self._looked = min(now - self._looked, _BETWEEN_LOOKS_S), now
        if self._process is None or self._process.poll() is not None:
            log.warn("porter_ended", "the process that accepts connections has ended; it is started again")
            with contextlib.suppress(OSError):
                self._start()
        (beat,) = struct.unpack_from("<Q", self._counts, 8 * BEAT)
        if beat != self._beat:
            self._beat, self._silent_s, self._patience_s = beat, 0.0, self.silent_s_max
            return 0.0
        self._silent_s += since_s
        if self._silent_s > self._patience_s and self._process is not None:
            log.warn("porter_stands", "the process that accepts connections has not responded for "
                                      f"{self._silent_s:.0f} s; it is killed and started again")
            self._process.kill()
            # On a machine where it comes no further in that time, one has to begin some time.
            self._silent_s, self._patience_s = 0.0, 2 * self._patience_s
        return since_s

    def close(self) -> None:
        """Let it send what it still has; it ends by itself, a moment later at most, or is killed."""
        self._let_go()
        for threshold in self._thresholds:
            threshold.listener.close()
        if self._process is not None and not self._ends():
            self._process.kill()
            self._ends()
        os.close(self._counts_fd)

    def _ends(self) -> bool:
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LEAVES_S)
        return self._process.returncode is not None

    def _start(self) -> None:
        self._let_go()
        theirs, self._control = os.pipe()
        doors = [(one.listener.fileno(), str(one.inner), one.greeting, one.most,
                  min(limits.handshakes_max, one.most // 2), min(limits.handshakes_peer_max, one.most // 4),
                  one.peer_most)
                 for one in self._thresholds]
        task = {"doors": doors, "control": theirs, "counts": self._counts_fd,
                "handshake_s": limits.handshake_ms / 1000}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", porter.__file__, json.dumps(task)], stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, pass_fds=[theirs, self._counts_fd, *(door[0] for door in doors)])
        finally:
            os.close(theirs)

    def _let_go(self) -> None:
        if self._control is not None:
            os.close(self._control)
            self._control = None
