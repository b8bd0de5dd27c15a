"""What drafted trees look like to attention and to verification, and which nodes of a large one are
kept.

A tree is its `parents`: column j hangs on column parents[j] < j, on what comes before the tree
(-1), or does not exist (-2, behind a sequence's last column).

    build_trees   ancestry[i, j] = how many columns up from i column j lies, counted from 1 for i
                  itself; 0 where j is not on i's path. First child and next sibling of each column.
    rerank        the `keep` nodes of best score, ties to the earlier one, renumbered in their order

A child's score is at most its parent's (cumulative log-probabilities), and a parent comes first, so
what is kept holds the parents of all it holds (EAGLE-2, arXiv 2406.16858).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .jit import Kernel, power_of_two, use_triton
from .native import INTEGER, POINTER, Native

if TYPE_CHECKING:
    import triton.language as tl

_NATIVE = Native(
    "tree_build",
    {
        "build_trees": [*[POINTER] * 4, *[INTEGER] * 2],
        "rerank": [*[POINTER] * 4, *[INTEGER] * 3],
    },
)

ABSENT = -2
"""The parent of a column that does not exist."""


@dataclass(frozen=True)
class TreeTables:
    """Tables of B trees of at most C columns.

    Attributes:
        ancestry: [B, C, C] int32, see the module. first_child, next_sibling: [B, C] int64, -1 for
            none; siblings come in ascending order.
    """

    ancestry: Tensor
    first_child: Tensor
    next_sibling: Tensor


def build_trees_reference(parents: Tensor, height: int) -> TreeTables:
    """The plain definition, see `build_trees`."""
    batch, columns = parents.shape
    order = torch.arange(columns, device=parents.device)
    exists = parents != ABSENT
    ancestry = torch.zeros(batch, columns, columns, dtype=torch.int32, device=parents.device)
    node = torch.where(exists, order, -1)
    for step in range(1, height + 1):
        ancestry += step * (node[:, :, None] == order).to(torch.int32)
        node = torch.where(node >= 0, parents.gather(1, node.clamp(min=0)), -1)
    siblings = (parents[:, :, None] == parents[:, None, :]) & exists[:, :, None]
    siblings &= order > order[:, None]
    children = parents[:, None, :] == order[:, None]
    first, following = (
        torch.where(table, order, columns).amin(2) for table in (children, siblings)
    )
    return TreeTables(
        ancestry,
        torch.where(first < columns, first, -1),
        torch.where(following < columns, following, -1),
    )


def build_trees(parents: Tensor, height: int) -> TreeTables:
    """Ancestors, first children and next siblings.

    Args:
        parents: [B, C] int64, see the module; C >= 1. height: at least the columns of the longest
            path.
    """
    native = parents.device.type == "cpu" and _NATIVE.serves(torch.empty(0))
    if not native and not use_triton(parents):
        return build_trees_reference(parents, height)
    batch, columns = parents.shape
    parents = parents.contiguous()
    ancestry = torch.empty(batch, columns, columns, dtype=torch.int32, device=parents.device)
    first, following = torch.empty(2, batch, columns, dtype=torch.int64, device=parents.device)
    tables = ancestry, first, following
    if native:
        assert parents.dtype == torch.int64
        pointers = [table.data_ptr() for table in (parents, *tables)]
        _NATIVE.functions.build_trees(*pointers, batch, columns)
    elif batch:
        build_trees_kernel[(batch, columns)](
            parents, *tables, columns, height, BLOCK=power_of_two(columns), num_warps=1
        )
    return TreeTables(*tables)


@Kernel
def build_trees_kernel(parents, ancestry, first, following, columns, height, BLOCK: tl.constexpr):
    """One column: its way up, and who else hangs where."""
    tree, column = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    table = parents + tree * columns
    place = tree * columns + column
    lane = tl.arange(0, BLOCK)
    inside = lane < columns
    others = tl.load(table + lane, inside, -2)
    mine = tl.load(table + column)
    child = tl.min(tl.where(others == column, lane, columns))
    beside = (others == mine) & (mine != -2) & (lane > column) & inside
    sibling = tl.min(tl.where(beside, lane, columns))
    tl.store(first + place, tl.where(child < columns, child, -1).to(tl.int64))
    tl.store(following + place, tl.where(sibling < columns, sibling, -1).to(tl.int64))
    way = tl.zeros([BLOCK], tl.int32)
    node = tl.where(mine == -2, -1, column)
    for step in range(1, height + 1):
        way = tl.where(lane == node, step, way)
        node = tl.load(table + node, node >= 0, -1)
    tl.store(ancestry + place * columns + lane, way, inside)


def rerank_reference(scores: Tensor, parents: Tensor, keep: int) -> tuple[Tensor, Tensor]:
    """The plain definition, see `rerank`."""
    exists = parents != ABSENT
    order = scores.masked_fill(~exists, float("-inf")).argsort(dim=1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(
        1, order, torch.arange(scores.shape[1], device=scores.device).expand_as(order)
    )
    kept = (rank < keep) & exists
    place = torch.where(kept, kept.cumsum(1) - 1, -1)
    above = torch.where(parents >= 0, place.gather(1, parents.clamp(min=0)), -1)
    tree, node = kept.nonzero(as_tuple=True)
    chosen = parents.new_full((scores.shape[0], keep), -1)
    renumbered = torch.full_like(chosen, ABSENT)
    chosen[tree, place[kept]] = node
    renumbered[tree, place[kept]] = above[kept]
    return chosen, renumbered


def rerank(scores: Tensor, parents: Tensor, keep: int) -> tuple[Tensor, Tensor]:
    """The best nodes of each tree.

    Args:
        scores: [B, M], no NaN; a child's is at most its parent's. parents: [B, M] int64, see the
            module; absent nodes lie behind the others. keep: nodes kept of each tree, or all where
            there are fewer.
    Returns:
        (their columns [B, keep] ascending, -1 behind the last; their parents [B, keep] among the
        kept ones, -2 behind the last).
    """
    native = scores.dtype == torch.float64 and _NATIVE.serves(scores)
    if not native and not use_triton(scores):
        return rerank_reference(scores, parents, keep)
    batch, size = scores.shape
    if native:
        scores, parents = scores.contiguous(), parents.contiguous()
        assert parents.dtype == torch.int64
        kept, above = torch.empty(2, batch, keep, dtype=torch.int64)
        pointers = [one.data_ptr() for one in (scores, parents, kept, above)]
        _NATIVE.functions.rerank(*pointers, batch, size, keep)
        return kept, above
    chosen = torch.full((batch, keep), -1, dtype=torch.int64, device=scores.device)
    renumbered = torch.full_like(chosen, ABSENT)
    if scores.numel():
        rerank_kernel[(batch,)](
            scores.contiguous(),
            parents.contiguous(),
            torch.empty(batch, size, dtype=torch.int64, device=scores.device),
            chosen,
            renumbered,
            size,
            keep,
            BLOCK=power_of_two(size),
            CHUNK=16,
            num_warps=8,
        )
    return chosen, renumbered


@Kernel
def rerank_kernel(
    scores,
    parents,
    places,
    chosen,
    renumbered,
    size,
    keep,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One tree: rank by counting who comes before, then renumber."""
    tree = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    inside = lane < size
    parent = tl.load(parents + tree * size + lane, inside, -2)
    mine = tl.load(scores + tree * size + lane, inside, 0.0)
    rank = tl.zeros([BLOCK], tl.int32)
    for base in range(0, size, CHUNK):
        at = base + tl.arange(0, CHUNK)
        other = tl.load(scores + tree * size + at, at < size, 0.0)
        exists = tl.load(parents + tree * size + at, at < size, -2) != -2
        before = (other[None, :] > mine[:, None]) | (
            (other[None, :] == mine[:, None]) & (at[None, :] < lane[:, None])
        )
        rank += tl.sum((before & exists[None, :]).to(tl.int32), 1)
    kept = (rank < keep) & (parent != -2)
    place = tl.cumsum(kept.to(tl.int32), 0) - 1
    place = tl.where(kept, place, -1).to(tl.int64)
    tl.store(places + tree * size + lane, place, inside)
    tl.debug_barrier()  # a parent's place was stored by another thread
    above = tl.load(places + tree * size + parent, kept & (parent >= 0), -1)
    tl.store(chosen + tree * keep + place, lane.to(tl.int64), kept)
    tl.store(renumbered + tree * keep + place, above, kept)
