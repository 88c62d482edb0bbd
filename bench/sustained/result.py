"""What bench/results holds of ``python -m bench.sustained``, and how it is shown."""

from __future__ import annotations

import statistics

import msgspec
from rich.table import Table

from bench.sustained.trial import Setting, Trial


class Result(msgspec.Struct):
    """What was measured, and the answer."""

    machine: str
    cores: int
    setting: Setting
    trials: list[Trial]  # the first as fast as the ring gave room, unless one rate was asked for
    best: Trial | None  # the highest rate that held
    disk_gb_s: float = 0.0  # one thread that only writes, with fsync
    disk_direct_gb_s: float = 0.0  # past the page cache; 0 where the file system cannot
    recovery: dict[str, float] = {}  # after a kill; see ``bench.sustained.recovery``


def shown(trial: Trial) -> str:
    """A trial on a line."""
    cpu = sum(trial.cpu_s_per_gb.get(name, 0.0) for name in ("sender", "writer", "porter"))
    text = "held" if trial.held else (f"did not hold: {trial.rows_dropped:,} rows dropped, {trial.unsealed_gb:.2g} GB "
                                      "unsealed")
    beside = (f" ({trial.ratio:.2f} of the plain threads' {trial.control_gb_s:.3f} at "
              f"{trial.control_cpu_s_per_gb:.2f} s/GB)" if trial.control_gb_s else "")
    return (f"offered {trial.offered_gb_s:.3f} GB/s, durable {trial.durable_gb_s:.3f}{beside}, p50 "
            f"{trial.durable_p50_ms:.0f} p99 {trial.durable_p99_ms:.0f} longest "
            f"{trial.durable_max_ms:.0f} ms, {cpu:.3f} s/GB; {text}")


def table(result: Result) -> Table:
    """The trial that is the answer, or the one that went as fast as it could."""
    trial = result.best or result.trials[0]
    how = "the highest rate that held" if result.best else "no rate held; as fast as it goes"
    if result.setting.engine == "real":
        how = f"{trial.seconds:.0f} s of generation" + ("" if trial.held else ", which did not hold")
    made = Table(title=f"{result.setting.shape}, {result.setting.codec}, {result.setting.store}: {how}")
    made.add_column("")
    made.add_column("", justify="right")
    rows = [("GB/s offered, and durable", f"{trial.offered_gb_s:.3f}, {trial.durable_gb_s:.3f}"),
            *([(f"over {result.setting.threads} plain threads", f"{trial.ratio:.3f}")] if trial.control_gb_s else []),
            ("rows offered, stored, dropped", f"{trial.rows_offered:,}, {trial.rows_stored:,}, {trial.rows_dropped:,}"),
            ("missing, by reason", ", ".join(f"{why} {rows:,}" for why, rows in trial.missing.items()) or "none"),
            ("ms until durable, p50, p99, longest",
             f"{trial.durable_p50_ms:.0f}, {trial.durable_p99_ms:.0f}, {trial.durable_max_ms:.0f}"),
            ("GB not sealed at the end", f"{trial.unsealed_gb:.2f}")]
    if result.disk_gb_s:
        for how, rate in (("past the page cache", result.disk_direct_gb_s), ("with fsync", result.disk_gb_s)):
            rows.insert(1 + bool(trial.control_gb_s), (f"over one thread that writes {how} ({rate:.3f} GB/s)",
                            f"{trial.durable_gb_s / rate:.3f}" if rate else ""))
    if tenth := len(trial.rounds_s) // 10:
        first, last = (statistics.median(part) for part in (trial.rounds_s[:tenth], trial.rounds_s[-tenth:]))
        rows.append((f"{len(trial.rounds_s)} rounds: the last tenth over the first", f"{last / first:.3f}"))
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
