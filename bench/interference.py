"""``python -m bench.interference``: does a tap change what is generated?

Every engine is a fresh process that compiles anew (own caches): three plain ones are the noise floor, since Inductor
chooses tiles by timing; then armed. In Inductor's deterministic mode plain and armed must agree bit for bit, tokens and
log-probabilities; where they do not, every site is armed alone.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from bench.configurations import CONFIGURATIONS, make_adapter, make_model

DENSE = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "mlp_post", "q", "k", "v", "z", "q_rot",
         "k_rot", "embed", "final_norm")
MIXTURE = tuple(site if site != "mlp_post" else "router_logits" for site in DENSE)
START_S = 280.0


@dataclass(frozen=True, slots=True)
class Engine:
    """One process: a configuration, what is armed ("" without taps), how it compiles, which of several alike."""

    configuration: str
    arm: str = ""
    deterministic: bool = False
    number: int = 0


@dataclass(slots=True)
class Row:
    """What a configuration showed; counts of requests, of all."""

    configuration: str
    requests: int = 0
    again: str = ""  # a plain engine against itself, asked twice
    floor: str = ""  # plain against plain
    armed: str = ""  # all sites against plain
    deterministic: str = ""  # plain against plain, then all sites against plain: idle and captured
    alone: list[str] = field(default_factory=list)  # sites that alone differ, deterministic
    fusions: str = ""
    kernels: str = ""
    rows: str = ""
    said: str = ""  # what the start said is computed apart
    failed: str = ""


def main() -> None:
    """Run all engines, several side by side; print a table, write bench/results/interference.{json,md}."""
    parser = argparse.ArgumentParser(prog="python -m bench.interference", description=__doc__)
    parser.add_argument("--configurations", default="",
                        help="names with + between them (default: all that the devices hold)")
    parser.add_argument("--side", type=int, default=8, help="engines side by side (default: 8)")
    parser.add_argument("--plain", type=int, default=3, help="plain compilations of each configuration (default: 3)")
    parser.add_argument("--deterministic", type=int, default=2, help="those in deterministic mode (default: 2)")
    parser.add_argument("--go-on", action="store_true", help="keep what bench/results/interference.json has")
    args = parser.parse_args()
    devices = len(list(Path("/dev").glob("nvidia[0-9]*"))) or 1
    chosen = args.configurations.split("+") if args.configurations else [
        name for name, one in CONFIGURATIONS.items() if one.ranks <= devices]
    path = Path(__file__).parent / "results" / "interference.json"
    path.parent.mkdir(exist_ok=True)
    found: dict[Engine, dict[str, Any]] = {}
    if args.go_on and path.exists():
        found = {Engine(*name): one for name, one in json.loads(path.read_text()) if "failed" not in one}
    with tempfile.TemporaryDirectory(prefix="vllm-tap-bench-") as text:
        folder = Path(text)
        for configuration in chosen:
            make_model(CONFIGURATIONS[configuration].model, folder)
        make_adapter(folder)
        _run([engine for configuration in chosen for engine in (
            *(Engine(configuration, number=number) for number in range(args.plain)),
            *(Engine(configuration, deterministic=True, number=number) for number in range(args.deterministic)),
            Engine(configuration, ",".join(sites(configuration))),
            Engine(configuration, ",".join(sites(configuration)), True))], args.side, folder, found, path)
        _run([Engine(configuration, site, True) for configuration in chosen
              if changed(found, configuration) for site in sites(configuration)], args.side, folder, found, path)
    table = markdown([row_of(found, configuration) for configuration in chosen])
    path.with_suffix(".md").write_text(table)
    print(table)


def sites(configuration: str) -> tuple[str, ...]:
    """The sites that a configuration's model has."""
    return MIXTURE if CONFIGURATIONS[configuration].model == "mixture" else DENSE


def _run(engines: list[Engine], side: int, folder: Path, found: dict[Engine, dict[str, Any]], path: Path) -> None:
    """Start engines that are not in ``found`` yet; what each said is there, and in the file ``path``, at once."""
    begin = time.monotonic()
    with ThreadPoolExecutor(side) as pool:
        running = {pool.submit(_start, engine, folder): engine for engine in engines if engine not in found}
        for done in as_completed(running):
            engine, one = running[done], done.result()
            found[engine] = one
            path.write_text(json.dumps([[astuple(engine), one] for engine, one in found.items()]))
            print(f"{time.monotonic() - begin:5.0f} s  {engine.configuration:16} "
                  f"{'plain' if not engine.arm else engine.arm if ',' not in engine.arm else 'every site':12} "
                  f"{'deterministic' if engine.deterministic else ''} {one.get('failed', '')}", flush=True)


def _start(engine: Engine, folder: Path) -> dict[str, Any]:
    """What one engine said; ``failed`` with the reason where it could not run."""
    chosen = CONFIGURATIONS[engine.configuration]
    shared = "/dev/shm" if Path("/dev/shm").is_dir() else None
    # The writer may still put a block there when its engine has ended.
    with tempfile.TemporaryDirectory(prefix="vllm-tap-bench-", dir=shared, ignore_cleanup_errors=True) as own:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("VLLM_TAP_")}
        environment |= {"VLLM_CACHE_ROOT": f"{own}/vllm", "TORCHINDUCTOR_CACHE_DIR": f"{own}/inductor",
                        "TRITON_CACHE_DIR": f"{own}/triton", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                        "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "DEBUG", "VLLM_CPU_KVCACHE_SPACE": "1"}
        if not engine.arm:
            environment["VLLM_PLUGINS"] = ""
        asked = {"configuration": engine.configuration, "arm": engine.arm, "deterministic": engine.deterministic,
                 "model": str(folder / chosen.model), "adapter": str(folder / "adapter") if chosen.adapter else "",
                 "store": f"{own}/store", "on_gpu": Path("/dev/nvidiactl").exists()}
        with Path(own, "log").open("w+", errors="replace") as log:
            running = subprocess.Popen([sys.executable, "-m", "bench.interference_run", json.dumps(asked)],
                                       env=environment, cwd=Path(__file__).parents[1], stdout=log,
                                       stderr=subprocess.STDOUT, start_new_session=True)
            try:
                running.wait(START_S)
            except subprocess.TimeoutExpired:
                return {"failed": f"no answer within {START_S:.0f} s"}
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(running.pid, signal.SIGKILL)
                running.wait()
            log.seek(0)
            text = log.read()
    lines = text.splitlines()
    answers = [line for line in lines if line.startswith("FOUND ")]
    if not answers:
        errors = [line for line in lines if re.search(r"\w(Error|Exception)\b.*: ", line)]
        return {"failed": (errors or lines or [f"exit code {running.returncode}"])[-1][-300:]}
    fusions = [int(number) for number in re.findall(r"(?:Replaced|Fused \D{0,40} on) (\d+) ", text)]
    apart = re.findall(r"this engine fuses what makes (.+?) with the next operation", text)
    return {**json.loads(answers[-1].removeprefix("FOUND ")), "fusions": sum(fusions), "said": "".join(apart[-1:])}


def compared(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> tuple[int, int, float]:
    """Requests with other tokens, with any other bit, and the largest shift of a log-probability on common tokens."""
    tokens = bits = 0
    shift = 0.0
    for mine, theirs in zip(one, other, strict=True):
        tokens += mine["tokens"] != theirs["tokens"]
        bits += mine != theirs
        steps = zip(mine["tokens"], theirs["tokens"], mine["logprobs"], theirs["logprobs"], strict=True)
        for token, same, a, b in steps:
            shift = max(shift, abs(a - b))  # the first other token still had the same context
            if token != same:
                break
    return tokens, bits, shift


def _words(pairs: list[tuple[Any, Any]]) -> str:
    """The worst of several comparisons."""
    tokens, bits, shift = (max(column) for column in zip(*(compared(*pair) for pair in pairs), strict=True))
    return "equal" if not bits else f"{tokens} of {len(pairs[0][0])} ({shift:.1g})"


def changed(found: dict[Engine, dict[str, Any]], configuration: str) -> bool:
    """Whether all sites together change a bit in deterministic mode, of an engine that answers twice the same."""
    armed = found[Engine(configuration, ",".join(sites(configuration)), True)]
    plain = found[Engine(configuration, deterministic=True)]
    return "failed" not in armed and "failed" not in plain and not compared(plain["idle"], plain["again"])[1] and any(
        compared(plain["idle"], armed[way])[1] for way in ("idle", "captured"))


def row_of(found: dict[Engine, dict[str, Any]], configuration: str) -> Row:
    """A line of the table."""
    every = ",".join(sites(configuration))
    mine = {engine: one for engine, one in found.items() if engine.configuration == configuration}
    row = Row(configuration)
    if failed := [one["failed"] for one in mine.values() if "failed" in one]:
        row.failed = failed[0]
        mine = {engine: one for engine, one in mine.items() if "failed" not in one}
    plain = [one["idle"] for engine, one in mine.items() if not engine.arm and not engine.deterministic]
    still = [one["idle"] for engine, one in mine.items() if not engine.arm and engine.deterministic]
    row.requests = len(plain[0]) if plain else 0
    if twice := [(one["idle"], one["again"]) for engine, one in mine.items() if not engine.arm and "again" in one]:
        row.again = _words(twice)
    if len(plain) > 1:
        row.floor = _words([(plain[0], other) for other in plain[1:]])
    if plain and (armed := mine.get(Engine(configuration, every))):
        row.armed = _words([(plain[0], armed["idle"]), (plain[0], armed["captured"])])
        rows = armed["rows"]
        row.rows = f"{rows['captured']:,} rows, {rows['missing']} missing; " + ", ".join(
            f"{name} {worst:.1g}" for name, worst in rows["worst"].items())
        first = mine[Engine(configuration)]
        row.fusions = f"{first['fusions']} → {armed['fusions']}"
        if "kernels" in armed:
            row.kernels = f"{first['kernels']:.0f} → {armed['kernels']:.0f}"
        row.said = armed["said"]
    if still and (armed := mine.get(Engine(configuration, every, True))):
        row.deterministic = "; ".join(_words([(still[0], other)])
                                      for other in (*still[1:], armed["idle"], armed["captured"]))
        row.alone = [engine.arm for engine, one in mine.items() if engine.arm and engine.deterministic
                     and engine.arm != every and any(compared(still[0], one[way])[1] for way in ("idle", "captured"))]
    return row


def markdown(rows: list[Row]) -> str:
    """The table: requests with other tokens, of all, and in brackets the largest shift of a log-probability."""
    lines = ["| configuration | plain, asked twice | plain, compiled anew | every site armed "
             "| deterministic: plain; armed; captured | alone | vLLM's fusions | kernels a step | rows |",
             "|---" * 9 + "|"]
    for row in rows:
        alone = ", ".join(row.alone) + (f" (said at start: {row.said})" if row.said else "")
        rows_of = " – ".join(filter(None, (row.rows, row.failed)))
        lines.append("| " + " | ".join((row.configuration, row.again, row.floor, row.armed, row.deterministic, alone,
                                        row.fusions, row.kernels, rows_of)) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
