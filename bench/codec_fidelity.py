"""How much of a row each codec keeps: ``python -m bench.codec_fidelity`` prints the table of docs/codecs.md.

SQNR in dB, 10·log10(Σx² / Σ(x − x̂)²): on rows of the small model (worst site × layer), on Gaussian rows, and on the
other columns of rows that carry massive ones. Patched back: one layer's decoded rows replace its output in a Hugging
Face forward; KL of the next-token distributions to the unpatched ones, over that of a bfloat16 forward (noise floor).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM

from engine_side.codecs import encode
from schemas import codecs
from vllm_tap.tiny_model import tiny_model

Rows = npt.NDArray[np.float32]
MASSIVE = [3, 70, 71, 900, 1900, 2500]


def round_trip(codec: str, rows: torch.Tensor) -> torch.Tensor:
    """Rows [n, width] encoded as the engine does and decoded as readers do, in float32."""
    dtype = str(rows.dtype).removeprefix("torch.")
    pieces = {name: piece.numpy() for name, piece in encode(codec, rows).items()}
    return torch.from_numpy(codecs.decode(codec, pieces, rows.shape[-1], dtype))


def sqnr(x: torch.Tensor, y: torch.Tensor) -> float:
    """Signal over quantisation noise in dB; infinity where nothing differs."""
    noise = (x.double() - y.double()).square().sum()
    return float("inf") if noise == 0 else float(10 * torch.log10(x.double().square().sum() / noise))


def massive_rows(width: int = 4096) -> torch.Tensor:
    """Gaussian rows with six columns a thousand times larger, three of them close together."""
    rows = torch.randn(512, width, generator=torch.Generator().manual_seed(1))
    rows[:, MASSIVE] *= 1000
    return rows


class Model:
    """The small model in float32, with the rows of every layer, and a way to patch one."""

    def __init__(self) -> None:
        self.net = AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.float32).eval()
        draw = torch.Generator().manual_seed(2)
        self.tokens = torch.randint(10, 2000, (8, 128), generator=draw)
        self.rows: dict[tuple[str, int], torch.Tensor] = {}
        for index, layer in enumerate(self.net.model.layers):
            for site, module in (("resid_post", layer), ("attn_out", layer.self_attn), ("mlp_out", layer.mlp)):
                module.register_forward_hook(self._keep(site, index))
        self.logits = self._forward()
        self.rows = {key: value.clone() for key, value in self.rows.items()}
        half = AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.bfloat16).eval()
        with torch.inference_mode():
            rounded = half(self.tokens).logits.float()
        self.noise_floor, self.noise_top = kl(self.logits, rounded), kept(self.logits, rounded)

    def _keep(self, site: str, layer: int) -> Callable[..., None]:
        def hook(_module: Any, _args: Any, output: Any) -> None:
            self.rows[site, layer] = (output[0] if isinstance(output, tuple) else output).detach()

        return hook

    def _forward(self) -> torch.Tensor:
        with torch.inference_mode():
            return self.net(self.tokens).logits  # type: ignore[no-any-return]

    def patched(self, codec: str, layer: int) -> torch.Tensor:
        """Logits with one layer's output replaced by its decoded rows."""
        original = self.rows["resid_post", layer]
        decoded = round_trip(codec, original.flatten(0, 1)).view_as(original)
        handle = self.net.model.layers[layer].register_forward_hook(
            lambda _m, _a, output: (decoded, *output[1:]) if isinstance(output, tuple) else decoded)
        before = dict(self.rows)
        try:
            return self._forward()
        finally:
            handle.remove()
            self.rows = before


def kl(p: torch.Tensor, q: torch.Tensor) -> float:
    """Mean KL(p ‖ q) of next-token distributions, in nats."""
    a, b = p.double().log_softmax(-1), q.double().log_softmax(-1)
    return float((a.exp() * (a - b)).sum(-1).mean())


def kept(p: torch.Tensor, q: torch.Tensor) -> float:
    """Share of positions whose most likely next token stays the same."""
    return float((p.argmax(-1) == q.argmax(-1)).float().mean())


def main() -> None:
    """Print the table."""
    model = Model()
    gaussian = torch.randn(512, 4096, generator=torch.Generator().manual_seed(0))
    massive = massive_rows()
    others = np.setdiff1d(np.arange(4096), MASSIVE)
    print("| codec | bytes a row of 4,096 (bfloat16) | SQNR, small model | SQNR, Gaussian | SQNR, other columns beside "
          "massive ones | KL patched back, × noise floor | top-1 kept |")
    print("|---|---|---|---|---|---|---|")
    for name in codecs.CODECS:
        nbytes = sum(stream.nbytes for stream in codecs.streams(name, 4096, "bfloat16"))
        worst = min(sqnr(rows.flatten(0, 1), round_trip(name, rows.flatten(0, 1))) for rows in model.rows.values())
        patched = [model.patched(name, layer) for layer in range(4)]
        ratio = max(kl(model.logits, logits) for logits in patched) / model.noise_floor
        top = min(kept(model.logits, logits) for logits in patched)
        beside = sqnr(massive[:, others], round_trip(name, massive)[:, others])
        print(f"| `{name}` | {nbytes:,} | {_db(worst)} | {_db(sqnr(gaussian, round_trip(name, gaussian)))} | "
              f"{_db(beside)} | {ratio:.2f} | {100 * top:.1f} % |")
    print(f"\nNoise floor: KL {model.noise_floor:.2e} nats and {100 * model.noise_top:.1f} % of top-1 kept between a "
          "bfloat16 and a float32 forward of the same model.")


def _db(value: float) -> str:
    return "exact" if value == float("inf") else f"{value:.1f} dB"


if __name__ == "__main__":
    main()
