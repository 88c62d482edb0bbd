"""What each codec keeps of a row: ``python -m bench.codec_fidelity`` prints the tables of docs/reference/codecs.md.

SQNR in dB, 10·log10(Σx² / Σ(x − x̂)²): on Gaussian rows, and on the other columns of rows that carry massive ones. What
a codec costs the plain pilot comes from docs/evidence/fidelity.json and kv.json, as ``make fidelity`` wrote them.
Cosine: root mean square error over pairs of rows.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bench.codec_tables import WIDTH, declared, formulas, shown
from bench.fidelity_page import written
from engine_side.codecs import encode
from schemas import codecs
from schemas.codecs import sketch

COMMAND = "python -m bench.codec_fidelity --write docs/reference/codecs.md"
EVIDENCE = Path(__file__).parents[1] / "docs" / "evidence"
Rows = npt.NDArray[np.float32]
ALSO_SHOWN = {"sketch": ("sketch:bits=1", "sketch:k=2048")}
MASSIVE = [3, 70, 71, 900, 1900, 2500]


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


def costs() -> dict[str, tuple[float, float]]:
    """By codec what it costs the plain pilot at its worst layer: KL over what bfloat16 costs, and top-1 kept."""
    rows = json.loads((EVIDENCE / "fidelity.json").read_text())["pilots"]["plain"]
    cache = json.loads((EVIDENCE / "kv.json").read_text())["plain"]
    shown_lines = [(rows["bar"], one) for one in rows["lines"] if one["site"] == "resid_post"]
    shown_lines += [(cache["bar"], one) for one in cache["lines"] if one["site"] == "in-forward/kv"
                    and one["name"] == "kv8"]
    return {"raw": (0.0, 1.0), **{one["name"]: (one["kl"]["value"] / bar, one["top1"]["value"])
                                  for bar, one in shown_lines}}  # the identity is a control: exactly 0


def measured() -> str:
    """The codecs that decode to the row itself."""
    gaussian, massive = gaussian_rows(), massive_rows()
    others, cost = np.setdiff1d(np.arange(WIDTH), MASSIVE), costs()
    lines = ["| codec | SQNR, Gaussian | SQNR, other columns beside massive ones | energy kept, Gaussian | "
             "KL in the pilot, × what bfloat16 costs | top-1 kept |", "|---|---|---|---|---|---|"]
    for name in [name for name, family in codecs.CODECS.items() if not family.projected]:
        codec = shown(name)
        share = energy(codec, gaussian)
        ratio, top = cost.get(codec, cost.get(name, (None, None)))
        lines.append(f"| `{codec}` | {_db(sqnr(gaussian, round_trip(codec, gaussian)))} | "
                     f"{_db(sqnr(massive[:, others], round_trip(codec, massive)[:, others]))} | "
                     f"{'all' if share is None else f'{100 * share:.0f} %'} | "
                     f"{'–' if ratio is None else f'{ratio:.2g}'} | {'–' if top is None else f'{100 * top:.1f} %'} |")
    return "\n".join(lines)


def projections() -> str:
    """The codecs that decode to a projection, by what they are for: cosines between rows."""
    lines = ["| codec | bytes | cosine error, Gaussian | cosine error, massive columns | 1.15·√((1 − k/W)/k) |",
             "|---|---|---|---|---|"]
    for text in [text for name, family in codecs.CODECS.items() if family.projected
                 for text in (name, *ALSO_SHOWN.get(name, ()))]:
        codec = codecs.parse_codec(text)
        nbytes = sum(stream.nbytes for stream in codec.streams(WIDTH, "bfloat16"))
        k = int(codec.parameters["k"])
        errors = (cosine_error(codec.identity, gaussian_rows()), cosine_error(codec.identity, massive_rows()),
                  1.15 * ((1 - k / WIDTH) / k) ** 0.5)
        lines.append(f"| `{codec.identity}` | {nbytes:,} | " + " | ".join(f"{one:.4f}" for one in errors) + " |")
    return "\n".join(lines)


def main() -> None:
    """Print the tables, or write them between the marks of a page."""
    parser = argparse.ArgumentParser(prog="python -m bench.codec_fidelity", description=__doc__)
    parser.add_argument("--write", type=Path, metavar="PAGE", help="the page whose tables are renewed")
    args = parser.parse_args()
    parts = {"declared": declared(), "formulas": formulas(), "measured": measured(), "projections": projections()}
    if args.write is None:
        print("\n\n".join(parts.values()))
        return
    args.write.write_text(written(args.write.read_text(), parts, COMMAND))


def _db(value: float) -> str:
    return "exact" if value == float("inf") else f"{value:.1f} dB"


if __name__ == "__main__":
    main()
