"""docs/evidence/models.md: what came of every architecture, from docs/evidence/models.json."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, Final

JSON: Final = Path(__file__).parents[2] / "docs" / "evidence" / "models.json"
PAGE: Final = JSON.with_suffix(".md")
BAR: Final = {"float32": 1e-4, "bfloat16": 5e-2}  # of a row's length
_WORDS: Final = {"admitted": "admitted", "refused": "refused", "not started": "not started here"}
_HEAD: Final = """# Models

`make survey` writes this page. It loads a small model of every text architecture that vLLM knows (few layers, random
weights) on a CPU. Then it runs the start-up search for the model's sites
([how it works](../explain/tap.md#models-that-are-in-no-table)). It does the same with the text rows of five models that
take images. vLLM starts these only if torchvision is installed.

{counts}

- *Admitted*: it is proved which tensor a row is. The stream adds up, and it moves with a value that is added to a
  row. This does not show that vLLM computes the model correctly. [Parity](parity.md) with Hugging Face shows it,
  for all sites and the scheduler's features.
- The column *Hugging Face* compares the stream, its outputs, `embed` and `final_norm`, for one prompt and its
  answer. It has the worst row's error over its norm. Models that need bfloat16 (vLLM's linear attention on a CPU)
  have the median row's error of the worst layer. "–" means that the model was not compared.
- *Refused*: an engine with taps does not start, and says this reason.
- *Not started here*: vLLM refused the model on this machine, with these words, or no working small configuration is
  known yet. Such a model may start on a GPU, where the search runs as well.

If a row is off by more than rounding, the stream is off as well. The stream is proved to be the source of the
model's output, so vLLM computes another number there than Hugging Face. Apertus, BLOOM and Nemotron-H have another
form of an activation or a scan, and are [as far off without taps](parity.md). The bias of Ernie 4.5 MoE's router is
zero here, because vLLM's CPU build leaves it out.

| architecture | result | sites, or the reason | Hugging Face |
|---|---|---|---|
"""


def worst(row: dict[str, Any]) -> float | None:
    """The error of the worst row that was held against Hugging Face; None where none was."""
    return max((one["error"] for one in row.get("held", {}).values()), default=None)


def page(rows: dict[str, dict[str, Any]]) -> str:
    """The page of these architectures."""
    results = Counter(row["result"] for row in rows.values())
    held = [off <= BAR[row["dtype"]] for row in rows.values() if (off := worst(row)) is not None]
    counts = (f"**{len(rows)} architectures: {results['admitted']} admitted, {results['refused']} refused, "
              f"{results['not started']} not started here.** {len(held)} were held against Hugging Face, "
              f"{sum(held)} of them within {BAR['float32']:g} ({BAR['bfloat16']:g} in bfloat16).")
    return _HEAD.format(counts=counts) + "".join(_line(name, row) for name, row in sorted(
        rows.items(), key=lambda item: (list(_WORDS).index(item[1]["result"]), item[0])))


def _line(name: str, row: dict[str, Any]) -> str:
    off = worst(row)
    dtype = "" if off is None or row["dtype"] == "float32" else f" ({row['dtype']})"
    said = ", ".join(f"`{site}`" for site in row.get("sites", ())) if row["result"] == "admitted" else _why(row)
    return f"| {name} | {_WORDS[row['result']]} | {said} | {'–' if off is None else f'{off:.1e}'}{dtype} |\n"


def _why(row: dict[str, Any]) -> str:
    text = str(row.get("why") or row.get("search") or "its process died")
    return " ".join(text.split()).replace("|", "/").removeprefix("vllm-tap: ")[:200]


def write() -> None:
    """Write the page anew."""
    PAGE.write_text(page(json.loads(JSON.read_text())))
