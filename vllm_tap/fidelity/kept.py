"""Identity of a run, and its measurements so far, on disk: a run that was ended goes on where it was."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import xxhash

from schemas.errors import ArgumentError, LimitError, NotFoundError
from vllm_tap.fidelity.reports.report import Report, place_of, plain
from vllm_tap.fidelity.study import PlaceStudy, Unpublished

__all__ = ["Kept", "config_digest", "weights_digest"]

_PIECE: Final = 1 << 16
_NOT_THE_MODEL: Final = ("transformers_version", "_name_or_path", "_commit_hash")


def config_digest(config: str) -> str:
    """XXH3 of a model's configuration, JSON, without the parts about the library that wrote it and the place where it
    lay.
    """
    return xxhash.xxh3_128_hexdigest(json.dumps(_of_the_model(json.loads(config)), sort_keys=True).encode())


def _of_the_model(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _of_the_model(each) for name, each in value.items() if name not in _NOT_THE_MODEL}
    return list(map(_of_the_model, value)) if isinstance(value, list) else value


def weights_digest(model: str, revision: str | None) -> str:
    """XXH3 of a model's weights, from the names and sizes of the files in its folder and 64 KiB at three places of
    each.

    The places are the start (in safetensors names and shapes of the tensors), the middle and the end. A model that is
    no folder gives its ``revision``. Without that, or without weights, it is "unknown".
    """
    folder = Path(model)
    if not folder.is_dir():
        return f"revision {revision}" if revision else "unknown"
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin")) + sorted(folder.glob("*.gguf"))
    digest = xxhash.xxh3_128()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for at in (0, size // 2, max(0, size - _PIECE)):
                file.seek(at)
                digest.update(file.read(_PIECE))
    return digest.hexdigest() if files else "unknown"


class Kept:
    """Results as they come, a JSON line each, added to the file. A run that is killed loses the line it is at, and goes
    on there. ArgumentError for results of another job.
    """

    def __init__(self, path: Path, report: Report) -> None:
        self._path = path
        head = {"model": report.model, "settings": {**report.settings, "arithmetic": None}, "text": report.text}
        self._digest = xxhash.xxh3_128_hexdigest(json.dumps(plain(head), sort_keys=True).encode())
        try:
            text = path.read_bytes() if path.exists() else b""
            whole = text[:text.rfind(b"\n") + 1]
            self._lines = [json.loads(line) for line in whole.splitlines()]
            others = any(line["job"] != self._digest for line in self._lines)
        except (ValueError, KeyError, TypeError) as error:
            raise ArgumentError("--out", str(path.parent), f"progress.jsonl is damaged ({error}): remove the file"
                                ) from None
        if others:
            raise ArgumentError("--out", str(path.parent), "has progress.jsonl of another run: finish that one with "
                                                           "its own arguments, or remove the file")
        if len(whole) < len(text):  # killed while it wrote its last line, which the next one must not go on with
            os.truncate(path, len(whole))
        self._report = report

    def floors(self, make: Callable[[], dict[str, list[float]]]) -> dict[str, list[float]]:
        for line in self._lines:
            if "floors" in line:
                self._report.settings["arithmetic"] = line["arithmetic"]
                return dict(line["floors"])
        found = make()
        self._write({"floors": found, "arithmetic": self._report.settings.get("arithmetic", "")})
        return found

    def place(self, place: tuple[str, int], make: Callable[[], PlaceStudy]) -> PlaceStudy:
        for line in self._lines:
            if "place" in line and (line["place"]["site"], line["place"]["layer"]) == place:
                return place_of(line["place"])
        return place_of(self._write({"place": asdict(make())})["place"])

    def part(self, name: str, make: Callable[[], Any]) -> dict[str, Any]:
        """The measurement ``name`` of the whole model, a dataclass as a dict; where it was not to be had, only ``why``.
        """
        for line in self._lines:
            if name in line:
                return dict(line[name])
        try:
            found = asdict(make())
        except (Unpublished, ArgumentError, LimitError, NotFoundError) as error:
            found = {"why": str(error)}
        return dict(self._write({name: found})[name])

    def _write(self, value: dict[str, Any]) -> dict[str, Any]:
        """The line as it will be read again."""
        text = json.dumps(plain({"job": self._digest, **value}), allow_nan=False)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        line: dict[str, Any] = json.loads(text)
        self._lines.append(line)
        return line
