"""The walk down drafted trees, one after the other: the definition of `accept_tree`, which has its
law.

Legend: as in `trees`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .accept import DraftLaw, draw
from .trees import Trees


def walk_greedy(
    tokens: Sequence[int],
    first_child: Sequence[int],
    next_sibling: Sequence[int],
    choices: Sequence[int],
) -> list[int]:
    """The rows of one tree that are kept below the root: the path of the target's own choices."""
    path, child = [], first_child[0]
    row = 0
    while child >= 0:
        if tokens[child] == choices[row]:
            row = child
            path.append(row)
            child = first_child[row]
        else:
            child = next_sibling[child]
    return path


def walk_sampled(
    tokens: Sequence[int],
    first_child: Sequence[int],
    next_sibling: Sequence[int],
    law: Callable[[int], Tensor] | None,
    target: Tensor,
    uniforms: Sequence[float],
) -> tuple[list[int], Tensor]:
    """One tree by rejection sampling, without the last draw.

    Args:
        tokens: of each row. law: row -> [V] what its children were drawn from; None for children
            that were chosen.
        target: [rows, V] the target's probabilities at each row. uniforms: one for each node.
    Returns:
        (the rows kept below the root, the weights [V] to draw the next token from, not normalised).
    """
    path, row = [], 0
    while True:
        p, child = target[row], first_child[row]
        q = law(row).clone() if law is not None and child >= 0 else None
        mass = weight = 1.0
        while child >= 0:
            token = tokens[child]
            chance = 1.0 if q is None else float(q[token])
            assert chance > 0, "a draft that its own law could not draw"
            if uniforms[child - 1] * (chance * mass) < float(p[token]) * weight:
                break
            if q is None:
                p = p.clone()
                p[token] = 0
            else:
                p = (p - q * (mass / weight)).clamp_(min=0)
                q[token] = 0
                weight = float(q.sum(dtype=torch.float64))
            mass = float(p.sum(dtype=torch.float64))
            if mass == 0:  # nothing else can follow: rounding alone refused it
                break
            child = next_sibling[child]
        if child < 0:
            return path, p
        path.append(child)
        row = child


def accept_trees_reference(
    trees: Trees, choices: Tensor, target: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The plain definition: one tree after the other. See `accept_trees`."""
    batch = trees.tokens.shape[0]
    kept = torch.full((batch, trees.height), -1, dtype=torch.int64, device=choices.device)
    following = torch.zeros_like(trees.starts[1:])
    ids = None if trees.columns is None else (trees.columns >= 0).nonzero()[:, 0]
    borders, greedy, drawn = trees.starts.tolist(), trees.greedy.tolist(), trees.drawn.tolist()
    tables = [t.tolist() for t in (trees.tokens, trees.first_child, trees.next_sibling)]
    decided = choices.tolist()
    for index in range(batch):
        first, end = borders[index], borders[index + 1]
        tokens, children, siblings = (table[index] for table in tables)
        if greedy[index]:
            path = walk_greedy(tokens, children, siblings, decided[first:end])
            token = decided[first + (path[-1] if path else 0)]
        else:
            assert target is not None
            law = _law_of(trees, index, ids, target.shape[1]) if drawn[index] else None
            uniforms = trees.uniforms[index, : end - first].tolist()
            path, weights = walk_sampled(
                tokens, children, siblings, law, target[first:end], uniforms
            )
            mass = float(weights.sum(dtype=torch.float64))
            token = draw(weights, uniforms[-1]) if 0 < mass < float("inf") else -1
        kept[index, : len(path)] = torch.tensor(path, dtype=torch.int64)
        following[index] = token
    return kept, following


def _law_of(trees: Trees, index: int, ids: Tensor | None, size: int) -> Callable[[int], Tensor]:
    table, laws = trees.law_rows, trees.law
    assert table is not None and laws is not None

    def law(row: int) -> Tensor:
        place = int(table[index, row])
        assert place >= 0, "drawn children without a law"
        return DraftLaw(laws[place : place + 1], ids).dense(size)[0]

    return law
