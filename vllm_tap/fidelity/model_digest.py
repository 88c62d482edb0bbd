"""Which model it was, whatever its folder is called and whichever library read its configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import xxhash

__all__ = ["config_digest", "weights_digest"]

_PIECE: Final = 1 << 16
_NOT_THE_MODEL: Final = ("transformers_version", "_name_or_path", "_commit_hash")


def config_digest(config: str) -> str:
    """XXH3 of a configuration's JSON, without what is about the library that wrote it and where it lay."""
    return xxhash.xxh3_128_hexdigest(json.dumps(_of_the_model(json.loads(config)), sort_keys=True).encode())


def _of_the_model(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _of_the_model(each) for name, each in value.items() if name not in _NOT_THE_MODEL}
    return list(map(_of_the_model, value)) if isinstance(value, list) else value


def weights_digest(model: str, revision: str | None) -> str:
    """XXH3 of the names and sizes of the weights in a model's folder and of 64 KiB at the start (in safetensors names
    and shapes of the tensors), in the middle and at the end of each; of a model that is no folder, its ``revision``.
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
