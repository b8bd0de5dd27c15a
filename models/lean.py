"""Decoder layers of the Llama family and its relatives without the overhead: fused weights, packed
once, nine calls a layer, or one for all layers.

In a decode pass of a small target, module calls and unfused elementwise steps cost as much as the
matrix products. These layers compute the same function from the same weights (tests hold them
against transformers' own in float64); they carry no gradient. q, k and v are one product; the
activation, the gate's product and both residual sums ride on the products that precede them. Where
the rows of a pass are few in every sequence, all layers are one call (`kernels.decoder_pass`); of
many rows, all between two attentions is one. Both are bit for bit the same.

    llama     as it is
    mistral   a sliding window
    qwen2     biases of q, k and v, a sliding window on some layers
    qwen3     norms of each head's q and k, a sliding window on some layers
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.decoder_pass import DecoderPass, LayerWeights, Norm
from ..kernels.packed_linear import GatedLinear, PackedLinear
from ..kernels.rotary import rotate
from .attention import AttentionContext, OverPages
from .norm import RMSNorm, added, own_norm

_MANY = 128
"""Rows a thread from which on a pass goes in blocks of rows."""
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


class LeanLayer:
    """One decoder layer.

    Args:
        layer: a `LlamaDecoderLayer` (or a relative's); its weights are copied in packed
            form.
        index: how the attention context knows this layer.
    """

    def __init__(self, layer: Any, index: int) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.index = index
        self.head_dim = int(attention.head_dim)
        self.scaling = float(attention.scaling)
        self.q_heads = attention.q_proj.weight.shape[0] // self.head_dim
        self.kv_heads = attention.k_proj.weight.shape[0] // self.head_dim
        self.qkv = PackedLinear(
            torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
        )
        biases = [p.bias for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
        self.bias = None if biases[0] is None else torch.cat(biases).detach()
        self.head_norms = [
            _inference_norm(getattr(attention, name))
            for name in ("q_norm", "k_norm")
            if hasattr(attention, name)
        ]
        own = getattr(attention.config, "sliding_window", None)
        self.window: int | None = getattr(attention, "sliding_window", own)
        self.o = PackedLinear(attention.o_proj.weight)
        self.gated = GatedLinear(mlp.gate_proj.weight, mlp.up_proj.weight)
        self.down = PackedLinear(mlp.down_proj.weight)
        self.input_norm = _inference_norm(layer.input_layernorm)
        self.mlp_norm = _inference_norm(layer.post_attention_layernorm)
        # Of a layer that ranks hold between them (`shard`), these two give a part of their sum.
        self.o = _summed(attention.o_proj, self.o)
        self.down = _summed(mlp.down_proj, self.down)
        # Whether o's product adds the residual itself; else the norm that reads the sum does.
        self.sum_rides = isinstance(self.o, _Summed) or self.o.packed or self.o.tiled

    @cached_property
    def weights(self) -> LayerWeights | None:
        """What `DecoderPass` runs this layer from; None where it cannot."""
        if isinstance(self.o, _Summed) or isinstance(self.down, _Summed):
            return None
        plain = Norm()
        norms = [_plain(norm) for norm in (self.input_norm, self.mlp_norm, *self.head_norms)]
        before, between, q, k = [*norms, plain, plain][:4]
        if before is None or between is None or between.weight is None or q is None or k is None:
            return None
        return LayerWeights(
            before, self.qkv, self.bias, q, k, self.o, between, self.gated, self.down, self.window
        )

    @cached_property
    def fused(self) -> DecoderPass | None:
        """This layer in one call, where it can be."""
        return _pass([self])

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, context: AttentionContext) -> Tensor:
        """x [N, H], cos and sin [N, D] (sin with the first half negated) -> [N, H]."""
        if (done := _in_one_call([self], self.fused, x, cos, sin, context)) is not None:
            return done[0]
        return self.step_by_step(self.input_norm(x), x, cos, sin, context)

    def after(
        self, read: Tensor, x: Tensor, cos: Tensor, sin: Tensor, context: AttentionContext
    ) -> Tensor:
        """The layer after its input norm: attention reads `read` [N, H] (or wider, where its
        projections are), x [N, H] is the residual -> [N, H]."""
        if (done := _in_one_call([self], self.fused, x, cos, sin, context, read=read)) is not None:
            return done[0]
        return self.step_by_step(read, x, cos, sin, context)

    def step_by_step(
        self, read: Tensor, x: Tensor, cos: Tensor, sin: Tensor, context: AttentionContext
    ) -> Tensor:
        """`after`, a call for each op."""
        product = self.qkv(read)
        if self.bias is not None:
            product += self.bias
        heads = product.view(x.shape[0], -1, self.head_dim)
        turned = self.q_heads + self.kv_heads
        both = heads[:, :turned].split((self.q_heads, self.kv_heads), 1)
        for norm, part in zip(self.head_norms, both, strict=False):  # or there are none
            part.copy_(norm(part.reshape(-1, self.head_dim)).view(part.shape))
        rotate(heads[:, :turned], cos, sin)
        q, k, v = (
            part.transpose(0, 1)[None]
            for part in heads.split((self.q_heads, self.kv_heads, self.kv_heads), 1)
        )
        mixed = context.attend(
            self.index, q, k, v, scaling=self.scaling, window=self.window, softcap=None
        )
        mixed = mixed.reshape(x.shape[0], -1)
        if self.sum_rides:
            x = self.o(mixed, "add", x)
            h = self.mlp_norm(x)
        else:
            h, x = added(self.o(mixed), x, self.mlp_norm)
        return self.down(self.gated(h), "add", x)


class _Summed:
    """A `PackedLinear` of this rank's columns: y = sum over the ranks, then the step that
    follows."""

    def __init__(self, part: PackedLinear, total: Callable[[Tensor], Tensor]) -> None:
        self.part = part
        self.total = total

    def __call__(self, x: Tensor, then: str = "none", other: Tensor | None = None) -> Tensor:
        """As `PackedLinear`'s, of which a layer's own two uses are known here."""
        assert then == "add" and other is not None
        return self.total(self.part(x)) + other


def _summed(module: Any, part: PackedLinear) -> PackedLinear | _Summed:
    total = getattr(module, "total", None)
    return part if total is None else _Summed(part, total)


class LeanStack:
    """All layers of a decoder; the transformers modules are not kept.

    Args:
        decoder: a `LlamaModel` or a relative's.
    """

    def __init__(self, decoder: Any) -> None:
        self.layers = [LeanLayer(layer, index) for index, layer in enumerate(decoder.layers)]
        self.rotary = LeanRotary(decoder.rotary_emb)
        self.fused = _pass(self.layers)

    @staticmethod
    def supports(config: Any) -> bool:
        """The module's families, with SiLU, without biases but Qwen2's."""
        return (
            config.model_type in FAMILIES
            and config.hidden_act == "silu"
            and not getattr(config, "attention_bias", False)
            and not getattr(config, "mlp_bias", False)
        )

    def forward(
        self,
        embeds: Tensor,
        positions: Tensor,
        context: AttentionContext,
        boundaries: tuple[int, ...],
    ) -> dict[int, Tensor]:
        """See `DecoderStack.forward`."""
        last = len(self.layers)
        unknown = sorted(k for k in boundaries if not 0 <= k <= last)
        if unknown:
            raise ValueError(f"boundaries {unknown}: this target has boundaries 0 to {last}")
        cos, sin = self.rotary(embeds, positions)
        kept = [boundary - 1 for boundary in boundaries if boundary]
        done = _in_one_call(self.layers, self.fused, embeds, cos, sin, context, kept)
        if done is not None:
            below = {0: embeds} if 0 in boundaries else {}
            return below | {layer + 1: states for layer, states in done.items()}
        if self.fused is not None and embeds.shape[0] >= _MANY * torch.get_num_threads():
            return _in_blocks(self.layers, self.fused, embeds, cos, sin, context, boundaries)
        caught: dict[int, Tensor] = {}
        x = embeds
        for layer in self.layers:
            if layer.index in boundaries:
                caught[layer.index] = x
            # What all layers could not do in one call, one of them cannot, either.
            x = layer.step_by_step(layer.input_norm(x), x, cos, sin, context)
        caught[last] = x
        return caught


class LeanRotary:
    """cos and sin of a family's own rotary module, the first half of sin negated for a swap of
    halves. On a CPU they are looked up in a table of all positions so far, which holds the very
    values that the module gives: its dozen small calls are a tenth of a head's pass.

    Args:
        rotary: a `LlamaRotaryEmbedding` or a relative, or our `Rotary`.
    """

    def __init__(self, rotary: nn.Module) -> None:
        self.rotary = rotary
        # There the frequencies change with the longest position of a pass.
        kind = getattr(rotary, "rope_type", "default")
        self.fixed = "dynamic" not in kind and kind != "longrope"
        self.table: tuple[Tensor, Tensor] | None = None

    def __call__(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """like [N, H], for its dtype and device; positions [N] int64 -> [N, D] each."""
        if not self.fixed or like.device.type != "cpu":
            return self._turned(like, positions)
        if self.table is None or self.table[0].dtype != like.dtype:
            self.table = self._turned(like, torch.arange(1024))
        try:
            cos, sin = (each[positions] for each in self.table)
        except IndexError:  # so that positions are looked at where one is beyond the table alone
            self.table = self._turned(like, torch.arange(2 * int(positions.max()) + 2))
            cos, sin = (each[positions] for each in self.table)
        return cos, sin

    def _turned(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.rotary(like[None], positions[None])
        sin = sin[0].clone()
        sin[:, : sin.shape[1] // 2].neg_()
        return cos[0], sin


def _plain(module: nn.Module) -> Norm | None:
    """The norm as `DecoderPass` takes it; None of another style."""
    if isinstance(module, nn.Identity):
        return Norm()
    assert isinstance(module, RMSNorm)
    return Norm(module.weight, module.eps) if module.style == "rms" else None


def _pass(layers: list[LeanLayer]) -> DecoderPass | None:
    weights = [layer.weights for layer in layers if layer.weights is not None]
    if len(weights) < len(layers) or not DecoderPass.supports(weights):
        return None
    return DecoderPass(weights, layers[0].head_dim, layers[0].scaling)


def _in_one_call(
    layers: list[LeanLayer],
    fused: DecoderPass | None,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    context: AttentionContext,
    kept: Iterable[int] = (),
    read: Tensor | None = None,
) -> dict[int, Tensor] | None:
    """Results [N, H] by layer of what can be run in one call here (see `DecoderPass`), else
    None."""
    if fused is None or not isinstance(context, OverPages):
        return None
    first = layers[0]
    like = x.new_empty(first.kv_heads, 1, first.head_dim)
    pages = context.few_rows(range(first.index, first.index + len(layers)), like)
    return None if pages is None else fused(x, cos, sin, pages, kept, read)


def _in_blocks(
    layers: list[LeanLayer],
    fused: DecoderPass,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    context: AttentionContext,
    boundaries: tuple[int, ...],
) -> dict[int, Tensor]:
    """Boundaries, and the last one always, of a pass of many rows (see `DecoderPass.between`)."""
    x, rows, first = x.contiguous(), x.shape[0], layers[0]
    caught = {0: x}
    qkv = x.new_empty(rows, first.qkv.out_features)
    fused.between(None, None, x, qkv, cos, sin, keep=False)
    for done, layer in enumerate(layers):
        q, k, v = (
            part.transpose(0, 1)[None]
            for part in qkv.view(rows, -1, layer.head_dim).split(
                (layer.q_heads, layer.kv_heads, layer.kv_heads), 1
            )
        )
        mixed = context.attend(
            layer.index, q, k, v, scaling=layer.scaling, window=layer.window, softcap=None
        )
        mixed = mixed.reshape(rows, -1).contiguous()
        keep = done == 0 or done in boundaries  # the first is the caller's
        x = fused.between(done, mixed, x, qkv, cos, sin, keep=keep)
        caught[done + 1] = x
    return {k: state for k, state in caught.items() if k in boundaries or k == len(layers)}


def _inference_norm(module: nn.Module) -> nn.Module:
    """The layer's norm without a gradient; a norm that was switched off stays the identity."""
    norm = module if isinstance(module, nn.Identity) else own_norm(module)
    return norm.requires_grad_(False)
