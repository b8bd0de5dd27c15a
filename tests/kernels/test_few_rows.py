"""Attention of the few rows of many sequences in one call, against its definition."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from draftsmith.kernels import few_rows
from draftsmith.kernels.few_rows import MOST, few_rows_attention
from draftsmith.kernels.paged_attention import paged_attention_reference
from draftsmith.kernels.paged_rows import DraftedRows, PagedRows
from draftsmith.kernels.tree_build import ABSENT, build_trees_reference

pytestmark = pytest.mark.skipif(
    not few_rows.serves(torch.empty(0)), reason="no C++ compiler on this machine"
)


def scene(page_size: int, width: int, values: int, dtype: torch.dtype, most: int = MOST + 1):
    """Ragged sequences on scattered pages of a poisoned pool: one row, chains, one of more rows
    than are taken."""
    counts, lengths = [1, 4, 1, most - 1, most, 2, 3], [1, 33, 70, most + 31, most + 23, 2, 129]
    generator = torch.Generator().manual_seed(page_size)
    tables = [-(-length // page_size) for length in lengths]
    order = torch.randperm(sum(tables) + 3, generator=generator).tolist()
    pages = torch.zeros(len(lengths), max(tables), dtype=torch.int32)
    slots = len(order) * page_size
    pools = [torch.full((2, slots, w), float("nan"), dtype=torch.float64) for w in (width, values)]
    for index, (length, count) in enumerate(zip(lengths, tables, strict=True)):
        pages[index, :count] = torch.tensor([order.pop() for _ in range(count)])
        place = torch.arange(length)
        taken = pages[index, place // page_size].long() * page_size + place % page_size
        for pool in pools:
            pool[:, taken] = torch.randn(
                2, length, pool.shape[2], generator=generator, dtype=torch.float64
            )
    starts = torch.tensor([0, *itertools.accumulate(counts)])
    q = torch.randn(sum(counts), 6, width, generator=generator, dtype=torch.float64)
    rows = PagedRows(starts, torch.tensor(lengths), pages, page_size, max(counts), max(lengths))
    taken = torch.cat([torch.full((n,), n <= MOST) for n in counts])
    return [t.to(dtype) for t in (q.transpose(0, 1), *pools)], rows, taken


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("page_size", [1, 8, 16])
@pytest.mark.parametrize(("width", "values"), [(64, 64), (128, 64), (24, 40)])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (5, None), (40, 3.0)])
def test_equals_the_definition(
    dtype: torch.dtype,
    page_size: int,
    width: int,
    values: int,
    window: int | None,
    softcap: float | None,
):
    """Every row but those of the long sequence; nothing of the poisoned slots gets in."""
    (q, keys, pool), rows, taken = scene(page_size, width, values, dtype)
    how = {"scaling": 0.2, "window": window, "softcap": softcap}
    out = few_rows_attention(q, keys, pool, rows, **how)
    expected = paged_attention_reference(q.double(), keys.double(), pool.double(), rows, **how)
    bound = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 1.5e-2}[dtype]
    assert out.dtype == dtype
    torch.testing.assert_close(out[taken].double(), expected[taken], rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_does_not_depend_on_what_is_beside_it(dtype: torch.dtype):
    """A chain's rows in one call are the rows of plain decoding, bit for bit."""
    (q, keys, pool), rows, _ = scene(16, 64, 64, dtype)
    out = few_rows_attention(q, keys, pool, rows, scaling=0.125)
    for row in range(4):  # of the second sequence
        alone = PagedRows(
            torch.tensor([0, 1]), rows.lengths[1:2] - 3 + row, rows.pages[1:2], 16, 1, 40
        )
        single = few_rows_attention(q[:, 1 + row : 2 + row], keys, pool, alone, scaling=0.125)
        assert torch.equal(single[0], out[1 + row])


def trees(rows: PagedRows, extra: list[int]) -> PagedRows:
    """Random trees in the last slots, `extra` columns of which passes before have written."""
    counts = rows.starts.diff().tolist()
    columns = [count + more for count, more in zip(counts, extra, strict=True)]
    parents = torch.full((len(counts), max(columns)), ABSENT)
    for index, size in enumerate(columns):
        for column in range(size):
            parents[index, column] = torch.randint(-1, column, ()) if column else -1
    ancestry = build_trees_reference(parents, max(columns)).ancestry
    own = [
        ancestry[i, size - n : size]
        for i, (size, n) in enumerate(zip(columns, counts, strict=True))
    ]
    tree = DraftedRows(torch.cat(own), torch.tensor(columns), torch.zeros(sum(counts)).long())
    return dataclasses.replace(rows, tree=tree)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("page_size", "width"), [(16, 64), (1, 64), (8, 24)])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (3, None), (30, 3.0)])
def test_a_row_of_a_tree_sees_its_own_path(
    dtype: torch.dtype, page_size: int, width: int, window: int | None, softcap: float | None
) -> None:
    """Trees of up to 64 rows, windows that end inside a tree and before it."""
    torch.manual_seed(page_size)
    (q, keys, pool), rows, _ = scene(page_size, width, width, dtype, most=17)
    rows = trees(rows, [0, 2, 0, 3, 1, 0, 5])
    how = {"scaling": 0.2, "window": window, "softcap": softcap}
    out = few_rows_attention(q, keys, pool, rows, **how)
    expected = paged_attention_reference(q.double(), keys.double(), pool.double(), rows, **how)
    bound = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 1.5e-2}[dtype]
    torch.testing.assert_close(out.double(), expected, rtol=bound, atol=bound)
    assert rows.most_rows <= MOST


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_lies_off_the_path_does_not_count(dtype: torch.dtype) -> None:
    """Two rows of a tree that see the same keys give the same bits, whatever a column off their
    path holds."""
    torch.manual_seed(0)
    (q, keys, pool), rows, _ = scene(16, 64, 64, dtype)
    rows = trees(rows, [0] * 7)
    before = few_rows_attention(q, keys, pool, rows, scaling=0.125)
    changed = int(rows.pages[1, 2]) * 16  # the second sequence's last key, of its last column
    keys[:, changed], pool[:, changed] = 9.0, -9.0
    after = few_rows_attention(q, keys, pool, rows, scaling=0.125)
    assert torch.equal(before[1:4], after[1:4]) and not torch.equal(before[4], after[4])
