"""Edits in Triton against the torch reference: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

from engine_side.edits.conditions import Conditions, Watched
from engine_side.edits.editor import Editor, Layout
from engine_side.edits.tables import ALONE, Size, Tables, edited, tables
from engine_side.tap.staging import Staging
from schemas.edits.resolved import IDENTITY, REPLACED, Condition
from tests.engine_side.kernels.test_kernels import DEVICE, GPU, HERE, kernel_test

PLACE = ("resid_post", 0)
DTYPES = [torch.bfloat16, torch.float16, torch.float32] if GPU else [torch.bfloat16]
WIDTHS = [64, 200, 2048, 4096, 18944] if GPU else [64, 200]
LARGEST = IDENTITY[3]
FORMS = [IDENTITY, REPLACED, (1.0, 0.5, -LARGEST, LARGEST), (0.5, 0.0, -LARGEST, LARGEST), (1.0, 0.0, 0.0, 0.0),
         (1.0, 0.0, -0.2, 0.3)]  # nothing, set, add, scale, ablate, cap


def filled(width: int, heads: int, device: torch.device, depth: int = 2) -> Tables:
    """Tables of one place with a slot of each form, their programs in pairs, and four rows from slot 9 on."""
    made = tables({PLACE: width}, Size(64, 2, depth, 40), {width: heads} if heads > 1 else {}, device)
    pool, chance = made.pools[width], torch.Generator().manual_seed(3)
    pool.vectors.copy_(torch.randn(pool.vectors.shape, generator=chance) / width**0.5)
    for slot, form in enumerate(FORMS):
        pool.forms[slot] = torch.tensor(form)
    pool.forms[9:13] = torch.tensor(REPLACED)
    if heads > 1:
        pool.heads[2, :] = pool.heads[5, :] = 0
        pool.heads[2, 1] = pool.heads[5, heads - 1] = ALONE
    for program in range(1, 30):
        first, second = divmod(program, len(FORMS))
        made.slots[PLACE][program] = torch.tensor([first, second], dtype=torch.int32)
    made.slots[PLACE][30] = torch.tensor([-9, 3], dtype=torch.int32)
    return made


@kernel_test
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("pair", [False, True])
def test_rows_are_changed_as_the_reference_does(pair: bool, heads: int, width: int, dtype: torch.dtype) -> None:
    """Every two edits in a row; rows that are not edited keep their bits; rows lie apart, as columns of more do."""
    from engine_side.kernels.edits import change_rows

    made = filled(width, heads, DEVICE)
    pool, chance = made.pools[width], torch.Generator().manual_seed(4)
    table = torch.randn(2, 40, width + 24, generator=chance).to(DEVICE, dtype)
    table[0, 33, 13] = torch.nan
    before = table.clone()
    first, second = table[0, :, 8 : 8 + width], table[1, :, 8 : 8 + width]
    made.programs[:31] = torch.arange(31, device=DEVICE)
    made.programs[33] = 6  # set, of a row that is no number
    made.ordinals[30] = 2
    others = pool.heads if heads > 1 else None
    whole = before[0, :, 8 : 8 + width] + before[1, :, 8 : 8 + width] if pair else before[0, :, 8 : 8 + width]
    counts = torch.zeros_like(made.counts[0])
    right, chosen = edited(whole, made.programs, made.ordinals, made.slots[PLACE], pool.vectors, pool.forms, counts,
                           others)
    change_rows(first, second if pair else None, (
        made.programs, made.ordinals, made.slots[PLACE], pool.vectors, pool.forms, made.counts[0]), others)
    edits = chosen[:, 0]
    assert 25 < int(edits.sum()) < 35
    assert torch.equal(first[~edits], before[0, :, 8 : 8 + width][~edits])
    near = {torch.bfloat16: 0.02, torch.float16: 3e-3, torch.float32: 2e-5}[dtype]
    assert torch.allclose(first[edits].float(), right[edits].float(), rtol=near, atol=near)
    assert bool(first[33].isfinite().all())
    assert torch.equal(first[6], right[6]) and torch.equal(first[30].isnan(), right[30].isnan())  # set: exact
    if pair:
        assert torch.equal(second[~edits], before[1, :, 8 : 8 + width][~edits]) and not second[edits].any()
    outside = torch.ones(width + 24, dtype=torch.bool)
    outside[8 : 8 + width] = False
    assert torch.equal(table[..., outside], before[..., outside])
    assert torch.equal(made.counts[0][1:], counts[1:])


def layout(rows: int, seed: int) -> tuple[Any, torch.Tensor]:
    """Owners of a step's rows and from where on programs hold, as an editor lays them out; their positions."""
    draw = np.random.default_rng(seed)
    owners = np.sort(draw.integers(0, 6, rows)).astype(np.int64) << 32
    edges, programs = [-1], [0]
    for number in (1, 2, 4):
        starts = np.unique(draw.integers(0, 40, 5))
        edges += [*((number << 32) + starts).tolist(), (number + 1) << 32]
        programs += [*draw.integers(0, 20, len(starts)).tolist(), 0]
    lines = draw.integers(0, 3, len(edges))
    columns = np.array([edges, programs, draw.integers(0, 20, len(edges)), lines, draw.integers(-9, 9, len(edges))])
    there = torch.from_numpy(np.concatenate([owners, columns.ravel().astype(np.int64)])).to(DEVICE)
    return there, torch.from_numpy(draw.integers(0, 40, rows + 9)).to(DEVICE)


@kernel_test
@pytest.mark.parametrize("watched", [False, True])
def test_tables_are_filled_as_the_reference_does(watched: bool) -> None:
    """Steps of more and fewer rows one after the other: nothing of one is left in the next."""
    from engine_side.kernels.edits import Filler

    ours, theirs = filled(64, 1, DEVICE), filled(64, 1, DEVICE)
    reference, before = Editor(theirs), 0
    staging = Staging({"resid_post": torch.zeros(1, 1, 64, device=DEVICE)}, {"resid_post": [0]}, {})
    conditions = reference.conditions = Conditions(staging, 2) if watched else None
    if conditions is not None:
        chance = torch.randint(0, 60, conditions.switches.shape, generator=torch.Generator().manual_seed(1))
        conditions.switches.copy_(chance.sort(dim=1).values)
    for seed, rows in enumerate((40, 3, 17, 64, 1)):
        there, positions = layout(rows, seed)
        filler = Filler(there, ours, conditions.switches if conditions else None, rows)
        for _ in range(2):  # the second has nothing to do anew
            filler(positions, before)
        request = Watched("", Condition("", 0, 0, None, False), 0, 1)
        reference._fill(Layout((), b"", rows, there, 0, [(request, 0)] if watched else []), positions)
        reference._rows = before = rows
        assert torch.equal(ours.programs, theirs.programs)
        assert torch.equal(ours.ordinals[:rows], theirs.ordinals[:rows])
        assert torch.equal(ours.counts[-1, 1:], 2 * theirs.counts[-1, 1:])
    assert int(theirs.counts[-1, 1:].sum()) > 20


@pytest.mark.skipif(HERE or find_spec("triton") is None, reason="compiled by the tests above, or interpreted")
@pytest.mark.parametrize("kernel", ["fill", "watched fill", "change", "change of two", "change of heads"])
def test_it_compiles_for_a_gpu(kernel: str) -> None:
    """The interpreter takes types that the compiler does not."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compiled

    from engine_side.kernels import edits

    numbers = ("rows", "edges", "cleared", "steps", "to_row", "to_other")
    types = {"programs": "*i32", "ordinals": "*i32", "counts": "*i32", "slots": "*i32", "heads": "*i8", "there": "*i64",
             "positions": "*i64", "switches": "*i64", "vectors": "*fp32", "forms": "*fp32"}
    if "fill" in kernel:
        function, constants = edits.fill, [kernel != "fill", 16, 128]
    else:
        function, constants = edits.change, [8, "two" in kernel, 256, 2, *((4, True, 4, 64) if "heads" in kernel else
                                                                        (1, False, 1, 256))]
        types |= {"rows": "*bf16", "others": "*bf16"}
    names = function.arg_names
    fixed = dict(zip(names[-len(constants):], constants, strict=True))
    signature = {name: "constexpr" if name in fixed else types.get(name) or {n: "i64" for n in numbers}[name]
                 for name in names}
    made = compiled(ASTSource(function, signature, {(names.index(name),): value for name, value in fixed.items()}),
                    target=GPUTarget("cuda", 90, 32))
    assert made.asm["cubin"]
