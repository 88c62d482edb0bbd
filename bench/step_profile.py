"""Where the time of a decode step goes: ``python -m bench.step_profile --shape 3b --codecs int8b64`` (needs a GPU).

The engine runs in this process, so that one trace shows the host, the model's stream, and ours beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.engine_run import options
from bench.scenarios import ENGINES
from bench.shapes import LOADS, make_model, prompts
from schemas.ids import new_ulid
from vllm_tap.serve.writer_process import WriterProcess


def main() -> None:
    """Print microseconds a decode step: host's share of ours, device time by stream, the device's idle share."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="3b")
    parser.add_argument("--load", default="decode32")
    parser.add_argument("--codecs", default="none,int8b64", help="none: nothing is captured")
    parser.add_argument("--trace", type=Path, help="write the last trace here, for a trace viewer")
    args = parser.parse_args()
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
    with tempfile.TemporaryDirectory(prefix="vllm-tap-bench-") as folder, \
         tempfile.TemporaryDirectory(prefix="vllm-tap-bench-", dir="/dev/shm") as store:
        endpoint = f"ipc://{folder}/w.sock"
        os.environ |= {"VLLM_TAP_ENDPOINT": endpoint, "VLLM_TAP_ARM": "resid_post"}
        with WriterProcess(Path(store), endpoint):
            _measure(args.shape, args.load, args.codecs.split(","), args.trace, Path(folder))


def _measure(shape: str, load_name: str, codecs: list[str], trace: Path | None, folder: Path) -> None:
    import torch
    from vllm import LLM, SamplingParams

    load = LOADS[load_name]
    llm: Any = LLM(str(make_model(shape, folder)), load_format="dummy", skip_tokenizer_init=True,
                   dtype="bfloat16", seed=0, enable_prefix_caching=False,
                   **options(ENGINES["tap"], shape, [load], True))
    timed = _timed()
    asked: Any = prompts(load, 0)

    def generate(codec: str) -> float:
        params = [
            SamplingParams(temperature=0, max_tokens=load.generated, ignore_eos=True, detokenize=False,
                           extra_args=None if codec == "none" else {"capture": {"codec": codec, "id": new_ulid()}})
            for _ in range(load.batch)
        ]
        begin = time.perf_counter()
        llm.generate(asked, params, use_tqdm=False)
        return time.perf_counter() - begin

    for codec in codecs:
        for _ in range(3):
            generate(codec)
        time.sleep(1.0)
        for spent in timed.values():
            spent.clear()
        seconds = [generate(codec) for _ in range(5)]
        print(json.dumps({
            "codec": codec, "load": load_name, "us_a_step": round(1e6 * statistics.median(seconds) / load.generated),
            **{name: f"{statistics.median(spent) * 1e6:.0f} µs (mean {statistics.fmean(spent) * 1e6:.0f}, p99 "
                     f"{sorted(spent)[int(len(spent) * 0.99)] * 1e6:.0f})" for name, spent in timed.items() if spent},
        }, ensure_ascii=False), flush=True)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU,
                                                torch.profiler.ProfilerActivity.CUDA]) as profile:
            generate(codec)
            torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            written = trace or Path(folder) / "trace.json"
            profile.export_chrome_trace(str(written))
            print(json.dumps(_device(json.loads(written.read_text())["traceEvents"]), ensure_ascii=False), flush=True)


def _timed() -> dict[str, list[float]]:
    """Seconds of every call, by what is called."""
    from vllm.v1.worker.gpu import model_runner as second

    from engine_side.step.bursts import Bursts
    from engine_side.step.recorder import Recorder

    found: dict[str, list[float]] = {}

    def watch(owner: Any, name: str, shown: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)
        spent = found.setdefault(shown, [])

        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                spent.append(time.perf_counter() - begin)

        setattr(owner, name, call)

    watch(Recorder, "before_step", "before_step")
    watch(Recorder, "after_step", "after_step")
    watch(Bursts, "take_next", "take_next")  # what most steps of decode are
    watch(second.GPUModelRunner, "execute_model", "execute_model")
    watch(second.GPUModelRunner, "sample_tokens", "sample_tokens")
    return found


def _device(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Device time by stream and name, a decode step; steps are counted by the graphs that are launched."""
    spans = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    launches = sorted(event["ts"] for event in events if "cudaGraphLaunch" in event.get("name", ""))
    if not launches:
        return {"graphs": 0}
    begin, end = launches[len(launches) // 4], launches[-2]
    steps = sum(begin <= at < end for at in launches)
    inside = sorted((event for event in spans if begin <= event["ts"] < end), key=lambda event: event["ts"])
    busy, until = 0.0, begin
    for event in inside:
        stop = event["ts"] + event["dur"]
        busy += max(0.0, stop - max(until, event["ts"]))
        until = max(until, stop)
    streams: dict[str, float] = defaultdict(float)
    ours: dict[str, float] = defaultdict(float)
    main = max({event["args"]["stream"] for event in inside},
               key=lambda stream: sum(e["dur"] for e in inside if e["args"]["stream"] == stream))
    for event in inside:
        stream = event["args"]["stream"]
        streams[f"stream {stream}"] += event["dur"] / steps
        if stream != main:
            ours[f"{stream} {event['name'][:48]}"] += event["dur"] / steps
    return {
        "us_a_step": round((end - begin) / steps), "device_busy": f"{busy / (end - begin):.3f}",
        "streams_us": {name: round(us) for name, us in streams.items()},
        "beside_us": {name: round(us, 1) for name, us in sorted(ours.items(), key=lambda item: -item[1])[:8]},
    }


if __name__ == "__main__":
    main()
