"""The highest rate that the line behind the engine sustains without a dropped row, found by bisection.

A played engine of a given shape hands rows over as a real one does: real recorder, ring, sender's process, writer. It
needs no GPU and no model. A trial offers rows at one rate for --seconds and holds where every row is in the store in
the end and sealing does not fall behind. In turns with the trials plain threads hash and copy the same bytes into files
of the same place; what counts are ratios over them, since bare seconds are of a machine and its hour.

    python -m bench.sustained                                    # shape 3b, int8b64, store in shared memory
    python -m bench.sustained --store disk --folder /data        # the disk that /data is on, with fsync
    python -m bench.sustained --store tcp                        # another network namespace, where root may make one
    python -m bench.sustained --profile --seconds 20 --steps 3   # seconds of processor and bytes touched, by stage
    python -m bench.sustained --beside readers,loader,retention
    python -m bench.sustained --engine real --seconds 600 --room-gb 24   # on a GPU: ten minutes of generation
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from bench.shapes import LOADS, SHAPES
from bench.sustained.beside import KINDS
from bench.sustained.recovery import recovery
from bench.sustained.result import Result, shown, stage_table, table
from bench.sustained.trial import Setting, Trial, bench, best, search
from writer_service.config import lanes_of

RESULTS = Path(__file__).parents[1] / "results"


def parse(argv: list[str] | None = None) -> tuple[Setting, argparse.Namespace]:
    """Flags as a Setting, and those beside it."""
    parser = argparse.ArgumentParser(prog="python -m bench.sustained", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="3b", help="model shape (default: %(default)s)")
    parser.add_argument("--codec", default="int8b64", help="of all layers of the residual (default: %(default)s)")
    parser.add_argument("--load", choices=LOADS, default="hook", help="prompts and tokens that are played "
                        "again and again (default: %(default)s, 32 prompts of 512 tokens, 128 generated)")
    parser.add_argument("--step-tokens", type=int, default=1024, help="of a step with prompts, whose rows come at "
                        "once: few make an even rate, 8192 the lumps of a large device (default: %(default)s)")
    parser.add_argument("--store", choices=("shm", "disk", "tcp"), default="shm",
                        help="shared memory; a disk, with fsync; shared memory behind TCP (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="of the store (default: /dev/shm; --store disk: /tmp)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of a trial (default: %(default)g)")
    parser.add_argument("--steps", type=int, default=5, help="of the bisection (default: %(default)s)")
    parser.add_argument("--engine", choices=("played", "real"), default="played", help="real: vLLM generates with a "
                        "model of that shape, every request captured; one trial of --seconds (default: %(default)s)")
    parser.add_argument("--rate", type=float, help="GB/s: one trial at that rate, no bisection")
    parser.add_argument("--beside", default="", help=f"who else is at work: some of {','.join(KINDS)}")
    parser.add_argument("--ring-gb", type=float, default=0.0, help="(default: as an engine on a GPU would take)")
    parser.add_argument("--room-gb", type=float, default=0.0, help="that the store may take; captures that came "
                        "first are deleted beyond it (default: a fourth of what is free, at most 4, of a disk 32)")
    parser.add_argument("--control", action=argparse.BooleanOptionalAction, default=True,
                        help="plain threads in turns with the trials (default: with them)")
    parser.add_argument("--threads", type=int, default=lanes_of(os.cpu_count() or 1),
                        help="of them (default: as many as the writer's lanes, here %(default)s)")
    parser.add_argument("--profile", action="store_true", help="processor and bytes by stage; some 0.01 s/GB more")
    parser.add_argument("--recovery-gb", type=float, default=0.0,
                        help="of a journal that a start after a kill reads again, in the end (default: none)")
    parser.add_argument("--name", default="", help="of the result (default: shape, codec and store)")
    args = parser.parse_args(argv)
    beside = tuple(filter(None, args.beside.split(",")))
    if args.engine == "real" and (args.rate is not None or args.profile or args.store == "tcp"):
        parser.error("--engine real goes as fast as it generates, on this host: without --rate, --profile, --store tcp")
    if unknown := set(beside) - set(KINDS):
        parser.error(f"--beside: {', '.join(sorted(unknown))}: valid are {', '.join(KINDS)}")
    folder = args.folder or Path(tempfile.gettempdir() if args.store == "disk" else "/dev/shm")
    if not folder.is_dir():
        parser.error(f"--folder {folder}: no such folder")
    free = os.statvfs(folder)
    room = int(1e9 * args.room_gb) or min((32 if args.store == "disk" else 4) << 30, free.f_bavail * free.f_frsize // 4)
    setting = Setting(args.shape, args.codec, args.load, args.step_tokens, args.store, str(folder),
                      int(1e9 * args.ring_gb), room, beside, args.threads,
                      5.0 if args.control and args.engine == "played" else 0.0, args.profile, args.engine)
    return setting, args


def measure(setting: Setting, seconds: float, steps: int, rate: float | None, console: Console) -> Result:
    """Everything, with a line of progress; what came of a trial is printed when it is over."""
    columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as progress, bench(setting, console.print) as made:
        task = progress.add_task("", total=seconds)

        def tell(what: str) -> Callable[[float], None]:
            progress.reset(task, description=what, total=seconds)
            return lambda done: progress.update(task, completed=done)

        def say(what: str, trial: Trial) -> None:
            console.print(f"{what}: {shown(trial)}", highlight=False)

        if setting.engine == "real":
            made.trial(None, min(seconds, 5.0), tell("warming"))
            trials = [made.trial(None, seconds, tell("generating"))]
            say("generating", trials[0])
        elif rate is None:
            trials = search(made, seconds, steps, tell, say)
        else:
            made.trial(None, min(seconds, 5.0), tell("warming"))
            before = made.control()
            trials = [made.trial(1e9 * rate, seconds, tell(f"{rate:.3g} GB/s"))]
            trials[0].beside(before, made.control())
            say("trial", trials[0])
        disk = direct = 0.0
        if setting.store == "disk":
            disk = made.control(hashed=False, threads=1)[0]
            with contextlib.suppress(OSError):  # not every file system can
                direct = made.control(hashed=False, threads=1, direct=True)[0]
    machine = f"{platform.machine()}, {platform.system()} {platform.release()}"
    return Result(machine, os.cpu_count() or 1, setting, trials, best(trials), disk, direct)


def main(argv: list[str] | None = None) -> None:
    """Measure, print, write bench/results/NAME.json."""
    setting, args = parse(argv)
    torch.set_num_threads(1)
    console = Console(width=140)
    result = measure(setting, args.seconds, args.steps, args.rate, console)
    console.print(table(result))
    if setting.profile:
        console.print(stage_table(result.trials[0]))
    if args.recovery_gb:
        result.recovery = recovery(setting, 1e9 * args.recovery_gb)
        console.print(", ".join(f"{name} {value:.3g}" for name, value in result.recovery.items()))
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{args.name or f'sustained-{setting.shape}-{setting.codec}-{setting.store}'}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    console.print(f"written: {path}")


if __name__ == "__main__":
    main()
