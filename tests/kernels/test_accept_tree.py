"""Verified trees have the target's law: every tree that can be drafted and every outcome of every
comparison, added up exactly."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.kernels.accept import DraftLaw, accept_sampled, draw
from draftsmith.kernels.tree_walk import walk_greedy, walk_sampled

FIRST, NEXT = [1, 3, 5, -1, -1, -1, -1], [-1, 2, -1, 4, -1, 6, -1]
"""Two children of the root, two of each of them."""


class Coin:
    """Stands for every uniform at once: a comparison `u * a < b` is true with probability b / a,
    and the run goes on with the side that `sides` says."""

    def __init__(self, sides: list[bool]) -> None:
        self.sides, self.taken, self.chance = sides, [], 1.0

    def __mul__(self, scale: float) -> Coin:
        self.scale = scale
        return self

    def __lt__(self, bound: float) -> bool:
        share = min(1.0, bound / self.scale)
        side = self.sides[len(self.taken)] if len(self.taken) < len(self.sides) else True
        self.taken.append(side)
        self.chance *= share if side else 1 - share
        return side


def outcomes(walk: Callable[[Any], tuple[list[int], Tensor]]) -> Iterator[tuple[float, Any]]:
    """(probability, result) of every way that a walk's comparisons can go."""
    sides: list[bool] = []
    while True:
        coin = Coin(sides)
        result = walk([coin] * 6)
        if coin.chance > 0:
            yield coin.chance, result
        sides = coin.taken
        while sides and not sides[-1]:
            sides.pop()
        if not sides:
            return
        sides[-1] = False


def drawings(law: Tensor, count: int) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Every ordered choice of `count` tokens without replacement, with its probability."""
    for tokens in itertools.permutations(range(len(law)), count):
        chance, left = 1.0, 1.0
        for token in tokens:
            chance *= float(law[token]) / left if left > 0 else 0.0
            left -= float(law[token])
        if chance > 0:
            yield chance, tokens


def random_laws(seed: int, size: int) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Target and drafter: a law for every prefix of at most two tokens, some tokens impossible."""
    generator = torch.Generator().manual_seed(seed)

    def table() -> dict[tuple[int, ...], Tensor]:
        found = {}
        for length in range(3):
            for prefix in itertools.product(range(size), repeat=length):
                weights = torch.rand(size, generator=generator, dtype=torch.float64) ** 3
                if seed % 2 and length:
                    weights[int(torch.randint(size, (1,), generator=generator))] = 0
                found[prefix] = weights / weights.sum()
        return found

    p, q = table(), table()
    return (lambda *prefix: p[prefix]), (lambda *prefix: q[prefix])


@pytest.mark.parametrize(
    ("size", "seed", "drawn"),
    [(2, 1, True), (3, 0, True), (3, 1, True), (2, 0, False), (3, 1, False), (4, 2, False)],
)
def test_the_joint_law_of_three_tokens_is_the_targets(size: int, seed: int, drawn: bool):
    """Depth 2, two children each: what a step emits, filled up with plain decoding where it is
    shorter, is the target's joint law to 1e-12."""
    p, q = random_laws(seed, size)

    def children(*prefix: int) -> list[tuple[float, tuple[int, ...]]]:
        law = q(*prefix)
        if drawn:
            return list(drawings(law, min(2, int((law > 0).sum()))))
        return [(1.0, tuple(law.topk(2).indices.tolist()))]

    joint = torch.zeros(size, size, size, dtype=torch.float64)
    for chance, top in children():
        lower = [children(token) for token in top] + [[(1.0, ())]] * (2 - len(top))
        for (left, a), (right, b) in itertools.product(*lower):
            tokens = [0, *_pad(top), *_pad(a), *_pad(b)]
            prefixes = [(), *[(t,) for t in tokens[1:3]], *_grand(tokens)]
            target = torch.stack([p(*prefix) for prefix in prefixes])
            first, following = _links([top, a, b])
            laws = [q(*prefix) for prefix in prefixes]
            law = laws.__getitem__ if drawn else None
            for share, (path, weights) in outcomes(
                lambda coins, t=tokens, f=first, n=following, w=law, p=target: walk_sampled(
                    t, f, n, w, p, coins
                )
            ):
                text = tuple(tokens[row] for row in path)
                total = chance * left * right * share
                for token, mass in enumerate((weights / weights.sum()).tolist()):
                    emitted = (*text, token)
                    rest = total * mass
                    for end in itertools.product(range(size), repeat=3 - len(emitted)):
                        whole = (*emitted, *end)
                        joint[whole] += rest * _plain(p, whole, len(emitted))
    expected = torch.zeros_like(joint)
    for whole in itertools.product(range(size), repeat=3):
        expected[whole] = _plain(p, whole, 0)
    assert float((joint - expected).abs().max()) < 1e-12


def _pad(tokens: tuple[int, ...]) -> list[int]:
    return [*tokens, *[0] * (2 - len(tokens))]


def _grand(tokens: list[int]) -> list[tuple[int, int]]:
    return [(tokens[1 + (row - 3) // 2], tokens[row]) for row in range(3, 7)]


def _links(levels: list[tuple[int, ...]]) -> tuple[list[int], list[int]]:
    """First children and next siblings of the rows that exist."""
    first, following = list(FIRST), list(NEXT)
    for parent, tokens in enumerate(levels):
        if len(tokens) < 2:
            following[FIRST[parent]] = -1
        if not tokens:
            first[parent] = -1
    return first, following


def _plain(p: Callable[..., Tensor], text: tuple[int, ...], known: int) -> float:
    chance = 1.0
    for place in range(known, len(text)):
        chance *= float(p(*text[:place])[text[place]])
    return chance


@pytest.mark.parametrize("drawn", [True, False])
def test_a_chain_is_a_tree_of_one_child_each(drawn: bool):
    """The same uniforms keep the same drafts and draw the same token."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(200):
        target, q = torch.softmax(torch.randn(2, 4, 5, generator=generator).double(), -1)
        drafts = [int(torch.multinomial(row, 1, generator=generator)) for row in q[:3]]
        uniforms = torch.rand(4, generator=generator, dtype=torch.float64).tolist()
        law = DraftLaw(q[:3], None) if drawn else None
        count, token = accept_sampled(drafts, law, target, uniforms)
        path, weights = walk_sampled(
            [0, *drafts],
            [1, 2, 3, -1],
            [-1] * 4,
            q.__getitem__ if drawn else None,
            target,
            uniforms,
        )
        assert path == list(range(1, count + 1)) and draw(weights, uniforms[-1]) == token


@pytest.mark.parametrize(
    ("choices", "path"),
    [
        ([7, 0, 0, 0, 0, 0, 0], []),
        ([2, 9, 9, 9, 9, 9, 9], [2]),
        ([1, 4, 9, 9, 9, 9, 9], [1, 4]),
        ([2, 9, 5, 9, 9, 9, 9], [2, 5]),
        ([3, 1, 2, 9, 9, 9, 9], []),
    ],
)
def test_the_greedy_walk_follows_the_targets_choices(choices: list[int], path: list[int]):
    """Down the tree of the rows' own numbers as tokens; a node of another branch does not count."""
    assert walk_greedy(list(range(7)), FIRST, NEXT, choices) == path


def test_a_child_that_only_rounding_refuses_is_kept():
    """The residual of two laws that differ in the last bit has no mass to draw from."""
    q = torch.tensor([0.5, 0.5], dtype=torch.float64)
    p = torch.tensor([0.5, 0.5 - 2**-53], dtype=torch.float64)
    path, weights = walk_sampled(
        [0, 1], [1, -1], [-1, -1], lambda row: q, torch.stack([p, p]), [1 - 2**-53]
    )
    assert path == [1] and torch.equal(weights, p)
