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
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from bench.shapes import LOADS, SHAPES
from bench.sustained.beside import KINDS
from bench.sustained.trial import Setting, Trial, bench, best, search
from writer_service.config import lanes_max

RESULTS = Path(__file__).parents[1] / "results"


class Result(msgspec.Struct):
    """What bench/results holds."""

    machine: str
    setting: Setting
    trials: list[Trial]
    best: Trial | None  # the highest rate that held
    disk_gb_s: float = 0.0  # one thread that only writes, with fsync


def parse(argv: list[str] | None = None) -> tuple[Setting, argparse.Namespace]:
    """Flags as a Setting, and those beside it."""
    parser = argparse.ArgumentParser(prog="python -m bench.sustained", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="3b", help="model shape (default: %(default)s)")
    parser.add_argument("--codec", default="int8b64", help="of all layers of the residual (default: %(default)s)")
    parser.add_argument("--load", choices=LOADS, default="hook", help="prompts and tokens that are played "
                        "again and again (default: %(default)s, 32 prompts of 512 tokens, 128 generated)")
    parser.add_argument("--store", choices=("shm", "disk", "tcp"), default="shm",
                        help="shared memory; a disk, with fsync; shared memory behind TCP (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="of the store (default: /dev/shm; --store disk: /tmp)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of a trial (default: %(default)g)")
    parser.add_argument("--steps", type=int, default=5, help="of the bisection (default: %(default)s)")
    parser.add_argument("--rate", type=float, help="GB/s: one trial at that rate, no bisection")
    parser.add_argument("--beside", default="", help=f"who else is at work: some of {','.join(KINDS)}")
    parser.add_argument("--ring-gb", type=float, default=0.0, help="(default: as an engine on a GPU would take)")
    parser.add_argument("--room-gb", type=float, default=0.0, help="that the store may take; captures that came "
                        "first are deleted beyond it (default: a fourth of what is free, at most 4, of a disk 32)")
    parser.add_argument("--control", action=argparse.BooleanOptionalAction, default=True,
                        help="plain threads in turns with the trials (default: with them)")
    parser.add_argument("--threads", type=int, default=min(lanes_max, os.cpu_count() or 1),
                        help="of them (default: as many as the writer's lanes, here %(default)s)")
    parser.add_argument("--profile", action="store_true", help="processor and bytes by stage; some 0.01 s/GB more")
    parser.add_argument("--name", default="", help="of the result (default: shape, codec and store)")
    args = parser.parse_args(argv)
    beside = tuple(filter(None, args.beside.split(",")))
    if unknown := set(beside) - set(KINDS):
        parser.error(f"--beside: {', '.join(sorted(unknown))}: valid are {', '.join(KINDS)}")
    folder = args.folder or Path(tempfile.gettempdir() if args.store == "disk" else "/dev/shm")
    if not folder.is_dir():
        parser.error(f"--folder {folder}: no such folder")
    free = os.statvfs(folder)
    room = int(1e9 * args.room_gb) or min((32 if args.store == "disk" else 4) << 30, free.f_bavail * free.f_frsize // 4)
    setting = Setting(args.shape, args.codec, args.load, args.store, folder, int(1e9 * args.ring_gb), room, beside,
                      args.threads, 5.0 if args.control else 0.0, args.profile)
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

        if rate is None:
            trials = search(made, seconds, steps, tell, say)
        else:
            made.trial(None, min(seconds, 5.0), tell("warming"))
            before = made.control()
            trials = [made.trial(1e9 * rate, seconds, tell(f"{rate:.3g} GB/s"))]
            trials[0].beside(before, made.control())
            say("trial", trials[0])
        disk = made.control(hashed=False, threads=1)[0] if setting.store == "disk" else 0.0
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}"
    return Result(machine, setting, trials, best(trials), disk)


def shown(trial: Trial) -> str:
    """A trial on a line."""
    cpu = sum(trial.cpu_s_per_gb.get(name, 0.0) for name in ("sender", "writer", "porter"))
    text = "held" if trial.held else (f"did not hold: {trial.rows_dropped:,} rows dropped, {trial.unsealed_gb:.2g} GB "
                                      "unsealed")
    return (f"offered {trial.offered_gb_s:.3f} GB/s, durable {trial.durable_gb_s:.3f} ({trial.ratio:.2f} of the plain "
            f"threads' {trial.control_gb_s:.3f} at {trial.control_cpu_s_per_gb:.2f} s/GB), p50 "
            f"{trial.durable_p50_ms:.0f} p99 {trial.durable_p99_ms:.0f} ms, "
            f"{cpu:.3f} s/GB; {text}")


def table(result: Result) -> Table:
    """The trial that is the answer, or the one that went as fast as it could."""
    trial = result.best or result.trials[0]
    made = Table(title=f"{result.setting.shape}, {result.setting.codec}, {result.setting.store}: "
                       + ("the highest rate that held" if result.best else "no rate held; as fast as it goes"))
    made.add_column("")
    made.add_column("", justify="right")
    rows = [("GB/s offered, and durable", f"{trial.offered_gb_s:.3f}, {trial.durable_gb_s:.3f}"),
            (f"over {result.setting.threads} plain threads", f"{trial.ratio:.3f}"),
            ("rows offered, stored, dropped", f"{trial.rows_offered:,}, {trial.rows_stored:,}, {trial.rows_dropped:,}"),
            ("missing, by reason", ", ".join(f"{why} {rows:,}" for why, rows in trial.missing.items()) or "none"),
            ("ms until durable, p50 and p99", f"{trial.durable_p50_ms:.0f}, {trial.durable_p99_ms:.0f}"),
            ("GB not sealed at the end", f"{trial.unsealed_gb:.2f}")]
    if result.disk_gb_s:
        rows.insert(2, ("over one thread that writes, with fsync", f"{trial.durable_gb_s / result.disk_gb_s:.3f}"))
    for name, seconds in trial.cpu_s_per_gb.items():
        rows.append((f"{name}: processor s/GB; memory MB, growth a minute",
                     f"{seconds:.3f}; {trial.memory_mb.get(name, 0):.0f}, {trial.memory_mb_min.get(name, 0):+.1f}"))
    for row in rows:
        made.add_row(*row)
    return made


def stage_table(trial: Trial) -> Table:
    """Stages of every thread of every process; what is no stage of a thread's stands as its rest."""
    made = Table(title=f"by stage, at {trial.durable_gb_s:.3f} GB/s, until everything was sealed")
    for column in ("process", "thread", "stage"):
        made.add_column(column)
    for column in ("processor s/GB", "clock s/GB", "read", "written", "hashed"):
        made.add_column(column, justify="right")
    for process, found in trial.stages.items():
        gigabytes, stages = found["gb"], found["stages"]
        for thread, seconds in sorted(found["threads"].items(), key=lambda item: -item[1]):
            mine = {name.partition("/")[2]: sums for name, sums in stages.items() if name.startswith(f"{thread}/")}
            rest = seconds - sum(sums[0] for sums in mine.values())
            for name, (cpu, wall, _, _, *touched) in sorted(mine.items(), key=lambda item: -item[1][0]):
                if cpu / gigabytes > 0.0005:
                    made.add_row(process, thread, name, f"{cpu / gigabytes:.4f}", f"{wall / gigabytes:.3f}",
                                 *(f"{nbytes / 1e9 / gigabytes:.2f}" if nbytes else "" for nbytes in touched))
            if rest / gigabytes > 0.0005:
                made.add_row(process, thread, "rest", f"{rest / gigabytes:.4f}", "", "", "", "")
    return made


def main(argv: list[str] | None = None) -> None:
    """Measure, print, write bench/results/NAME.json."""
    setting, args = parse(argv)
    torch.set_num_threads(1)
    console = Console(width=140)
    result = measure(setting, args.seconds, args.steps, args.rate, console)
    console.print(table(result))
    if setting.profile:
        console.print(stage_table(result.trials[0]))
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{args.name or f'sustained-{setting.shape}-{setting.codec}-{setting.store}'}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result, enc_hook=str), indent=1) + b"\n")
    console.print(f"written: {path}")


if __name__ == "__main__":
    main()
