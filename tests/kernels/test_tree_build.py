"""Tables of a tree, and which nodes are kept, on trees small enough to see."""

from __future__ import annotations

import pytest
import torch

from draftsmith.kernels.tree_build import (
    ABSENT,
    build_trees,
    build_trees_reference,
    rerank,
    rerank_reference,
)


def test_the_tables_of_a_small_tree():
    """Root, two children, a grandchild; beside it a chain of two."""
    tables = build_trees(torch.tensor([[-1, 0, 0, 1], [-1, 0, ABSENT, ABSENT]]), 3)
    assert tables.ancestry.tolist() == [
        [[1, 0, 0, 0], [2, 1, 0, 0], [2, 0, 1, 0], [3, 2, 0, 1]],
        [[1, 0, 0, 0], [2, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]],
    ]
    assert tables.first_child.tolist() == [[1, 3, -1, -1], [1, -1, -1, -1]]
    assert tables.next_sibling.tolist() == [[-1, 2, -1, -1], [-1, -1, -1, -1]]


def test_random_trees_have_the_tables_of_the_definition():
    """Several roots, columns that do not exist, chains."""
    generator = torch.Generator().manual_seed(0)
    for columns in (1, 2, 7, 33):
        parents = torch.full((5, columns), ABSENT)
        for tree in range(5):
            for column in range(max(1, columns - tree)):
                parents[tree, column] = (
                    int(torch.randint(-1, column, (), generator=generator)) if column else -1
                )
        found, plain = build_trees(parents, columns), build_trees_reference(parents, columns)
        for name in ("ancestry", "first_child", "next_sibling"):
            assert torch.equal(getattr(found, name), getattr(plain, name)), name


@pytest.mark.parametrize("keep", [1, 4, 9, 14])
@pytest.mark.parametrize("spread", [0.0, 1.0, float("inf")])
def test_what_is_kept_is_closed_under_parents(keep: int, spread: float):
    """Certain nodes (log-probability 0) and impossible ones tie with their parents in whole
    levels."""
    generator = torch.Generator().manual_seed(keep)
    parents = torch.tensor([-1, -1, -1, *(i // 3 for i in range(9)), ABSENT])
    for _ in range(30):
        gains = -spread * torch.randint(0, 3, (13,), generator=generator).double()
        gains = gains.nan_to_num(nan=0.0, neginf=-torch.inf)
        scores = torch.zeros(13, dtype=torch.float64)
        for node, parent in enumerate(parents.tolist()):
            scores[node] = gains[node] + (scores[parent] if parent >= 0 else 0)
        chosen, renumbered = rerank(scores[None], parents[None], keep)
        plain = rerank_reference(scores[None], parents[None], keep)
        assert torch.equal(chosen, plain[0]) and torch.equal(renumbered, plain[1])
        nodes = [node for node in chosen[0].tolist() if node >= 0]
        assert len(nodes) == min(keep, 12) and nodes == sorted(nodes)
        for place, node in enumerate(nodes):
            parent = int(parents[node])
            assert renumbered[0, place] == (nodes.index(parent) if parent >= 0 else -1)
        left = [node for node in range(12) if node not in nodes]
        assert all(scores[a] >= scores[b] for a in nodes for b in left)
        assert renumbered[0, len(nodes) :].tolist() == [ABSENT] * (keep - len(nodes))
