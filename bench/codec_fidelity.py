"""What each codec keeps of a row: ``python -m bench.codec_fidelity`` prints the tables of docs/reference/codecs.md.

SQNR in dB, 10·log10(Σx² / Σ(x − x̂)²): on rows of the small model (worst site × layer), on Gaussian rows, and on the
other columns of rows that carry massive ones. Patched back: one layer's decoded rows replace the module's output in a
Hugging Face forward (keys and values for kv8, queries and keys for qk8); KL of the next-token distributions to the
unpatched ones, over that of a bfloat16 forward (noise floor). Cosine: root mean square error over pairs of rows.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM

from bench.codec_tables import WIDTH, declared, formulas, shown
from engine_side.codecs import encode
from schemas import codecs
from schemas.codecs import sketch
from vllm_tap.tiny_model import tiny_model

Rows = npt.NDArray[np.float32]
ALSO_SHOWN = {"sketch": ("sketch:bits=1", "sketch:k=2048")}
MASSIVE = [3, 70, 71, 900, 1900, 2500]
HEADS = ("q", "k", "v")  # sites of the small model that have heads


def pieces_of(codec: str, rows: torch.Tensor) -> dict[str, npt.NDArray[Any]]:
    """What the engine makes of rows [n, width]."""
    return {name: piece.numpy() for name, piece in encode(codec, rows).items()}


def round_trip(codec: str, rows: torch.Tensor) -> torch.Tensor:
    """Rows [n, width] encoded as the engine does and decoded as readers do, in float32."""
    dtype = str(rows.dtype).removeprefix("torch.")
    return torch.from_numpy(codecs.decode(codec, pieces_of(codec, rows), rows.shape[-1], dtype))


def sqnr(x: torch.Tensor, y: torch.Tensor) -> float:
    """Signal over quantisation noise in dB; infinity where nothing differs."""
    noise = (x.double() - y.double()).square().sum()
    return float("inf") if noise == 0 else float(10 * torch.log10(x.double().square().sum() / noise))


def gaussian_rows() -> torch.Tensor:
    """Independent normal numbers [512, WIDTH]."""
    return torch.randn(512, WIDTH, generator=torch.Generator().manual_seed(0))


def massive_rows() -> torch.Tensor:
    """Gaussian rows with six columns a thousand times larger, three of them close together."""
    rows = torch.randn(512, WIDTH, generator=torch.Generator().manual_seed(1))
    rows[:, MASSIVE] *= 1000
    return rows


class Model:
    """The small model in float32, with the rows of every layer, and a way to patch one."""

    def __init__(self) -> None:
        self.net = AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.float32).eval()
        self.head = int(self.net.config.head_dim)
        draw = torch.Generator().manual_seed(2)
        self.tokens = torch.randint(10, 2000, (8, 128), generator=draw)
        self.rows: dict[tuple[str, int], torch.Tensor] = {}
        self.modules = {(site, index): module for index, layer in enumerate(self.net.model.layers) for site, module in (
            ("resid_post", layer), ("attn_out", layer.self_attn), ("mlp_out", layer.mlp),
            ("q", layer.self_attn.q_proj), ("k", layer.self_attn.k_proj), ("v", layer.self_attn.v_proj))}
        for (site, index), module in self.modules.items():
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

    def codec(self, name: str) -> str:
        """The identity that fits this model."""
        return f"{name}:head={self.head}" if codecs.CODECS[name].sites else shown(name)

    def rows_of(self, name: str) -> list[torch.Tensor]:
        """Rows [n, width] of every layer and site that the codec is for."""
        sites = _sites(name) or ("resid_post", "attn_out", "mlp_out")
        return [rows.flatten(0, 1) for (site, _), rows in self.rows.items() if site in sites]

    def patched(self, name: str, layer: int) -> torch.Tensor:
        """Logits with one layer's outputs replaced by their decoded rows."""
        before, handles = dict(self.rows), []
        for site in _sites(name) or ("resid_post",):
            original = self.rows[site, layer]
            decoded = round_trip(self.codec(name), original.flatten(0, 1)).view_as(original)
            handles.append(self.modules[site, layer].register_forward_hook(_replacing(decoded)))
        try:
            return self._forward()
        finally:
            for handle in handles:
                handle.remove()
            self.rows = before


def _sites(name: str) -> tuple[str, ...]:
    """Sites of the small model that a codec for heads is for; none of any other codec."""
    return tuple(site for site in HEADS if site in codecs.CODECS[name].sites)


def _replacing(decoded: torch.Tensor) -> Callable[..., Any]:
    return lambda _module, _args, output: (decoded, *output[1:]) if isinstance(output, tuple) else decoded


def kl(p: torch.Tensor, q: torch.Tensor) -> float:
    """Mean KL(p ‖ q) of next-token distributions, in nats."""
    a, b = p.double().log_softmax(-1), q.double().log_softmax(-1)
    return float((a.exp() * (a - b)).sum(-1).mean())


def kept(p: torch.Tensor, q: torch.Tensor) -> float:
    """Share of positions whose most likely next token stays the same."""
    return float((p.argmax(-1) == q.argmax(-1)).float().mean())


def cosine_error(codec: str, rows: torch.Tensor) -> float:
    """Root mean square error of the cosines between rows, as estimated from what is stored."""
    known, decoded = codecs.identified(codec), round_trip(codec, rows).numpy()
    if known.family.name == "sketch":
        estimated = sketch.cosine(decoded, decoded, int(known.parameters["bits"]))
    else:
        estimated = sketch.cosines(decoded, decoded)
    pairs = np.triu_indices(len(rows), 1)
    return float(np.sqrt(np.mean((estimated - sketch.cosines(rows.numpy(), rows.numpy()))[pairs] ** 2)))


def energy(codec: str, rows: torch.Tensor) -> float | None:
    """Mean share of a row's energy that is kept; None where the codec keeps every column."""
    shares = codecs.kept_energy(pieces_of(codec, rows))
    return None if shares is None else float(shares.mean())


def measured(model: Model) -> str:
    """The codecs that decode to the row itself."""
    gaussian, massive = gaussian_rows(), massive_rows()
    others = np.setdiff1d(np.arange(WIDTH), MASSIVE)
    lines = ["| codec | SQNR, small model (float32) | SQNR, Gaussian | SQNR, other columns beside massive ones | "
             "energy kept, Gaussian / small model | KL patched back, × noise floor | top-1 kept |",
             "|---|---|---|---|---|---|---|"]
    for name in [name for name, family in codecs.CODECS.items() if not family.projected]:
        codec = model.codec(name)
        worst = min(sqnr(rows, round_trip(codec, rows)) for rows in model.rows_of(name))
        patched = [model.patched(name, layer) for layer in range(4)]
        ratio = max(kl(model.logits, logits) for logits in patched) / model.noise_floor
        top = min(kept(model.logits, logits) for logits in patched)
        wide = shown(name)
        shares = [energy(wide, gaussian), *(energy(codec, rows) for rows in model.rows_of(name))]
        share = "all" if shares[0] is None else \
            f"{100 * shares[0]:.0f} % / {100 * min(s for s in shares[1:] if s is not None):.0f} %"
        lines.append(f"| `{wide}` | {_db(worst)} | {_db(sqnr(gaussian, round_trip(wide, gaussian)))} | "
                     f"{_db(sqnr(massive[:, others], round_trip(wide, massive)[:, others]))} | {share} | {ratio:.2f} | "
                     f"{100 * top:.1f} % |")
    lines.append(f"\nNoise floor: KL {model.noise_floor:.2e} nats and {100 * model.noise_top:.1f} % of top-1 kept "
                 "between a bfloat16 and a float32 forward of the same model.")
    return "\n".join(lines)


def projections(model: Model) -> str:
    """The codecs that decode to a projection, by what they are for: cosines between rows."""
    lines = ["| codec | bytes | cosine error, Gaussian | cosine error, massive columns | cosine error, small model | "
             "1.15·√((1 − k/W)/k) at W = 4,096 / of the small model |", "|---|---|---|---|---|---|"]
    for text in [text for name, family in codecs.CODECS.items() if family.projected
                 for text in (name, *ALSO_SHOWN.get(name, ()))]:
        codec = codecs.parse_codec(text)
        nbytes = sum(stream.nbytes for stream in codec.streams(WIDTH, "bfloat16"))
        small = codecs.parse_codec(re.sub(r"k=\d+", "k=64", codec.identity))
        ours = max(cosine_error(small.identity, rows[:512]) for (site, _), rows in
                   ((key, value.flatten(0, 1)) for key, value in model.rows.items()) if site == "resid_post")
        width = model.rows["resid_post", 0].shape[-1]
        bars = [1.15 * ((1 - k / w) / k) ** 0.5 for k, w in ((int(codec.parameters["k"]), WIDTH), (64, width))]
        lines.append(f"| `{codec.identity}` | {nbytes:,} | {cosine_error(codec.identity, gaussian_rows()):.4f} | "
                     f"{cosine_error(codec.identity, massive_rows()):.4f} | {ours:.4f} (k = 64) | "
                     f"{bars[0]:.4f} / {bars[1]:.4f} |")
    return "\n".join(lines)


def main() -> None:
    """Print the tables, or write them between the marks of a page."""
    parser = argparse.ArgumentParser(prog="python -m bench.codec_fidelity", description=__doc__)
    parser.add_argument("--write", type=Path, metavar="PAGE", help="the page whose tables are renewed")
    args = parser.parse_args()
    model = Model()
    parts = {"declared": declared(), "formulas": formulas(), "measured": measured(model),
             "projections": projections(model)}
    if args.write is None:
        print("\n\n".join(parts.values()))
        return
    page = args.write.read_text()
    for name, text in parts.items():
        begin, end = (f"<!-- {edge} {name} (python -m bench.codec_fidelity --write docs/reference/codecs.md) -->"
                      for edge in ("begin", "end"))
        if page.count(begin) != 1 or page.count(end) != 1:
            parser.error(f"{args.write}: no place for the table {name!r}: {begin} … {end}")
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}"
    args.write.write_text(page)


def _db(value: float) -> str:
    return "exact" if value == float("inf") else f"{value:.1f} dB"


if __name__ == "__main__":
    main()
