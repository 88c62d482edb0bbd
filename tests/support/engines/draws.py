"""Random engines and random mixes of requests, each from a seed alone."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import islice
from typing import Any

from tests.support.engines.accounts import Circumstances, Request
from tests.support.models.coded_model import EOS, LAYERS, REQUESTS, greedy, text, words

SITES = ("resid_post", "attn_out", "mlp_out", "mlp_post", "embed")
CODECS = ("raw", "raw16", "int8b64")
MODEL_LEN = 256
_PROMPT_MAX, _TOKENS_MAX = 150, 40
_LENS = {"resid_post": "blocks.{}.hook_out", "attn_out": "blocks.{}.hook_attn_out", "mlp_out": "mlp_out.{}",
         "mlp_post": "blocks.{}.mlp.hook_post"}
SPECULATION = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
_RING_MIN = 4 << 20


@dataclass(frozen=True)
class Setting:
    """An engine: the scheduler's limits, and the tap's."""

    budget: int  # tokens a step
    requests: int  # at once
    block_size: int
    blocks: int | None = None  # few: requests are preempted
    caching: bool = True
    chunked: bool = True
    drafts: bool = False
    by_priority: bool = False
    piece: int = 0  # tokens of one prompt a step; 0: as many as the budget has
    drops: bool = False  # the smallest ring, a writer that stands still at times, and nobody waits for it
    family: str = "coded"  # or "qwen3", whose rows are known from Hugging Face alone

    @property
    def options(self) -> dict[str, Any]:
        """Of ``LLM``."""
        return {
            "max_model_len": MODEL_LEN, "max_num_batched_tokens": self.budget, "max_num_seqs": self.requests,
            "block_size": self.block_size, "num_gpu_blocks_override": self.blocks, "seed": 0,
            "enable_prefix_caching": self.caching, "enable_chunked_prefill": self.chunked,
            "speculative_config": SPECULATION if self.drafts else None,
            "long_prefill_token_threshold": self.piece, "scheduling_policy": "priority" if self.by_priority else "fcfs",
            "disable_log_stats": False,
        }

    @property
    def environment(self) -> dict[str, str]:
        """Of the plugin."""
        sites = SITES if self.family == "coded" else ("resid_post", "attn_out", "mlp_out")
        return {"VLLM_TAP_ARM": ",".join(sites), "VLLM_TAP_ON_FULL": "drop" if self.drops else "wait",
                "VLLM_TAP_RING_BYTES": str(_RING_MIN if self.drops else 64 << 20)}

    def circumstances(self, requests: list[Request]) -> Circumstances:
        """What may happen to the captures of these requests here.

        With drafts, vLLM's sampler on a CPU says any token as soon as one request of the batch is not greedy.
        """
        sane = not self.drafts or all(request.params.get("temperature", 0) == 0 for request in requests)
        return Circumstances(self.block_size, self.caching, self.blocks is not None, self.drops,
                             self.family == "coded" and sane)


def setting(seed: int) -> Setting:
    """An engine; any twenty seeds in a row have every trait and most pairs of them."""
    rng = random.Random(f"engine {seed}")
    block_size, chunked, few = rng.choice((32, 32, 32, 64)), rng.random() < 0.8, seed % 5 in (0, 2, 3)
    return Setting(
        budget=rng.choice((16, 24, 48, 64, 128, 512)) if chunked else rng.choice((MODEL_LEN, 512)),
        requests=rng.choice((6, 8, 16)) if few else rng.choice((1, 3, 8, 16)), block_size=block_size,
        blocks=MODEL_LEN // block_size + rng.randint(1, 3) if few else None,
        caching=rng.random() < 0.7, chunked=chunked, drafts=seed % 3 == 1, by_priority=rng.random() < 0.4,
        piece=rng.choice((0, 16, 32)) if chunked else 0, drops=seed % 4 == 2,
        family="qwen3" if seed % 10 == 9 else "coded")


def mix(seed: int, draw: int, engine: Setting) -> list[Request]:
    """The requests of one draw; draws of a seed share prefixes, so the cache has them.

    In every second draw on an engine that drops, prompts are long and most captures are of everything.
    """
    rng, shared = random.Random(f"mix {seed} {draw}"), random.Random(f"prefix {seed}").choices(words(0), k=_PROMPT_MAX)
    sites = engine.environment["VLLM_TAP_ARM"].split(",")
    heavy = engine.drops and draw % 2 == 1
    requests: list[Request] = []
    for of in rng.sample(range(1, REQUESTS - 4), rng.randint(3, 14)):
        prompt = _prompt(rng, of, shared, 100 if heavy else 1)
        aborted = rng.random() < 0.15
        spec, layers, codecs = None, {}, {}
        if rng.random() < 0.85:
            before = [request for request in requests if request.spec is not None]
            if before and rng.random() < 0.25:
                spec, layers, codecs = (like := rng.choice(before)).spec, like.layers, like.codecs
            elif heavy and rng.random() < 0.9:
                spec, codecs = {"codec": "raw"}, dict.fromkeys(sites, "raw")
                layers = {site: (0,) if site == "embed" else tuple(range(LAYERS)) for site in sites}
            else:
                spec, layers, codecs = _spec(rng, sites)
        requests.append(Request(
            prompt, _params(rng, prompt, engine.drafts and draw % 2 == 0), spec, layers, codecs,
            arrival=rng.choice((0, 0, 0, rng.randint(1, 25))), abort=rng.randint(0, 30) if aborted else None,
            priority=rng.randint(0, 3) if engine.by_priority else 0))
    return requests


def _prompt(rng: random.Random, of: int, shared: list[int], least: int) -> tuple[int, ...]:
    length = max(least, rng.choice((1, 2, rng.randint(1, 40), rng.randint(1, _PROMPT_MAX), 64, 96)))
    common = shared[: rng.choice((0, 0, rng.randint(0, length), length))]
    own = rng.choices(words(of), k=length)
    if rng.random() < 0.5:  # as the model goes on by itself: what drafts are guessed from
        own = [*own[:2], *islice(greedy(tuple(own[:2])), length)]
    return tuple([*common, *own][:length])


def _params(rng: random.Random, prompt: tuple[int, ...], greedily: bool) -> dict[str, Any]:
    params: dict[str, Any] = {
        "max_tokens": rng.choice((1, 2, rng.randint(1, _TOKENS_MAX), _TOKENS_MAX)),
        "temperature": 0.0 if greedily else rng.choice((0.0, 0.0, 1.0)), "ignore_eos": rng.random() < 0.7,
    }
    if rng.random() < 0.15 and not greedily:
        params |= {"n": rng.randint(2, 4), "temperature": 1.0}
    future = list(islice(greedy(prompt), _TOKENS_MAX))
    at = rng.randrange(_TOKENS_MAX - 1)
    if rng.random() < 0.15:
        params["stop_token_ids"] = [rng.choice((future[at], EOS, rng.choice(words(prompt[-1] // 64))))]
    elif rng.random() < 0.15:
        params["stop"] = [rng.choice((text(future[at]), f"{text(future[at])} {text(future[at + 1])}"[2:-1]))]
    return params


def _spec(rng: random.Random, armed: list[str]) -> tuple[dict[str, Any], dict[str, tuple[int, ...]], dict[str, str]]:
    """A spec, and plainly what it asks for: layers by site, codec by site."""
    spec: dict[str, Any] = {}
    sites = armed
    layers = tuple(range(LAYERS))
    if rng.random() < 0.6:
        sites = spec["sites"] = rng.sample(armed, rng.randint(0, len(armed)))
    kind = rng.choice(("default", "all", "list", "slice", "named"))
    if kind == "all":
        spec["layers"] = "all"
    elif kind == "list":
        layers = tuple(sorted(rng.sample(layers, rng.randint(1, LAYERS))))
        spec["layers"] = rng.sample(layers, len(layers))
    elif kind == "slice":
        ends = [(start, stop) for start in (None, 0, 1, -2) for stop in (None, 2, 4, 9, -1) if layers[start:stop]]
        (start, stop), step = rng.choice(ends), rng.choice((None, 1, 2, 3))
        layers = layers[start:stop:step]
        spec["layers"] = ":".join("" if part is None else str(part) for part in (start, stop, step)[: 3 if step else 2])
    chosen = {site: (0,) if site == "embed" else layers for site in sites}
    if kind == "named":
        chosen = {site: (0,) if site == "embed" else (rng.randrange(LAYERS),) for site in sites}
        spec["sites"] = [site if site == "embed" else _LENS[site].format(chosen[site][0]) for site in sites]
    spec["codec"] = rng.choice((*CODECS, "raw"))
    codecs = dict.fromkeys(chosen, spec["codec"])
    if rng.random() < 0.2:
        spec["codec"] = {site: rng.choice(CODECS) for site in sites if rng.random() < 0.7}
        codecs = {site: spec["codec"].get(site, "int8b64") for site in chosen}
    positions = rng.choice(("default", "all", "prompt", "generated", "last_prompt", "list", "ranges", "none"))
    if positions == "list":
        spec["positions"] = [rng.randint(0, rng.choice((20, 200, 100_000))) for _ in range(rng.randint(1, 9))]
    elif positions == "ranges":
        starts = [rng.randint(0, rng.choice((20, 200))) for _ in range(rng.randint(1, 4))]
        spec["positions"] = [[start, start + rng.choice((1, rng.randint(1, 60), 10_000))] for start in starts]
    elif positions != "default":
        spec["positions"] = [] if positions == "none" else positions
    if rng.random() < 0.4:
        spec["prefix_cache"] = rng.choice(("allow", "recompute"))
    return spec, chosen, codecs
