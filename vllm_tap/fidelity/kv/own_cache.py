"""vLLM's own dtypes of the K/V cache beside codecs: each in an engine of its own, with the same prompts and steps.

An engine is another process here, since vLLM does not start well where another engine has been. It is asked by a file
and answers by files. The last norm's rows and the answers are compared, as they are for codecs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, get_args

import numpy as np

from engine_side.seams.kept.keys_values import Heads
from schemas.errors import ArgumentError
from vllm_tap.fidelity.bench import Answer, Bench, Unpublished
from vllm_tap.fidelity.distributions import I64
from vllm_tap.fidelity.job import FidelityJob, laboratory
from vllm_tap.fidelity.kv.codecs import SHUFFLED
from vllm_tap.fidelity.kv.modes import shuffled
from vllm_tap.fidelity.kv.study import Batch, Where, batches, width_of
from vllm_tap.fidelity.study import PlaceStudy, Reference, Variant, add, judge, unlike

__all__ = ["AUTO", "SITE", "OwnCache", "check_dtypes", "check_kept", "run_own", "study_own"]

AUTO: Final = "auto"  # the control: another process with the model's own dtype
SITE: Final = "engine"


@dataclass(frozen=True, slots=True)
class OwnCache:
    """The results of an engine with a cache dtype of its own, of all prompts.

    ``norm``: rows of the last norm, float32 [prompts, positions, width]. ``tokens``: the answers, int64 [prompts,
    tokens]. ``token_bytes``: bytes of a token's keys and values in all layers.
    """

    norm: np.ndarray[Any, np.dtype[np.float32]]
    tokens: I64
    token_bytes: int

    def answers(self, start: int, count: int) -> list[Answer]:
        """The answers to some prompts."""
        return [Answer(tuple(self.tokens[at].tolist()), np.array(self.norm[at]), None)
                for at in range(start, start + count)]


def check_dtypes(names: Sequence[str]) -> None:
    """ArgumentError for one that this vLLM does not know."""
    from vllm.config.cache import CacheDType

    valid = [name for name in get_args(CacheDType) if name != AUTO]
    for name in names:
        if name not in valid:
            raise ArgumentError("--engine-dtypes", name, f"valid for this vLLM: {', '.join(valid)}")
    if len(set(names)) < len(names):
        raise ArgumentError("--engine-dtypes", ",".join(names), "names one twice")


def run_own(job: FidelityJob, prompts: I64, batch: int, words: Sequence[str], names: Sequence[str], folder: Path
            ) -> dict[str, OwnCache]:
    """The results of engines with these dtypes, and of the control, on the prompts [prompts, positions]; ``words``:
    vLLM's arguments, without the dtype. ArgumentError, with vLLM's own words, for one that does not run here.
    """
    np.save(folder / "prompts.npy", prompts)
    found = {}
    for name in (AUTO, *names):
        out = folder / name
        out.mkdir()
        (out / "asked.json").write_text(json.dumps({
            "model": job.model, "size": job.size, "engine_args": job.engine_args, "batch": batch,
            "words": [*words, "--kv-cache-dtype", name], "prompts": str(folder / "prompts.npy")}))
        done = subprocess.run([sys.executable, "-m", __name__, str(out)], stdout=subprocess.DEVNULL)
        told = out / "told.json"
        said: dict[str, Any] = {"error": f"it ended with {done.returncode}"}
        if told.exists():
            said = json.loads(told.read_text())
        if "error" in said:
            raise ArgumentError("--engine-dtypes", name, f"an engine with --kv-cache-dtype {name} does not run here: "
                                                         f"{said['error']}; leave it out")
        found[name] = OwnCache(np.load(out / "norm.npy", mmap_mode="r"), np.load(out / "tokens.npy"),
                               said["token_bytes"])
        check_kept(name, found)
    return found


def check_kept(name: str, found: Mapping[str, OwnCache]) -> None:
    """ArgumentError for a dtype that changes nothing: a back end may take its name and keep the model's own."""
    one, auto = found[name], found[AUTO]
    if name != AUTO and all(np.array_equal(mine, other) for mine, other in zip(one.norm, auto.norm, strict=True)):
        raise ArgumentError("--engine-dtypes", name, f"an engine with it gives the same bits as without, from "
                            f"{one.token_bytes} bytes a token ({auto.token_bytes} without): its attention does not "
                            "keep the cache so here, though it takes the name; leave it out")


def study_own(bench: Bench, tokens: I64, own: Mapping[str, OwnCache], heads: Heads, setting: tuple[int, int],
              tell: Callable[[], None]) -> PlaceStudy:
    """The dtypes compared with this engine's run without any change, with the controls of in-forward. ``setting``:
    prompts of a batch, and the context. Unpublished where another start with the model's own dtype gives other bits.
    """
    size, context = setting
    where = Where(SITE, "kv", tuple(sorted(heads)))
    variants = {name: Variant("codec", name) for name in own if name != AUTO}
    control, told, harness = Variant("control", SHUFFLED), dict[str, str](), list[float]()
    start = 0
    for chunk in batches(tokens, size):
        run = Batch(bench, chunk, where, context)
        if wrong := unlike(run.clean, own[AUTO].answers(start, len(chunk))):
            raise Unpublished(f"{SITE}: another start with the cache in the model's dtype changes {wrong}: what a "
                              "dtype costs cannot be told from what a start does")
        reference = Reference(bench, run.clean, chunk)
        harness += [float(one.kl[context:].mean()) for one in reference.against(run.identity)]
        told = told or {"identity": "the same bits, from another start as well", "one wrong row": run.one_wrong()}
        for name, variant in variants.items():
            judge(variant, run.clean, own[name].answers(start, len(chunk)), reference)
        run.judge(control, shuffled(len(harness)), reference)
        start += len(chunk)
        tell()
    study = PlaceStudy(where.site, where.layer, width_of(where, heads), harness, told=told)
    add(study, [*variants.values(), control], {name: each.token_bytes for name, each in own.items()}, context)
    return study


def _answer(out: Path) -> None:
    """Run the prompts that ``asked.json`` asks for, and write the answers beside it."""
    asked = json.loads((out / "asked.json").read_text())
    job = FidelityJob(asked["model"], out, size=asked["size"], engine_args=tuple(asked["engine_args"]))
    prompts = np.load(asked["prompts"])
    with laboratory(job, prompts.shape[1], tuple(asked["words"]), "final_norm") as (bench, _):
        answers = [one for chunk in batches(prompts, asked["batch"]) for one in bench.unedited(chunk)]
        token_bytes = _token_bytes(bench.engine)
    np.save(out / "norm.npy", np.stack([one.norm for one in answers]))
    np.save(out / "tokens.npy", np.array([one.tokens for one in answers], np.int64))
    (out / "told.json").write_text(json.dumps({"token_bytes": token_bytes}))


def _token_bytes(engine: Any) -> int:
    """Bytes of a token in the cache, all layers together, as the engine lays it out."""
    config, = engine.collective_rpc(lambda worker: worker.model_runner.kv_cache_config)
    layers = [(group.kv_cache_spec, 1 if hasattr(group.kv_cache_spec, "kv_cache_specs") else len(group.layer_names))
              for group in config.kv_cache_groups]
    return sum(-(-spec.page_size_bytes * count // spec.block_size) for spec, count in layers)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    try:
        _answer(folder)
    except Exception as error:  # whatever vLLM says of a dtype that it cannot have here
        words = (str(error).splitlines() or [""])[-1][:300]
        (folder / "told.json").write_text(json.dumps({"error": f"{type(error).__name__}: {words}"}))
        raise SystemExit(1) from None
