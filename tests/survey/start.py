"""One architecture: loaded by vLLM, looked into where a start looks, run, and its rows held against Hugging Face."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from engine_side.discovery.discover import FAILED
from engine_side.tap.architectures import Family
from schemas.errors import StartError
from tests.survey.configs import DIFFERS, Differs
from tests.survey.folders import make
from tests.survey.held import Reference, watch

PROMPT: Final = [(7 * token + 11) % 490 + 8 for token in range(21)]
GENERATED: Final = 6


class Seen(Exception):
    """What a start was for has been seen, and the rest of it is not wanted."""


def survey(architecture: str, folder: Path) -> dict[str, Any]:
    """What came of a small random model of ``architecture``, made in ``folder``: a row of the page.

    ``result`` is ``admitted`` (with ``sites``, ``places`` and, if Hugging Face has the model, what rows are ``held``
    to), ``refused`` by the search, or ``not started`` by vLLM, each of the latter with ``why``.
    """
    differs = DIFFERS.get(architecture, Differs())
    row: dict[str, Any] = {"result": "not started", "stage": "configuration", "dtype": differs.dtype}
    found: list[tuple[nn.Module, Family, int]] = []
    try:
        made = make(architecture, folder)
        row |= {"model_type": made.model_type, "stage": "load"}
        with _looked_into(row, found, again=made.weights):
            llm = _start(folder, differs.dtype, made.weights)
        if found:
            _hold(row, llm, folder, *found[0])
    except Seen:
        pass
    except Exception as error:
        row["why"] = _said(error)
        row["trace"] = row.get("trace", "") + traceback.format_exc()[-4000:]
    return row


def _start(folder: Path, dtype: str, weights: bool) -> Any:
    from vllm import LLM

    # vLLM's C++ rotary embedding on the CPU is wrong for queries of three dimensions: its own in torch is right. Of its
    # two kernels of latent attention for CPUs the one that it takes where they have AMX knows bfloat16 alone; models
    # without latent attention do not mind.
    return LLM(str(folder), load_format="auto" if weights else "dummy", dtype=dtype, enforce_eager=True,
               skip_tokenizer_init=not (folder / "tokenizer.json").is_file(), max_model_len=256, max_num_seqs=2,
               max_num_batched_tokens=256, seed=0, enable_prefix_caching=False,
               compilation_config={"custom_ops": ["none"]}, attention_backend="CPU_MLA")


@contextmanager
def _looked_into(row: dict[str, Any], found: list[tuple[nn.Module, Family, int]], again: bool) -> Iterator[None]:
    """Models that are loaded meanwhile are looked into, where the product looks; ``again``: and then started.

    A search that vLLM's code ended, not the search itself, is said to have if vLLM's own start does not end so.
    """
    from vllm.model_executor.model_loader import base_loader, dummy_loader

    from engine_side.seams.recorded_step import discover

    original, dummies = base_loader.BaseModelLoader.load_model, dummy_loader.DummyModelLoader.load_weights

    def load_model(self: Any, vllm_config: Any, model_config: Any, *args: Any, **kwargs: Any) -> nn.Module:
        model: nn.Module = original(self, vllm_config, model_config, *args, **kwargs)
        row.update({"class": type(model).__name__, "stage": "search"})
        try:
            family = discover(model, vllm_config)
        except StartError as error:
            row.update(result="refused", why=str(error).partition(FAILED)[2] or str(error))
            raise Seen from None
        except Exception as error:
            row.update(search=_said(error), trace=traceback.format_exc()[-4000:])
        else:
            found.append((model, family, model_config.get_total_num_hidden_layers()))
            row.update(result="admitted", **_family(family))
            if not again:
                raise Seen
        row["stage"] = "start"
        return model

    base_loader.BaseModelLoader.load_model = load_model
    dummy_loader.DummyModelLoader.load_weights = lambda _self, model, _config: fill(model)
    try:
        yield
    finally:
        base_loader.BaseModelLoader.load_model = original
        dummy_loader.DummyModelLoader.load_weights = dummies


def _family(family: Family) -> dict[str, Any]:
    """Of what was found, what a row has: by site its layers, and its place in the first of them."""
    first = {site: places[min(places)] for site, places in family.found.items()}
    return {"sites": {site: sorted(places) for site, places in family.found.items()},
            "places": {site: f"{place.path}: {place.rule}" for site, place in first.items()},
            "absent": dict(family.refused)}


def _hold(row: dict[str, Any], llm: Any, folder: Path, model: nn.Module, family: Family, n_layers: int) -> None:
    """Run a prompt and what follows it, and say of every site how far its rows are from Hugging Face's."""
    from vllm import SamplingParams

    row["stage"] = "run"
    rows = watch(model, family)
    (output,) = llm.generate([{"prompt_token_ids": PROMPT}], SamplingParams(
        temperature=0.0, max_tokens=GENERATED, ignore_eos=True, detokenize=False), use_tqdm=False)
    tokens = [*PROMPT, *output.outputs[0].token_ids][:-1]
    row["stage"] = "reference"
    reference = Reference(folder, tokens, n_layers, row["dtype"])
    row["held"] = {site: {"error": held.error, "as": held.module} for site, held in reference.holds(
        {key: torch.cat(steps) for key, steps in rows.items()}).items()}
    row["stage"] = "held"


def fill(model: nn.Module) -> None:
    """Random weights by a seed: vLLM's own dummies are a thousandth, too small to prove anything."""
    draws = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=draws)
                vector = tensor.dim() == 1
                tensor.copy_((1 if vector and not name.endswith("bias") else 0) + (0.2 if vector else 0.1) * noise)


def _said(error: BaseException) -> str:
    """An error in one line, its first."""
    text = " ".join(str(error).split()) or "(no message)"
    return f"{type(error).__name__}: {text[:300]}"
