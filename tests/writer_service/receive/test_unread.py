"""Answers that a peer left unread when it went: its connection ends, and the writer does."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import zmq

from tests.support.processes import PATIENCE_S
from writer_service.receive import sockets

ROUNDS = 50  # without the writer's own setting one in some 50 to 600 ended never


def test_the_end_does_not_wait_for_a_peer_that_went(tmp_path: Path) -> None:
    """However a peer goes in that moment: libzmq takes how long from the socket as it was when it was bound."""
    for number in range(ROUNDS):
        context, theirs = zmq.Context(), zmq.Context()
        router = sockets._bound(sockets._router(context), tmp_path / "w", b"h", "--endpoint", "w")
        assert 0 < router.getsockopt(zmq.LINGER) <= 1000, "it is told before the socket is bound"
        peer = theirs.socket(zmq.DEALER)
        peer.setsockopt(zmq.LINGER, 0)
        peer.setsockopt(zmq.RCVHWM, 1)
        peer.connect(f"ipc://{tmp_path}/w~h")
        peer.send(b"hello")
        name, _ = router.recv_multipart()
        begun_s, answering_s = time.monotonic(), random.random() * 0.003
        leaving = threading.Timer(random.random() * 0.003, theirs.destroy, (0,))
        leaving.start()
        while time.monotonic() < begun_s + answering_s:
            try:
                router.send_multipart([name, b"answer" * 400], zmq.NOBLOCK)
            except zmq.Again:
                time.sleep(0.0001)
        router.close()
        ended = threading.Thread(target=context.term, daemon=True)
        ended.start()
        ended.join(PATIENCE_S)
        assert not ended.is_alive(), f"round {number}"
        leaving.join()
