"""Read the inside of large language models while vLLM serves them.

>>> from vllm_tap import Client, open_store                                       # doctest: +SKIP
>>> Client().generate("Hello", capture={"sites": ["resid_post"]})["resid_post", 12].shape    # doctest: +SKIP
(20, 1024)
>>> open_store("captures")["01J…"]["resid_post", 12].shape                        # doctest: +SKIP
(20, 1024)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from schemas.attended import Attention, Unattended
    from schemas.attention import AttentionRule
    from schemas.errors import NotFoundError, SpecError, TapError
    from schemas.ids import new_ulid
    from schemas.manifest import Manifest, Missing
    from schemas.read.reader import CaptureRow
    from vllm_tap.client.answers import Generation
    from vllm_tap.client.async_client import AsyncCapture, AsyncClient, AsyncGeneration
    from vllm_tap.client.captures import Capture, Rows
    from vllm_tap.client.client import Client
    from vllm_tap.client.sweep_plan import LogitDifference
    from vllm_tap.client.sweep_result import PatchSweep
    from vllm_tap.errors import BadRequest, Conflict, MissingRows, NotComplete, NotFound, ServiceError, Unavailable
    from vllm_tap.loader.dataset import Activations, RowDataset, activations, rows
    from vllm_tap.offline.recording import Recording, capture_args, manifest, recording
    from vllm_tap.store import Store, open_store

__all__ = [
    "Activations", "AsyncCapture", "AsyncClient", "AsyncGeneration", "Attention", "AttentionRule", "BadRequest",
    "Capture", "CaptureRow", "Client", "Conflict", "Generation", "LogitDifference", "Manifest", "Missing",
    "MissingRows", "NotComplete", "NotFound", "NotFoundError", "PatchSweep", "Recording", "RowDataset", "Rows",
    "ServiceError", "SpecError", "Store", "TapError", "Unattended", "Unavailable", "activations", "capture_args",
    "manifest", "new_ulid", "open_store", "recording", "rows",
]

# Imported when first used: the command line starts without loading what it does not need.
_MODULES: Final = {
    "vllm_tap.client.answers": ("Generation",),
    "vllm_tap.client.async_client": ("AsyncCapture", "AsyncClient", "AsyncGeneration"),
    "vllm_tap.client.captures": ("Capture", "Rows"),
    "vllm_tap.client.client": ("Client",),
    "vllm_tap.client.sweep_plan": ("LogitDifference",),
    "vllm_tap.client.sweep_result": ("PatchSweep",),
    "vllm_tap.errors": ("BadRequest", "Conflict", "MissingRows", "NotComplete", "NotFound", "ServiceError",
                        "Unavailable"),
    "vllm_tap.offline.recording": ("Recording", "capture_args", "manifest", "recording"),
    "vllm_tap.loader.dataset": ("Activations", "RowDataset", "activations", "rows"),
    "vllm_tap.store": ("Store", "open_store"),
    "schemas.attended": ("Attention", "Unattended"),
    "schemas.attention": ("AttentionRule",),
    "schemas.errors": ("NotFoundError", "SpecError", "TapError"),
    "schemas.ids": ("new_ulid",),
    "schemas.manifest": ("Manifest", "Missing"),
    "schemas.read.reader": ("CaptureRow",),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'vllm_tap' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
