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
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .accept import draw_rows
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

    @cached_property
    def lengths(self) -> Tensor:
        """[B] int64: the drafts of each chain."""
        return self.starts.diff() - 1

    @cached_property
    def real(self) -> Tensor:
        """[B, K] bool: where there is a draft."""
        steps = torch.arange(self.drafts.shape[1], device=self.drafts.device)
        return steps < self.lengths[:, None]

    @cached_property
    def rows(self) -> Tensor:
        """[B, K] int64: the row that judges a draft; any row where there is none."""
        steps = torch.arange(self.drafts.shape[1], device=self.drafts.device)
        return self.starts[:-1, None] + torch.where(self.real, steps, 0)

    @property
    def last_uniforms(self) -> Tensor:
        """[B] float64: the draw of the token that follows."""
        return self.uniforms.gather(1, self.lengths[:, None])[:, 0]

    def count_while(self, agrees: Tensor) -> Tensor:
        """[B] int64: how many drafts agree [B, K] before the first that does not."""
        return (agrees & self.real).to(torch.int64).cumprod(1).sum(1)

    def likelihoods(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """([B, K], [B, K]) float64: every draft's probability in the target's law and in its own,
        which is 1 where it was chosen."""
        tokens = self.drafts.clamp(min=0)
        p = target[self.rows, tokens].double()
        q = torch.ones_like(p)
        if self.law is not None and p.numel():
            column = tokens if self.columns is None else self.columns[tokens]
            own = self.law.gather(2, column.clamp(min=0)[:, :, None])[:, :, 0].double()
            q = torch.where(self.drawn[:, None], torch.where(column >= 0, own, 0), q)
        return p, q

    def residual(self, target: Tensor, kept: Tensor, scale: Tensor | None = None) -> Tensor:
        """[B, V]: the weights of the token that follows `kept` [B] drafts: max(s p - q, 0) where a
        draft was refused, p where all were kept. scale: [B] float64, s; None is 1."""
        weights = target[self.starts[:-1] + kept]
        if not self.drafts.shape[1]:
            return weights
        if scale is not None:
            weights = weights * scale[:, None].to(weights.dtype)
        refused = kept < self.lengths
        chain = torch.arange(len(kept), device=kept.device)
        at = kept.clamp(max=self.drafts.shape[1] - 1)
        if self.law is not None:
            own = self.law[chain, at] * (refused & self.drawn)[:, None]
            if self.columns is not None:
                # Column -1, of a token that is never drafted, is the zero at the end.
                own = torch.nn.functional.pad(own, (0, 1))[:, self.columns]
            weights = (weights - own).clamp_(min=0)
        chosen = refused & ~self.drawn
        token = self.drafts[chain, at].clamp(min=0)
        struck = torch.where(chosen, 0, weights[chain, token])
        return weights.index_put_((chain, token), struck)


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
