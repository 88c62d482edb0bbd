"""Options that several commands share, and the words that an option may be."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from schemas.bucket.reader import Cataloged, Source
from schemas.checks import Durability, LogFormat, OnFull
from schemas.codecs import CODECS
from schemas.errors import TapError
from schemas.legacy import MODES
from schemas.store.paths import NOT_A_FOLDER, url_of

__all__ = ["ActBits", "ActMode", "AnyStores", "Arm", "Catalog", "Durability", "Edit", "EditDepth", "EditRows", "Format",
           "Keys", "LogFormat", "MaxModelLen", "OnFull", "Probes", "Ref", "RpK", "RpSeed", "Store", "Tiny", "TopkK",
           "Vectors", "engine_of", "model_of", "source_of"]


class Format(StrEnum):
    """A format that `export` writes."""

    npz = "npz"
    safetensors = "safetensors"
    npy = "npy"
    hf = "hf"
    zarr = "zarr"


Ref = Annotated[str, typer.Argument(help="A capture id, a response id or an X-Request-Id.")]
def _folder(path: Path) -> Path:
    if (url := url_of(path)) is not None:
        raise TapError(f"--store = {url!r}: {NOT_A_FOLDER}")
    return path


Store = Annotated[Path, typer.Option("--store", "--act-outdir", envvar="VLLM_ACT_OUTDIR", callback=_folder,
                                     help="The folder of captures.")]
def _stores() -> list[str]:
    return [os.environ.get("VLLM_ACT_OUTDIR") or "captures"]  # one, whatever spaces are in it


AnyStores = Annotated[list[str], typer.Option(
    "--store", "--act-outdir", default_factory=_stores, show_default="captures", help="The folder of captures, or the "
    "URL of one in a bucket, as s3://BUCKET/PREFIX (VLLM_ACT_OUTDIR names it too); s3://BUCKET/PREFIX/* is all one "
    "level below; repeatable: all are read as one.")]
Catalog = Annotated[str | None, typer.Option(
    "--catalog", metavar="URL", help="Postgres database that has the catalogs of stores in a bucket, "
                                     "postgresql://USER@HOST/DATABASE.")]
ActMode = Annotated[str | None, typer.Option(
    help=f"Legacy codec: {', '.join(f'{mode} ({CODECS[mode].error})' for mode in MODES)}.")]
RpK = Annotated[int | None, typer.Option(help="rp8: numbers that a row becomes (default 512).")]
RpSeed = Annotated[int | None, typer.Option(help="rp8: seed of the projection (default 0).")]
TopkK = Annotated[int | None, typer.Option(help="topk8: entries kept of a row (default 4 % of them).")]
ActBits = Annotated[int | None, typer.Option(help="Bits of a stored number; only 8 is accepted.")]
Keys = Annotated[Path | None, typer.Option("--keys", help="File of the API keys (default: keys.json of the store, if "
                                                          "there is one); needed to listen beyond loopback.")]
Tiny = Annotated[bool, typer.Option("--tiny", help="Use a small random model, made on the spot, instead of MODEL.")]
Probes = Annotated[list[str] | None, typer.Option(
    "--probe", help="Register a probe: NAME=FILE (safetensors), or NAME=FILE@resid_post.12; repeatable.")]
Arm = Annotated[str, typer.Option(help="Sites to arm, comma-separated: resid_post, attn_out, mlp_out, … in every "
                                       "layer; resid_post.12 in one layer. GPU memory: sites x layers x tokens of a "
                                       "step x width x bytes of a number.")]
Edit = Annotated[str, typer.Option(help="Sites that requests may edit, comma-separated: resid_post, attn_out, z, … in "
                                        "every layer; resid_post.12 in one layer (docs/howto/edits.md).")]
EditDepth = Annotated[int | None, typer.Option(help="Edits that one row may have at one site and layer (default 2).")]
EditRows = Annotated[int | None, typer.Option(help="Rows that edits with one row for each position (set, rows) may "
                                                   "hold at once, of all requests together (default 256).")]
Vectors = Annotated[list[str] | None, typer.Option(
    "--vector", help="Register a vector that edits may name: NAME=FILE (safetensors with one tensor, vector); "
                     "repeatable.")]
MaxModelLen = Annotated[int | None, typer.Option(help="Longest prompt and answer together, in tokens.")]


def source_of(stores: list[str], catalog: str | None) -> Source:
    """The stores of --store and --catalog."""
    return stores if catalog is None else Cataloged(stores, catalog)


def engine_of(tiny: bool, max_model_len: int | None, for_vllm: tuple[str, ...]
              ) -> tuple[dict[str, str], tuple[str, ...]]:
    """Environment and vLLM arguments of a command that starts an engine."""
    environment: dict[str, str] = {}
    arguments: tuple[str, ...] = ()
    if tiny:  # fit for a small machine; without --dtype vLLM would narrow a float32 model to 16 bits
        environment, arguments = {"VLLM_CPU_KVCACHE_SPACE": "1"}, ("--dtype", "float32")
    if max_model_len is not None:
        if max_model_len < 1:
            raise TapError(f"--max-model-len = {max_model_len}: at least 1")
        arguments = (*arguments, "--max-model-len", str(max_model_len))
    return environment, (*arguments, *for_vllm)


def model_of(model: str | None, tiny: bool, how: str = "MODEL") -> str:
    """The model that a command is given, or the tiny one; TapError where it is given both, or none."""
    if tiny and model is not None:
        raise TapError(f"either {how} or --tiny, not both")
    if tiny:
        from vllm_tap.tiny_model import tiny_model

        return str(tiny_model())
    if model is None:
        raise TapError(f"name a model ({how}) or use --tiny")
    return model
