"""Decoder layers of the Llama family over the pages, on a CPU: all layers of a pass in one call.

    x' = x  + attend(turn(norm(x) Wqkv^T + b)) Wo^T        q and k of each head normed, or not
    y  = x' + (silu(g) * u) Wd^T                           [g ; u] = norm(x') [G ; U]^T

In a pass of few rows the steps beside the products are short, and calling them one by one costs as
much as they do. Here one team of threads goes through all of it; each step is the very function
that the op beside it runs (`packed_linear`, `few_rows`, `rotary`, `rms_norm`, `kv_append`), so the
result is bit for bit that of the ops called in turn, which is the definition (`models.lean`). For
bfloat16 where the products have their own form; sequences have at most `few_rows.MOST` rows.

In a pass of many rows all but the attention is a row's own. There (`DecoderPass.between`) each
thread takes blocks of rows from one attention to the next, through all steps while they lie in its
cache, again with the very functions of the ops beside.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from . import few_rows
from .native import INTEGER, POINTER, Native
from .packed_linear import GatedLinear, PackedLinear
from .paged_attention import PagedRows

_NATIVE = Native(
    "decoder_pass",
    {
        "usable": [],
        "decoder_pass": [POINTER, POINTER, POINTER, INTEGER],
        "between": [POINTER, POINTER, POINTER, POINTER, POINTER, POINTER],
    },
    returns=("usable",),
)


@dataclass(frozen=True)
class Norm:
    """RMSNorm: weight [H] (or [D] of one head) and eps; no weight is the identity."""

    weight: Tensor | None = None
    eps: float = 0.0


@dataclass(frozen=True)
class LayerWeights:
    """One layer, see the module's equations. bias: [(Hq + 2 Hk) D] or None; window: a row sees at
    most this many keys, None = all."""

    input_norm: Norm
    qkv: PackedLinear
    bias: Tensor | None
    q_norm: Norm
    k_norm: Norm
    o: PackedLinear
    mlp_norm: Norm
    gated: GatedLinear
    down: PackedLinear
    window: int | None


@dataclass(frozen=True)
class PagedLayers:
    """Where the layers of a pass find and leave their keys.

    Attributes:
        rows: whose rows they are, of which each sequence has few. slots: [N] int64,
            -1 for a row that is not stored. keys, values: by layer [Hk, S, D], alike in strides.
    """

    rows: PagedRows
    slots: Tensor
    keys: list[Tensor]
    values: list[Tensor]


class _Norm(ctypes.Structure):
    _fields_ = [("weight", ctypes.c_void_p), ("eps", ctypes.c_double)]


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, _Norm) for name in ("input", "mlp", "q", "k")),
        *((name, ctypes.c_void_p) for name in ("qkv", "bias", "o", "gated", "down")),
        ("window", ctypes.c_int64),
    ]


class _Pass(ctypes.Structure):
    _fields_ = [
        ("shape", few_rows.Shape),
        *((name, ctypes.c_void_p) for name in ("slots", "x", "read", "cos", "sin")),
        *((name, ctypes.c_int64) for name in ("rows", "size", "inner", "read_size")),
        *((name, ctypes.c_int64) for name in ("cos_stride", "sin_stride")),
    ]


class DecoderPass:
    """Several layers of one shape, to be run in one call.

    Args:
        layers: their weights, which are kept. head_dim: D. scaling: factor of the scores.
    """

    def __init__(self, layers: list[LayerWeights], head_dim: int, scaling: float) -> None:
        self.layers = layers
        self.head_dim = head_dim
        self.scaling = scaling
        self._table = (_Layer * len(layers))(*map(_described, layers))

    @staticmethod
    def supports(layers: Iterable[LayerWeights]) -> bool:
        """Whether these layers can be run so on this machine."""
        return all(
            layer.qkv.tiled
            and layer.o.tiled
            and layer.down.tiled
            and layer.gated.both is not None
            and all(one.dtype == torch.bfloat16 and one.is_contiguous() for one in _vectors(layer))
            for layer in layers
        ) and (_NATIVE.library is not None and bool(_NATIVE.library.usable()))

    def __call__(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        pages: PagedLayers,
        kept: Iterable[int] = (),
        read: Tensor | None = None,
    ) -> dict[int, Tensor]:
        """Run them.

        Args:
            x: [N, H] bfloat16, what enters the first layer. cos, sin: [N, D], see `rotate`. kept:
                which layers' results are wanted beside the last one's. read: what the first
                layer's attention reads in place of its normed input, [N, H] or wider, where its
                projections are.
        Returns:
            [N, H] by layer.
        """
        x, weights, rows = x.contiguous(), self.layers[0], pages.rows
        read = None if read is None else read.contiguous()
        assert x.dtype == cos.dtype == sin.dtype == torch.bfloat16
        assert cos.stride(1) == sin.stride(1) == 1
        assert rows.most_rows <= few_rows.MOST
        keys, values, width = pages.keys[0], pages.values[0], weights.qkv.out_features
        assert keys.dtype == torch.bfloat16 and pages.slots.dtype == torch.int64
        assert pages.slots.is_contiguous()
        assert all(one.stride() == keys.stride() for one in pages.keys)
        assert all(one.stride() == values.stride() for one in pages.values)
        heads = width // self.head_dim - 2 * keys.shape[0]
        last = len(self.layers) - 1
        results = {index: torch.empty_like(x) for index in {*kept, last}}
        passed = torch.empty_like(x)  # what nobody wants to keep
        places = (ctypes.c_void_p * (3 * len(self.layers)))()
        for index in range(len(self.layers)):
            places[3 * index : 3 * index + 3] = (
                pages.keys[index].data_ptr(),
                pages.values[index].data_ptr(),
                results.get(index, passed).data_ptr(),
            )
        shape = few_rows.shape_of(
            rows, heads, keys, values, (self.head_dim, width), self.scaling, None, None
        )
        asked = _Pass(
            shape,
            pages.slots.data_ptr(),
            x.data_ptr(),
            None if read is None else read.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            x.shape[0],
            x.shape[1],
            weights.gated.out_features,
            0 if read is None else read.shape[1],
            cos.stride(0),
            sin.stride(0),
        )
        _NATIVE.functions.decoder_pass(
            ctypes.addressof(asked), self._table, places, len(self.layers)
        )
        return results

    def between(
        self,
        done: int | None,
        mixed: Tensor | None,
        x: Tensor,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        *,
        keep: bool,
    ) -> Tensor:
        """From the attention of one layer to that of the next.

        Args:
            done: the layer whose attention is done; None before the first. mixed: [N, Hq D], what
                it gave. x: [N, H] bfloat16, what entered that layer. qkv: [N, (Hq + 2 Hk) D],
                overwritten by the next layer's normed and turned heads, where there is a next.
                cos, sin: [N, D], see `rotate`. keep: leave x as it is.
        Returns:
            [N, H], what enters the next layer; x itself, overwritten, where it is not kept.
        """
        following = 0 if done is None else done + 1
        assert x.is_contiguous() and qkv.is_contiguous() and x.dtype == qkv.dtype == torch.bfloat16
        assert mixed is None or (mixed.is_contiguous() and mixed.dtype == torch.bfloat16)
        assert cos.dtype == sin.dtype == torch.bfloat16 and cos.stride(1) == sin.stride(1) == 1
        weights, out = self.layers[0], torch.empty_like(x) if keep else x
        heads = weights.o.in_features // self.head_dim
        shape = few_rows.Shape(
            heads=heads,
            key_heads=(qkv.shape[1] // self.head_dim - heads) // 2,
            width=self.head_dim,
            q_row=qkv.shape[1],
        )
        asked = _Pass(
            shape=shape,
            x=x.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            rows=x.shape[0],
            size=x.shape[1],
            inner=weights.gated.out_features,
            cos_stride=cos.stride(0),
            sin_stride=sin.stride(0),
        )
        _NATIVE.functions.between(
            ctypes.addressof(asked),
            None if done is None else ctypes.addressof(self._table[done]),
            ctypes.addressof(self._table[following]) if following < len(self.layers) else None,
            None if mixed is None else mixed.data_ptr(),
            out.data_ptr(),
            qkv.data_ptr(),
        )
        return out


def _vectors(layer: LayerWeights) -> list[Tensor]:
    """The layer's weights that are no matrices."""
    norms = (layer.input_norm, layer.q_norm, layer.k_norm, layer.mlp_norm)
    found = (layer.bias, *(norm.weight for norm in norms))
    return [one for one in found if one is not None]


def _described(layer: LayerWeights) -> _Layer:
    def norm(one: Norm) -> _Norm:
        return _Norm(None if one.weight is None else one.weight.data_ptr(), one.eps)

    both = layer.gated.both
    assert both is not None
    return _Layer(
        norm(layer.input_norm),
        norm(layer.mlp_norm),
        norm(layer.q_norm),
        norm(layer.k_norm),
        layer.qkv.weight.data_ptr(),
        None if layer.bias is None else layer.bias.data_ptr(),
        layer.o.weight.data_ptr(),
        both.data_ptr(),
        layer.down.weight.data_ptr(),
        layer.window or 0,
    )
