"""Block verification (Sun et al., arXiv 2403.10444, algorithm 2): drafts are judged jointly, and at
least as many are kept as one by one. The law of what is emitted is the target's.

For a chain of k drafts x_1 … x_k, with q_i the law that draft i was drawn from, p_i the target's
law at its row and p_{k+1} the law behind it:

    w_0 = 1     w_i = min(1, w_{i-1} p_i(x_i) / q_i(x_i))
    R_i = sum over x of max(w_i p_{i+1}(x) - q_{i+1}(x), 0)
    h_i = R_i / (R_i + 1 - w_i)  for i < k       h_k = w_k
    kept = the last i with u_i < h_i, or 0: a refused draft does not end the chain
    next token ~ max(w_kept p_{kept+1} - q_{kept+1}, 0), or p_{k+1} when all are kept

A chosen draft has a one-hot q, so R_i = w_i (1 - p_{i+1}(x_{i+1})).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .accept import draw_rows
from .accept_chains import judge
from .chains import Chains
from .jit import use_triton


def accept_block_reference(chains: Chains, target: Tensor) -> tuple[Tensor, Tensor]:
    """The plain form, every chain at once. See `accept_block`."""
    batch, most = chains.drafts.shape
    p, q = chains.likelihoods(target)
    scale = p.new_ones(batch)
    kept = torch.zeros_like(chains.lengths)
    scale_kept = scale
    for step in range(most):
        real = chains.real[:, step]
        ratio = torch.where(q[:, step] > 0, p[:, step] / q[:, step], 0)
        scale = torch.where(real, (scale * ratio).clamp(max=1), scale)
        last = chains.lengths == step + 1
        keeps = torch.where(last, scale, _continues(chains, target, scale, step + 1))
        holds = real & (chains.uniforms[:, step] < keeps)
        kept = torch.where(holds, step + 1, kept)
        scale_kept = torch.where(holds, scale, scale_kept)
    scale_kept = torch.where(kept == chains.lengths, 1.0, scale_kept)
    weights = chains.residual(target, kept, scale_kept)
    # Where w p = q up to rounding there is nothing left to draw from, and the target's row is it.
    empty = weights.amax(-1, keepdim=True) <= 0
    weights = torch.where(empty, target[chains.starts[:-1] + kept], weights)
    return kept, draw_rows(weights, chains.last_uniforms)


def accept_block(chains: Chains, target: Tensor) -> tuple[Tensor, Tensor]:
    """Judge every chain as a block.

    Args:
        chains: the drafts; `greedy` is not read. target: [N, V] the target's probabilities.
    Returns:
        (kept [B] int64, the next token [B] int64), as `accept_chains`: -1 where the weights to draw
        from are not finite.
    """
    if not use_triton(target):
        return accept_block_reference(chains, target)
    return judge(chains, target, joint=True)


def _continues(chains: Chains, target: Tensor, scale: Tensor, kept: int) -> Tensor:
    """[B] float64: h after `kept` drafts of a longer chain."""
    if kept == chains.drafts.shape[1]:
        return scale
    held = chains.lengths.clamp(max=kept)
    left = chains.residual(target, held, scale).sum(-1, dtype=torch.float64)
    return torch.where(left > 0, left / (left + 1 - scale), 0)
