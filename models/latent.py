"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) on latents themselves.

Of each row the family makes a latent c (width r = kv_lora_rank, normed) and a key part k_pe that is
turned (qk_rope_head_dim) and shared by all heads; the keys and values of head h follow from them:

    k_h = [W_UK,h c ; k_pe]        v_h = W_UV,h c

Both products can be moved to the other side of the attention:

    q_h . k_h      = [W_UK,h^T q_nope,h ; q_pe,h] . [c ; k_pe]
    sum_j p_j v_hj = W_UV,h sum_j p_j c_j

So the pages hold one key head [c ; k_pe] for all query heads, whose first r columns are the values:
r + qk_rope_head_dim numbers a row (DeepSeek-V3: 576) where expanded heads are
H * (qk_nope_head_dim + qk_rope_head_dim + v_head_dim) (40,960). A pair of query and key costs more
(2r + rope products a head against nope + rope + v), which is why rows without a past, of which
nothing is kept, are run expanded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .attention import AttentionContext, PackedContext

_FAMILIES = {
    "deepseek_v2": "DeepseekV2Attention",
    "deepseek_v3": "DeepseekV3Attention",
    "glm4_moe_lite": "Glm4MoeLiteAttention",
    "youtu": "YoutuAttention",
}
"""Families whose attention is the one above, and their classes in transformers, which make keys and
values of latents in the method `expand_kv`."""


class LatentAttention(nn.Module):
    """A family's own attention module, with the up-projections absorbed.

    Projections, norms, rotary convention and scale stay the module's.

    Args:
        attention: one of `_FAMILIES`, in evaluation mode; from now on it hands latents to its
            attention function.
    """

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.attention = attention
        attention.expand_kv = _joined

    def forward(self, *args: Any, draftsmith: AttentionContext, **kwargs: Any) -> Any:
        """As the family's module; [1, N, H] -> [1, N, H] and None."""
        return self.attention(*args, draftsmith=_Absorbed(self.attention, draftsmith), **kwargs)


def latent_width(config: Any) -> int | None:
    """Numbers a row and layer that the pages of such a family hold, None for any other. config:
    transformers' of a target."""
    if config.model_type not in _FAMILIES:
        return None
    return int(config.kv_lora_rank) + int(config.qk_rope_head_dim)


def use_latents(module: nn.Module) -> None:
    """Put `LatentAttention` around every attention of `_FAMILIES` below `module`; others stay as
    they are. For inference alone: names of parameters change."""
    known = set(_FAMILIES.values())
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ in known and not isinstance(parent, LatentAttention):
                setattr(parent, name, LatentAttention(child))


class _Absorbed:
    """The context of a pass, as one layer's attention function sees it."""

    def __init__(self, attention: Any, context: AttentionContext) -> None:
        self.attention = attention
        self.context = context

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """q [1, Hq, N, nope + rope], k [1, 1, N, r + rope], v its first r columns ->
        [1, N, Hq, v_head_dim]."""
        rank = v.shape[-1]
        if isinstance(self.context, PackedContext):
            k, v = type(self.attention).expand_kv(self.attention, v, k[..., rank:])
            return self.context.attend(
                layer, q, k, v, scaling=scaling, window=window, softcap=softcap
            )
        nope = int(self.attention.qk_nope_head_dim)
        up = self.attention.kv_b_proj.weight.view(q.shape[1], -1, rank)  # [Hq, nope + v, r]
        absorbed = torch.cat((q[0, ..., :nope] @ up[:, :nope], q[0, ..., nope:]), -1)
        mixed = self.context.attend(
            layer, absorbed[None], k, v, scaling=scaling, window=window, softcap=softcap
        )
        return (mixed[0].transpose(0, 1) @ up[:, nope:].transpose(1, 2)).transpose(0, 1)[None]


def _joined(latent: Tensor, turned: Tensor) -> tuple[Tensor, Tensor]:
    """[1, 1, N, r] and [1, 1, N, rope] -> keys [1, 1, N, r + rope], values a view of them."""
    keys = torch.cat((latent, turned), -1)
    return keys, keys[..., : latent.shape[-1]]
