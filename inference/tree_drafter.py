"""A trained head drafts a tree, level by level.

For a sequence whose tokens are x_0 .. x_n the children of the root come from the head's row n-1,
as in a chain. A node that is to have children gets a row of the head: its token, the state that
its parent's row recycled, position n-1+depth. These rows are written to the slots n, n+1, ... in
the order in which they are run, and each sees the text and its own ancestors' rows; `observe`
writes true rows over them. A head without keys (Medusa) gives one row a level for all nodes.

    static    every node gets the children that the shape says: the head's likeliest tokens, or, of
              a request that draws, tokens drawn without replacement, with the law they came from
    dynamic   a node's score is the log-probability of its path. The top_k best of a level get the
              next level's children, top_k each, and the best `nodes` of all are verified (EAGLE-2,
              arXiv 2406.16858). Children are chosen, never drawn: which of them stay depends on
              what they are
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..kernels.accept import DraftLaw, draw
from ..kernels.top_ranked import top_ranked
from ..kernels.tree_build import rerank
from ..models.heads import Head
from .batch import Batch
from .drafters import Proposal
from .head_drafter import HeadDrafter
from .sampler import probabilities
from .sequence import Sequence
from .tree import Path, TreeConfig
from .upload import upload


@dataclass
class _Node:
    """A node that may get children. index: among its tree's nodes, -1 for the root. row: where its
    state lies among the rows of the level's pass. column: of its own row in the head's slots."""

    index: int
    path: Path
    score: float
    row: int
    column: int


@dataclass
class _Tree:
    """What one sequence's tree has come to."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    laws: list[Tensor] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    """Parents of the rows that the head ran, among these rows."""
    leaves: list[_Node] = field(default_factory=list)
    """The nodes that get children next."""


class TreeHeadDrafter(HeadDrafter):
    """A head of one module, or one without keys, as a drafter of trees.

    Args:
        tree: the shape; its depth is what the engine asks for, `engine.draft_tokens`.
        head, draft_ids, name: see `HeadDrafter`.
    Raises:
        ValueError: the head has several modules with keys of their own, or trees are off.
    """

    def __init__(
        self, head: Head, draft_ids: Tensor | None, tree: TreeConfig, name: str | None = None
    ) -> None:
        super().__init__(head, draft_ids, name)
        if head.num_modules > 1:
            raise ValueError(
                f"engine.tree.kind={tree.kind}: the head has {head.num_modules} modules with keys "
                "of their own, which draft chains only; set engine.tree.kind=none, or train a head "
                "of one module"
            )
        if tree.kind == "none":
            raise ValueError("engine.tree.kind=none drafts chains; choose static or dynamic")
        self.tree = tree
        # On the host, where trees are put together.
        self._ids = None if draft_ids is None else draft_ids.tolist()

    @torch.inference_mode()
    def propose(self, sequences: list[Sequence], counts: list[int]) -> list[Proposal]:
        """See `Drafter`; trees of at most `counts` levels."""
        longest = self.head.max_steps
        depths = counts if longest is None else [min(count, longest) for count in counts]
        trees = [_Tree() for _ in sequences]
        active = [index for index, depth in enumerate(depths) if depth]
        if not active:
            return [Proposal([]) for _ in sequences]
        carried = [self._carried[sequences[index]] for index in active]
        drafted = torch.stack([one.drafted for one in carried])
        recycled = torch.cat([one.recycled[0] for one in carried])
        for row, index in enumerate(active):
            trees[index].leaves = [_Node(-1, (), 0.0, row, -1)]
        level = 0
        while active:
            self._branch(sequences, trees, active, depths, level, drafted)
            level += 1
            active = [index for index in active if level < depths[index] and trees[index].leaves]
            if active:
                grow = self._row_each if self.num_layers else self._row_for_all
                drafted, recycled = grow(sequences, trees, active, level, recycled)
        return [self._proposal(tree) for tree in trees]

    def _branch(
        self,
        sequences: list[Sequence],
        trees: list[_Tree],
        active: list[int],
        depths: list[int],
        level: int,
        drafted: Tensor,
    ) -> None:
        """Give the leaves their children; the children that get some next are the new leaves."""
        logits = self.logits(drafted, level)
        widths = [self._widths(trees[index], depths[index]) for index in active]
        ranked = top_ranked(logits, min(max(map(max, widths)), logits.shape[1]))
        chances, tokens = (table.tolist() for table in ranked)
        for index, wide in zip(active, widths, strict=True):
            tree, sequence = trees[index], sequences[index]
            leaves, tree.leaves = tree.leaves, []
            for leaf, width in zip(leaves, wide, strict=True):
                if self.draws(sequence):
                    wide = torch.promote_types(logits.dtype, torch.float32)
                    law = probabilities(logits[leaf.row][None].to(wide), sequence.params)[0]
                    tree.laws.append(law)
                    found = _drawn(sequence, law, width)
                    gains = [0.0] * len(found)
                else:
                    found, gains = tokens[leaf.row][:width], chances[leaf.row]
                for rank, token in enumerate(self._offer(sequence, leaf, found)):
                    score = leaf.score + gains[rank]
                    path = (*leaf.path, rank)
                    tree.leaves.append(_Node(len(tree.tokens), path, score, leaf.row, leaf.column))
                    tree.tokens.append(token)
                    tree.parents.append(leaf.index)
                    tree.scores.append(score)
            tree.leaves = self._chosen(tree.leaves, depths[index])
            if level + 1 == depths[index]:
                tree.leaves = []

    def draws(self, sequence: Sequence) -> bool:
        """Whether a request's children are drawn, not chosen."""
        return self.tree.kind == "static" and sequence.params.draws_drafts

    def _widths(self, tree: _Tree, depth: int) -> list[int]:
        """How many children each leaf is to have."""
        if self.tree.kind == "dynamic":
            return [self.tree.top_k] * len(tree.leaves)
        shape = self.tree.children(depth)
        return [shape[leaf.path] for leaf in tree.leaves]

    def _chosen(self, nodes: list[_Node], depth: int) -> list[_Node]:
        """Of a new level's nodes those that get children."""
        if self.tree.kind == "static":
            shape = self.tree.children(depth)
            return [node for node in nodes if node.path in shape]
        best = sorted(nodes, key=lambda node: -node.score)[: self.tree.top_k]
        return sorted(best, key=lambda node: node.index)

    def _offer(self, sequence: Sequence, leaf: _Node, found: list[int]) -> list[int]:
        """The target's ids of a leaf's children."""
        return found if self._ids is None else [self._ids[column] for column in found]

    def _row_each(
        self,
        sequences: list[Sequence],
        trees: list[_Tree],
        active: list[int],
        level: int,
        recycled: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Run a row for every leaf."""
        parts, parents, fed = [], [], []
        for index in active:
            tree, sequence = trees[index], sequences[index]
            first = len(sequence.tokens) - 1 + len(tree.columns)
            for leaf in tree.leaves:
                tree.columns.append(leaf.column)
                leaf.column = len(tree.columns) - 1
                fed.append(leaf.row)
                leaf.row = len(fed) - 1
            parts.append((sequence, first, [tree.tokens[leaf.index] for leaf in tree.leaves]))
            parents.append(list(tree.columns))
        batch = Batch.build(parts, recycled.device, parents)
        hidden = recycled[upload(fed, recycled.device)]
        out = self._run(batch, batch.tokens, hidden, level)
        return out.drafted, out.recycled

    def _row_for_all(
        self,
        sequences: list[Sequence],
        trees: list[_Tree],
        active: list[int],
        level: int,
        recycled: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Run one row a sequence, which reads neither keys nor its token."""
        rows = [trees[index].leaves[0].row for index in active]
        for row, index in enumerate(active):
            for leaf in trees[index].leaves:
                leaf.row = row
        parts = [(sequences[i], len(sequences[i].tokens) - 1, [0]) for i in active]
        batch = Batch.build(parts, recycled.device)
        hidden = recycled[upload(rows, recycled.device)]
        out = self._run(batch, batch.tokens, hidden, level)
        return out.drafted, out.recycled

    def _proposal(self, tree: _Tree) -> Proposal:
        """What is verified of a tree."""
        if self.tree.kind == "dynamic" and len(tree.tokens) > self.tree.nodes:
            scores = torch.tensor([tree.scores], dtype=torch.float64)
            chosen, parents = rerank(scores, torch.tensor([tree.parents]), self.tree.nodes)
            tokens = [tree.tokens[node] for node in chosen[0].tolist()]
            return Proposal(tokens, None, parents[0].tolist())
        law = DraftLaw(torch.stack(tree.laws), self.draft_ids) if tree.laws else None
        return Proposal(tree.tokens, law, tree.parents)


def _drawn(sequence: Sequence, law: Tensor, count: int) -> list[int]:
    """`count` tokens drawn one after the other without replacement, fewer where the law has
    fewer."""
    left = law.clone()
    found: list[int] = []
    for uniform in sequence.uniforms(min(count, int((law > 0).sum()))):
        found.append(draw(left, uniform))
        left[found[-1]] = 0
    return found
