"""The training loader against reading the same files from front to back: rows/s and GB/s, both decoded to 16 bits.

    python -m bench.loader [--gib 4] [--rounds 7] [--codec raw16,int8b64] [--store DIR]

The store is made through a real writer: frames of 64 rows × 8 layers × 4096 numbers, one site. Both sides read one
layer in one thread, hold every frame's head against its hash and give batches of 4,096 rows in bfloat16. The sequential
side knows the files' order: it reads each frame's rows straight to where a batch is decoded from, or stays. They take
turns, so that both meet the same machine, after a warming round: files that fit are read from the page cache. A round
is an epoch of one dataset. ``cpu_ratio`` is of CPU seconds, which others on the machine disturb least.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import xxhash
import zmq

from bench.content import content
from schemas import codecs
from schemas.ids import new_ulid
from schemas.read.segment_maps import opened
from schemas.read.slices import RowFormat
from schemas.spec import Armed, Resolved
from schemas.store.segment import read_frame
from schemas.wire.engine_info import EngineInfo
from schemas.wire.messages import Ack, Frame, Hello, StreamPart, Welcome, decode_from_writer, encode
from schemas.wire.records import Finish, Open
from schemas.wire.row_table import RowTable
from vllm_tap.loader.dataset import RowDataset, rows
from vllm_tap.loader.row_decode import decode, is_as_stored
from vllm_tap.serve.services import make_socket_dir
from vllm_tap.serve.writer_process import WriterProcess

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
    """Batches in the order of the files."""
    index, kind = data.index, data.index.kinds[0]
    stored, at, file = empty_batch(kind), 0, (-1, Path(), -1)
    for number, offset in index.frames.tolist():
        if number != file[0]:
            close(file[2])
            file = (number, *opened(index.store, index.segments[number], lambda path: os.open(path, os.O_RDONLY)))
        view = read_frame(file[2], offset, index.uuid, number, file[1], payload=False)
        first = int(view.pieces([view.frame.layers.index(LAYER)], [0])[0, 0])
        for begin, rows_of in zip(view.layout.parts, stored.values(), strict=True):
            part = rows_of[at:at + view.rows]
            assert os.preadv(file[2], [part.data], offset + begin + first * rows_of.shape[1]) == part.size
        at += view.rows
        if at == BATCH:
            yield decode(kind, stored, torch.bfloat16)
            at = 0
            if is_as_stored(kind, torch.bfloat16):  # then what was given is that memory
                stored = empty_batch(kind)
    close(file[2])


def empty_batch(kind: RowFormat) -> dict[str, np.ndarray]:
    """Memory for the stored bytes of a batch, by stream."""
    return {stream.name: np.empty((BATCH, stream.nbytes), np.uint8) for stream in kind.streams}


def close(fd: int) -> None:
    """Close a file if one was open."""
    if fd >= 0:
        os.close(fd)


@dataclass(frozen=True, slots=True)
class Timed:
    """So many rows took so long, of the clock and of the CPU."""

    rows: int
    wall_s: float
    cpu_s: float

    def figures(self) -> dict[str, float]:
        """Speeds, and what a row costs."""
        rows_s = self.rows / self.wall_s
        return {"rows_s": rows_s, "gb_s": rows_s * WIDTH * 2 / 1e9, "cpu_us_row": self.cpu_s / self.rows * 1e6}


def timed(batches: Iterable[torch.Tensor]) -> Timed:
    """Take all batches."""
    began, began_cpu, count = time.perf_counter(), time.process_time(), 0
    for batch in batches:
        count += len(batch)
    return Timed(count, time.perf_counter() - began, time.process_time() - began_cpu)


def measure(codec: str, gib: float, rounds: int, folder: Path) -> dict[str, float]:
    """Medians over the rounds; one warming round before them is thrown away."""
    store = folder / codec
    fill(store, codec, gib)
    data = rows(store, SITE, LAYER, batch=BATCH, dtype=torch.bfloat16)
    name, = data.names
    results = []
    for number in range(rounds + 1):
        data.set_epoch(number)
        ordered = timed(sequential(data))
        shuffled = timed(batch[name] for batch in itertools.islice(data, ordered.rows // BATCH))
        line = {f"{side}_{unit}": value for side, run in (("sequential", ordered), ("loader", shuffled))
                for unit, value in run.figures().items()}
        line["ratio"] = line["loader_rows_s"] / line["sequential_rows_s"]
        line["cpu_ratio"] = line["sequential_cpu_us_row"] / line["loader_cpu_us_row"]
        if number:
            results.append(line)
        print(codec, " ".join(f"{key}={value:.3g}" for key, value in line.items()) + ("" if number else " (warming)"),
              file=sys.stderr)
    return {"rows": data.rows, **{key: statistics.median(line[key] for line in results) for key in results[0]}}


def main() -> None:
    """Print the medians by codec as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=4.0, help="of stored rows, all layers together")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--codec", default="raw16,int8b64")
    parser.add_argument("--store", type=Path, default=Path(tempfile.gettempdir()), help="folder on the disk to measure")
    args = parser.parse_args()
    torch.set_num_threads(1)  # as in a DataLoader's worker
    with tempfile.TemporaryDirectory(prefix="vllm-tap-bench-", dir=args.store) as folder:
        found = {codec: measure(codec, args.gib, args.rounds, Path(folder)) for codec in args.codec.split(",")}
    print(json.dumps({codec: {key: round(value, 3) for key, value in line.items()} for codec, line in found.items()}))


if __name__ == "__main__":
    main()
