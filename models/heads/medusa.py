"""Medusa heads (arXiv 2401.10774): K residual heads on the target's state; no attention, no keys.

    g_p = h_p after the target's final norm
    g_p = g_p + silu(A g_p + b)                    `num_layers` such blocks in head k
    q_p = softmax(lm_head g_p)                     predicts x_{p+2+k}; lm_head: the target's

Every step reads the same h_p and neither x_{p+1} nor a draft. The published heads train a [V, H]
lm_head each (`own_lm_heads`); sharing the target's keeps a head at H² parameters a block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..attention import AttentionContext
from .config import HeadConfig, recycle_spec
from .protocol import Head, HeadStep
from .start import Start


class ResidualBlock(nn.Module):
    """x + silu(A x + b), [N, H] -> [N, H]."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        return x + nn.functional.silu(self.linear(x))


class MedusaHead(Head):
    """See the module's equations and `protocol.Head`. `head.modules` is K."""

    kind = "medusa"

    def __init__(
        self, config: HeadConfig, target_config: Any, draft_vocab_size: int | None = None
    ) -> None:
        super().__init__(config, target_config, draft_vocab_size)
        size = int(target_config.hidden_size)
        self.heads = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(size) for _ in range(config.num_layers)))
            for _ in range(config.modules)
        )
        if config.own_lm_heads:
            rows = int(target_config.vocab_size) if draft_vocab_size is None else draft_vocab_size
            self.lm_head = nn.Parameter(torch.zeros(config.modules, rows, size))
        self.num_layers = 0
        self.max_steps = config.modules
        self.recycle = recycle_spec(config)

    def forward(
        self,
        embeds: Tensor,
        hidden: Tensor,
        positions: Tensor,
        context: AttentionContext,
        step: int = 0,
    ) -> HeadStep:
        """See `Head.forward`; the state is passed on as it came, so that every step reads it."""
        return HeadStep(hidden, self.heads[step](hidden))

    def start(self, start: Start) -> None:
        """See `Head.start`; blocks of zeros add nothing, so the head begins with the target's own
        next token."""
        for name, value in self.heads.named_parameters():
            if name.endswith("bias") or start.passes_through:
                nn.init.zeros_(value)
            else:
                start.random(value)
        if self.lm_head is not None:
            rows = start.trunk.lm_head_weight(start.draft_ids)
            self.lm_head.copy_(rows * start.trunk.logit_scale)
