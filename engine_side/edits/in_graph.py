"""An edit as one kernel of the compiled graph, on a GPU: rows are changed where they lie, and most are not touched.

What the compiler makes of ``tables.edited`` takes 6 µs a place and step of a 3B model on an H200 also where nothing is
edited, and rows that a norm reads are added twice; a kernel that ends at once takes a third of it.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch

from engine_side.edits.tables import edited

__all__ = ["DEVICES", "acts_on", "change"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_WIDTH_MAX = 32768

_library = torch.library.Library("vllm_tap", "FRAGMENT")
_library.define("edit(Tensor(a!) rows, Tensor(b!)? others, Tensor[] tables, Tensor(c!) counts, Tensor? heads) -> ()")


def _edit(rows: torch.Tensor, others: torch.Tensor | None, tables: list[torch.Tensor], counts: torch.Tensor,
          heads: torch.Tensor | None) -> None:
    """Edit rows [n, width], or with ``others`` their sum, which ``rows`` takes."""
    from engine_side.kernels.edits import change_rows

    if rows.shape[0] > tables[0].shape[0]:
        raise ValueError(f"a step of {rows.shape[0]} rows, and tables of edits for {tables[0].shape[0]}")
    if rows.shape[0]:
        change_rows(rows, others, (*tables, counts), heads)


def _edit_fake(rows: torch.Tensor, others: torch.Tensor | None, tables: list[torch.Tensor], counts: torch.Tensor,
               heads: torch.Tensor | None) -> None:
    """Nothing is returned."""


def _edit_by_torch(rows: torch.Tensor, others: torch.Tensor | None, tables: list[torch.Tensor], counts: torch.Tensor,
                   heads: torch.Tensor | None) -> None:
    """The same on a CPU, where nobody asks for it but who compares."""
    programs, ordinals, slots, vectors, forms = tables
    now, chosen = edited(rows if others is None else rows + others, programs, ordinals, slots, vectors, forms, counts,
                         heads)
    rows.copy_(torch.where(chosen, now, rows))
    if others is not None:
        others.masked_fill_(chosen, 0)


_library.impl("edit", _edit, "CUDA")
_library.impl("edit", _edit_by_torch, "CPU")
torch.library.register_fake("vllm_tap::edit", _edit_fake, lib=_library)


DEVICES = {"cuda"} if find_spec("triton") is not None else set()


def acts_on(rows: torch.Tensor) -> bool:
    """Whether rows are where such a kernel runs, in a dtype that it knows."""
    return rows.device.type in DEVICES and rows.dtype in _DTYPES


def change(rows: torch.Tensor, others: torch.Tensor | None = None, *, tables: tuple[torch.Tensor, ...],
           heads: torch.Tensor | None) -> bool:
    """Edit rows, or with ``others`` their sum, where they lie; False, with nothing done, where that cannot be.

    ``tables``: programs, ordinals, slots, vectors, forms and counts of the place; ``heads`` as of its pool.
    """
    width = tables[3].shape[-1]
    parts = [rows] if others is None else [rows, others]
    if not (acts_on(rows) and width <= _WIDTH_MAX and all(
            part.dtype == rows.dtype and _lined_up(part, width) for part in parts)):
        return False
    first, *second = [part if part.dim() == 2 else part.view(-1, width) for part in parts]
    *read, counts = tables
    torch.ops.vllm_tap.edit(first, second[0] if second else None, read, counts, heads)
    return True


def _lined_up(rows: torch.Tensor, width: int) -> bool:
    """Whether rows are lines of one table."""
    if rows.dim() != 2:
        return bool(rows.is_contiguous())
    return bool(rows.shape[1] == width and rows.stride(1) == 1)
