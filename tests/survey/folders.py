"""A folder that vLLM can start: config.json of a small model, with random weights where Hugging Face has its class."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.support.models.families import family_model
from tests.survey.configs import DIFFERS, PLAIN, WRAPPERS, Differs, small


@cache
def _types() -> dict[str, str]:
    """Model types by the class that Hugging Face runs them with."""
    return {name: kind for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()}


@dataclass(frozen=True, slots=True)
class Made:
    """A model's folder: whether there are weights in it, of a model that Hugging Face has as well."""

    model_type: str
    weights: bool


def make(architecture: str, folder: Path) -> Made:
    """Write a small model of ``architecture`` into ``folder``."""
    if family := WRAPPERS.get(architecture):
        shutil.copytree(family_model(family, "float32"), folder, dirs_exist_ok=True)
        return Made(family, True)
    differs = DIFFERS.get(architecture, Differs())
    kind = differs.model_type or _types().get(architecture, architecture.removesuffix("ForCausalLM").lower())
    config = _config(kind, differs.said or {})
    config.architectures = [architecture]
    weights = architecture in _types() and differs.reference
    if weights:
        _model(config, differs.dtype, differs.zero).save_pretrained(folder)
    else:
        config.save_pretrained(folder)
    said = json.loads((folder / "config.json").read_text())
    said |= {"architectures": [architecture], "model_type": kind, "dtype": differs.dtype, **(differs.written or {})}
    (folder / "config.json").write_text(json.dumps(said, indent=1))
    return Made(kind, weights)


class _Fields(dict[str, Any]):
    """Fields of a part of a configuration, as code of a model reads them."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def _init(self: PretrainedConfig, **said: Any) -> None:
    """A plain configuration has what it is given."""
    PretrainedConfig.__init__(self, **said)
    if "block_configs" in said:
        self.block_configs = [_Fields({part: _Fields(fields) for part, fields in block.items()})
                              for block in said["block_configs"]]


def _config(kind: str, said: dict[str, Any]) -> PretrainedConfig:
    """A configuration of the class that Hugging Face or vLLM has for a type, or a plain one, known from now on."""
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    if kind in CONFIG_MAPPING:
        made = CONFIG_MAPPING[kind]
    elif kind in _CONFIG_REGISTRY:
        made = _CONFIG_REGISTRY[kind]
    else:
        made = type(f"Plain_{kind}", (PretrainedConfig,), {"model_type": kind, "__init__": _init})
        AutoConfig.register(kind, made)
        return made(**{**PLAIN, **said})
    return made(**small(made().to_dict(), said))


def _model(config: PretrainedConfig, dtype: str, zero: str) -> torch.nn.Module:
    """Hugging Face's model with random weights, none of which is neutral but those whose names end in ``zero``."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if zero and path.endswith(zero):
                parameter.zero_()
            elif parameter.dim() == 1:  # norms and biases start as ones and zeros, which would hide their use
                parameter += 0.2 * torch.randn_like(parameter)
            elif not parameter.isfinite().all() or not parameter.any():  # left as memory was, or as zeros
                parameter.copy_(0.1 * torch.randn_like(parameter))
    return model.to(getattr(torch, dtype))
