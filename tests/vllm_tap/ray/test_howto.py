"""The page about Ray: its blocks as they stand, with tasks so small that two workers share them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.pages.readme import blocks
from tests.vllm_tap.loader.test_dataset import WIDTH, Made, made, sealed_copy  # noqa: F401
from vllm_tap.loader.dataset import rows

PAGE = "docs/howto/ray.md"


def off(got: Any, want: Any) -> float:
    """The distance of what was computed in float32, as a share of the whole."""
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def test_the_recipe_that_whitens(cluster: Any, made: Made, sealed_copy: Path, tmp_path: Path,  # noqa: F811
                                 monkeypatch: pytest.MonkeyPatch) -> None:
    zarr, parquet = pytest.importorskip("zarr"), pytest.importorskip("pyarrow.parquet")
    sealed_copy.rename(tmp_path / "captures")
    monkeypatch.chdir(tmp_path)
    space: dict[str, Any] = {"__name__": PAGE}
    recipe = [block for block in blocks("python", PAGE) if "from vllm import" not in block
              and "ray.data.llm" not in block]
    assert len(recipe) == 5
    for number, block in enumerate(recipe):
        text = block.replace('where={"run": "train"}', 'codec="int8b64"').replace("64 << 20", "100_000")
        assert text != block or number, "nothing was made smaller"
        exec(compile(text, f"{PAGE}, block {number}", "exec"), space)  # noqa: S102

    data = rows("captures", "resid_post", 2, codec="int8b64", shuffle=False, batch=10_000)
    batch, = list(data)
    x = batch["resid_post.2"].numpy().astype(np.float64)
    assert space["x"].shape[1:] == (WIDTH,) and str(space["x"].dtype) == "torch.float32"
    assert len(x) == space["count"] == made.rows
    assert off(space["mean"], x.mean(0)) < 1e-9 and off(space["covariance"], np.cov(x.T, bias=True)) < 1e-9
    want = (x - space["mean"]) @ space["matrix"]
    array = zarr.open_array("whitened.zarr", mode="r")
    assert array.shape == (made.rows, WIDTH) and off(array[:], want) < 1e-3
    table = parquet.read_table("whitened").to_pydict()
    assert sorted(table["row"]) == list(range(made.rows))
    number = {(data.captures[capture], int(position)): number for number, (capture, position) in
              enumerate(zip(batch["capture"], batch["position"], strict=True))}
    order = [number.pop(place) for place in zip(table["capture"], table["position"], strict=True)]
    assert not number and off(np.asarray(table["white"]), want[order]) < 1e-3
    assert int(space["figures"]["rows"].sum()) == made.rows
    one_chunk = {"row": np.arange(64, 128), "white": np.zeros((64, WIDTH), np.float32)}
    with pytest.raises(ValueError, match="rows 64 to 128 share a chunk with another task"):
        space["write_zarr"](one_chunk)
