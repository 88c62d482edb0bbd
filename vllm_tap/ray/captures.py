"""Rows of a store as a dataset of Ray Data: what is asked for is checked here, before Ray is asked for anything."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from schemas import limits
from schemas.errors import ArgumentError, LimitError
from vllm_tap.client.captures import Layers
from vllm_tap.client.convert import need
from vllm_tap.client.listing import Where
from vllm_tap.loader.joined_index import stores_named
from vllm_tap.loader.row_index import InBucket, keys_of
from vllm_tap.progress import ProgressReport
from vllm_tap.ray.row_part import DTYPES, columns_of, rows_a_task
from vllm_tap.ray.stores import Chosen, index_stores
from vllm_tap.store import Store

if TYPE_CHECKING:
    import ray.data

__all__ = ["TASK_BYTES", "read_captures"]

TASK_BYTES: Final = 64 << 20
AnyStore = str | Path | Store


def read_captures(store: AnyStore | Sequence[AnyStore], *, sites: str | Sequence[str], layers: Layers = None,
                  where: Where = None, codec: str | None = None, columns: Sequence[str] | None = None,
                  dtype: str = "float32", allow_missing: bool = False, verify: bool = False,
                  task_bytes: int = TASK_BYTES, progress: ProgressReport = False, **options: Any) -> ray.data.Dataset:
    """The rows of sites and layers over all captures that ended, a row a token, in the order of the disk.

    ``store`` may be several: a capture that more than one has, as where a task of many engines was run again, is
    counted once, where it is complete. ``sites``, ``layers``, ``where``, ``codec`` and ``verify`` choose what they
    choose in ``vllm_tap.rows``. Columns: ``capture`` (its id, a string), ``position`` and ``token_id`` int64, ``row``
    int64 (the number of the row in this dataset), and for each ``site.layer`` a tensor ``[width]`` of ``dtype``.

    Args:
        columns: those wanted, in this order; no other is read. A dataset's ``select_columns`` has the same effect, and
            ``filter(expr=…)`` on ``capture``, ``position`` and ``row`` chooses rows before any is read.
        dtype: "float32", "float16" (rounded once), or "codes": the numbers as they are stored, a column
            ``site.layer.stream`` for each stream of the codec.
        allow_missing: take the rows that are there where a chosen capture lacks some, instead of MissingRows.
        task_bytes: of the tensors that one task reads; at most 256 MiB.
        options: of ``ray.data.read_datasource``, such as ``concurrency=2``.

    Every node must see a store in a folder under the same path, or have the credentials of its bucket. A task that is
    run again reads the same rows. The captures are chosen now: one that ends later is not in this dataset, and one that
    is deleted makes reading raise NotFoundError.

    Raises:
        MissingRows: a chosen capture lacks rows; it names the first, its ranges and the reasons.
        NotFoundError: no capture that has ended is chosen.
        SpecError: an argument is wrong; chosen captures are stored in more than one way.
        TapError: Ray is not installed.

    Examples:
        >>> data = read_captures("captures", sites=["resid_post"], layers=[12], where={"run": "a"})  # doctest: +SKIP
        >>> data.map_batches(lambda batch: {"norm": (batch["resid_post.12"] ** 2).sum(1)})           # doctest: +SKIP
    """
    data = need("ray.data", "read_captures()", "ray")
    need("pyarrow", "read_captures()", "ray")
    given = [store] if isinstance(store, str | Path | Store) else list(store)
    stores = [each if isinstance(each, InBucket) else each.absolute() for one in given for each in stores_named(one)]
    if not stores or len(set(map(str, stores))) != len(stores):
        raise ArgumentError("store", store, "a store, or several, each once")
    if dtype not in DTYPES:
        raise ArgumentError("dtype", dtype, f"valid: {', '.join(DTYPES)} (Arrow has no bfloat16)")
    if where is not None and not callable(where) and not (
            isinstance(where, Mapping) and all(isinstance(value, str) for value in where.values())):
        raise ArgumentError("where", where, "valid: tags and their values, both strings, or a function of a CaptureRow")
    if not isinstance(task_bytes, int) or not 0 < task_bytes <= limits.ray_task_bytes_max:
        raise ArgumentError("task_bytes", task_bytes, f"valid: 1 to {limits.ray_task_bytes_max}")
    _check_options(options, data.read_datasource)
    try:
        keys = keys_of(sites, layers)
    except ArgumentError as error:  # by the names that they have here
        raise ArgumentError(f"{error.field}s", error.value, error.reason) from None
    indexes = index_stores(stores, keys, where, codec, progress, allow_missing)
    known = columns_of(indexes[0], dtype)
    chosen = known if columns is None else tuple(columns)
    if isinstance(columns, str) or not chosen or len({*chosen} & {*known}) != len(chosen):
        raise ArgumentError("columns", columns, f"valid: each once of {', '.join(known)}")
    step = rows_a_task(indexes[0], dtype, task_bytes, chosen)
    tasks = sum(-(-index.rows // step) for index in indexes)
    if tasks > limits.ray_tasks_max:
        raise LimitError("tasks", tasks, limits.ray_tasks_max, "give a larger task_bytes, or choose with where=…")
    from vllm_tap.ray.datasource import CaptureDatasource

    source = CaptureDatasource(tuple(Chosen(index.place, tuple(index.captures)) for index in indexes), indexes[0].keys,
                               codec, dtype, verify, task_bytes, chosen)
    source.keep(indexes)
    return data.read_datasource(source, override_num_blocks=tasks, **options)


def _check_options(options: Mapping[str, Any], read: Callable[..., Any]) -> None:
    """SpecError on an option that Ray has not: it would be dropped without a word."""
    known = {name for name, each in inspect.signature(read).parameters.items() if each.kind is each.KEYWORD_ONLY}
    for name, value in options.items():
        if name in ("override_num_blocks", "parallelism"):
            raise ArgumentError(name, value, "tasks are cut by task_bytes=…")
        if name not in known:
            raise ArgumentError(name, value, "neither an argument of read_captures() nor an option of "
                                             "ray.data.read_datasource()")
