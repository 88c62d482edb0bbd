"""A store in a bucket against plain obstore, which asks for the same spans: rates of cold slices, in turns.

    python -m bench.bucket_reads [--gib 0.5] [--rounds 9] [--codec int8b64] [--url s3://BUCKET/PREFIX]

A compacted store is pushed to a bucket; without ``--url`` to one of moto's S3 server, in a process of its own (``make
bucket-test`` installs it). A round reads 512 tokens of one layer of each capture, with an empty cache, through the
store: requests, checksums, decoding to float32. Then plain obstore fetches the same spans of the same objects, call by
call, and does nothing with them. They take turns in going first. ``ratio`` is the store's rate over obstore's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import obstore
from obstore.store import from_url

from bench.loader import LAYER, SITE, fill
from schemas.objects.objects import Objects
from tests.support.buckets import s3_server
from vllm_tap.bucket.push import push
from vllm_tap.store import open_store
from writer_service.tools.compaction import compact

TOKENS = 512
Call = tuple[str, list[tuple[int, int]]]


def through_the_store(url: str, cache: Path, calls: list[Call] | None = None) -> float:
    """Seconds of cold slices; ``calls`` gets what was asked of the bucket for them."""
    ranges = Objects.ranges

    def noted(self: Objects, key: str, spans: Any) -> Any:
        if calls is not None:
            calls.append((key, list(spans)))
        return ranges(self, key, spans)

    with open_store(url, cache) as store, mock.patch.object(Objects, "ranges", noted):
        captures = [row.id for row in store.captures(limit=1000) if row.total_len > TOKENS]
        began = time.perf_counter()
        for capture in captures:
            found = store[capture].slice(SITE, [LAYER], 0, TOKENS)
            assert np.isfinite(found.values).all() and found.values.shape[1] == TOKENS
        return time.perf_counter() - began


def plainly(url: str, calls: list[Call]) -> float:
    """Seconds of the same spans by obstore alone."""
    bucket: Any = from_url(url)
    began = time.perf_counter()
    for key, spans in calls:
        obstore.get_ranges(bucket, key, starts=[start for start, _ in spans], ends=[stop for _, stop in spans])
    return time.perf_counter() - began


def main() -> None:
    """Print the rates of each round, and what they come to, as JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.bucket_reads", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=0.5, help="rows of the store")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--codec", default="int8b64")
    parser.add_argument("--url", help="an empty prefix of a bucket (default: a server of moto's, started here)")
    args = parser.parse_args()
    with ExitStack() as ended:
        folder = Path(ended.enter_context(tempfile.TemporaryDirectory(prefix="vllm-tap-bucket-")))
        url = args.url
        if url is None:
            server = ended.enter_context(s3_server())
            os.environ |= server.environment | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.upstream}"}
            url = "s3://bucket/reads"
        fill(folder / "store", args.codec, args.gib)
        compact(folder / "store")
        push(folder / "store", url)
        calls: list[Call] = []
        through_the_store(url, folder / "warm", calls)
        nbytes = sum(stop - start for _, spans in calls for start, stop in spans)
        ratios = []
        for number in range(args.rounds):
            sides = [lambda number=number: through_the_store(url, folder / f"cache-{number}"),
                     lambda: plainly(url, calls)]
            taken = [side() for side in reversed(sides)][::-1] if number % 2 else [side() for side in sides]
            ratios.append(taken[1] / taken[0])
            print(json.dumps({"round": number, "store_mb_s": round(nbytes / taken[0] / 1e6, 1),
                              "obstore_mb_s": round(nbytes / taken[1] / 1e6, 1), "ratio": round(ratios[-1], 3)}))
    low, _, high = statistics.quantiles(ratios, n=4)
    print(json.dumps({"spans": sum(len(spans) for _, spans in calls), "calls": len(calls), "mb": round(nbytes / 1e6, 1),
                      "ratio": round(statistics.median(ratios), 3), "quartiles": [round(low, 3), round(high, 3)]}))


if __name__ == "__main__":
    main()
