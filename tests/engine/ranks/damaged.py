"""A model of which one rank has a damage that the others have not: a loader of vLLM's kind, which reads the weights as
always and then breaks a thing of that rank. ``DAMAGED`` are the options of an engine that loads so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from vllm.config.load import LoadConfig
from vllm.distributed import get_world_group
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from schemas.errors import StartError
from tests.support.store_helpers import until


def _no_number(model: Any) -> None:
    """The final norm's weight is lost."""
    model.model.norm.weight.data.fill_(float("nan"))


def _another_factor(model: Any) -> None:
    """What block 1 adds to the stream is multiplied by what the configuration does not say."""
    model.model.layers[1].residual_multiplier = 0.37


def _stale(model: Any) -> None:
    """What block 1 hands on is what it handed on first: right as long as a step is the same."""
    first = list[Any]()

    def hook(_block: nn.Module, _given: Any, result: Any) -> Any:
        first.append(_copied(result))
        return _copied(first[0])

    model.model.layers[1].register_forward_hook(hook)


def _longer(model: Any) -> None:
    """Block 1 hands on a tenth more than it made (bfloat16 rounds a hundredth away), of the MLP's rows where it returns
    them apart.
    """
    model.model.layers[1].register_forward_hook(
        lambda _block, _given, result: 1.1 * result if isinstance(result, torch.Tensor) else
        (1.1 * result[0], *result[1:]))


def _raises(model: Any) -> None:
    """Block 1 ends in mid-step, before its MLP is summed: as where memory is short on one rank."""
    def hook(_mlp: nn.Module, _given: Any) -> None:
        raise MemoryError("no room for the MLP")

    model.model.layers[1].mlp.down_proj.register_forward_pre_hook(hook)


def _copied(result: Any) -> Any:
    return result.clone() if isinstance(result, torch.Tensor) else tuple(one.clone() for one in result)


DAMAGES: Final[dict[str, Callable[[Any], None]]] = {
    "no number": _no_number, "another factor": _another_factor, "stale": _stale, "longer": _longer,
    "raises": _raises}


@register_model_loader("damaged")
class DamagedLoader(DefaultModelLoader):
    """Takes ``damage``, of ``DAMAGES``, the ``rank`` of the engine that has it, and the ``folder`` in which each of
    two ranks leaves what its start ended with, as its extra configuration.
    """

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(replace(load_config, load_format="auto", model_loader_extra_config={}))
        self.said: Any = load_config.model_loader_extra_config

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        super().load_weights(model, model_config)
        if get_world_group().rank_in_group == self.said["rank"]:
            DAMAGES[self.said["damage"]](model)

    def load_model(self, *args: Any, **kwargs: Any) -> nn.Module:
        """Load, and then wait for the other rank if it can come: vLLM ends it as soon as this one has failed."""
        said = "it was loaded"
        try:
            return super().load_model(*args, **kwargs)
        except StartError as error:
            said = str(error)
            raise
        finally:
            folder, rank = Path(self.said["folder"]), get_world_group().rank_in_group
            (folder / f"writing {rank}").write_text(said)
            (folder / f"writing {rank}").rename(folder / str(rank))
            if self.said["damage"] != "raises":
                until(lambda: all((folder / str(each)).exists() for each in range(2)))


class Registers:
    """What a worker is extended by: its module registers the loader there."""


def damaged(damage: str, rank: int, folder: Path) -> dict[str, Any]:
    """Options of an engine whose rank has a damage."""
    return {"load_format": "damaged",
            "model_loader_extra_config": {"damage": damage, "rank": rank, "folder": str(folder)},
            "worker_extension_cls": f"{__name__}.{Registers.__name__}"}
