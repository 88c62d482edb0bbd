"""What a scheduler does to requests: each feature made to happen on a running engine, and seen to have happened.

A feature belongs to a group: the features that one engine can show. ``run`` returns the captures to compare.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from schemas.ids import new_ulid
from tests.support.engines.engines import ON_GPU, Captured, Engine, prompt
from tests.support.models.unlisted import UNLISTED
from tests.support.store_helpers import until

BATCHED_TOKENS: Final = 64
BLOCK: Final = 32
RAW: Final = {"codec": "raw"}
GREEDY: Final = {"ignore_eos": True, "detokenize": False}


@dataclass(frozen=True, slots=True)
class Group:
    """Engine options; environment variables to leave out (``without``); why it cannot run there (``not_on_cpu``)."""

    options: dict[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    not_on_cpu: str = ""


@dataclass(frozen=True, slots=True)
class Feature:
    """``name`` heads its row of the table, ``meaning`` explains it below."""

    name: str
    group: str
    meaning: str
    run: Callable[[Engine], list[Captured]]


GROUPS: Final[dict[str, Group]] = {
    # With few cache blocks (see ``options``), so that requests are preempted; the prefix cache is on, as by default.
    "scheduler": Group({"disable_log_stats": False}),
    "eager": Group({"enforce_eager": True}),
    "compiled": Group(without=("VLLM_CPU_CI_ENV",)),
    "speculative": Group({"disable_log_stats": False, "speculative_config": {
        "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}}),
    "async": Group({"async_scheduling": True}, not_on_cpu="vLLM's CPU platform switches asynchronous scheduling off"),
}


# How a model is laid out over ranks, by name; of which TAP_LAYOUT asks for one.
LAYOUTS: Final[dict[str, dict[str, Any]]] = {
    "": {}, "tensor parallel": {"tensor_parallel_size": 2}, "pipeline parallel": {"pipeline_parallel_size": 2},
    "expert parallel": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "pipeline and tensor parallel": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}}


def options(family: str, group: str) -> dict[str, Any]:
    """Engine options of a group; the scheduler's has too few cache blocks for what ``preempted`` wants."""
    more = UNLISTED[family].engine if family in UNLISTED and not ON_GPU else {}
    few = {"num_gpu_blocks_override": _few_blocks(family)} if group == "scheduler" else {}
    return {"max_num_batched_tokens": BATCHED_TOKENS, "block_size": BLOCK, **GROUPS[group].options, **few, **more}


def _few_blocks(family: str) -> int:
    """Cache blocks of which there are fewer than ``preempted`` wants."""
    if family in UNLISTED:
        says = UNLISTED[family].says  # latent attention has blocks of 16 tokens
        return UNLISTED[family].blocks or (40 if "sliding_window" in says else 28 if "kv_lora_rank" in says else 14)
    return 40 if family.startswith("gemma") else 14


def tokens(length: int, seed: int) -> list[int]:
    """A prompt of the small models' vocabulary of 512."""
    return [token % 500 + 3 for token in prompt(length, seed=seed)]


def counted(engine: Engine, name: str) -> int:
    """One of vLLM's own counters."""
    return sum(int(metric.value) for metric in engine.llm.get_metrics() if metric.name == f"vllm:{name}")


def config(engine: Engine) -> Any:
    """What the engine runs with."""
    return engine.llm.llm_engine.vllm_config


def ragged(engine: Engine) -> list[Captured]:
    lengths, scheduler = (9, 80, 1, 33, 20, 5, 70, 64), config(engine).scheduler_config
    assert sum(lengths) > scheduler.max_num_batched_tokens == BATCHED_TOKENS or not scheduler.enable_chunked_prefill
    return engine.run([tokens(n, seed=n) for n in lengths], [{"max_tokens": 6, **GREEDY}] * 8, [RAW] * 8)


def chunked(engine: Engine) -> list[Captured]:
    length = 3 * BATCHED_TOKENS + 8
    assert length > 3 * config(engine).scheduler_config.max_num_batched_tokens, "it fits in less than four steps"
    return engine.run([tokens(length, seed=1)], [{"max_tokens": 3, **GREEDY}], [RAW])


def preempted(engine: Engine) -> list[Captured]:
    before = counted(engine, "num_preemptions")
    lengths = (30, 90, 17, 61, 5, 75, 44, 8)
    captured = engine.run([tokens(n, seed=n) for n in lengths], [{"max_tokens": 50, **GREEDY}] * 8, [RAW] * 8)
    assert counted(engine, "num_preemptions") > before, "nothing was preempted"
    assert sum(one.manifest.recomputed for one in captured) > 0, "no row was computed twice"
    return captured


def prefix_recomputed(engine: Engine) -> list[Captured]:
    captured, plain = (_after_warming(engine, spec, seed=2) for spec in (RAW, None))
    assert plain.num_cached_tokens >= BLOCK, "the prefix cache was not used"
    assert captured.output.num_cached_tokens == captured.manifest.cached == 0
    return [captured]


def prefix_allowed(engine: Engine) -> list[Captured]:
    captured = _after_warming(engine, {**RAW, "prefix_cache": "allow"}, seed=3)
    assert captured.manifest.cached == captured.output.num_cached_tokens >= BLOCK, "the prefix cache was not used"
    return [captured]


def _after_warming(engine: Engine, spec: dict[str, Any] | None, seed: int) -> Any:
    one = [tokens(150, seed=seed)]
    engine.run(one, [{"max_tokens": 1, **GREEDY}], [None])
    return engine.run(one, [{"max_tokens": 5, **GREEDY}], [spec])[0]


def samples(engine: Engine) -> list[Captured]:
    from vllm import SamplingParams

    ulid = new_ulid()
    params = SamplingParams(n=2, temperature=1.0, max_tokens=9, **GREEDY, extra_args={"capture": {**RAW, "id": ulid}})
    (output,) = engine.llm.generate([{"prompt_token_ids": tokens(70, seed=4)}], params, use_tqdm=False)
    assert output.outputs[0].token_ids != output.outputs[1].token_ids
    return [engine.captured(f"{ulid}.{sample}", output, sample) for sample in range(2)]


def aborted(engine: Engine) -> list[Captured]:
    from vllm import SamplingParams

    ulid, core = new_ulid(), engine.llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=60, **GREEDY, extra_args={"capture": {**RAW, "id": ulid}})
    core.add_request(ulid, {"prompt_token_ids": tokens(70, seed=5)}, params)
    seen: list[int] = []
    while len(seen) < 4:
        seen = next((list(output.outputs[0].token_ids) for output in core.step()), seen)
    core.abort_request([ulid])
    manifest = until(lambda: (found := engine.reader.manifest(ulid)).status != "running" and found)
    assert manifest and (manifest.status, manifest.finish_reason) == ("complete", "abort")
    assert 4 <= len(manifest.output_token_ids) < 60, "it was not aborted in the middle"
    assert manifest.output_token_ids[: len(seen)] == seen
    while core.has_unfinished_requests():
        core.step()
    return [Captured(ulid, (*manifest.prompt_token_ids, *manifest.output_token_ids), 70, None, manifest)]


def eager(engine: Engine) -> list[Captured]:
    assert config(engine).compilation_config.mode.name == "NONE"
    return ragged(engine)


def compiled(engine: Engine) -> list[Captured]:
    found = config(engine).compilation_config
    assert found.mode.name != "NONE" and found.backend in ("inductor", ""), (found.mode, found.backend)
    return ragged(engine)


def speculative(engine: Engine) -> list[Captured]:
    lengths = (8, 3, 5, 2, 7, 4)
    prompts = [tokens(n, seed=n) * (40 // n) for n in lengths]
    names = [f"spec_decode_num_{kind}_tokens" for kind in ("draft", "accepted")]
    before = [counted(engine, name) for name in names]  # of earlier engines in this process too
    captured = engine.run(prompts, [{"max_tokens": 40, **GREEDY}] * 6, [RAW] * 6)
    drafted, accepted = (counted(engine, name) - past for name, past in zip(names, before, strict=True))
    assert 0 < accepted < drafted, f"{accepted} of {drafted} drafts accepted: some must be, and some must not"
    return captured


def asynchronous(engine: Engine) -> list[Captured]:
    assert config(engine).scheduler_config.async_scheduling
    return ragged(engine)


FEATURES: Final = tuple(Feature(*row) for row in (
    ("ragged batch", "scheduler", "eight requests of 1 to 80 prompt tokens at once, 64 tokens a step", ragged),
    ("chunked prefill", "scheduler", "a prompt of 200 tokens, 64 tokens a step", chunked),
    ("preemption", "scheduler", "eight requests that want more cache blocks than there are: some are preempted and "
     "computed again", preempted),
    ("prefix cache, recomputed", "scheduler", "a prompt that lies in the prefix cache, its rows computed again", 
     prefix_recomputed),
    ("prefix cache, allowed", "scheduler", "the same, its cached rows left out and named as missing", prefix_allowed),
    ("n = 2", "scheduler", "two samples of one prompt at temperature 1, a capture each", samples),
    ("abort", "scheduler", "a request aborted in the middle of its generation", aborted),
    ("eager", "eager", "the ragged batch with `enforce_eager`: nothing compiled", eager),
    ("compiled", "compiled", "the ragged batch compiled as vLLM does by default: Inductor (on CUDA with graphs)",
     compiled),
    ("speculative decoding", "speculative", "n-gram drafts of three tokens, some accepted and some rejected",
     speculative),
    ("async scheduling", "async", "the ragged batch with a step scheduled before the last one's tokens are known",
     asynchronous),
))


def not_run(group: Group) -> str:
    """Why this machine cannot show a group's features; empty where it can."""
    return "" if ON_GPU else group.not_on_cpu
