"""The MTP head: one module, recycled K times (DeepSeek-V3, arXiv 2412.19437, eq. 21-23, D = 1).

    z_p = W [enorm(E x_{p+1}) ; hnorm(h_p)]        z: [N, H], W: [H, 2H], no bias
    g_p = norm(layer(z)_p)                         layer: one decoder layer of the target's family
    q_p = softmax(lm_head g_p)                     predicts x_{p+2}; E and lm_head: the target's

Step k feeds g of step k-1 in place of h, with token x_{p+1+k} at position p+k.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.packed_linear import PackedLinear
from ..attention import AttentionContext
from ..layer import decoder_layer
from ..lean import LeanLayer, LeanStack, lean_rotary
from ..norm import RMSNorm
from .config import HeadConfig, RecycleSpec

HeadFunction = Callable[[Tensor, Tensor, Tensor, AttentionContext], Tensor]


class MTPHead(nn.Module):
    """See the module's equations.

    Args:
        config: the head's shape. target_config: transformers' configuration of the target.
    """

    kind = "mtp"
    rotary: nn.Module

    def __init__(self, config: HeadConfig, target_config: Any) -> None:
        super().__init__()
        size, eps = int(target_config.hidden_size), float(target_config.rms_norm_eps)
        self.config = config
        self.target_config = target_config
        self.layer, rotary = decoder_layer(target_config)
        style = next((m.style for m in self.layer.modules() if isinstance(m, RMSNorm)), "rms")
        self.recycle = RecycleSpec(norm_style=style)
        self.enorm = RMSNorm(size, eps, style) if config.norms.embedding else nn.Identity()
        self.hnorm = RMSNorm(size, eps, style) if config.norms.hidden else nn.Identity()
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.norm = RMSNorm(size, eps, style) if config.norms.output else nn.Identity()
        if not config.norms.attention_input:
            self.layer.input_layernorm = nn.Identity()
        # A plain attribute: rotary tables follow from the configuration and belong in no
        # checkpoint.
        self.__dict__["rotary"] = rotary

    @property
    def num_layers(self) -> int:
        """How many layers of keys and values the engine must hold for this head."""
        return 1

    def forward(
        self, embeds: Tensor, hidden: Tensor, positions: Tensor, context: AttentionContext
    ) -> Tensor:
        """One step over packed rows.

        Args:
            embeds: [N, H] embeddings of x_{p+1+k}. hidden: [N, H] what is fed (see `RecycleSpec`).
            positions: [N] int64, p + k. context: what each row may see.
        Returns:
            [N, H]: read by lm_head, and the next step's `hidden`.
        """
        fused = self.eh_proj(torch.cat([self.enorm(embeds), self.hnorm(hidden)], -1))
        out = self.layer(
            fused[None],
            attention_mask=None,
            position_ids=positions[None],
            position_embeddings=self.rotary(fused[None], positions[None]),
            draftsmith=context,
        )
        return self.norm((out[0] if isinstance(out, tuple) else out)[0])

    def for_inference(
        self, dtype: torch.dtype, device: torch.device, lean: bool = True
    ) -> HeadFunction:
        """The engine's form of these very weights: the same signature as `forward`, no gradient.

        Llama-family layers run lean; others run the module itself in `dtype`.
        """
        copy = MTPHead(self.config, self.target_config)
        copy.load_state_dict({name: value.detach() for name, value in self.state_dict().items()})
        copy = copy.to(device, dtype).eval().requires_grad_(False)
        copy.__dict__["rotary"] = self.rotary.to(device)
        return _LeanMTP(copy) if lean and LeanStack.supports(self.target_config) else copy


class _LeanMTP:
    """`MTPHead.forward` with packed weights and a lean layer."""

    def __init__(self, head: MTPHead) -> None:
        self.enorm, self.hnorm, self.norm = head.enorm, head.hnorm, head.norm
        self.projection = PackedLinear(head.eh_proj.weight)
        self.layer = LeanLayer(head.layer, 0)
        self.rotary = head.rotary

    def __call__(
        self, embeds: Tensor, hidden: Tensor, positions: Tensor, context: AttentionContext
    ) -> Tensor:
        fused = self.projection(torch.cat([self.enorm(embeds), self.hnorm(hidden)], -1))
        cos, sin = lean_rotary(self.rotary, fused, positions)
        return self.norm(self.layer(fused, cos, sin, context))
