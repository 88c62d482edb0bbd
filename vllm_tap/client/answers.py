"""The answer to a generation, with its captures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from schemas.errors import TapError
from schemas.manifest import Manifest
from vllm_tap.client.captures import F32, Capture, Key, Layers, Rows

__all__ = ["Answer", "Generation"]

C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class Answer:
    """The server's answer to a generation: ``response`` as it came."""

    response: dict[str, Any]

    @property
    def id(self) -> str:
        """The response id; it names the capture too."""
        return str(self.response["id"])

    @property
    def texts(self) -> list[str]:
        """The text of every choice."""
        return [str(choice["message"]["content"] or "") if "message" in choice else str(choice["text"])
                for choice in self.response["choices"]]

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.texts[0]

    @property
    def capture_ids(self) -> list[str]:
        """The ids of its captures, one a choice; empty where none was asked for."""
        return list(self.response.get("capture", {}).get("ids", []))

    @property
    def capture_id(self) -> str:
        """The capture's id; where the request made several, the id they share."""
        if not self.capture_ids:
            raise TapError("this generation was asked for without a capture; pass capture={…} to generate()")
        return str(self.response["capture"]["id"])

    def _only(self, captures: Sequence[C]) -> C:
        """The one capture; TapError where there is none or there are several."""
        if self.capture_id and len(captures) > 1:
            raise TapError(f"this generation has {len(captures)} captures; use .captures[i]")
        return captures[0]


@dataclass(frozen=True, slots=True)
class Generation(Answer):
    """An answer with its captures, one for each choice captured."""

    captures: list[Capture] = field(default_factory=list)

    @property
    def capture(self) -> Capture:
        """The one capture; TapError where there is none or there are several."""
        return self._only(self.captures)

    def manifest(self) -> Manifest:
        """``Capture.manifest`` of the one capture."""
        return self.capture.manifest()

    def __getitem__(self, key: Key) -> F32:
        """``Capture.__getitem__`` of the one capture."""
        return self.capture[key]

    def probe(self, name: str) -> F32:
        """``Capture.probe`` of the one capture."""
        return self.capture.probe(name)

    def slice(self, site: str, layer: Layers = None, start: int = 0, stop: int | None = None,
              allow_missing: bool = False) -> Rows:
        """``Capture.slice`` of the one capture."""
        return self.capture.slice(site, layer, start, stop, allow_missing)
