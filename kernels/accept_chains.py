"""`accept` for a whole batch of chains, greedy and sampled side by side, in one launch.

Each sequence has k drafts and k + 1 rows of the target. Its own flag says how it is judged:

    greedy    keep while draft_i = argmax of row i; the next token is the argmax behind
    sampled   keep while u_i * q_i(x_i) < p_i(x_i); at the first refusal draw from
              max(p_i - q_i, 0), or from p_{k+1} when all are kept, by inverting the cumulative sum
              at u_{k+1}. q is one-hot for drafts that were chosen, not drawn.

The law is `accept.accept_sampled`'s, which is the definition. Cumulative sums are taken in float64
as there; they add in blocks, so a uniform within 1e-15 of an edge can fall on its other side.

The kernel here is also that of `accept_block` and `accept_typical`: all three walk along a chain,
weigh the row behind what is kept and draw from it, and differ in what they ask at each draft.

Legend: as in `chains`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .accept import draw_rows
from .chains import Chains
from .jit import Kernel, power_of_two, use_triton

if TYPE_CHECKING:
    import triton.language as tl


def accept_chains_reference(
    chains: Chains, choices: Tensor, target: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The plain form, every chain at once. See `accept_chains`."""
    first = chains.starts[:-1]
    kept = chains.count_while(chains.drafts == choices[chains.rows])
    if target is None:
        return kept, choices[first + kept]
    p, q = chains.likelihoods(target)
    holds = chains.count_while(chains.uniforms[:, :-1] * q < p)
    kept = torch.where(chains.greedy, kept, holds)
    tokens = draw_rows(chains.residual(target, kept), chains.last_uniforms)
    return kept, torch.where(chains.greedy, choices[first + kept], tokens)


def accept_chains(chains: Chains, choices: Tensor, target: Tensor | None) -> tuple[Tensor, Tensor]:
    """Judge every chain.

    Args:
        chains: the drafts. choices: [N] int64, the target's argmax of each row (read for greedy
            sequences).
        target: [N, V] the target's probabilities (read for sampled sequences); None when all are
            greedy.
    Returns:
        (kept [B] int64, the next token [B] int64). The token is -1 where the weights to draw from
        have no mass or are not finite (NaN logits upstream): the device is not waited for here, so
        whoever reads the tokens must refuse it.
    """
    if not use_triton(choices if target is None else target):
        return accept_chains_reference(chains, choices, target)
    return judge(chains, target, choices)


def judge(
    chains: Chains,
    target: Tensor | None,
    choices: Tensor | None = None,
    typical: tuple[Tensor, Tensor] | None = None,
    *,
    joint: bool = False,
) -> tuple[Tensor, Tensor]:
    """The launch of all three rules: with choices `accept_chains`, with `typical` = (threshold,
    scale), each [B] float64, `accept_typical`, with `joint` `accept_block`."""
    batch, most = chains.drafts.shape
    device = chains.drafts.device
    kept, following = torch.empty(2, batch, dtype=torch.int64, device=device)
    size = 1 if target is None else target.shape[1]
    law = None if typical is not None else chains.law
    threshold, scale = (None, None) if typical is None else typical
    if batch:
        accept_chains_kernel[(batch,)](
            chains.drafts.contiguous(),
            chains.starts,
            None if choices is None else chains.greedy,
            chains.drawn,
            chains.uniforms.contiguous(),
            None if law is None else law.contiguous(),
            None if law is None else chains.columns,
            choices,
            None if target is None else target.contiguous(),
            None if threshold is None else threshold.contiguous(),
            None if scale is None else scale.contiguous(),
            kept,
            following,
            most,
            size,
            0 if law is None else law.shape[2],
            JOINT=joint,
            BLOCK=min(1024, power_of_two(size)),
        )
    return kept, following


@Kernel
def accept_chains_kernel(
    drafts,
    starts,
    greedy,
    drawn,
    uniforms,
    law,
    columns,
    choices,
    target,
    threshold,
    typical_scale,
    kept,
    following,
    most,
    vocabulary,
    law_width,
    JOINT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One chain: at each draft whether it is kept, a pass over the row behind the last that is (of
    a JOINT chain over every row) for its mass, and one more that draws."""
    chain = tl.program_id(0).to(tl.int64)
    first = tl.load(starts + chain)
    length = tl.load(starts + (chain + 1)) - first - 1
    is_drawn = tl.load(drawn + chain) != 0
    is_greedy = length < 0
    if choices is not None:
        is_greedy = tl.load(greedy + chain) != 0
    if target is None:
        is_greedy = length >= 0
    lane = tl.arange(0, BLOCK)
    going = length >= 0
    count = tl.zeros([], tl.int64)
    scale = tl.full([], 1.0, tl.float64)  # w of a JOINT chain, by which the target's row counts
    share = tl.full([], 1.0, tl.float32)  # that of the row behind what is kept
    mass = tl.zeros([], tl.float64)  # of the weights there
    final = tl.full([], -1, tl.int64)  # the last token with weight
    whole = tl.zeros([], tl.float64)  # of that row as it is
    whole_final = tl.full([], -1, tl.int64)
    for step in range(0, length + 1):
        if going:
            row = first + step
            token = tl.load(drafts + (chain * most + step), step < length, -1)
            holds = token >= 0
            if choices is not None:
                holds = token == tl.load(choices + row)
            if not JOINT:
                count = row - first
            if target is not None:
                if not is_greedy:
                    source = target + row * vocabulary
                    place = (chain * most + step) * law_width
                    p = tl.load(source + token, step < length, 0.0).to(tl.float64)
                    q = tl.full([], 1.0, tl.float64)
                    if law is not None:
                        own = token
                        if columns is not None:
                            own = tl.load(columns + token, step < length, -1)
                        q = tl.load(law + (place + own), is_drawn & (own >= 0), 0.0).to(tl.float64)
                        q = tl.where(is_drawn, q, 1.0)
                    if threshold is not None:
                        entropy = tl.zeros([], tl.float64)
                        for base in range(0, vocabulary, BLOCK):
                            at = base + lane
                            weight = tl.load(source + at, at < vocabulary, 0.0).to(tl.float32)
                            log = tl.log(tl.where(weight == 0, 1.0, weight))
                            entropy -= tl.sum((weight * log).to(tl.float64))
                        likely = tl.load(typical_scale + chain) * tl.exp(-entropy)
                        limit = tl.load(threshold + chain)
                        holds = p > tl.where(limit < likely, limit, likely)  # NaN keeps nothing
                    else:
                        holds = tl.load(uniforms + (chain * (most + 1) + step)) * q < p
                    weighs = not holds
                    if JOINT:
                        weighs = going
                    if weighs:
                        refuses = (step < length) & (threshold is None)
                        subtracts = refuses & is_drawn
                        struck = tl.where(refuses & (not is_drawn), token, -1)
                        factor = tl.where(step < length, scale, 1.0).to(tl.float32)
                        left = tl.zeros([], tl.float64)
                        last = tl.full([], -1, tl.int64)
                        plain = tl.zeros([], tl.float64)
                        plain_last = tl.full([], -1, tl.int64)
                        for base in range(0, vocabulary, BLOCK):
                            at = base + lane
                            inside = at < vocabulary
                            weight = tl.load(source + at, inside, 0.0).to(tl.float32)
                            if JOINT:
                                plain += tl.sum(weight.to(tl.float64))
                                top = tl.max(tl.where(weight > 0, at, -1))
                                plain_last = tl.maximum(plain_last, top.to(tl.int64))
                                weight *= factor
                            if law is not None:
                                column = at.to(tl.int64)
                                if columns is not None:
                                    column = tl.load(columns + at, inside, -1)
                                read = inside & subtracts & (column >= 0)
                                weight -= tl.load(law + (place + column), read, 0.0).to(tl.float32)
                            weight = tl.where((weight < 0) | (at == struck), 0.0, weight)
                            left += tl.sum(weight.to(tl.float64))  # NaN stays
                            top = tl.max(tl.where(weight > 0, at, -1))
                            last = tl.maximum(last, top.to(tl.int64))
                        keeps = going
                        if JOINT:
                            finite = tl.where(left < float("inf"), left, 0.0)  # nor NaN
                            chance = finite / tl.where(finite > 0, finite + 1 - scale, 1.0)
                            chance = tl.where(step < length, chance, scale)
                            before = uniforms + (chain * (most + 1) + step - 1)
                            keeps = (row == first) | (tl.load(before, row > first, 0.0) < chance)
                        if keeps:
                            count = row - first
                            share, mass, final = factor, left, last
                            whole, whole_final = plain, plain_last
                    if JOINT:
                        ratio = tl.where(q > 0, scale * p / tl.where(q > 0, q, 1.0), 0.0)
                        scale = tl.where(ratio > 1, 1.0, ratio)  # NaN stays
                        holds = scale > 0  # none can be kept behind 0
            going = holds
    tl.store(kept + chain, count)
    row = first + count
    token = tl.full([], -1, tl.int64)
    if choices is not None:
        token = tl.load(choices + row)
    if target is not None:
        if not is_greedy:
            refuses = (count < length) & (threshold is None)
            if JOINT:
                if mass == 0:  # where w p = q up to rounding
                    refuses = count < 0
                    share = tl.full([], 1.0, tl.float32)
                    mass, final = whole, whole_final
            subtracts = refuses & is_drawn
            struck = tl.load(drafts + (chain * most + count), refuses & (not is_drawn), -1)
            token = tl.full([], -1, tl.int64)
            if (mass > 0) & (mass < float("inf")):
                uniform = tl.load(uniforms + (chain * (most + 1) + length))
                edge = uniform * mass
                running = tl.zeros([], tl.float64)
                found = tl.full([], vocabulary, tl.int64)
                for base in range(0, vocabulary, BLOCK):
                    at = base + lane
                    inside = at < vocabulary
                    weight = tl.load(target + row * vocabulary + at, inside, 0.0).to(tl.float32)
                    if JOINT:
                        weight *= share
                    if law is not None:
                        column = at.to(tl.int64)
                        if columns is not None:
                            column = tl.load(columns + at, inside, -1)
                        place = (chain * most + count) * law_width + column
                        read = inside & subtracts & (column >= 0)
                        weight -= tl.load(law + place, read, 0.0).to(tl.float32)
                    weight = tl.where((weight < 0) | (at == struck), 0.0, weight)
                    reached = running + tl.cumsum(weight.to(tl.float64))
                    hit = tl.min(tl.where(reached > edge, at, vocabulary)).to(tl.int64)
                    found = tl.minimum(found, hit)
                    running = tl.max(reached)
                token = tl.minimum(found, final)
    tl.store(following + chain, token)
