"""Kept paths of trees in the pools of all layers, closed up in one call."""

from __future__ import annotations

import itertools

import pytest
import torch

from draftsmith.kernels import few_rows
from draftsmith.kernels.kv_move import PoolTable, compact_paths, compact_paths_reference

pytestmark = pytest.mark.skipif(
    not few_rows.serves(torch.empty(0)), reason="no C++ compiler on this machine"
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("page_size", [1, 4])
def test_all_pools_are_closed_up(page_size: int, dtype: torch.dtype) -> None:
    """All ascending paths of three of six nodes beside a shorter and an empty one, pools of other
    widths and strides among them: equal to gathering first and scattering then."""
    pages = torch.randperm(36).view(3, 12)
    for path in itertools.combinations(range(6), 3):
        paths = torch.tensor([path, (path[2], -1, -1), (-1, -1, -1)])
        first = torch.tensor([2, 5, 0])
        pools = [torch.randn(2, 36 * page_size, width).to(dtype) for width in (5, 8, 3)]
        pools[1] = pools[1][:, :, 1:6]
        others = [pool.clone() for pool in pools]
        held = PoolTable(pools) if path[0] else pools
        compact_paths(held, pages, page_size, first, paths)
        for pool, other in zip(pools, others, strict=True):
            compact_paths_reference(other, pages, page_size, first, paths)
            assert torch.equal(pool, other)
