"""Drafted chains of a batch, as the rules of acceptance read them (`accept_chains`, `accept_block`,
`accept_typical`).

Legend: B sequences, K the most drafts of any, N = sum(k + 1) rows, V vocabulary, Vd draft
vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


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
            own = torch.where((refused & self.drawn)[:, None], self.law[chain, at], 0)
            if self.columns is not None:
                # Column -1, of a token that is never drafted, is the zero at the end.
                own = torch.nn.functional.pad(own, (0, 1))[:, self.columns]
            weights = (weights - own).clamp_(min=0)
        chosen = refused & ~self.drawn
        token = self.drafts[chain, at].clamp(min=0)
        struck = torch.where(chosen, 0, weights[chain, token])
        return weights.index_put_((chain, token), struck)
