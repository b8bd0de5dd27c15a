"""Which path of a drafted tree is kept, for a whole batch, greedy and sampled side by side, in one
launch.

At a row of the target, the children of that row are tried in order; the first that is kept is the
next row, and where none is, the row's own next token ends the walk:

    greedy    keep the child that is the row's argmax; the token that follows is the argmax
    sampled   p is the row's law, q what its children were drawn from, one after the other without
              replacement. Child x is kept where u * q(x) / |q| < p(x) / |p|, else
                  p <- max(p - q |p| / |q|, 0),  q(x) <- 0
              and the next child is tried with what is left; the token that follows is drawn from p.
              For children that were chosen, not drawn, q is one-hot each time: keep x where
              u < p(x) / |p|, else p(x) <- 0.

|.| is the sum. Every token has the target's law whatever was drafted (recursive rejection without
replacement: arXiv 2402.14160; a tree of one child each is the chain of `accept`). Sums
are taken in float64; they add in blocks, so a uniform within 1e-15 of an edge can fall on its other
side.

`tree_walk` is the definition.

Legend: as in `trees`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .jit import Kernel, power_of_two, use_triton
from .tree_walk import accept_trees_reference
from .trees import Trees

if TYPE_CHECKING:
    import triton.language as tl


def accept_trees(trees: Trees, choices: Tensor, target: Tensor | None) -> tuple[Tensor, Tensor]:
    """Judge every tree.

    Args:
        trees: the drafts. choices: [N] int64, the target's argmax of each row (read for greedy
            trees).
        target: [N, V] the target's probabilities (read for sampled trees); None when all are
            greedy.
    Returns:
        (the rows kept below each root, in order [B, height] int64, -1 behind the last; the next
        token [B] int64). The token is -1 where the weights to draw from have no mass or are not
        finite (NaN logits upstream): the device is not waited for here, so whoever reads the tokens
        must refuse it.
    """
    if not use_triton(choices if target is None else target):
        return accept_trees_reference(trees, choices, target)
    batch, most = trees.tokens.shape
    device = choices.device
    kept = torch.full((batch, trees.height), -1, dtype=torch.int64, device=device)
    following = torch.empty(batch, dtype=torch.int64, device=device)
    size = 1 if target is None else target.shape[1]
    left = None
    if target is not None:  # what is left of p, and of q
        left = torch.empty(batch, 1 if trees.law is None else 2, size, device=device)
    if batch:
        accept_trees_kernel[(batch,)](
            trees.tokens.contiguous(),
            trees.starts,
            trees.first_child.contiguous(),
            trees.next_sibling.contiguous(),
            trees.greedy,
            trees.drawn,
            trees.uniforms.contiguous(),
            None if trees.law is None else trees.law.contiguous(),
            None if trees.law_rows is None else trees.law_rows.contiguous(),
            trees.columns,
            choices,
            None if target is None else target.contiguous(),
            left,
            kept,
            following,
            most,
            trees.height,
            size,
            0 if trees.law is None else trees.law.shape[1],
            BLOCK=min(1024, power_of_two(size)),
        )
    return kept, following


@Kernel
def accept_trees_kernel(
    tokens,
    starts,
    first_child,
    next_sibling,
    greedy,
    drawn,
    uniforms,
    law,
    law_rows,
    columns,
    choices,
    target,
    left,
    kept,
    following,
    most,
    height,
    vocabulary,
    law_width,
    BLOCK: tl.constexpr,
):
    """One tree: each node is tried at most once; a refusal goes over the vocabulary, and the draw
    twice."""
    tree = tl.program_id(0).to(tl.int64)
    base = tree * most
    first = tl.load(starts + tree)
    rows = tl.load(starts + (tree + 1)) - first
    is_greedy = tl.load(greedy + tree) != 0
    is_drawn = tl.load(drawn + tree) != 0
    lane = tl.arange(0, BLOCK)
    row = tl.zeros([], tl.int64)
    count = tl.zeros([], tl.int64)
    child = tl.load(first_child + base)
    refusals = tl.zeros([], tl.int32)
    mass = tl.full([], 1.0, tl.float64)
    weight = tl.full([], 1.0, tl.float64)
    remains = tl.zeros([], tl.float64)  # p of the child to be tried, once some were refused
    for _ in range(1, rows):
        if child >= 0:
            token = tl.load(tokens + base + child)
            sibling = tl.load(next_sibling + base + child)
            keeps = token == tl.load(choices + (first + row))
            if target is not None:
                if not is_greedy:
                    source = target + (first + row) * vocabulary
                    rest = left + tree * (1 if law is None else 2) * vocabulary
                    chance = tl.full([], 1.0, tl.float64)
                    place = tl.zeros([], tl.int64)
                    if law is not None:
                        place = tl.load(law_rows + base + row, is_drawn, 0) * law_width
                        if refusals > 0:
                            chance = tl.load(rest + (vocabulary + token), is_drawn, 0.0)
                            chance = chance.to(tl.float64)
                        else:
                            column = token
                            if columns is not None:
                                column = tl.load(columns + token)
                            read = is_drawn & (column >= 0)
                            chance = tl.load(law + place + column, read, 0.0).to(tl.float64)
                        chance = tl.where(is_drawn, chance, 1.0)
                    if refusals == 0:
                        remains = tl.load(source + token).to(tl.float64)
                    uniform = tl.load(uniforms + (base + child - 1))
                    keeps = uniform * (chance * mass) < remains * weight
                    if not keeps:
                        sought = tl.load(tokens + base + sibling, sibling >= 0, -1)
                        share = (mass / weight).to(tl.float32)
                        mass = tl.zeros([], tl.float64)
                        weight = tl.zeros([], tl.float64)
                        remains = tl.zeros([], tl.float64)
                        tl.debug_barrier()  # all have read what is left of q at the token
                        for begin in range(0, vocabulary, BLOCK):
                            at = begin + lane
                            inside = at < vocabulary
                            p = tl.load(source + at, inside & (refusals == 0), 0.0)
                            p = p.to(tl.float32)
                            p += tl.load(rest + at, inside & (refusals > 0), 0.0)
                            if law is not None:
                                column = at.to(tl.int64)
                                if columns is not None:
                                    column = tl.load(columns + at, inside, -1)
                                read = inside & is_drawn & (column >= 0) & (refusals == 0)
                                q = tl.load(law + place + column, read, 0.0).to(tl.float32)
                                again = inside & is_drawn & (refusals > 0)
                                q += tl.load(rest + (vocabulary + at), again, 0.0)
                                p -= q * share
                                q = tl.where(at == token, 0.0, q)
                                tl.store(rest + (vocabulary + at), q, inside)
                                weight += tl.sum(q.to(tl.float64))
                            struck = (at == token) & (not is_drawn)
                            p = tl.where((p < 0) | struck, 0.0, p)  # NaN stays
                            tl.store(rest + at, p, inside)
                            mass += tl.sum(p.to(tl.float64))
                            hit = tl.where(inside & (at == sought), p, 0.0)
                            remains += tl.sum(hit.to(tl.float64))
                        tl.debug_barrier()
                        weight = tl.where(is_drawn, weight, 1.0)
                        refusals += 1
                        keeps = mass == 0  # rounding alone refused it
            if keeps:
                row = child
                tl.store(kept + tree * height + count, row)
                count += 1
                child = tl.load(first_child + base + row)
                refusals = tl.zeros([], tl.int32)
                mass = tl.full([], 1.0, tl.float64)
                weight = tl.full([], 1.0, tl.float64)
            else:
                child = sibling
    token = tl.load(choices + (first + row))
    if target is not None:
        if not is_greedy:
            source = target + (first + row) * vocabulary
            rest = left + tree * (1 if law is None else 2) * vocabulary
            uniform = tl.load(uniforms + (base + rows - 1))
            total = tl.zeros([], tl.float64)
            final = tl.full([], -1, tl.int64)  # the last token with mass
            for begin in range(0, vocabulary, BLOCK):
                at = begin + lane
                inside = at < vocabulary
                p = tl.load(source + at, inside & (refusals == 0), 0.0).to(tl.float32)
                p += tl.load(rest + at, inside & (refusals > 0), 0.0)
                total += tl.sum(p.to(tl.float64))
                final = tl.maximum(final, tl.max(tl.where(p > 0, at, -1)).to(tl.int64))
            token = tl.full([], -1, tl.int64)
            if (total > 0) & (total < float("inf")):
                threshold = uniform * total
                running = tl.zeros([], tl.float64)
                found = tl.full([], vocabulary, tl.int64)
                for begin in range(0, vocabulary, BLOCK):
                    at = begin + lane
                    inside = at < vocabulary
                    p = tl.load(source + at, inside & (refusals == 0), 0.0).to(tl.float32)
                    p += tl.load(rest + at, inside & (refusals > 0), 0.0)
                    reached = running + tl.cumsum(p.to(tl.float64))
                    hit = tl.min(tl.where(reached > threshold, at, vocabulary)).to(tl.int64)
                    found = tl.minimum(found, hit)
                    running = tl.max(reached)
                token = tl.minimum(found, final)
    tl.store(following + tree, token)
