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

What the start does with every text architecture that vLLM knows, and with five models that take images (their rows of
text; vLLM starts them where torchvision is installed): a small model of each (few layers, random weights) is loaded on
a CPU, and the search of its sites ([how it works](../explain/tap.md#models-that-are-in-no-table)) is run on it.
Written by `make survey`.

{counts}

*Admitted* says which tensor a row is: the stream adds up, and moves with what is added to it. It does not say that
vLLM computes the model: parity with Hugging Face does, [here](parity.md) for all sites under the scheduler's
features, and in the column *Hugging Face* for the stream, its outputs, `embed` and `final_norm` of one prompt and
what followed it (the worst row's error over its length; in bfloat16, which vLLM's linear attention for the CPU wants,
the median row's of the worst layer; "–" where it was not held). *Refused* means that an engine
with taps does not start, and says this reason. *Not started here* is vLLM's own word on this machine, or a small
configuration that nobody has found yet: on a GPU such a model may start, and is looked into there as well.

Where a row is off by more than rounding, the stream is off as well, which is proved to be what the model's output
is made of: vLLM computes another number there than Hugging Face. For Apertus, BLOOM and Nemotron-H that is another
form of an activation or a scan, [as far off without taps](parity.md). The bias of Ernie 4.5 MoE's router is zero
here: vLLM's CPU build leaves it out.

| architecture | result | sites, or why not | Hugging Face |
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
