"""The EAGLE-3 head (arXiv 2503.01840): raw states of several boundaries, fused.

    g_p = W [h_a ; h_b ; h_c]_p                    step 0; W: [H, B·H] (`fc`), raw states, or normed
                                                   ones (`norm_before_fc`: each, or all as one)
    a_p = attention([enorm(E x_{p+1+k}) ; hnorm(g)])_p        its projections read 2H
    x_p = g_p + a_p;  x_p = x_p + mlp(norm(x_p))   residual g, or hnorm(g) (`norm_before_residual`);
                                                   what is added as in the family's own layer
    ... further decoder layers of the target's family (`num_layers` > 1)
    q_p = softmax(lm_head norm(x_p))               lm_head: the head's own, [Vd, H]; no soft cap

Step k recycles x of step k-1 before the output norm, or after it (`norm_output`).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from ...kernels.packed_linear import PackedLinear
from ..attention import AttentionContext
from ..layer import decoder_layer, drop_input_norm, residual_step, widen
from ..lean import LeanLayer, LeanRotary
from ..norm import RMSNorm, side_by_side
from ..trunk import Trunk
from .config import HeadConfig, recycle_spec
from .protocol import Head, HeadFunction, HeadStep
from .start import Start


class Eagle3Head(Head):
    """See the module's equations and `protocol.Head`.

    Raises:
        ValueError: a target too shallow for the boundaries, or of a family whose attention has no
        q, k and v projections or whose layer is put together in a way of its own.
    """

    kind = "eagle3"

    def __init__(
        self, config: HeadConfig, target_config: Any, draft_vocab_size: int | None = None
    ) -> None:
        super().__init__(config, target_config, draft_vocab_size)
        size, eps = int(target_config.hidden_size), float(target_config.rms_norm_eps)
        parts = [decoder_layer(target_config, index) for index in range(config.num_layers)]
        layers = [layer for layer, _ in parts]
        widen(layers[0], parts[0][1])
        style = next((m.style for m in layers[0].modules() if isinstance(m, RMSNorm)), "rms")
        norms = config.norms
        # The first layer's attention input has the two norms below instead.
        for layer in layers[:1] if norms.attention_input else layers:
            drop_input_norm(layer)
        count = len(self.boundaries)
        self.fc = nn.Linear(count * size, size, bias=config.projection_bias)
        widths = {"none": [], "each": [size] * count, "all": [count * size]}
        self.fed_norms = nn.ModuleList(
            RMSNorm(width, eps, style) for width in widths[config.norm_before_fc]
        )
        self.enorm = RMSNorm(size, eps, style) if norms.embedding else nn.Identity()
        self.hnorm = RMSNorm(size, eps, style) if norms.hidden else nn.Identity()
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(size, eps, style) if norms.output else nn.Identity()
        vocabulary = int(target_config.vocab_size) if draft_vocab_size is None else draft_vocab_size
        self.lm_head = nn.Parameter(torch.zeros(vocabulary, size))
        self.num_layers = config.num_layers
        self.recycle = recycle_spec(config, style)
        self.rotary = parts[0][1]

    @classmethod
    def reads(cls, config: HeadConfig, target_layers: int) -> tuple[int, ...]:
        """See `Head.reads`; the published choice is the stream entering layers 2, L//2 and L-3."""
        chosen = config.boundaries or (2, target_layers // 2, target_layers - 3)
        if list(chosen) != sorted(set(chosen)) or chosen[-1] > target_layers or chosen[0] < 0:
            given = "head.boundaries" if config.boundaries else "the defaults 2, L//2, L-3"
            raise ValueError(
                f"boundaries {list(chosen)} ({given}): a target of {target_layers} layers is too "
                f"shallow for them; set head.boundaries to ascending ids among 0 to {target_layers}"
            )
        return tuple(chosen)

    def feed(self, states: dict[int, Tensor], trunk: Trunk) -> Tensor:
        """See `Head.feed`."""
        return self.fc(self.fused(states))

    def fused(self, states: dict[int, Tensor]) -> Tensor:
        """What `fc` reads: the states [N, H] side by side, normed as `norm_before_fc` says."""
        dtype, norms = self.fc.weight.dtype, list(self.fed_norms)
        parts = [states[k].to(dtype) for k in self.boundaries]
        if self.config.norm_before_fc == "each":
            parts = [norm(part) for norm, part in zip(norms, parts, strict=True)]
        fused = torch.cat(parts, -1)
        return norms[0](fused) if self.config.norm_before_fc == "all" else fused

    def forward(
        self,
        embeds: Tensor,
        hidden: Tensor,
        positions: Tensor,
        context: AttentionContext,
        step: int = 0,
    ) -> HeadStep:
        """See `Head.forward`."""
        read, residual = self.read(embeds, hidden)
        rotary = self.rotary(hidden[None], positions[None])
        first, *others = cast("list[Any]", list(self.layers))
        x = residual_step(first, read, residual, rotary, context)
        for layer in others:
            x = residual_step(layer, None, x, rotary, context)
        return self._result(x)

    def read(self, embeds: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What the first layer's attention reads, [N, 2H], and where the residual stream starts."""
        read = side_by_side(self.enorm, embeds, self.hnorm, hidden)
        normed = read[:, hidden.shape[1] :]
        return read, normed if self.recycle.residual == "post-norm" else hidden

    def _result(self, x: Tensor) -> HeadStep:
        drafted = self.norm(x)
        return HeadStep(drafted if self.recycle.recycled == "post-output-norm" else x, drafted)

    def start(self, start: Start) -> None:
        """See `Head.start`; the highest of the fused boundaries is let through."""
        frame = start.frame(self.norm)
        start.wide_layer(self.layers[0], frame, self.enorm, self.hnorm)
        for layer in list(self.layers)[1:]:
            start.layer(layer, frame)
        start.output_norm(self.norm)
        rows = start.trunk.lm_head_weight(start.draft_ids)
        assert self.lm_head is not None
        self.lm_head.copy_(rows * start.trunk.logit_scale)
        if self.fc.bias is not None:
            nn.init.zeros_(self.fc.bias)
        if start.passes_through:
            size = self.fc.weight.shape[0]
            # A normed state is let through at the size it had.
            gain = start.state_rms if self.fed_norms else 1.0
            self.fc.weight.zero_()
            self.fc.weight[:, -size:] = torch.diag(gain * frame)
        else:
            start.random(self.fc.weight)

    def lean(self) -> HeadFunction:
        """See `Head.lean`."""
        return _LeanEagle3(self)


class _LeanEagle3:
    """`Eagle3Head` with packed weights and lean layers."""

    def __init__(self, head: Eagle3Head) -> None:
        self.source = head
        self.fc = PackedLinear(head.fc.weight)
        self.layers = [LeanLayer(layer, index) for index, layer in enumerate(head.layers)]
        self.rotary = LeanRotary(head.rotary)

    def feed(self, states: dict[int, Tensor], trunk: Trunk) -> Tensor:
        """See `Head.feed`."""
        fused = self.fc(self.source.fused(states))
        return fused if self.source.fc.bias is None else fused + self.source.fc.bias

    def __call__(
        self,
        embeds: Tensor,
        hidden: Tensor,
        positions: Tensor,
        context: AttentionContext,
        step: int = 0,
    ) -> HeadStep:
        head = self.source
        read, residual = head.read(embeds, hidden)
        cos, sin = self.rotary(hidden, positions)
        x = self.layers[0].after(read, residual, cos, sin, context)
        for layer in self.layers[1:]:
            x = layer(x, cos, sin, context)
        return head._result(x)
