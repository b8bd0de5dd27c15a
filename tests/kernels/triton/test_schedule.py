"""Shifted tokens and the places of the next rows, against their definitions."""

from __future__ import annotations

import itertools

import pytest
import torch

from draftsmith.kernels.place_rows import place_rows, place_rows_reference
from draftsmith.kernels.shift import shift_insert, shift_insert_reference


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_every_pattern_of_kept_drafts(dtype: torch.dtype):
    """Three sequences with two drafts each: all 27 combinations of accepted lengths, in one batch
    with a prompt's chunk of one row."""
    starts = torch.tensor([0, 3, 6, 9, 10])
    tokens = torch.arange(100, 110, dtype=dtype)
    next_tokens = torch.tensor([7, 8, 9, 10])
    for kept in itertools.product(range(3), repeat=3):
        last = starts[:-1] + torch.tensor([*kept, 0])
        got = shift_insert(tokens, starts, last, next_tokens)
        assert got.dtype == dtype
        assert torch.equal(got, shift_insert_reference(tokens, starts, last, next_tokens))
        assert got[last].tolist() == [7, 8, 9, 10]


def test_a_chunk_longer_than_a_block_and_an_empty_batch():
    """Rows beyond the first 256 are written, and no sequence at all is no fault."""
    lengths = torch.tensor([0, 257, 1, 600])
    starts = lengths.cumsum(0)
    tokens = torch.randint(0, 1000, (int(starts[-1]),))
    last = starts[1:] - 1
    args = tokens, starts, last, torch.tensor([5, 6, 7])
    assert torch.equal(shift_insert(*args), shift_insert_reference(*args))
    empty = torch.empty(0, dtype=torch.int64)
    assert shift_insert(empty, torch.tensor([0]), empty, empty).shape == (0,)


@pytest.mark.parametrize("page_size,width", [(1, 1), (4, 5), (16, 3)])
@pytest.mark.parametrize("table", [torch.int32, torch.int64], ids=str)
def test_rows_are_placed_page_by_page(page_size: int, width: int, table: torch.dtype):
    """Entries behind the limit are not read (they hold nonsense) and give slot -1."""
    pages = torch.randperm(24).view(3, 8).to(table)
    limits = torch.tensor([8 * page_size, 5 * page_size, 1])
    pages[1, 5:] = -(2**31)
    pages[2, 1:] = -(2**31)
    first = torch.tensor([2, 5 * page_size - 2, 0]).clamp(min=0)
    got = place_rows(first, limits, pages, page_size, width)
    expected = place_rows_reference(first, limits, pages, page_size, width)
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)
    assert int(got[1][2, -1]) == (-1 if width > 1 else int(pages[2, 0]) * page_size)


def test_slots_beyond_32_bits():
    """A page id times the page size exceeds 2**31."""
    pages = torch.tensor([[2**28]], dtype=torch.int32)
    slots = place_rows(torch.tensor([3]), torch.tensor([16]), pages, 16, 2)[1]
    assert slots.tolist() == [[2**32 + 3, 2**32 + 4]]
