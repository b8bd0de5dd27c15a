"""Which drafts are kept: lossless verification of a chain.

Greedy: keep the longest prefix that equals the target's argmax; the target's next token comes free.

Sampled (Leviathan et al., arXiv 2211.17192, algorithm 1): draft i was drawn from q_i; keep it with
probability min(1, p_i(x) / q_i(x)); at the first rejection draw from norm(max(p_i - q_i, 0)); when
all are kept draw the bonus from p_{k+1}. A draft that was not drawn but chosen (argmax, look-up)
has a one-hot q: keep it with probability p(x), else draw from p with x struck out. Either way every
emitted token has the target's law.

Legend: B sequences, k drafts of one sequence, K the most drafts of any, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

DRAW_BLOCK = 256
"""Weights that `draw_rows` adds at once."""


@dataclass(frozen=True)
class DraftLaw:
    """The exact distributions a chain was drawn from.

    Attributes:
        probabilities: [k, Vd]. ids: [Vd] the target ids of its columns, None when Vd = V.
    """

    probabilities: Tensor
    ids: Tensor | None

    def dense(self, vocab_size: int) -> Tensor:
        """[k, V], zero outside the draft vocabulary."""
        if self.ids is None:
            return self.probabilities
        dense = self.probabilities.new_zeros(self.probabilities.shape[0], vocab_size)
        return dense.index_copy_(1, self.ids, self.probabilities)


def accept_greedy(drafts: Tensor, choices: Tensor) -> Tensor:
    """How many drafts of each chain are kept.

    Args:
        drafts: [B, K] int64, -1 where a chain is shorter. choices: [B, K] int64, the target's
            argmax at each row.
    Returns:
        [B] int64.
    """
    return (drafts == choices).to(torch.int64).cumprod(1).sum(1)


def accept_sampled(
    drafts: list[int], law: DraftLaw | None, target: Tensor, uniforms: list[float]
) -> tuple[int, int]:
    """Verify one chain by rejection sampling.

    Args:
        drafts: k token ids. law: what they were drawn from; None for drafts that were chosen, not
            drawn.
        target: [k+1, V] the target's probabilities at each row, after temperature and truncation.
        uniforms: k+1 draws in [0, 1): one per draft, the last for the token that comes from the
            target.
    Returns:
        (number kept, the next token).
    """
    assert len(uniforms) == len(drafts) + 1
    kept, weights = keep_sampled(drafts, law, target, uniforms)
    return kept, draw(weights, uniforms[-1])


def keep_sampled(
    drafts: list[int], law: DraftLaw | None, target: Tensor, uniforms: list[float]
) -> tuple[int, Tensor]:
    """`accept_sampled` without its last draw.

    Returns:
        (number kept, the weights [V] to draw the next token from, not normalised).
    """
    assert target.shape[0] == len(drafts) + 1
    dense = None if law is None else law.dense(target.shape[1])
    for row, token in enumerate(drafts):
        p = target[row]
        q = 1.0 if dense is None else float(dense[row, token])
        assert q > 0, "a draft that its own law could not draw"
        if uniforms[row] * q < float(p[token]):
            continue
        if dense is None:
            residual = p.clone()
            residual[token] = 0
        else:
            residual = (p - dense[row]).clamp_(min=0)
        return row, residual
    return len(drafts), target[-1]


def draw(weights: Tensor, uniform: float) -> int:
    """`draw_rows` of one row of weights [V].

    Raises:
        ValueError: the weights have no mass or are not finite (NaN logits upstream).
    """
    uniforms = torch.tensor([uniform], dtype=torch.float64, device=weights.device)
    token = int(draw_rows(weights[None], uniforms))
    if token < 0:
        raise ValueError(
            f"cannot sample: the weights sum to {float(weights.sum(dtype=torch.float64))}; the "
            "logits hold NaN or infinity"
        )
    return token


def draw_rows(weights: Tensor, uniforms: Tensor) -> Tensor:
    """A token of every row, by inverting the cumulative sum of its weights.

    The sum is taken in float64 over blocks first and then inside one block, which is four times as
    fast as one running sum. A row's token depends on that row alone.

    Args:
        weights: [n, V], not negative, not necessarily normalised. uniforms: [n] float64 in [0, 1).
    Returns:
        [n] int64; -1 where the weights have no mass or are not finite.
    """
    rows, size = weights.shape
    whole = size - size % DRAW_BLOCK
    sums = weights[:, :whole].reshape(rows, -1, DRAW_BLOCK).sum(-1, dtype=torch.float64)
    if whole < size:
        rest = weights[:, whole:].sum(-1, keepdim=True, dtype=torch.float64)
        sums = torch.cat([sums, rest], 1)
    borders = sums.cumsum(-1)
    total = borders[:, -1:]
    threshold = uniforms[:, None] * total
    block = _reached(borders, threshold, sums)
    start = (borders - sums).gather(1, block)
    lanes = block * DRAW_BLOCK + torch.arange(min(size, DRAW_BLOCK), device=weights.device)
    inside = weights.gather(1, lanes.clamp(max=size - 1)).double()
    inside = torch.where(lanes < size, inside, 0)
    place = _reached(start + inside.cumsum(-1), threshold, inside)
    token = (block * DRAW_BLOCK + place)[:, 0]
    return torch.where(((total > 0) & (total < float("inf")))[:, 0], token, -1)


def _reached(cumulative: Tensor, threshold: Tensor, weights: Tensor) -> Tensor:
    """[n, 1]: the first place whose cumulative sum [n, m] passes the threshold [n, 1]; where
    rounding leaves none, the last place that has weight."""
    place = torch.searchsorted(cumulative, threshold, right=True)
    lanes = torch.arange(weights.shape[1], device=weights.device)
    final = torch.where(weights > 0, lanes, 0).amax(-1, keepdim=True)
    return torch.minimum(place, final)
