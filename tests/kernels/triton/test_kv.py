"""Appending, copying and compacting keys and values, against the definitions."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from draftsmith.kernels.kv_append import kv_append, kv_append_reference
from draftsmith.kernels.kv_move import (
    compact_paths,
    compact_paths_reference,
    copy_pages,
    copy_pages_reference,
)

NAN = float("nan")


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


@pytest.mark.parametrize("width,value_width", [(1, 1), (20, 9), (64, 64)])
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_rows_go_to_their_slots_and_nowhere_else(rows: int, width: int, value_width: int):
    """The rest of a poisoned pool keeps its NaN bit for bit; a row with slot -1 is not read."""
    heads, slots = 3, 40
    pools = [
        [torch.full((heads, slots, w), NAN, dtype=torch.bfloat16) for w in (width, value_width)]
        for _ in range(2)
    ]
    k = torch.randn(rows, heads, width).bfloat16().transpose(0, 1)  # strided, as a layer gives it
    v = torch.randn(rows, heads, value_width).bfloat16().transpose(0, 1)
    places = torch.randperm(slots)[:rows]
    if rows > 1:
        places[1] = -1
        k[:, 1] = NAN
    kv_append(pools[0][0], pools[0][1], k, v, places)
    kv_append_reference(pools[1][0], pools[1][1], k, v, places)
    for one, other in zip(*pools, strict=True):
        assert _same(one, other)


def test_values_inside_the_keys_are_written_with_them():
    """Only the keys are; what is given as values is not read, nor the columns behind touched."""
    pools = [torch.full((1, 40, 24), NAN, dtype=torch.bfloat16) for _ in range(2)]
    k, unread = torch.randn(1, 7, 20).bfloat16(), torch.full((1, 7, 9), NAN).bfloat16()
    places = torch.randperm(40)[:7]
    for pool, append in zip(pools, (kv_append, kv_append_reference), strict=True):
        keys = pool[..., :20]
        append(keys, keys[..., :9], k, unread, places)
        assert torch.equal(keys[:, places], k) and bool(pool[..., 20:].isnan().all())
    assert _same(*pools)


@pytest.mark.parametrize("page_size", [1, 5, 16, 32])
def test_pages_are_copied_whole(page_size: int):
    """Odd page sizes, ids in any order."""
    pool = torch.randn(2, 12 * page_size, 9).bfloat16()
    other = pool.clone()
    source, target = torch.tensor([3, 0, 11]), torch.tensor([4, 10, 1], dtype=torch.int32)
    copy_pages(pool, source, target, page_size)
    copy_pages_reference(other, source, target, page_size)
    assert _same(pool, other)
    empty = torch.empty(0, dtype=torch.int64)
    copy_pages(pool, empty, empty, page_size)
    assert _same(pool, other)


@pytest.mark.parametrize("page_size", [1, 4])
def test_every_path_is_closed_up(page_size: int):
    """All ascending paths of three nodes out of six, each beside a shorter and an empty one, over
    pages in any order: equal to gathering first and scattering then."""
    pages = torch.randperm(36).view(3, 12)
    for path in itertools.combinations(range(6), 3):
        paths = torch.tensor([path, (path[2], -1, -1), (-1, -1, -1)])
        first = torch.tensor([2, 5, 0])
        pool = torch.randn(2, 36 * page_size, 5).bfloat16()
        other = pool.clone()
        compact_paths([pool], pages, page_size, first, paths)
        compact_paths_reference(other, pages, page_size, first, paths)
        assert _same(pool, other)


def test_a_pool_of_more_elements_than_32_bits_count(far_memory: Callable[[int], Tensor]):
    """Slot 2**29 of width 4 begins at element 2**31."""
    far, page_size = 2**29, 16
    pool = far_memory(256).view(1, -1, 4)
    row = torch.randn(1, 2, 4).bfloat16()
    kv_append(pool, pool, row, row, torch.tensor([far + 3, 5]))
    assert torch.equal(pool[0, far + 3], row[0, 0]) and torch.equal(pool[0, 5], row[0, 1])
    page = far // page_size
    copy_pages(pool, torch.tensor([page]), torch.tensor([page + 1]), page_size)
    assert torch.equal(pool[0, far + 19], row[0, 0])
    compact_paths(
        [pool],
        torch.tensor([[page, page + 1]]),
        page_size,
        torch.tensor([16]),
        torch.tensor([[3]]),
    )
    assert torch.equal(pool[0, far + 16], row[0, 0])
