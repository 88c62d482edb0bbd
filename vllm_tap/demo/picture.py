"""A heat map of a capture: how far each token's residual stream moves in each layer."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from schemas.manifest import Manifest
from vllm_tap.client.client import Client
from vllm_tap.tiny_model import tiny_model

__all__ = ["heat_map"]


def heat_map(client: Client, manifest: Manifest, path: Path) -> None:
    """Writes a PNG of the norm of ``resid_post``, token × layer."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from tokenizers import Tokenizer

    layers = manifest.resolved["layers"]["resid_post"]
    rows = client.capture(manifest.id).slice("resid_post", layers)
    norms = np.linalg.norm(rows.values, axis=-1)
    tokenizer = Tokenizer.from_file(str(tiny_model() / "tokenizer.json"))
    words = [tokenizer.decode([int(token)], skip_special_tokens=False) for token in rows.token_ids]
    figure, axes = plt.subplots(figsize=(max(6.0, 0.2 * len(words) + 1.5), 3.2), layout="constrained")
    image = axes.imshow(norms, aspect="auto", origin="lower", cmap="magma")
    axes.set_yticks(range(len(layers)), [str(layer) for layer in layers])
    axes.set_xticks(range(len(words)), [word.replace("\n", "⏎").replace("$", r"\$") for word in words],
                    rotation=90, fontsize=7)
    axes.axvline(manifest.prompt_len - 0.5, color="white", linewidth=1, linestyle="--")
    axes.set_xlabel("token")
    axes.set_ylabel("layer")
    axes.set_title("norm of the residual stream after each block (dashed: generation begins)", fontsize=9)
    figure.colorbar(image, ax=axes, pad=0.01, label="‖x‖")
    figure.savefig(path, dpi=120)
    plt.close(figure)
