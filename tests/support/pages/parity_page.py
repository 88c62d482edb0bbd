"""docs/evidence/parity.md: the figures of docs/evidence/parity.json as tables, one part a machine.

``parity.json``: ``{machine: {"versions", "dtype", "tolerance", "errors": {family: {feature: {site: error}}},
"own": {family: {"vllm", "rows"}}, "not_run": {feature: why}}, "lens": {…}}``. A run replaces what it measured and
leaves the rest, so that one page can hold what a CPU and what a GPU showed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from schemas.sites import BY_MODEL, SITES
from tests.support.models.families import CONFIGURATIONS, FAMILIES
from tests.support.models.features import FEATURES, LAYOUTS, Feature
from tests.support.models.unlisted import UNLISTED

Errors = dict[str, dict[str, dict[str, float]]]

HEADING = """# Parity

This page compares rows captured from real vLLM (`raw`) with a Hugging Face forward in float32 of the same tokens, at
every position. The figure is the worst row's error over its length, ‖x − x̂‖ / ‖x̂‖, of all rows of all captures. The
models are small (three layers) and have random weights. Hugging Face's own classes make them. `make parity` regenerates
this page from the figures of its own machine. docs/evidence/parity.json keeps the figures of other machines.

Each feature is made to happen, and the test fails if it did not. vLLM's own metrics count preemptions and accepted and
rejected drafts. Its outputs count cached tokens.

| what | compared with | where |
|---|---|---|
| eleven architectures, every site, ten features of the scheduler | Hugging Face, float32 | [CPU][features] |
| the same on two ranks, a ragged batch; Qwen3 under all features | Hugging Face, float32 | CPU, below |
| their other configurations | Hugging Face, float32 | [CPU](#other-configurations-the-worst-site-of-a-ragged-batch) |
| families in no table | Hugging Face, float32 | [CPU][unlisted] |
| most of all these families, bfloat16; Qwen3 and Mixtral under all features | Hugging Face, float32 | GPU, below |
| names, on eleven architectures | [TransformerLens](#transformerlens) | CPU |

[features]: #by-feature-the-worst-site
[unlisted]: #families-that-are-in-no-table-the-worst-site-by-feature
"""


def merge(file: Path, machine: str, run: dict[str, Any], errors: Errors,
          own: dict[str, dict[str, float]]) -> None:
    """Put a run's figures into the JSON file: features that it did not measure keep theirs.

    ``own``: by family by how much a log-probability of vLLM's without taps is off at most, in nats: of Hugging Face's
    (``vllm``), and of what the captured ``final_norm`` gives (``rows``).
    """
    found = json.loads(file.read_text()) if file.exists() else {}
    kept: Errors = found.get(machine, {}).get("errors", {})
    for family, features in errors.items():
        kept.setdefault(family, {}).update(features)
    apart = {**found.get(machine, {}).get("own", {}), **own}
    found[machine] = {**run, "errors": kept, **({"own": apart} if apart else {})}
    write(file, found)


def merge_lens(file: Path, family: str, errors: dict[str, float | None], version: str) -> None:
    """Put a family's comparison with TransformerLens into the JSON file."""
    found = json.loads(file.read_text()) if file.exists() else {}
    kept = found.get("lens", {}).get("errors", {})
    found["lens"] = {"versions": version, "errors": {**kept, family: errors}}
    write(file, found)


def write(file: Path, found: dict[str, Any]) -> None:
    """The JSON file, a line a feature, and the page beside it."""
    file.write_text(_lines(found) + "\n")
    file.with_suffix(".md").write_text(page(found))


def _lines(value: Any, depth: int = 0) -> str:
    """JSON with an innermost object on one line and figures of three digits."""
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, dict) and not any(isinstance(inner, dict) for inner in value.values()):
        return "{" + ", ".join(f"{json.dumps(key)}: {_lines(part)}" for key, part in value.items()) + "}"
    if not isinstance(value, dict):
        return json.dumps(value)
    indent = " " * depth
    inner = ",\n".join(f"{indent} {json.dumps(key)}: {_lines(part, depth + 1)}" for key, part in value.items())
    return f"{{\n{inner}\n{indent}}}"


def page(found: dict[str, Any]) -> str:
    """The page as Markdown."""
    parts = [HEADING]
    for machine in (", ".join(filter(None, (kind, layout))) for kind in ("cpu", "gpu") for layout in LAYOUTS):
        if machine in found:
            parts += _machine(machine, found[machine])
    if "lens" in found:
        parts += _lens(found["lens"])
    return "\n".join(parts)


def _machine(machine: str, run: dict[str, Any]) -> list[str]:
    errors: Errors = run["errors"]
    families = [family for family in FAMILIES if family in errors]
    kind, *layout = machine.split(", ")
    named = ", ".join([kind.upper(), *(f"two ranks, {each}" for each in layout)])
    heading = f"## {named}: {run['versions']}, {run['dtype']}, tolerance {run['tolerance']:g}\n"
    table = _table("feature", families, [
        (feature.name, [max(errors[family].get(feature.name, {}).values(), default=None) for family in families],
         run["not_run"].get(feature.name) or _worst(errors, feature.name)) for feature in FEATURES], absent="not run")
    if layout:
        return [heading, *table, ""]
    return [
        heading,
        "### By feature: the worst site\n",
        *table,
        "", *(f"- *{feature.name}*: {feature.meaning}." for feature in FEATURES), "",
        "### By site: the worst feature\n",
        *_table("site", families, [
            (f"`{site}`", [max((sites[site] for sites in errors[family].values() if site in sites), default=None)
                           for family in families], None)
            for site in SITES if any(site in sites for family in families for sites in errors[family].values())
        ]),
        *_configurations(errors),
        "", "`–`: the architecture has no such site, or (on a GPU, in bfloat16) all its rows follow a router's choice, "
        "which a close call turns.", "",
        *_unlisted(errors, run.get("own", {}), kind == "cpu"),
    ]


BY_STRUCTURE = """### Families that are in no table: the worst site by feature

Their sites are [found by structure](../explain/tap.md#models-that-are-in-no-table) as the engine starts. These are
the stream before and after every block (`resid_pre`, `resid_post`), `embed` and `final_norm`. They are also the tensors
that blocks add to the stream (`attn_out`, `mlp_out`, with `resid_mid` between), in every layer that has them. If a norm
makes such a tensor, the norm's input is a site too (`…_raw`). The reference hooks Hugging Face's own blocks. There are
{count} families. The notes below the table explain `not run` and exceptions.
"""


ON_A_GPU = """### On a GPU: families that are in no table, the worst site by feature

In bfloat16 a row that follows a router's choice is not compared, since a close call turns the choice. There are {count}
families.
"""


def _unlisted(errors: Errors, own: dict[str, dict[str, float]], on_a_cpu: bool) -> list[str]:
    """A row a family, a column a feature."""
    families = [family for family in UNLISTED if family in errors]
    if not families:
        return []
    features = [feature for feature in FEATURES if any(feature.name in errors[family] for family in families)]
    rows: list[tuple[str, list[float | None], str | None]] = []
    for family in families:
        worst = {feature: max(sites.values()) for feature, sites in errors[family].items()}
        at = max(errors[family][max(worst, key=lambda feature: worst[feature])].items(), key=lambda one: one[1])[0]
        rows.append((family, [worst.get(feature.name) for feature in features], f"`{at}`"))
    table = _table("family", [feature.name for feature in features], rows, absent="not run")
    if not on_a_cpu:
        return [ON_A_GPU.format(count=len(families)), *table, ""]
    return [BY_STRUCTURE.format(count=len(families)), *table, "",
            *(f"- *{family}*: {note}." for family in families for note in [
                *_notes(family, own.get(family)), *_more(family, errors[family]), *_not_yet(family, [
                    feature for feature in features if feature.name not in errors[family]])]), ""]


def _notes(family: str, own: dict[str, float] | None) -> list[str]:
    """What a family lacks, its bar where that is another, and what was not run."""
    of = UNLISTED[family]
    lacks = [site for site in ("resid_mid", "attn_out", "mlp_out") if site not in of.sites]
    reasons: dict[str, list[str]] = {}
    for what, why in of.not_run.items():
        reasons.setdefault(why, []).append(what)
    return [
        *([f"no {', '.join(f'`{site}`' for site in lacks)}: {of.lacks}"] if lacks else []),
        *([f"tolerance {of.tolerance:g}: {of.why}"] if of.why else []),
        *([f"{of.dtype}, tolerance {of.tolerance:g}: vLLM's CPU build has no other kernel of its linear attention; an "
           "error is over its row's length or the median row's, the longer"] if of.dtype else []),
        *([f"a log-probability of vLLM without taps is up to {own['vllm']:.1e} nats off Hugging Face's, and "
           f"{own['rows']:.1e} off what the captured `final_norm` gives"] if own else []),
        *(["`embed` is scaled, by the embedding module itself"] if of.scale != 1 else []),
        *([f"`{of.zero}` is zeros: {of.because}"] if of.zero else []),
        *(f"Hugging Face's model is told `{key}` = {value}, vLLM {of.says[key]}, which it takes for one more"
          for key, value in of.reads.items()),
        *(f"{', '.join(what)} not run: {why}" for why, what in reasons.items())]


def _more(family: str, measured: dict[str, dict[str, float]]) -> list[str]:
    """Sites besides the stream and what is added to it, and the features that held them where not all did."""
    by_features: dict[tuple[str, ...], list[str]] = {}
    for site in UNLISTED[family].more:
        by_features.setdefault(tuple(name for name, sites in measured.items() if site in sites), []).append(f"`{site}`")
    return [f"{', '.join(sites)} {'too' if len(held) == len(measured) else 'in the ' + ', '.join(held)}"
            for held, sites in by_features.items() if held]


def _not_yet(family: str, absent: list[Feature]) -> list[str]:
    """Features that nothing keeps a family from, of which it has no figures."""
    reasons = UNLISTED[family].not_run
    names = [feature.name for feature in absent if feature.name not in reasons and feature.group not in reasons]
    return [f"{', '.join(names)} not run yet"] if names else []


def _configurations(errors: Errors) -> list[str]:
    shown = {name: errors[name][feature] for name in CONFIGURATIONS if name in errors for feature in errors[name]}
    return [] if not shown else [
        "", "### Other configurations: the worst site of a ragged batch\n",
        "These configurations set switches of a family's code in vLLM to other values than above. "
        "[Limits](../reference/limits.md#configurations) lists the sites that each switch takes away.", "",
        "| configuration | sites | worst | at | what differs |", "|---|---|---|---|---|",
        *(f"| {name} | {len(sites)} | {max(sites.values()):.1e} | `{max(sites, key=lambda site: sites[site])}` | "
          f"{', '.join(f'`{key}`' for key in CONFIGURATIONS[name][1])} |" for name, sites in shown.items())]


LENS = """## TransformerLens

The same captures (CPU, float32) are compared with {versions}, `TransformerBridge`. Its weights are as they are (nothing
folded or centred). The table has every name under which a site is accepted, and the worst row of the worst layer.
`make lens` regenerates this part.

- **`attn.hook_out`, `mlp.hook_out`** are the results of the modules themselves. On Gemma these are `attn_out_raw` and
  `mlp_out_raw`, elsewhere the same as `hook_attn_out` and `hook_mlp_out`.
- **`hook_embed`** is after Gemma's scaling, `embed` before it. So the name is refused there; `resid_pre` of layer 0 has
  such rows.
- **Where names are accepted.** Specs and captures take these names if the model is known. `--arm`, probes and the
  loader take sites.
- **`ln_final.hook_normalized`** is refused. TransformerLens takes it before the norm's weight. `final_norm` is after
  the weight, as is `ln_final.hook_out`.
- **`HookedTransformer`'s default processing** (layer norms folded, weights centred). `resid_*`, `q`, `k`, `v`,
  `mlp_post` and `final_norm` differ from it. Captures are of the model's own weights, as every manifest says under
  `meaning`.
- **Heads** of `q`, `k`, `v`, `z` lie side by side in a row: reshape to `[heads, head_dim]`. Rotary dimensions are in
  Hugging Face's order, in `q_rot` and `k_rot` too.
"""


def _lens(run: dict[str, Any]) -> list[str]:
    errors: dict[str, dict[str, float]] = run["errors"]
    families = [family for family in FAMILIES if family in errors]
    named = [(name, f"`{site.name}`") for site in SITES.values() for name in site.lens] + [
        (name, " or ".join(f"`{site}`" for site in of.sites[:1 + ("{l}" in name)]))
        for of in BY_MODEL.values() for name in of.lens]
    rows = [(f"`{name}`", [errors[family].get(name) for family in families], site)
            for name, site in named if any(name in errors[family] for family in families)]
    return [LENS.format(versions=run["versions"]), *_table("name", families, rows, "site"), "",
            "`–`: the architecture has no such site, or TransformerLens no such name.", "", *_by_structure(errors)]


def _by_structure(errors: dict[str, dict[str, float]]) -> list[str]:
    """Of models in no table, how many names were held and the worst of them."""
    others = {family: {name: off for name, off in errors[family].items() if off is not None}
              for family in UNLISTED if family in errors}
    if not others:
        return []
    lines = [f"| {family} | {len(offs)} | {max(offs.values()):.1e} |" for family, offs in others.items() if offs]
    return ["The sites of models in no table are found by structure. This table has the number of names that "
            "TransformerLens has too, and the worst row of any.", "",
            "| model | names | worst row |", "|---|---|---|", *lines, ""]


def _worst(errors: Errors, feature: str) -> str:
    error, site, family = max(((error, site, family) for family, features in errors.items()
                               if family in FAMILIES for site, error in features.get(feature, {}).items()),
                              default=(-1.0, "", ""))
    return f"`{site}` of {family}" if error >= 0 else "not run"


def _table(corner: str, columns: list[str], rows: list[tuple[str, list[float | None], str | None]],
           last: str = "worst at", absent: str = "–") -> list[str]:
    named = any(note for *_, note in rows)
    heads = [corner, *columns, *([last] if named else [])]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for name, cells, note in rows:
        shown = [absent if cell is None else f"{cell:.1e}" for cell in cells]
        lines.append("| " + " | ".join([name, *shown, *([note or ""] if named else [])]) + " |")
    return lines
