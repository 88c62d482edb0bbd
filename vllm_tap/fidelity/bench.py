"""One engine in this process that runs batches of prompts, edited and captured, always in the same composition.

vLLM does not promise a request the same bits in another batch. So what is compared here ran in batches of the same
prompts in the same order, and only the numbers that were set differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from engine_side.seams.kept.keys_values import Change, rewritten
from engine_side.seams.kept.logits import logits_of
from schemas import limits
from schemas.errors import StartError, TapError
from schemas.ids import new_ulid
from vllm_tap.client.captures import Capture, CaptureSource
from vllm_tap.verify.laboratory import F32, Place, control, patched

if TYPE_CHECKING:
    from vllm import LLMEngine

    from schemas.edits.arms import Arms
    from schemas.manifest import Manifest

__all__ = ["NORM", "Answer", "Bench", "Unpublished", "numbers_max"]

I64 = npt.NDArray[np.int64]

NORM: Final = ("final_norm", 0)
_WAIT_S: Final = 120.0
_ULID: Final = 26  # characters


class Unpublished(TapError):
    """A control did not behave, so that no number of this run means anything."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one prompt: its greedy continuation, the rows of the last norm and, where they were asked for, of
    the place [positions, width].
    """

    tokens: tuple[int, ...]
    norm: F32
    rows: F32 | None


@dataclass(slots=True)
class Bench:
    """An engine and the store that its captures arrive in; ``continued``: tokens generated behind each prompt."""

    engine: LLMEngine
    source: CaptureSource
    continued: int = 16
    _numbers: dict[str, int] = field(default_factory=dict)  # of the prompts that run, by request

    @property
    def arms(self) -> Arms:
        """The places that are armed for edits."""
        found: Arms = self.engine.input_processor.vllm_tap_edits.arms
        return found

    @property
    def dtype(self) -> str:
        """The dtype of the model: float32, bfloat16, …"""
        return str(self.engine.model_config.dtype).removeprefix("torch.")

    def unedited(self, prompts: I64, generated: bool = False) -> list[Answer]:
        """The prompts [prompts, positions] as anybody's would be run; ``generated``: with rows of the last norm at the
        positions of the answer as well, but for its last.
        """
        spec = {"sites": [NORM[0]], "codec": "raw", "positions": "all" if generated else "prompt"}
        names = self._ended(prompts, spec, [None] * len(prompts))
        return [self._answer(name, tokens, None) for name, tokens in names]

    def captured(self, prompts: I64, sites: Sequence[str], layer: int) -> list[tuple[Manifest, dict[str, F32]]]:
        """The manifest of each prompt's capture ([prompts, positions]), and by site the rows of a layer, as they
        are.
        """
        found = self._ended(prompts, {"sites": list(sites), "codec": "raw", "layers": [layer], "positions": "prompt"},
                            [None] * len(prompts))
        captures = [Capture(self.source, name, _WAIT_S) for name, _ in found]
        return [(each.manifest(), {site: each[site, layer] for site in sites}) for each in captures]

    def control(self, prompts: I64, place: Place, codec: str = "raw") -> list[Answer]:
        """The prompts with an edit at the place that changes nothing, and its rows through the engine's own encoder."""
        return self._run(prompts, [control(place, prompts.shape[1])] * len(prompts), place, codec)

    def patched(self, prompts: I64, place: Place, rows: Sequence[F32]) -> list[Answer]:
        """The prompts with every row of the place set: to ``rows``, for each prompt [positions, width]. Unpublished
        where the engine counted a row that it did not set.
        """
        return self._run(prompts, [patched(place, each) for each in rows], None, "raw")

    def rewritten(self, prompts: I64, change: Change) -> list[Answer]:
        """The prompts with keys and values of the cache changed as they are written."""
        with rewritten(self.engine, change):
            return self.unedited(prompts)

    def number_of(self, request: str) -> int:
        """The number of the prompt that is running as a request; vLLM adds to names that it is given."""
        return self._numbers[request[:_ULID]]

    def logits(self, norm: F32) -> F32:
        """Logits [positions, vocabulary] of rows of the last norm."""
        return logits_of(self.engine, norm)

    def _run(self, prompts: I64, edits: Sequence[dict[str, Any] | None], place: Place | None,
             codec: str) -> list[Answer]:
        capture = {"sites": [NORM[0]], "codec": {NORM[0]: "raw"}, "positions": "prompt"} if place is None else {
            "sites": [place[0], NORM[0]], "codec": {place[0]: codec, NORM[0]: "raw"}, "positions": "prompt",
            "layers": [place[1]]}
        return [self._answer(name, tokens, place) for name, tokens in self._ended(prompts, capture, edits)]

    def _ended(self, prompts: I64, spec: dict[str, Any], edits: Sequence[dict[str, Any] | None]
               ) -> list[tuple[str, tuple[int, ...]]]:
        """Run the prompts to their ends: names of their captures, and the tokens of their answers."""
        from vllm import SamplingParams

        names = [new_ulid() for _ in prompts]
        self._numbers = {name: number for number, name in enumerate(names)}
        for name, tokens, edit in zip(names, prompts.tolist(), edits, strict=True):
            capture = {"id": name, **spec}
            params = SamplingParams(temperature=0.0, max_tokens=max(1, self.continued), ignore_eos=True,
                                    extra_args={"capture": capture, **({"edit": [edit]} if edit else {})},
                                    detokenize=False)
            params.skip_reading_prefix_cache = True
            self.engine.add_request(name, {"prompt_token_ids": tokens}, params)
        done = self._to_their_ends(len(names))
        return [(name, done[name]) for name in names]

    def _to_their_ends(self, count: int) -> dict[str, tuple[int, ...]]:
        found = {}
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                if getattr(output, "finished", False):
                    found[str(output.request_id)] = tuple(output.outputs[0].token_ids)
        if len(found) != count:
            raise StartError(f"the engine ended {count - len(found)} of {count} requests without an answer")
        return found

    def _answer(self, name: str, tokens: tuple[int, ...], place: Place | None) -> Answer:
        capture = Capture(self.source, name, _WAIT_S)
        for edit in capture.manifest().edits:
            for rows in edit.get("rows", ()):
                if rows["missing"]:
                    raise Unpublished(f"edits of {edit['site']}.{rows['layers'][0]}: {rows['missing']} of "
                                      f"{rows['expected']} rows were not set ({rows.get('reason', 'not_applied')}); "
                                      "the engine's log tells why")
        return Answer(tokens, capture[NORM], None if place is None else capture[place])


def numbers_max() -> int:
    """The numbers that the rows of one request may have: as base64 they fit its edits."""
    return 3 * limits.edit_json_bytes_max // 16 - 1024
