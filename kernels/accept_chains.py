"""`accept` for a whole batch of chains, greedy and sampled side by side, in one launch.

Each sequence has k drafts and k + 1 rows of the target. Its own flag says how it is judged:

    greedy    keep while draft_i = argmax of row i; the next token is the argmax behind
    sampled   keep while u_i * q_i(x_i) < p_i(x_i); at the first refusal draw from
              max(p_i - q_i, 0), or from p_{k+1} when all are kept, by inverting the cumulative sum
              at u_{k+1}. q is one-hot for drafts that were chosen, not drawn.

The law is `accept.accept_sampled`'s, which is the definition. Cumulative sums are taken in float64
as there; they add in blocks, so a uniform within 1e-15 of an edge can fall on its other side.

Legend: B sequences, K the most drafts of any, N = sum(k + 1) rows, V vocabulary, Vd draft
vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .accept import DraftLaw, accept_greedy, draw, keep_sampled
from .jit import Kernel, power_of_two, use_triton

if TYPE_CHECKING:
    import triton.language as tl


@dataclass(frozen=True)
class Chains:
    """What was drafted for a batch; all tensors on one device.

    Attributes:
        drafts: [B, K] int64, -1 where a chain is shorter. starts: [B+1] int64 borders of the rows;
            sequence b has starts[b+1] - starts[b] - 1 drafts.
        greedy: [B] bool. drawn: [B] bool, false where the drafts were chosen (one-hot law).
        uniforms: [B, K+1] float64 in [0, 1): one per draft, then one for the token that follows.
        law: [B, K, Vd] what drawn drafts were drawn from, or None when none was.
        columns: [V] int64, the column of `law` that holds a token, -1 for none, ascending; None
            when Vd = V.
    """

    drafts: Tensor
    starts: Tensor
    greedy: Tensor
    drawn: Tensor
    uniforms: Tensor
    law: Tensor | None = None
    columns: Tensor | None = None


def accept_chains_reference(
    chains: Chains, choices: Tensor, target: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The plain definition: one chain after the other. See `accept_chains`."""
    kept = torch.zeros_like(chains.starts[1:])
    following = torch.zeros_like(kept)
    ids = None if chains.columns is None else (chains.columns >= 0).nonzero()[:, 0]
    for index, (first, end) in enumerate(
        zip(chains.starts[:-1].tolist(), chains.starts[1:].tolist(), strict=True)
    ):
        count = end - first - 1
        drafts = chains.drafts[index, :count]
        if chains.greedy[index]:
            held = int(accept_greedy(drafts[None], choices[None, first : end - 1]))
            kept[index], following[index] = held, choices[first + held]
            continue
        assert target is not None
        law = None
        if chains.drawn[index] and count:
            assert chains.law is not None
            law = DraftLaw(chains.law[index, :count], ids)
        uniforms = chains.uniforms[index, : count + 1].tolist()
        held, weights = keep_sampled(drafts.tolist(), law, target[first:end], uniforms)
        mass = float(weights.sum(dtype=torch.float64))
        token = draw(weights, uniforms[-1]) if 0 < mass < float("inf") else -1
        kept[index], following[index] = held, token
    return kept, following


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
    batch, most = chains.drafts.shape
    kept, following = torch.empty(2, batch, dtype=torch.int64, device=choices.device)
    size = 1 if target is None else target.shape[1]
    if batch:
        accept_chains_kernel[(batch,)](
            chains.drafts.contiguous(),
            chains.starts,
            chains.greedy,
            chains.drawn,
            chains.uniforms.contiguous(),
            None if chains.law is None else chains.law.contiguous(),
            chains.columns,
            choices,
            None if target is None else target.contiguous(),
            kept,
            following,
            most,
            size,
            0 if chains.law is None else chains.law.shape[2],
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
    kept,
    following,
    most,
    vocabulary,
    law_width,
    BLOCK: tl.constexpr,
):
    """One chain: count what is kept, then draw in two passes over the row behind it."""
    chain = tl.program_id(0).to(tl.int64)
    first = tl.load(starts + chain)
    length = tl.load(starts + (chain + 1)) - first - 1
    is_greedy = tl.load(greedy + chain) != 0
    is_drawn = tl.load(drawn + chain) != 0
    going = length >= 0
    count = tl.zeros([], tl.int64)
    for step in range(0, length):
        token = tl.load(drafts + (chain * most + step))
        agrees = token == tl.load(choices + (first + step))
        if target is not None:
            column = token
            if columns is not None:
                column = tl.load(columns + token)
            q = tl.full([], 1.0, tl.float64)
            if law is not None:
                place = (chain * most + step) * law_width + column
                q = tl.load(law + place, is_drawn & (column >= 0), 0.0).to(tl.float64)
                q = tl.where(is_drawn, q, 1.0)
            p = tl.load(target + ((first + step) * vocabulary + token)).to(tl.float64)
            holds = tl.load(uniforms + (chain * (most + 1) + step)) * q < p
            agrees = tl.where(is_greedy, agrees, holds)
        going = going & agrees
        count += going.to(tl.int64)
    tl.store(kept + chain, count)
    row = first + count
    token = tl.load(choices + row)
    if target is not None:
        if not is_greedy:
            refused = count < length
            struck = tl.load(drafts + (chain * most + count), refused & (not is_drawn), -1)
            subtracts = refused & is_drawn
            uniform = tl.load(uniforms + (chain * (most + 1) + length))
            lane = tl.arange(0, BLOCK)
            mass = tl.zeros([], tl.float64)
            final = tl.full([], -1, tl.int64)  # the last token with mass
            for base in range(0, vocabulary, BLOCK):
                at = base + lane
                inside = at < vocabulary
                weight = tl.load(target + row * vocabulary + at, inside, 0.0).to(tl.float32)
                if law is not None:
                    column = at.to(tl.int64)
                    if columns is not None:
                        column = tl.load(columns + at, inside, -1)
                    place = (chain * most + count) * law_width + column
                    read = inside & subtracts & (column >= 0)
                    weight -= tl.load(law + place, read, 0.0).to(tl.float32)
                weight = tl.where((weight < 0) | (at == struck), 0.0, weight)  # NaN stays
                mass += tl.sum(weight.to(tl.float64))
                final = tl.maximum(final, tl.max(tl.where(weight > 0, at, -1)).to(tl.int64))
            token = tl.full([], -1, tl.int64)
            if (mass > 0) & (mass < float("inf")):
                threshold = uniform * mass
                running = tl.zeros([], tl.float64)
                found = tl.full([], vocabulary, tl.int64)
                for base in range(0, vocabulary, BLOCK):
                    at = base + lane
                    inside = at < vocabulary
                    weight = tl.load(target + row * vocabulary + at, inside, 0.0).to(tl.float32)
                    if law is not None:
                        column = at.to(tl.int64)
                        if columns is not None:
                            column = tl.load(columns + at, inside, -1)
                        place = (chain * most + count) * law_width + column
                        read = inside & subtracts & (column >= 0)
                        weight -= tl.load(law + place, read, 0.0).to(tl.float32)
                    weight = tl.where((weight < 0) | (at == struck), 0.0, weight)
                    reached = running + tl.cumsum(weight.to(tl.float64))
                    hit = tl.min(tl.where(reached > threshold, at, vocabulary)).to(tl.int64)
                    found = tl.minimum(found, hit)
                    running = tl.max(reached)
                token = tl.minimum(found, final)
    tl.store(following + chain, token)
