"""Attention over pages against gather-and-attend, in a pool that is NaN wherever no key lies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.kernels import paged_attention as module
from draftsmith.kernels.merge_splits import merge_splits, merge_splits_reference
from draftsmith.kernels.paged_attention import paged_attention, paged_attention_reference
from draftsmith.kernels.paged_rows import DraftedRows, PagedRows
from draftsmith.kernels.tree_build import ABSENT, build_trees_reference

CASES: dict[str, dict[str, Any]] = {
    "decode, odd widths": dict(counts=[1, 1, 1], lengths=[7, 1, 33], heads=(4, 2), widths=(9, 5)),
    "decode, a page of one slot": dict(
        counts=[1, 1], lengths=[70, 3], heads=(3, 3), widths=(16, 16), page_size=1
    ),
    "verify, group of three": dict(
        counts=[4, 1, 3], lengths=[70, 1, 33], heads=(6, 2), widths=(16, 16)
    ),
    "verify in pieces, one sequence without rows": dict(
        counts=[4, 0, 3], lengths=[70, 1, 133], heads=(8, 1), widths=(24, 16), span=64
    ),
    "pieces, window, soft cap": dict(
        counts=[4, 1, 3],
        lengths=[70, 1, 133],
        heads=(4, 4),
        widths=(24, 16),
        page_size=5,
        span=64,
        window=9,
        softcap=3.0,
    ),
    "prompt chunk, window, soft cap": dict(
        counts=[40, 1, 33],
        lengths=[70, 1, 133],
        heads=(4, 2),
        widths=(24, 16),
        page_size=5,
        window=9,
        softcap=3.0,
    ),
    "values inside the keys, decode, odd widths": dict(
        counts=[1, 1, 1], lengths=[7, 1, 33], heads=(20, 1), widths=(37, 21), inside=True
    ),
    "values inside the keys, verify in pieces": dict(
        counts=[4, 0, 3], lengths=[70, 1, 133], heads=(16, 1), widths=(24, 16), span=64, inside=True
    ),
    "values inside the keys, prompt chunk, window, soft cap": dict(
        counts=[40, 1, 33],
        lengths=[70, 1, 133],
        heads=(4, 2),
        widths=(40, 32),
        page_size=5,
        window=9,
        softcap=3.0,
        inside=True,
    ),
    "whole prompts": dict(counts=[40, 1, 73], lengths=[40, 1, 73], heads=(2, 1), widths=(16, 16)),
}


def _batch(
    counts: list[int],
    lengths: list[int],
    heads: tuple[int, int],
    widths: tuple[int, int],
    page_size: int = 4,
    dtype: torch.dtype = torch.float32,
    inside: bool = False,
) -> tuple[Tensor, Tensor, Tensor, PagedRows]:
    """Random rows over randomly scattered pages; everything that must not be read is NaN, and page
    ids that must not be read are nonsense."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(len(counts))
    most = -(-max(lengths) // page_size) + 1
    slots = page_size * (len(counts) * most + 3)
    keys, values = (
        torch.full((heads[1], slots, width), float("nan"), dtype=dtype) for width in widths
    )
    free = iter(torch.randperm(slots // page_size, generator=generator).tolist())
    pages = torch.full((len(counts), most), 2**30, dtype=torch.int32)
    for index, length in enumerate(lengths):
        for page in range(-(-length // page_size)):
            pages[index, page] = next(free)
        position = torch.arange(length)
        places = pages[index, position // page_size].long() * page_size + position % page_size
        for tensor in (keys, values):
            shape = (heads[1], length, tensor.shape[2])
            tensor[:, places] = torch.randn(*shape, generator=generator).to(dtype)
    if inside:
        values = keys[..., : widths[1]]
    starts = torch.tensor([0, *counts]).cumsum(0)
    q = torch.randn(int(starts[-1]), heads[0], widths[0], generator=generator).to(dtype)
    rows = PagedRows(starts, torch.tensor(lengths), pages, page_size, max(counts), max(lengths))
    return q.transpose(0, 1), keys, values, rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", list(CASES))
def test_equals_the_definition(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """Grouped heads, unequal widths, windows, soft caps, pieces of long contexts."""
    case = dict(CASES[name])
    monkeypatch.setattr(module, "_SPAN", case.pop("span", 1024))
    settings = {key: case.pop(key, None) for key in ("window", "softcap")}
    q, keys, values, rows = _batch(**case, dtype=dtype)
    out = paged_attention(q, keys, values, rows, scaling=0.3, **settings)
    exact = paged_attention_reference(
        q.double(), keys.double(), values.double(), rows, scaling=0.3, **settings
    )
    assert out.dtype == dtype
    tolerance = 2e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("span", [1024, 64])
def test_a_sequence_does_not_feel_its_neighbours(span: int, monkeypatch: pytest.MonkeyPatch):
    """Bit for bit the same alone and beside a longer one with as many rows, in pieces or not."""
    monkeypatch.setattr(module, "_SPAN", span)
    q, keys, values, rows = _batch([2, 2], [50, 150], (4, 2), (16, 16))
    together = paged_attention(q, keys, values, rows, scaling=0.3)
    alone = PagedRows(rows.starts[:2], rows.lengths[:1], rows.pages[:1], rows.page_size, 2, 50)
    single = paged_attention(q[:, :2], keys, values, alone, scaling=0.3)
    assert torch.equal(together[:2], single)


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_pieces_are_put_together(rows: int):
    """Odd widths, a piece that has nothing for a row, masses far apart."""
    partial, mass = torch.randn(3, rows, 2, 21), torch.randn(3, rows, 2) * 30
    if rows:
        mass[1, 0], partial[1, 0] = float("-inf"), 0
    out, expected = torch.empty(rows, 2, 21), torch.empty(rows, 2, 21, dtype=torch.float64)
    merge_splits(partial, mass, out)
    merge_splits_reference(partial.double(), mass.double(), expected)
    torch.testing.assert_close(out.double(), expected, rtol=2e-6, atol=2e-6)


def test_an_empty_batch():
    """No rows, no launch."""
    _, keys, values, rows = _batch([1], [3], (4, 2), (16, 8))
    empty = torch.empty(0, dtype=torch.int64)
    none = PagedRows(torch.tensor([0]), empty, rows.pages[:0], 4, 0, 0)
    assert paged_attention(torch.empty(4, 0, 16), keys, values, none, scaling=1.0).shape == (
        0,
        4,
        8,
    )


def test_keys_beyond_the_reach_of_32_bits(far_memory: Callable[[int], Tensor]):
    """Slot 2**27 of width 16 begins at element 2**31."""
    pool = far_memory(16 * 16).view(1, -1, 16)
    far = torch.tensor([[2**27 // 8]], dtype=torch.int32)
    near = torch.tensor([[0]], dtype=torch.int32)
    pool[0, :5] = torch.randn(5, 16).bfloat16()
    pool[0, 2**27 : 2**27 + 5] = pool[0, :5]
    q = torch.randn(1, 2, 16).bfloat16()
    results = [
        paged_attention(
            q,
            pool,
            pool,
            PagedRows(torch.tensor([0, 2]), torch.tensor([5]), pages, 8, 2, 5),
            scaling=0.3,
        )
        for pages in (far, near)
    ]
    assert torch.equal(*results)


TREES: dict[str, dict[str, Any]] = {
    "trees beside a chain": dict(counts=[8, 1, 6], lengths=[70, 1, 33], heads=(6, 2)),
    "window and soft cap": dict(
        counts=[8, 3, 6], lengths=[70, 20, 33], heads=(4, 4), page_size=5, window=9, softcap=3.0
    ),
    "a window inside the tree": dict(counts=[8, 3], lengths=[70, 20], heads=(4, 1), window=2),
    "in pieces": dict(counts=[8, 2], lengths=[70, 90], heads=(8, 1), span=64, window=70),
    "many rows": dict(counts=[40, 1], lengths=[70, 1], heads=(4, 2), page_size=1),
}


@pytest.mark.parametrize("name", list(TREES))
def test_attention_of_trees(name: str, monkeypatch: pytest.MonkeyPatch):
    """Batches of trees whose rows are the last of the tree's columns, as a head's levels are."""
    case = dict(TREES[name])
    dtype = torch.bfloat16 if name == "trees beside a chain" else torch.float32
    monkeypatch.setattr(module, "_SPAN", case.pop("span", 1024))
    settings = {key: case.pop(key, None) for key in ("window", "softcap")}
    q, keys, values, rows = _batch(**case, widths=(24, 16), dtype=dtype)
    tree = _tree_rows(rows, case["counts"])
    rows = PagedRows(
        rows.starts, rows.lengths, rows.pages, rows.page_size, rows.most_rows, rows.longest, tree
    )
    out = paged_attention(q, keys, values, rows, scaling=0.3, **settings)
    exact = paged_attention_reference(
        q.double(), keys.double(), values.double(), rows, scaling=0.3, **settings
    )
    tolerance = 2e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance)


def _tree_rows(rows: PagedRows, counts: list[int]) -> DraftedRows:
    """A random tree for each sequence; the first has two columns more than rows."""
    columns = [count + (2 if index == 0 else 0) for index, count in enumerate(counts)]
    generator = torch.Generator(torch.get_default_device()).manual_seed(5)
    parents = torch.full((len(columns), max(columns)), ABSENT)
    for index, size in enumerate(columns):
        parents[index, 0] = -1
        for column in range(1, size):
            parents[index, column] = torch.randint(0, column, (1,), generator=generator)
    ancestry = build_trees_reference(parents, max(columns)).ancestry
    parts, positions = [], []
    for index, (count, size) in enumerate(zip(counts, columns, strict=True)):
        part = ancestry[index, size - count : size]
        parts.append(part)
        text = int(rows.lengths[index]) - size
        positions.append(text + (part > 0).sum(1) - 1)
    return DraftedRows(torch.cat(parts), torch.tensor(columns), torch.cat(positions))
