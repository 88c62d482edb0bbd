"""An edit as one operation of the compiled graph: rows are changed where they lie, and most are not touched.

It runs on a GPU, and on a CPU where rows are rounded. The compiler's own code for ``tables.edited`` takes 6 µs for each
place and step of a 3B model on an H200, even where nothing is edited. It also computes the sum that a norm reads twice.
A kernel that ends at once takes a third of that time.

The operation is given whole tensors, and the first column of the rows in them. Where two operations change parts of one
tensor, Inductor would give the second one memory that is too small (torch 2.11 to 2.13).
"""

from __future__ import annotations

from importlib.util import find_spec

import torch

from engine_side.edits.tables import edited

__all__ = ["DEVICES", "acts_on", "change"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_WIDTH_MAX = 32768

_library = torch.library.Library("vllm_tap", "FRAGMENT")
_library.define("edit(Tensor(a!) rows, Tensor(b!)? others, Tensor[] tables, Tensor(c!) counts, Tensor? heads, "
                "int first) -> ()")


def _edit(rows: torch.Tensor, others: torch.Tensor | None, tables: list[torch.Tensor], counts: torch.Tensor,
          heads: torch.Tensor | None, first: int) -> None:
    """Edit the columns of rows [n, first + width or more], or with ``others`` their sum, which ``rows`` takes."""
    from engine_side.kernels.edits import change_rows

    if rows.shape[0] > tables[0].shape[0]:
        raise ValueError(f"a step of {rows.shape[0]} rows, and tables of edits for {tables[0].shape[0]}")
    if rows.shape[0]:
        change_rows(_columns(rows, tables, first), others, (*tables, counts), heads)


def _edit_fake(rows: torch.Tensor, others: torch.Tensor | None, tables: list[torch.Tensor], counts: torch.Tensor,
               heads: torch.Tensor | None, first: int) -> None:
    """Return nothing."""


def _edit_by_torch(rows: torch.Tensor, others: torch.Tensor | None, tables: list[torch.Tensor], counts: torch.Tensor,
                   heads: torch.Tensor | None, first: int) -> None:
    """The same on a CPU."""
    programs, ordinals, slots, vectors, forms = tables
    rows = _columns(rows, tables, first)
    now, chosen = edited(rows if others is None else rows + others, programs, ordinals, slots, vectors, forms, counts,
                         heads)
    rows.copy_(torch.where(chosen, now, rows))
    if others is not None:
        others.masked_fill_(chosen, 0)


def _columns(rows: torch.Tensor, tables: list[torch.Tensor], first: int) -> torch.Tensor:
    """The columns that a place has of rows, as many as its vectors."""
    return rows[:, first : first + tables[3].shape[-1]]


_library.impl("edit", _edit, "CUDA")
_library.impl("edit", _edit_by_torch, "CPU")
torch.library.register_fake("vllm_tap::edit", _edit_fake, lib=_library)


DEVICES = {"cuda"} if find_spec("triton") is not None else set()


def acts_on(rows: torch.Tensor) -> bool:
    """Whether rows are edited by this operation: where its kernel runs, and on a CPU those that are rounded to a narrow
    dtype, which the compiler's own code for them would leave out.
    """
    rounded = rows.device.type == "cpu" and rows.dtype != torch.float32
    return (rows.device.type in DEVICES or rounded) and rows.dtype in _DTYPES


def change(rows: torch.Tensor, others: torch.Tensor | None = None, *, tables: tuple[torch.Tensor, ...],
           heads: torch.Tensor | None, columns: tuple[int, int] | None = None) -> bool:
    """Edit rows where they lie: ``rows``, with ``others`` the sum of both, or only ``columns`` of them. Return False,
    with nothing done, where that cannot be. The kernel does not take every device, dtype and width, nor a tensor with
    gaps, which is a part of another.

    ``tables``: programs, ordinals, slots, vectors, forms and counts of the place; ``heads`` as of its pool.
    """
    width = tables[3].shape[-1]
    first, last = columns or (0, width)
    parts = [rows] if others is None else [rows, others]
    if not (acts_on(rows) and width <= _WIDTH_MAX and last - first == width and all(
            part.dtype == rows.dtype and part.is_contiguous() for part in parts)):
        return False
    wide = rows.shape[-1] if columns else width
    mine, *second = [part if part.dim() == 2 and part.shape[1] == wide else part.view(-1, wide) for part in parts]
    *read, counts = tables
    torch.ops.vllm_tap.edit(mine, second[0] if second else None, read, counts, heads, first)
    return True
