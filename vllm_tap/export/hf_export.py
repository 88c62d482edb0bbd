"""``export --format hf``: captures as one Hugging Face dataset on disk, written a block at a time.

A row of the dataset is a token: ``capture``, ``position``, ``token_id``, and a list of float32 for each ``site.layer``.
With ``context`` a row is so many tokens that follow each other, as SAE trainers cache activations. It has ``token_ids``
int32 ``[context]`` and, by TransformerLens's names, ``Array2D`` float32 ``[context, width]``. Tokens of a capture that
fill no such row are then left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from schemas.bucket.reader import Source, open_reader, shown
from schemas.errors import ArgumentError, NotFoundError, TapError
from schemas.manifest import Manifest
from schemas.sites import names_of, transformer_lens_name
from vllm_tap.client.captures import Rows
from vllm_tap.client.convert import need, token_table
from vllm_tap.client.listing import Filters
from vllm_tap.export.array_files import replacing_folder
from vllm_tap.export.export_rows import ExportRows
from vllm_tap.progress import ProgressReport, reporting

__all__ = ["export_hf"]

_BLOCK_BYTES: Final = 64 << 20
_OURS: Final = re.compile(r"data-[0-9]+-of-[0-9]+\.arrow|dataset_info\.json|state\.json")


def export_hf(store: Source, ref: str | None, out: Path | None, chosen: Callable[[Manifest], dict[str, list[int]]],
              tags: Mapping[str, str | None], context: int | None = None, force: bool = False,
              progress: ProgressReport = False) -> list[Path]:
    """Writes one capture, or all complete ones with these ``tags``, and returns the folder.

    All captures must have the sites and layers ``chosen`` of their manifests, decoded to rows of the same widths.
    """
    if context is not None and context < 1:
        raise ArgumentError("--context", context, "at least 1 token")
    target = out or Path(ref or "activations")
    if target.exists() and not force:
        raise TapError(f"--out = {str(target)!r}: exists already; name another or add --force")
    if target.exists() and not _is_dataset(target):
        raise TapError(f"--out = {str(target)!r}: a dataset takes the place of a dataset, even with --force, and this "
                       "is none, or holds other files; name another")
    with open_reader(store) as reader:
        refs = [ref] if ref else [row.id for row in Filters("complete", tags).of(reader)][::-1]
        if not refs:
            raise NotFoundError(f"no complete captures in {shown(store)}"
                                + (f" with tags {dict(tags)}" if tags else ""))
        datasets = need("datasets", "--format hf")  # takes seconds: what is refused is refused before
        manifests = map(reader.manifest, refs)
        captures = (ExportRows(reader, manifest, chosen(manifest)) for manifest in manifests)
        first = next(captures)
        try:
            with replacing_folder(target) as folder:
                rows = folder.with_name("rows.arrow")
                with reporting(progress, "exporting") as tell:
                    _write(rows, first, captures, context, lambda done: tell(done, len(refs)))
                datasets.Dataset.from_file(str(rows)).save_to_disk(str(folder))
        except OSError as error:
            raise TapError(f"--out = {str(target)!r}: {error}") from None
    return [target]


def _is_dataset(path: Path) -> bool:
    """Whether there is nothing but a dataset as this writes it, or nothing at all: only that is ever removed."""
    return path.is_dir() and not path.is_symlink() and all(map(_OURS.fullmatch, (each.name for each in path.iterdir())))


def _write(file: Path, first: ExportRows, others: Iterator[ExportRows], context: int | None,
           tell: Callable[[int], None]) -> None:
    """The rows of captures as one Arrow file; ``tell`` hears how many are done."""
    from datasets.arrow_writer import ArrowWriter

    longest = 0
    with ArrowWriter(path=str(file), features=_features(first, context)) as writer:
        for done, rows in enumerate(chain([first], others), 1):
            if _shape(rows) != _shape(first):
                raise TapError(f"captures have different sites or layers: {first.manifest.id} has {_shape(first)}, "
                               f"{rows.manifest.id} {_shape(rows)}; choose with --sites, --layers or --tag")
            if context is not None:
                longest = max(longest, *map(len, _runs(rows)))
            for parts in _blocks(rows, context):
                if context is None:
                    writer.write_table(token_table(parts))
                else:
                    writer.write_batch(_contexts(parts, context, names_of(first.manifest.engine)))
            tell(done)
        if context is not None and context > longest:
            raise ArgumentError("--context", context, "no capture has so many tokens that follow each other; "
                                                      f"the longest run is of {longest}")
        writer.finalize()


def _shape(rows: ExportRows) -> dict[str, int]:
    """Widths by column."""
    return {f"{site}.{layer}": rows.site(site).decoded_width for site, layers in rows.chosen.items()
            for layer in layers}


def _column(name: str, names: Mapping[str, str]) -> str:
    site, _, layer = name.rpartition(".")
    return transformer_lens_name(site, int(layer), names) or name


def _features(rows: ExportRows, context: int | None) -> Any:
    import datasets

    shape, names = _shape(rows), names_of(rows.manifest.engine)
    if not shape:
        raise NotFoundError(f"capture {rows.manifest.id} is {rows.manifest.status} and holds no rows to export")
    value = datasets.Value
    if context is None:
        return datasets.Features({
            "capture": value("string"), "position": value("int32"), "token_id": value("int32"),
            **{name: datasets.Sequence(value("float32"), length=width) for name, width in shape.items()}})
    return datasets.Features({
        "token_ids": datasets.Sequence(value("int32"), length=context),
        **{_column(name, names): datasets.Array2D((context, width), "float32") for name, width in shape.items()}})


def _blocks(rows: ExportRows, context: int | None) -> Iterator[list[Rows]]:
    """The rows that all chosen sites and layers have, a block of positions at a time; with ``context``, of runs."""
    step = max(1, _BLOCK_BYTES // max(1, 4 * sum(_shape(rows).values())))
    if context is None:
        runs = [rows.positions]
    else:
        step = max(1, step // context) * context
        runs = [run[:len(run) // context * context] for run in _runs(rows)]
    for run in runs:
        for begin in range(0, len(run), step):
            block = run[begin:begin + step]
            yield [_part(rows, site, layers, block) for site, layers in rows.chosen.items()]


def _runs(rows: ExportRows) -> list[npt.NDArray[Any]]:
    """The positions, in runs that follow each other."""
    return np.split(rows.positions, np.flatnonzero(np.diff(rows.positions) != 1) + 1)


def _part(rows: ExportRows, site: str, layers: list[int], block: np.ndarray) -> Rows:
    part = rows.reader.slice(rows.manifest.id, site, layers, int(block[0]), int(block[-1]) + 1)
    kept = np.isin(part.positions, block)
    return Rows(part.capture, site, layers, part.start, part.stop, part.positions[kept], part.token_ids[kept],
                part.values()[:, kept], [], part.clipped)


def _contexts(parts: list[Rows], context: int, names: Mapping[str, str]) -> dict[str, Any]:
    return {"token_ids": list(parts[0].token_ids.astype(np.int32).reshape(-1, context)),
            **{_column(f"{rows.site}.{layer}", names): list(values.reshape(-1, context, values.shape[-1]))
               for rows in parts for layer, values in zip(rows.layers, rows.values, strict=True)}}
