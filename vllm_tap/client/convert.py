"""Rows as PyTorch, xarray and Hugging Face's datasets have them; each of these is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from schemas.errors import TapError
from schemas.sites import transformer_lens_name

if TYPE_CHECKING:
    import datasets
    import torch
    import xarray

    from vllm_tap.client.captures import F32, Rows

__all__ = ["data_array", "dataset_of_sites", "hugging_face", "need", "tensor", "tensors"]


def need(module: str, what: str, extra: str | None = None) -> Any:
    """A module that not everybody has; TapError saying how to get it: by an ``extra`` of this package, or by its name.
    """
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        install = module if extra is None else f"'vllm-tap[{extra}]'"
        raise TapError(f"{what} needs {module}: pip install {install} ({error})") from None


def tensor(values: F32) -> torch.Tensor:
    """A tensor over the same memory where that can be written to, else over a copy."""
    torch = need("torch", "to_torch()")
    return torch.from_numpy(values if values.flags.writeable else values.copy())


def tensors(parts: Sequence[Rows], names: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """``[rows, width]`` by TransformerLens's name on a model with these ``names``, by ``site.layer`` where it has none.
    """
    return {transformer_lens_name(rows.site, layer, names) or f"{rows.site}.{layer}": tensor(values)
            for rows in parts for layer, values in zip(rows.layers, rows.values, strict=True)}


def data_array(rows: Rows) -> xarray.DataArray:
    """Rows with names on them: dimensions token, layer, hidden."""
    xarray = need("xarray", "to_xarray()")
    return xarray.DataArray(
        rows.values.transpose(1, 0, 2), dims=("token", "layer", "hidden"), name=rows.site,
        coords={"position": ("token", rows.positions.astype(np.int64)),
                "token_id": ("token", rows.token_ids.astype(np.int64)), "layer": rows.layers},
        attrs={"capture": rows.capture})


def dataset_of_sites(parts: Sequence[Rows]) -> xarray.Dataset:
    """The sites of a capture side by side, over the tokens that all of them have."""
    xarray = need("xarray", "to_xarray()")
    made = xarray.Dataset()
    for rows in aligned(parts):
        array = data_array(rows)
        names = {}
        if made.sizes.get("hidden", array.sizes["hidden"]) != array.sizes["hidden"]:
            names["hidden"] = f"{rows.site}_width"
        if "layer" in made and made["layer"].values.tolist() != rows.layers:
            names["layer"] = f"{rows.site}_layer"
        made[rows.site] = array.rename(names)
        made.attrs["capture"] = rows.capture
    return made


def aligned(parts: Sequence[Rows]) -> list[Rows]:
    """The same parts, at the positions that all of them have."""
    if not parts:
        return []
    common: npt.NDArray[np.uint32] = parts[0].positions
    for rows in parts[1:]:
        common = np.intersect1d(common, rows.positions, assume_unique=True)
    return [_only(rows, np.isin(rows.positions, common)) for rows in parts]


def _only(rows: Rows, kept: npt.NDArray[np.bool_]) -> Rows:
    if kept.all():
        return rows
    return replace(rows, positions=rows.positions[kept], token_ids=rows.token_ids[kept], values=rows.values[:, kept])


def hugging_face(parts: Sequence[Rows]) -> datasets.Dataset:
    """A row a token."""
    datasets = need("datasets", "to_dataset()")
    return datasets.Dataset(token_table(aligned(parts)))


def token_table(parts: Sequence[Rows]) -> Any:
    """An Arrow table with a row a token; ``parts`` are aligned."""
    arrow = need("pyarrow", "a table of tokens")
    if not parts:
        raise TapError("no rows: nothing was captured that could be written")
    first = parts[0]
    columns = {"capture": arrow.array([first.capture] * len(first.positions), arrow.string()),
               "position": arrow.array(first.positions.astype(np.int32)),
               "token_id": arrow.array(first.token_ids.astype(np.int32))}
    for rows in parts:
        for layer, values in zip(rows.layers, rows.values, strict=True):
            flat = arrow.array(np.ascontiguousarray(values).reshape(-1))
            columns[f"{rows.site}.{layer}"] = arrow.FixedSizeListArray.from_arrays(flat, values.shape[1])
    return arrow.table(columns)
