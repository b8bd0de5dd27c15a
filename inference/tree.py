"""Trees of drafts: which shape they have, and what a tree is to the rest of the engine.

A tree is the `parents` of its nodes: parents[i] < i, -1 for a child of the root, which is the
sequence's newest token. A chain is the tree 0 <- 1 <- 2 ...
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

Path = tuple[int, ...]
"""A node by the ranks of the children on the way to it: (0, 2) is the likeliest child's third."""

PUBLISHED: dict[Path, int] = {
    (): 4,
    (0,): 3,
    (1,): 2,
    (2,): 2,
    (3,): 1,
    (0, 0): 3,
    (0, 1): 2,
    (0, 2): 2,
    (1, 0): 1,
    (0, 0, 0): 3,
    (0, 0, 0, 0): 2,
}
"""EAGLE's 25 paths, five levels deep, as how many children each inner node has (SafeAILab/EAGLE,
`mc_sim_7b_63`)."""
MOST_NODES = 256


@dataclass(frozen=True)
class TreeConfig:
    """Whether a head drafts trees instead of chains, and of which shape; `engine.draft_tokens` is
    their depth."""

    kind: Literal["none", "static", "dynamic"] = "none"
    """none (chains), static (one shape for every step, EAGLE and Medusa) or dynamic (grown along
    the head's own probabilities, EAGLE-2)."""
    shape: Literal["published", "comb", "full"] = "published"
    """Of a static tree: published (EAGLE's 25 paths, five levels), comb (top_k children of the
    likeliest node of each level) or full (top_k children of every node); all cut at
    engine.draft_tokens levels."""
    top_k: int = 4
    """Children of a node; of a dynamic tree also the nodes of a level that get children."""
    nodes: int = 16
    """Of a dynamic tree: the best so many nodes are verified."""
    lookup: int = 8
    """Drafters `ngram+…`: a branch of so many tokens that look-up finds stands beside the tree; 0
    has look-up draft in the model's place, as without trees."""

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= 32:
            raise ValueError(f"engine.tree.top_k {self.top_k}: choose 1 to 32")
        if not 1 <= self.nodes <= MOST_NODES:
            raise ValueError(f"engine.tree.nodes {self.nodes}: choose 1 to {MOST_NODES}")
        if not 0 <= self.lookup <= 32:
            raise ValueError(f"engine.tree.lookup {self.lookup}: choose 0 to 32")

    def children(self, depth: int) -> dict[Path, int]:
        """A static tree of at most `depth` levels: how many children each inner node has.

        Raises:
            ValueError: more than 256 nodes.
        """
        found = _children(self.shape, self.top_k, depth)
        if sum(found.values()) > MOST_NODES:
            raise ValueError(
                f"engine.tree: a {self.shape} tree of {depth} levels and top_k {self.top_k} has "
                f"more than {MOST_NODES} nodes; lower engine.tree.top_k or engine.draft_tokens, or "
                "choose engine.tree.kind=dynamic"
            )
        return found

    def slots(self, depth: int) -> int:
        """How many rows a step needs behind the decided tokens for trees of so many levels: those
        that are verified, or those that the head runs on the way, whichever are more."""
        if self.kind == "none" or depth == 0:
            return depth
        if self.kind == "static":
            return sum(self.children(depth).values()) + self.lookup
        return max(self.nodes + self.lookup, self.top_k * (depth - 1))


@cache
def _children(shape: str, top_k: int, depth: int) -> dict[Path, int]:
    if shape == "published":
        return {path: count for path, count in PUBLISHED.items() if len(path) < depth}
    found: dict[Path, int] = {}
    level: list[Path] = [()]
    for _ in range(depth):
        found |= dict.fromkeys(level, top_k)
        if len(found) > MOST_NODES:
            break
        wide = range(top_k if shape == "full" else 1)
        level = [(*path, rank) for path in level for rank in wide]
    return found


def grafted(
    tokens: list[int], parents: list[int] | None, branch: list[int]
) -> tuple[list[int], list[int]]:
    """A tree (parents None: a chain) and a path from its root in one: what they begin with alike is
    there once, the rest of the path comes behind all other nodes.

    Returns:
        (tokens, parents) of the whole.
    """
    tokens = list(tokens)
    parents = list(range(-1, len(tokens) - 1)) if parents is None else list(parents)
    known = {pair: node for node, pair in enumerate(zip(parents, tokens, strict=True))}
    last = -1
    for token in branch:
        node = known.get((last, token), -1)
        if node < 0:
            node = len(tokens)
            tokens.append(token)
            parents.append(last)
        last = node
    return tokens, parents


def depths_of(parents: list[int]) -> list[int]:
    """How far below the root each node lies: 1 for its children."""
    depths: list[int] = []
    for node, parent in enumerate(parents):
        assert -1 <= parent < node, f"parents {parents}: node {node} comes before its parent"
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


def rows_of(parents: list[int] | None, count: int) -> list[int]:
    """A proposal's parents as a verify batch's: row 0 is the root, row i + 1 is node i.

    Args:
        parents: of its nodes; None for a chain of `count`.
    """
    return [-1, *range(count)] if parents is None else [-1, *(parent + 1 for parent in parents)]
