"""The tables of docs/reference/codecs.md that follow from the declarations alone."""

from __future__ import annotations

from schemas.codecs import CODECS, parse_codec
from schemas.codecs.declare import Parameter, Stream

HEAD = 128  # of the model that per-head codecs are shown for
WIDTH = 4096


def shown(name: str) -> str:
    """The identity that a codec is shown and measured by: its defaults."""
    return parse_codec(f"{name}:head={HEAD}" if CODECS[name].sites else name).identity


def declared() -> str:
    """One row a codec: parameters, streams and bytes of a row, declared bound."""
    lines = [f"| codec | parameters | streams of a bfloat16 row of {WIDTH:,} numbers | bytes | error, at most |",
             "|---|---|---|---|---|"]
    for name, family in CODECS.items():
        streams = parse_codec(shown(name)).streams(WIDTH, "bfloat16")
        parameters = "; ".join(map(_parameter, family.parameters)) or "–"
        only = f" (sites {', '.join(family.sites)})" if family.sites else ""
        lines.append(f"| `{name}`{only} | {parameters} | {', '.join(map(_stream, streams))} | "
                     f"{sum(stream.nbytes for stream in streams):,} | {family.error} |")
    return "\n".join(lines)


def formulas() -> str:
    """One row a codec: what it is, and how a row is decoded."""
    lines = ["| codec | what it is | a row, decoded | which is |", "|---|---|---|---|"]
    lines += [f"| `{name}` | {family.meaning} | `{family.formula}` | {family.decoded} |"
              for name, family in CODECS.items()]
    return "\n".join(lines)


def _parameter(parameter: Parameter) -> str:
    default = "" if parameter.default is None else f" = {parameter.default:g}"
    return f"`{parameter.name}`{default}, {parameter.low:g} to {parameter.high:.10g}: {parameter.meaning}"


def _stream(stream: Stream) -> str:
    return f"`{stream.name}` {stream.view or stream.dtype} {list(stream.shape)}"
