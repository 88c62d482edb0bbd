"""Row 4: the service is killed in the middle of an answer. What came so far can never be taken for the whole."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
import xxhash

from tests.faults.conftest import times
from tests.support.api_stack import running

FORMATS = ("safetensors", "npy", "npz", "arrow")


@pytest.mark.faults
def test_row_04_killed_in_the_middle_of_a_slice(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """A short body is an error of the connection, whatever the format; the rest can be had once the service is back."""
    kills, cut = times(1, 6), 0
    with running(tmp_path) as stack:
        spec = {"codec": "raw", "sites": ["resid_post"], "layers": [0]}
        ulid = stack.complete("x" * 20_000, max_tokens=1, capture=spec).json()["capture"]["id"]
        path = f"/v1/captures/{ulid}/activations?site=resid_post&layer=0&dtype=float32&wait=complete&timeout=20&format="
        whole = {name: stack.http.get(path + name) for name in FORMATS}
        assert all(answer.status_code == 200 and len(answer.content) > 7e6 for answer in whole.values())
        for kill in range(kills):
            small = httpx.HTTPTransport(socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)])
            with ExitStack() as open_answers, httpx.Client(base_url=stack.url,
                                                           transport=small) as client:
                answers = [open_answers.enter_context(client.stream("GET", path + name)) for name in FORMATS]
                pieces = [answer.iter_raw(1 << 14) for answer in answers]
                came = [b"".join(next(piece) for _ in range(1 + 8 * kill)) for piece in pieces]
                stack.processes["api"].kill()
                for at, piece in enumerate(pieces):
                    with pytest.raises(httpx.RemoteProtocolError):
                        for more in piece:
                            came[at] += more
            stack.start_api()
            stack.wait_ready()
            for name, answer, start in zip(FORMATS, answers, came, strict=True):
                assert 0 < len(start) < int(answer.headers["content-length"]) == len(whole[name].content)
                assert xxhash.xxh3_64_hexdigest(start) != answer.headers["x-tap-xxh3"]
                rest = stack.http.get(path + name, headers={"range": f"bytes={len(start)}-",
                                                            "if-range": answer.headers["etag"]})
                assert rest.status_code == 206 and start + rest.content == whole[name].content
                cut += 1
    assert all(xxhash.xxh3_64_hexdigest(answer.content) == answer.headers["x-tap-xxh3"] for answer in whole.values())
    record_property("times", f"{kills} kills, {cut} answers cut short, each known to be and completed afterwards")
