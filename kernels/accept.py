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
    """A token by inverting the cumulative sum of non-negative weights [V] (not necessarily
    normalised).

    Raises:
        ValueError: the weights have no mass or are not finite (NaN logits upstream).
    """
    cumulative = weights.to(torch.float64).cumsum(0)
    total = float(cumulative[-1])
    if not 0 < total < float("inf"):
        raise ValueError(
            f"cannot sample: the weights sum to {total}; the logits hold NaN or infinity"
        )
    threshold = torch.tensor([uniform * total], dtype=torch.float64, device=weights.device)
    token = int(torch.searchsorted(cumulative, threshold, right=True)[0])
    # Rounding of uniform * total can land on the last edge; the last token with mass is meant.
    return min(token, int(weights.nonzero()[-1]))
