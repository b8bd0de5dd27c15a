"""The MTP head (DeepSeek-V3, arXiv 2412.19437, eq. 21-23): D modules, the last one recycled.

    z_p = W [enorm(E x_{p+1+k}) ; hnorm(h)]        z: [N, H], W: [H, 2H], no bias
    g_p = norm(layer(z)_p)                         layer: one decoder layer of the target's family
    q_p = softmax(lm_head g_p)                     predicts x_{p+2+k}; E and lm_head: the target's

Step 0 feeds h = h_p, the target's state after its final norm; step k feeds g of step k-1 at
position p+k. What a family does otherwise its `RecycleSpec` says, and everything here reads it
there: the order of the two parts, layer(z)_p recycled before the norm, E x zeroed at position 0.

Step k is module min(k, D-1). Each module attends over what it wrote itself; with D = 1 those are
the rows of step 0 and the chain's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.packed_linear import PackedLinear
from ..attention import AttentionContext
from ..layer import decoder_layer, drop_input_norm
from ..lean import LeanLayer, LeanRotary
from ..norm import RMSNorm, side_by_side
from ..trunk import Trunk
from .config import HeadConfig, RecycleSpec, recycle_spec
from .protocol import Head, HeadFunction, HeadStep
from .start import Start


class FusedModule(nn.Module):
    """One module: see the equations above.

    Args:
        config: the head's shape. target_config: transformers' configuration of the target. index:
            how the attention context knows its layer.
    """

    def __init__(self, config: HeadConfig, target_config: Any, index: int) -> None:
        super().__init__()
        size, eps = int(target_config.hidden_size), float(target_config.rms_norm_eps)
        norms = config.norms
        self.layer, rotary = decoder_layer(target_config, index)
        style = next((m.style for m in self.layer.modules() if isinstance(m, RMSNorm)), "rms")
        self.recycle = recycle_spec(config, style)
        self.enorm = RMSNorm(size, eps, style) if norms.embedding else nn.Identity()
        self.hnorm = RMSNorm(size, eps, style) if norms.hidden else nn.Identity()
        self.eh_proj = nn.Linear(2 * size, size, bias=config.projection_bias)
        self.norm = RMSNorm(size, eps, style) if norms.output else nn.Identity()
        if not norms.attention_input:
            drop_input_norm(self.layer)
        self.rotary = rotary

    def forward(
        self, embeds: Tensor, hidden: Tensor, positions: Tensor, context: AttentionContext
    ) -> HeadStep:
        """[N, H] embeddings and states -> what is recycled and drafted, [N, H] each."""
        fused = self.eh_proj(self.read(embeds, hidden, positions))
        out = self.layer(
            fused[None],
            attention_mask=None,
            position_ids=positions[None],
            position_embeddings=self.rotary(fused[None], positions[None]),
            draftsmith=context,
        )
        return self.result((out[0] if isinstance(out, tuple) else out)[0])

    def read(self, embeds: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        """What the projection reads, [N, 2H]: both parts normed, side by side as `fusion_order`
        says."""
        if self.recycle.mask_position_zero:
            embeds = embeds.masked_fill((positions == 0)[:, None], 0.0)
        parts = {"embedding": (self.enorm, embeds), "hidden": (self.hnorm, hidden)}
        first, second = (parts[name] for name in self.recycle.fusion_order)
        return side_by_side(*first, *second)

    def result(self, x: Tensor) -> HeadStep:
        """The layer's output [N, H], normed to be drafted from, recycled as `recycled` says."""
        drafted = self.norm(x)
        return HeadStep(drafted if self.recycle.recycled == "post-output-norm" else x, drafted)

    def start(self, start: Start) -> None:
        """See `Head.start`."""
        frame = start.frame(self.norm)
        start.layer(self.layer, frame)
        start.output_norm(self.norm)
        weight = self.eh_proj.weight
        if self.eh_proj.bias is not None:
            nn.init.zeros_(self.eh_proj.bias)
        if not start.passes_through:
            start.random(weight)
            return
        embeds = 1.0 if isinstance(self.enorm, RMSNorm) else start.embedding_rms
        hidden = 1.0 if isinstance(self.hnorm, RMSNorm) else start.normed_rms
        identity = torch.diag(frame * start.state_rms)
        share = start.init.embedding_share / embeds
        parts = {"embedding": share * identity, "hidden": identity / hidden}
        weight.copy_(torch.cat([parts[name] for name in self.recycle.fusion_order], 1))


class MTPHead(Head):
    """See the module's equations and `protocol.Head`."""

    kind = "mtp"

    def __init__(
        self, config: HeadConfig, target_config: Any, draft_vocab_size: int | None = None
    ) -> None:
        super().__init__(config, target_config, draft_vocab_size)
        self.blocks = nn.ModuleList(
            FusedModule(config, target_config, index) for index in range(config.modules)
        )
        self.num_modules = self.num_layers = config.modules
        first = self.blocks[0]
        assert isinstance(first, FusedModule)
        self.recycle: RecycleSpec = first.recycle

    def forward(
        self,
        embeds: Tensor,
        hidden: Tensor,
        positions: Tensor,
        context: AttentionContext,
        step: int = 0,
    ) -> HeadStep:
        """See `Head.forward`; recycled and drafted are one tensor, unless the former is raw."""
        block = self.blocks[min(step, self.num_modules - 1)]
        return block(embeds, hidden, positions, context)

    def start(self, start: Start) -> None:
        """See `Head.start`; every module starts alike."""
        for block in self.blocks:
            assert isinstance(block, FusedModule)
            block.start(start)

    def lean(self) -> HeadFunction:
        """See `Head.lean`."""
        return _LeanMTP(self)


class _LeanModule:
    """`FusedModule.forward` with packed weights and a lean layer."""

    def __init__(self, block: Any, index: int) -> None:
        self.source = block
        self.projection = PackedLinear(block.eh_proj.weight)
        self.layer = LeanLayer(block.layer, index)
        self.rotary = LeanRotary(block.rotary)

    def __call__(
        self, embeds: Tensor, hidden: Tensor, positions: Tensor, context: AttentionContext
    ) -> HeadStep:
        fused = self.projection(self.source.read(embeds, hidden, positions))
        if self.source.eh_proj.bias is not None:
            fused = fused + self.source.eh_proj.bias
        cos, sin = self.rotary(fused, positions)
        return self.source.result(self.layer(fused, cos, sin, context))


class _LeanMTP:
    """`MTPHead` from lean modules."""

    def __init__(self, head: MTPHead) -> None:
        self.modules = [_LeanModule(block, index) for index, block in enumerate(head.blocks)]
        self.source = head

    def feed(self, states: dict[int, Tensor], trunk: Trunk) -> Tensor:
        """See `Head.feed`."""
        return self.source.feed(states, trunk)

    def __call__(
        self,
        embeds: Tensor,
        hidden: Tensor,
        positions: Tensor,
        context: AttentionContext,
        step: int = 0,
    ) -> HeadStep:
        module = self.modules[min(step, len(self.modules) - 1)]
        return module(embeds, hidden, positions, context)
