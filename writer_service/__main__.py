"""``python -m writer_service --store DIR --endpoint ipc://…``: run a store's writer until SIGTERM."""

from __future__ import annotations

import argparse
import dataclasses
import os
import resource
import signal
import sqlite3
import sys
from pathlib import Path

from schemas import limits
from schemas.catalog.records import remedy
from schemas.codecs import check_installed
from schemas.errors import StartError, StoreError
from writer_service import log
from writer_service.config import Config
from writer_service.server import Writer


def flags() -> argparse.ArgumentParser:
    """The flags of the process."""
    parser = argparse.ArgumentParser(prog="python -m writer_service", description="The writer of a store.")
    parser.add_argument("--store", type=Path, required=True, metavar="DIR", help="the folder of captures; one "
                        "writer at a time")
    parser.add_argument("--endpoint", required=True, metavar="ipc://PATH", help="its socket, in a folder "
                        "of mode 0700")
    parser.add_argument("--listen", default="", metavar="tcp://HOST:PORT",
                        help="address for engines on other hosts; with --curve")
    parser.add_argument("--curve", type=Path, metavar="DIR", help="keys of those engines: `vllm-tap curve-keys NAME`")
    parser.add_argument("--durability", default="fsync", help="meaning of an acknowledgement: fsync, on the disk; os, "
                        "with the operating system")
    parser.add_argument("--segment-bytes", type=int, default=limits.segment_bytes_target, metavar="N",
                        help="seal a file at N bytes")
    parser.add_argument("--seal-idle-s", type=float, default=5.0, metavar="S",
                        help="turn what was written into Zarr after S seconds without new rows")
    parser.add_argument("--engine-lost-s", type=float, default=limits.engine_lost_after_ms / 1000, metavar="S",
                        help="close captures of an engine that is silent for S seconds")
    parser.add_argument("--retain-days", type=float, metavar="D", help="delete captures that are older than D days")
    parser.add_argument("--retain-bytes", type=int, metavar="N",
                        help="delete the oldest captures while the store's rows take more than N bytes")
    parser.add_argument("--quota-bytes", type=int, metavar="N",
                        help="take no rows of new captures while the store's rows take more than N bytes")
    parser.add_argument("--metrics-port", type=int, default=0, metavar="P", help="metrics for Prometheus; 0 for none")
    parser.add_argument("--metrics-host", default="127.0.0.1", metavar="HOST",
                        help="address of the metrics; no key is asked there")
    parser.add_argument("--log-format", default="text", help="text or json, on standard error")
    parser.add_argument("--keep-s", type=float, default=1.0, metavar="S", help="seconds between two rounds of erasing")
    return parser


def parse(argv: list[str]) -> Config:
    """Flags as a Config; argparse ends the process with status 2 on a bad one."""
    return Config(**vars(flags().parse_args(argv)))


def main(argv: list[str] | None = None) -> int:
    """0 after a clean stop, 2 where the writer cannot start, 1 where it had to end."""
    os.umask(0o077)  # what is stored is what users said
    # Each open segment and each engine's ring holds a descriptor: take as many as this process may have.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        config = parse(sys.argv[1:] if argv is None else argv)
        if config.log_format == "json":
            log.use_json()
        check_installed()
        writer = Writer(config)
    except (StartError, StoreError, OSError) as error:
        log.warn("no_start", str(error))
        return 2
    except sqlite3.Error as error:
        log.warn("no_start", f"the catalog of {config.store} cannot be opened or written: {error} ({remedy(error)})")
        return 2

    def stop(*_: object) -> None:
        writer.stop = True

    # Sealing computes in Python beside threads that need the interpreter several times a frame: they must not wait the
    # usual 5 ms for every turn.
    sys.setswitchinterval(0.0001)
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    try:
        writer.run()
    except StartError as error:
        log.warn("no_start", str(error))
        return 2
    except StoreError as error:
        log.warn("ended", str(error))
        return 1
    counts = " ".join(f"{key}={round(value, 3) if isinstance(value, float) else value}"
                      for key, value in dataclasses.asdict(writer.counters).items() if value)
    if (times := writer.times()).waited:
        print(times.line())
    print(f"writer stopped {counts}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
