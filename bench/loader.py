"""The training loader against reading the same files from front to back: rows/s and GB/s, both decoded to 16 bits.

    python -m bench.loader [--gib 1] [--rounds 3] [--codec raw16,int8b64] [--store DIR]

The store is made through a real writer: frames of 64 rows × 8 layers × 4096 numbers, one site. Both sides read one
layer and give batches of 4,096 rows in bfloat16; the sequential side knows the files' order and decodes each frame's
rows straight into the batch. In turns, so that both meet the same machine; files that fit are read from its page cache.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import xxhash
import zmq

from bench.content import content
from schemas import codecs
from schemas.control import Ack, EngineInfo, Finish, Frame, Hello, Open, StreamPart, Welcome, decode_from_writer, encode
from schemas.frame import RowTable
from schemas.ids import new_ulid
from schemas.mapping import SegmentMaps
from schemas.spec import Armed, Resolved
from vllm_tap.loader import RowDataset, rows
from vllm_tap.row_decode import decode, empty
from vllm_tap.services import make_socket_dir
from vllm_tap.writer_process import WriterProcess

LAYERS, WIDTH, ROWS, CAPTURE_FRAMES, BATCH, LAYER = 8, 4096, 64, 16, 4096, 3
SITE, DTYPE = "resid_post", "bfloat16"


def fill(store: Path, codec: str, gib: float) -> None:
    """A store of so many GiB of stored rows, in captures of 1,024 tokens."""
    names = [stream.name for stream in codecs.streams(codec, WIDTH, DTYPE)]
    pieces = list(zip(names, content(codec, WIDTH, DTYPE, ROWS * LAYERS), strict=True))
    parts = [StreamPart(name, len(data), xxhash.xxh3_64_intdigest(data)) for name, data in pieces]
    count = max(CAPTURE_FRAMES, int(gib * 2**30 / sum(len(data) for _, data in pieces)))
    layers = list(range(LAYERS))
    info = EngineInfo("bench", DTYPE, "f", "", "", LAYERS, Armed({SITE: layers}, LAYERS), {SITE: WIDTH}, 1 << 20, "",
                      "", "")
    with WriterProcess(store, f"ipc://{make_socket_dir()}/writer.sock", "os") as writer:
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.connect(writer.endpoint)
        socket.send(encode(Hello(new_ulid(), "engine", 1, engine=info)))
        assert isinstance(decode_from_writer(socket.recv()), Welcome)
        seq, durable = 0, 0
        for number in range(count):
            place = number % CAPTURE_FRAMES
            if place == 0:
                capture = new_ulid()
                resolved = Resolved({SITE: layers}, {SITE: codec}, "all", "allow")
                seq += 1
                socket.send(encode(Open(seq, capture, "r", "{}", resolved, 0, b"", 0, 1)))
            position = np.arange(place * ROWS, (place + 1) * ROWS, dtype=np.uint32)
            table = RowTable(position * 0, position, position, position * 0).to_bytes()
            seq += 1
            socket.send_multipart([
                encode(Frame(seq, SITE, codec, DTYPE, WIDTH, layers, [capture], [ROWS],
                             xxhash.xxh3_64_intdigest(table), parts, "f")), table, *(data for _, data in pieces)])
            if place == CAPTURE_FRAMES - 1 or number == count - 1:
                seq += 1
                output = np.zeros((place + 1) * ROWS + 1, "<u4").tobytes()
                socket.send(encode(Finish(seq, capture, "length", None, output, (place + 1) * ROWS)))
            while seq - durable > 64 or (number == count - 1 and durable < seq):
                answer = decode_from_writer(socket.recv())
                durable = answer.durable if isinstance(answer, Ack) else durable
        socket.close()


def sequential(data: RowDataset) -> Iterator[torch.Tensor]:
    """Batches in the order of the files, each row decoded straight to where it stays."""
    index = data.index
    maps = SegmentMaps(index.store, index.uuid)
    batch, at = empty(BATCH, WIDTH, torch.bfloat16), 0
    for segment, offset in index.frames.tolist():
        view = maps.frame(index.segments[segment], offset, verify=False)
        pieces = view.pieces([view.frame.layers.index(LAYER)], np.arange(view.rows))[0]
        run = slice(int(pieces[0]), int(pieces[-1]) + 1)
        stored = {stream.name: view.section(number)[run] for number, stream in enumerate(view.declared)}
        batch[at:at + view.rows] = decode(index.kinds[0], stored, torch.bfloat16)
        at += view.rows
        if at == BATCH:
            yield batch
            batch, at = empty(BATCH, WIDTH, torch.bfloat16), 0
    maps.close()


def timed(batches: Iterator[torch.Tensor]) -> tuple[float, int]:
    """Seconds, and rows."""
    began, count = time.perf_counter(), 0
    for batch in batches:
        count += len(batch)
    return time.perf_counter() - began, count


def measure(codec: str, gib: float, rounds: int, folder: Path) -> dict[str, float]:
    """Medians over the rounds; one warming round before them is thrown away."""
    store = folder / codec
    fill(store, codec, gib)
    results = []
    for number in range(rounds + 1):
        data = rows(store, SITE, LAYER, batch=BATCH, dtype=torch.bfloat16, seed=number)
        name, = data.names
        seconds, count = timed(sequential(data))
        shuffled_s, shuffled = timed(batch[name] for batch in itertools.islice(data, count // BATCH))
        line = {"sequential_rows_s": count / seconds, "loader_rows_s": shuffled / shuffled_s,
                "sequential_gb_s": count * WIDTH * 2 / seconds / 1e9,
                "loader_gb_s": shuffled * WIDTH * 2 / shuffled_s / 1e9,
                "ratio": (shuffled / shuffled_s) / (count / seconds)}
        if number:
            results.append(line)
        print(codec, " ".join(f"{key}={value:.3g}" for key, value in line.items()) + ("" if number else " (warming)"),
              file=sys.stderr)
    return {"rows": data.rows, **{key: statistics.median(line[key] for line in results) for key in results[0]}}


def main() -> None:
    """Print the medians by codec as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=2.0, help="of stored rows, all layers together")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--codec", default="raw16,int8b64")
    parser.add_argument("--store", type=Path, default=Path(tempfile.gettempdir()), help="folder on the disk to measure")
    args = parser.parse_args()
    torch.set_num_threads(1)  # as in a DataLoader's worker
    with tempfile.TemporaryDirectory(prefix="vllm-tap-bench-", dir=args.store) as folder:
        found = {codec: measure(codec, args.gib, args.rounds, Path(folder)) for codec in args.codec.split(",")}
    print(json.dumps({codec: {key: round(value, 3) for key, value in line.items()} for codec, line in found.items()}))


if __name__ == "__main__":
    main()
