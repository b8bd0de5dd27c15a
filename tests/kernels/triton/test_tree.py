"""Tables, reranking and acceptance of trees: the kernels against their definitions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from draftsmith.kernels.accept_tree import accept_trees
from draftsmith.kernels.tree_build import (
    ABSENT,
    build_trees,
    build_trees_reference,
    rerank,
    rerank_reference,
)
from draftsmith.kernels.tree_walk import accept_trees_reference
from draftsmith.kernels.trees import Trees


def _forest(seed: int, sizes: tuple[int, ...]) -> Tensor:
    """Random trees of so many columns, padded."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    parents = torch.full((len(sizes), max(sizes)), ABSENT)
    for tree, size in enumerate(sizes):
        parents[tree, 0] = -1
        for column in range(1, size):
            parents[tree, column] = torch.randint(0, column, (1,), generator=generator)
    return parents


def test_tables():
    """Ragged trees, and one of several roots."""
    parents = torch.cat([_forest(1, (5, 1, 9)), torch.full((1, 9), -1)])
    got, expected = build_trees(parents, 9), build_trees_reference(parents, 9)
    assert torch.equal(got.ancestry, expected.ancestry)
    assert torch.equal(got.first_child, expected.first_child)
    assert torch.equal(got.next_sibling, expected.next_sibling)


@pytest.mark.parametrize("keep", [1, 9, 40])
def test_reranked_nodes(keep: int):
    """Scores with many ties; more asked for than there are."""
    parents = _forest(2, (33, 5, 21))
    scores = torch.zeros(parents.shape)
    for column in range(33):
        above = parents[:, column].clamp(min=0)
        gain = -torch.randint(0, 3, (3,)).float()
        scores[:, column] = scores.gather(1, above[:, None])[:, 0] + gain
    for got, expected in zip(
        rerank(scores, parents, keep), rerank_reference(scores, parents, keep), strict=True
    ):
        assert torch.equal(got, expected)


def _drafted(seed: int, size: int, reduced: int | None) -> tuple[Trees, Tensor, Tensor]:
    """Six trees: greedy, drawn and chosen ones, one without nodes."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    parents = torch.tensor(
        [
            [-1, 0, 0, 0, 1, 1, 2, 4],
            [-1, 0, 0, 0, 1, 1, 2, 4],
            [-1, 0, 0, 0, 0, 3, 3, 3],
            [-1, *[ABSENT] * 7],
            [-1, 0, 1, 2, ABSENT, ABSENT, ABSENT, ABSENT],
            [-1, 0, 0, 1, 1, 2, 2, ABSENT],
        ]
    )
    tables, counts = build_trees(parents, 8), (parents != ABSENT).sum(1)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    total, width = int(starts[-1]), reduced or size
    target = torch.softmax(torch.randn(total, size, generator=generator) * 1.5, -1)
    ids = torch.arange(size) if reduced is None else torch.randperm(size, generator=generator)
    ids = ids[:width].sort().values
    columns = None
    if reduced is not None:
        columns = torch.full((size,), -1)
        columns[ids] = torch.arange(width)
    drawn = torch.tensor([False, True, True, True, True, False])
    laws, law_rows = [], torch.full(parents.shape, -1)
    tokens = torch.zeros_like(parents)
    choices = target.argmax(-1)
    for tree in range(6):
        for row in range(int(counts[tree])):
            children = (parents[tree] == row).nonzero()[:, 0]
            if not len(children):
                continue
            near = target[starts[tree] + row][ids] ** 0.7
            law = near / near.sum()
            picked = torch.multinomial(law, len(children), generator=generator)
            tokens[tree, children] = ids[picked]
            if not drawn[tree] and torch.rand(1, generator=generator) < 0.5:
                tokens[tree, children[0]] = choices[starts[tree] + row]
            if drawn[tree]:
                law_rows[tree, row] = len(laws)
                laws.append(law)
    uniforms = torch.rand(parents.shape, generator=generator, dtype=torch.float64)
    greedy = torch.tensor([True, False, False, False, False, False])
    trees = Trees(
        tokens,
        starts,
        tables.first_child,
        tables.next_sibling,
        greedy,
        drawn,
        uniforms,
        4,
        torch.stack(laws),
        law_rows,
        columns,
    )
    return trees, choices, target


@pytest.mark.parametrize("reduced", [None, 20])
def test_kept_paths_are_those_of_the_definition(reduced: int | None):
    """Random batches: first and later siblings, and none, are kept, at every depth."""
    seen = set()
    for seed in range(4):
        trees, choices, target = _drafted(seed, 37, reduced)
        kept, following = accept_trees(trees, choices, target)
        expected = accept_trees_reference(trees, choices, target)
        assert torch.equal(kept, expected[0]) and torch.equal(following, expected[1])
        seen |= {tuple(path) for path in kept.tolist()}
    assert len(seen) > 5 and max(sum(row >= 0 for row in path) for path in seen) >= 2


@pytest.mark.parametrize("size", [49152, 151936])
def test_real_vocabularies(size: int):
    """Two refusals and the draw go over many blocks."""
    target = torch.softmax(torch.randn(3, size) * 3, -1)
    law = torch.softmax(torch.randn(1, size) * 3, -1)
    tables = build_trees(torch.tensor([[-1, 0, 0]]), 2)
    trees = Trees(
        torch.tensor([[0, *law[0].topk(2).indices.tolist()]]),
        torch.tensor([0, 3]),
        tables.first_child,
        tables.next_sibling,
        torch.tensor([False]),
        torch.tensor([True]),
        torch.tensor([[0.999999, 0.999999, 0.73]], dtype=torch.float64),
        1,
        law,
        torch.tensor([[0, -1, -1]]),
    )
    got, expected = (
        accept_trees(trees, target.argmax(-1), target),
        accept_trees_reference(trees, target.argmax(-1), target),
    )
    assert got[0].tolist() == [[-1]] == expected[0].tolist()
    assert torch.equal(got[1], expected[1])


def test_greedy_alone_needs_no_probabilities():
    """Neither the target's nor the drafts'."""
    trees, choices, _ = _drafted(4, 37, None)
    greedy = Trees(
        trees.tokens,
        trees.starts,
        trees.first_child,
        trees.next_sibling,
        torch.ones(6, dtype=torch.bool),
        torch.zeros(6, dtype=torch.bool),
        torch.full_like(trees.uniforms, float("nan")),
        4,
    )
    got, expected = (
        accept_trees(greedy, choices, None),
        accept_trees_reference(greedy, choices, None),
    )
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


@pytest.mark.parametrize("fault", [float("nan"), float("inf"), 0.0])
def test_weights_without_a_law_give_no_token(fault: float):
    """-1 behind a path that is kept, and the neighbour is not touched by it."""
    parents = torch.tensor([[-1, 0], [-1, ABSENT]])
    tables = build_trees(parents, 2)
    trees = Trees(
        torch.tensor([[0, 0], [0, 0]]),
        torch.tensor([0, 2, 3]),
        tables.first_child,
        tables.next_sibling,
        torch.zeros(2, dtype=torch.bool),
        torch.zeros(2, dtype=torch.bool),
        torch.tensor([[0.1, 0.5], [0.5, 0.5]], dtype=torch.float64),
        1,
    )
    target = torch.tensor([[0.5, 0.5], [fault, 0.0], [1.0, 0.0]])
    kept, following = accept_trees(trees, torch.zeros(3, dtype=torch.int64), target)
    assert kept.tolist() == [[1], [-1]] and following.tolist() == [-1, 0]


def test_trees_behind_the_reach_of_32_bits(far_memory: Callable[[int], Tensor]):
    """Row 2**17 of 2**14 columns begins at element 2**31."""
    target = far_memory(2**14).view(2**17 + 1, 2**14)
    target[2**17 - 1, 5], target[2**17, 2**14 - 2] = 1, 1
    tables = build_trees(torch.tensor([[-1, 0]]), 2)
    trees = Trees(
        torch.tensor([[0, 5]]),
        torch.tensor([2**17 - 1, 2**17 + 1]),
        tables.first_child,
        tables.next_sibling,
        torch.tensor([False]),
        torch.tensor([False]),
        torch.tensor([[0.5, 0.5]], dtype=torch.float64),
        1,
    )
    kept, following = accept_trees(trees, torch.zeros(2**17 + 1, dtype=torch.int64), target)
    assert kept.tolist() == [[1]] and following.tolist() == [2**14 - 2]
