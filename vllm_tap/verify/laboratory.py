"""A laboratory: one engine in this process that runs one request at a time and keeps all that can be seen of it."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from engine_side.seams.kept.cache import Blocks, Unread, blocks_of_running, digests
from schemas.errors import StartError
from schemas.ids import new_ulid
from vllm_tap.client.captures import Capture, CaptureSource

if TYPE_CHECKING:
    from vllm import LLMEngine

    from schemas.edits.arms import Arms

__all__ = ["F32", "Laboratory", "Place", "Run", "Seen", "control", "differences", "patched"]

F32 = npt.NDArray[np.float32]
Place = tuple[str, int]  # site and layer

_CHANCES: Final = 20  # log-probabilities kept of each token: each holds the sum over the whole vocabulary
_WAIT_S: Final = 60.0
_DOWNSTREAM: Final = ("final_norm",)
_KEYS_AND_VALUES: Final = ("k_rot", "v")


@dataclass(frozen=True, slots=True)
class Run:
    """One request: its prompt, its edits, the places that are captured, and as what."""

    prompt: tuple[int, ...]
    generated: int
    edits: tuple[dict[str, Any], ...] = ()
    places: tuple[Place, ...] = ()
    codec: str = "raw"
    cached: bool = False  # whether it may read the prefix cache


@dataclass(frozen=True, slots=True)
class Seen:
    """Observations of a request; ``chances``: by token generated, those of the likeliest and its own."""

    tokens: tuple[int, ...]
    chances: tuple[dict[int, float], ...]
    rows: dict[Place, F32]  # [positions, width]
    cache: dict[str, str] = field(default_factory=dict)  # digests by layer; empty: not read
    cached: int = 0  # tokens of the prompt that were read from the prefix cache


@dataclass(slots=True)
class Laboratory:
    """An engine and the store that its captures arrive in; ``unread`` says why the K/V cache cannot be read."""

    engine: LLMEngine
    source: CaptureSource
    armed: dict[str, list[int]]  # for captures
    unread: str = ""

    @property
    def arms(self) -> Arms:
        """The places that are armed for edits."""
        found: Arms = self.engine.input_processor.vllm_tap_edits.arms
        return found

    @property
    def places(self) -> list[Place]:
        """The places that can be edited."""
        return [(site, layer) for site, layers in self.arms.layers.items() for layer in layers]

    @property
    def dtype(self) -> str:
        """The dtype of the model: float32, bfloat16, …"""
        return str(self.engine.model_config.dtype).removeprefix("torch.")

    def downstream(self) -> list[Place]:
        """Places that are watched whatever is edited."""
        sites = (*_DOWNSTREAM, *(_KEYS_AND_VALUES if self.unread else ()))
        return [(site, layer) for site in sites for layer in self.armed.get(site, ())]

    def run(self, asked: Run) -> Seen:
        """Run a request by itself, to its end."""
        from vllm import SamplingParams

        name, extra = new_ulid(), dict[str, Any]()
        if asked.cached and asked.edits:
            extra["capture"] = {"id": name, "sites": [], "prefix_cache": "allow"}
        elif asked.places:
            sites = sorted({site for site, _ in asked.places})
            layers = sorted({layer for site, layer in asked.places})
            extra["capture"] = {"id": name, "sites": sites, "layers": layers, "codec": asked.codec}
        if asked.edits:
            extra["edit"] = list(asked.edits)
        params = SamplingParams(temperature=0.0, max_tokens=asked.generated, ignore_eos=True, logprobs=_CHANCES,
                                extra_args=extra or None, detokenize=False)
        if not asked.cached:
            params.skip_reading_prefix_cache = True
        self.engine.add_request(name, {"prompt_token_ids": list(asked.prompt)}, params)
        output, blocks = self._to_its_end()
        chosen = output.outputs[0]
        return Seen(tuple(chosen.token_ids),
                    tuple({token: one.logprob for token, one in each.items()} for each in chosen.logprobs or ()),
                    self._rows(name, asked), self._cache(blocks), output.num_cached_tokens or 0)

    def _to_its_end(self) -> tuple[Any, Blocks | None]:
        """The output and the blocks that it had: they are given back at its end, and hold what they held."""
        blocks: Blocks | None = None
        last = None
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                last = output if getattr(output, "finished", False) else last
            if not self.unread:
                blocks = blocks_of_running(self.engine) or blocks
        if last is None:
            raise StartError("the engine ended a request without an answer")
        return last, blocks

    def _cache(self, blocks: Blocks | None) -> dict[str, str]:
        if blocks is None:
            self.unread = self.unread or "a request had ended before its blocks were seen"
            return {}
        try:
            return digests(self.engine, blocks)
        except Unread as error:
            self.unread = str(error)
            return {}

    def _rows(self, name: str, asked: Run) -> dict[Place, F32]:
        if not asked.places:
            return {}
        capture = Capture(self.source, name, _WAIT_S)
        return {place: capture[place] for place in asked.places}


def control(place: Place, stop: int) -> dict[str, Any]:
    """The edit of a place that goes the way of any other and changes no row before position ``stop``."""
    return {"site": f"{place[0]}.{place[1]}", "op": "scale", "by": 1, "positions": [[0, stop]]}


def patched(place: Place, rows: F32) -> dict[str, Any]:
    """The edit that sets the rows of a place, float32 [positions, width], from position 0 on."""
    text = base64.b64encode(np.ascontiguousarray(rows, "<f4").tobytes()).decode()
    return {"site": f"{place[0]}.{place[1]}", "op": "set", "positions": [[0, len(rows)]], "rows": {"base64": text}}


def differences(one: Seen, other: Seen, signs: bool = True) -> list[str]:
    """The differences, bit for bit; without ``signs`` zeros of both signs are."""
    found = []
    if one.tokens != other.tokens:
        at = next(at for at, pair in enumerate(zip(one.tokens, other.tokens, strict=True)) if pair[0] != pair[1])
        found.append(f"token {at} of the answer")
    if one.chances != other.chances:
        found.append("log-probabilities")
    for place, rows in one.rows.items():
        if place in other.rows and (count := _unlike(rows, other.rows[place], signs)):
            found.append(f"{count} of {len(rows)} rows of {place[0]}.{place[1]}")
    if one.cache and other.cache and (layers := [name for name, digest in one.cache.items()
                                                if other.cache.get(name) != digest]):
        found.append(f"the K/V cache of {len(layers)} of {len(one.cache)} layers, first {layers[0]}")
    return found


def _unlike(one: F32, other: F32, signs: bool) -> int:
    if one.shape != other.shape:
        return max(len(one), len(other))
    if signs:
        return int((one.view(np.uint32) != other.view(np.uint32)).any(axis=-1).sum())
    return int((~((one == other) | (np.isnan(one) & np.isnan(other)))).any(axis=-1).sum())
