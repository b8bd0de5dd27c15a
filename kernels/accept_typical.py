"""Typical acceptance (Medusa, arXiv 2401.10774, section 2.3.1). LOSSY: what is emitted does not
have the target's law, it is only likely enough under it.

    keep draft x while p(x) > min(threshold, scale * exp(-H(p)))      H the entropy of the row
    next token ~ p of the row behind the last that was kept
"""

from __future__ import annotations

import torch
from torch import Tensor

from .accept import draw_rows
from .accept_chains import judge
from .chains import Chains
from .jit import use_triton


def accept_typical_reference(
    chains: Chains, target: Tensor, threshold: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """The plain form, every chain at once. See `accept_typical`."""
    entropy = torch.special.entr(target).sum(-1, dtype=torch.float64)
    likely = torch.minimum(threshold[:, None], scale[:, None] * (-entropy[chains.rows]).exp())
    tokens = chains.drafts.clamp(min=0)
    kept = chains.count_while(target[chains.rows, tokens] > likely)
    weights = target[chains.starts[:-1] + kept]
    return kept, draw_rows(weights, chains.last_uniforms)


def accept_typical(
    chains: Chains, target: Tensor, threshold: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Judge every chain by how likely its drafts are.

    Args:
        chains: the drafts; `greedy`, `drawn` and `law` are not read. target: [N, V] the target's
            probabilities. threshold, scale: [B] float64.
    Returns:
        (kept [B] int64, the next token [B] int64), as `accept_chains`.
    """
    if not use_triton(target):
        return accept_typical_reference(chains, target, threshold, scale)
    return judge(chains, target, typical=(threshold, scale))
