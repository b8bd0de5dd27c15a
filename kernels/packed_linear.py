"""y = x W^T with the weight laid out once for the processor, and the elementwise step that follows
it fused in.

    none      x W^T
    silu      silu(x W^T)
    mul       (x W^T) * other
    add       (x W^T) + other

    GatedLinear    silu(x G^T) * (x U^T)

In bfloat16 on CPUs with AVX-512 products of that type, and where the C++ form can be built
(`native`), one layout serves one row and thousands: few rows read the weights once, at the speed of
the memory, in blocks of matrix tiles where the processor has them. Rows do not depend on what is
beside them: a row's sums are the same in a pass over one and over many. Elsewhere oneDNN's own
blocked layout is used on a CPU, and the plain definition for dtypes that it does not pack and on
other devices. Sums are accumulated in float32 and rounded once. Inference only: no gradient.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .native import INTEGER, POINTER, SMALL, Native

_PACKABLE = (torch.float32, torch.bfloat16)
_THEN = {"none": 0, "silu": 1, "mul": 2, "add": 3, "gate": 4}
_NATIVE = Native(
    "packed_linear",
    {
        "usable": [],
        "pack": [POINTER, POINTER, POINTER, INTEGER, INTEGER],
        "linear": [POINTER, INTEGER, POINTER, POINTER, INTEGER, POINTER]
        + [INTEGER, INTEGER, INTEGER, SMALL, SMALL],
    },
    returns=("usable",),
)
_DEPTH = 32  # the native form takes widths of x that are a multiple of it
_COLUMNS = 16


def linear_reference(
    x: Tensor, weight: Tensor, then: str = "none", other: Tensor | None = None
) -> Tensor:
    """The plain definition. x [N, in], weight [out, in], other [N, out] -> [N, out]."""
    y = F.linear(x, weight)
    if then == "silu":
        return F.silu(y)
    if then in ("mul", "add"):
        assert other is not None
        return y * other if then == "mul" else y + other
    return y


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN packs this weight on this machine."""
    return (
        weight.device.type == "cpu"
        and weight.dtype in _PACKABLE
        and torch.backends.mkldnn.is_available()
        and (weight.dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def can_tile(weight: Tensor) -> bool:
    """Whether the native form takes this weight [out, in] on this machine."""
    if weight.dtype != torch.bfloat16 or weight.shape[1] % _DEPTH or not _NATIVE.serves(weight):
        return False
    return _NATIVE.library is not None and bool(_NATIVE.library.usable())


class PackedLinear:
    """A frozen linear map without bias.

    Args:
        weight: [out, in]; laid out here in a copy where that pays, kept as it is elsewhere.
    """

    def __init__(self, weight: Tensor) -> None:
        weight = weight.detach()
        self.out_features, self.in_features = weight.shape
        self.tiled = can_tile(weight)
        self.packed = not self.tiled and can_pack(weight)
        if self.tiled:
            self.weight = _tiles(weight, None)
        elif self.packed:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        else:
            self.weight = weight

    def __call__(self, x: Tensor, then: str = "none", other: Tensor | None = None) -> Tensor:
        """x [N, in] (and other [N, out] for mul and add) -> [N, out], see the module's table."""
        if self.tiled:
            return _product(x, self.weight, self.out_features, then, other)
        if not self.packed:
            return linear_reference(x, self.weight, then, other)
        op = torch.ops.mkldnn._linear_pointwise
        if then == "none":
            return op(x, self.weight, None, "none", [], "")
        if then == "silu":
            return op(x, self.weight, None, "swish", [], "")
        assert then in ("mul", "add") and other is not None
        return op.binary(x, other, self.weight, None, then)

    def widened(self, x: Tensor) -> Tensor:
        """x W^T, rounded to its own dtype and given in at least float32: what `self(x).float()` is,
        without the copy where the native form runs."""
        if self.tiled:
            return _product(x, self.weight, self.out_features, "none", None, torch.float32)
        y = self(x)
        return y.to(torch.promote_types(y.dtype, torch.float32))


class GatedLinear:
    """silu(x G^T) * (x U^T), frozen; one product where the native form runs.

    Args:
        gate, up: [out, in].
    """

    def __init__(self, gate: Tensor, up: Tensor) -> None:
        gate, up = gate.detach(), up.detach()
        assert gate.shape == up.shape and gate.dtype == up.dtype
        self.out_features = gate.shape[0]
        self.both = _tiles(gate, up) if can_tile(gate) else None
        self.parts = None if self.both is not None else (PackedLinear(gate), PackedLinear(up))

    def __call__(self, x: Tensor) -> Tensor:
        """x [N, in] -> [N, out]."""
        if self.both is not None:
            return _product(x, self.both, self.out_features, "gate", None)
        assert self.parts is not None
        gate, up = self.parts
        return up(x, "mul", gate(x, "silu"))


def _tiles(weight: Tensor, second: Tensor | None) -> Tensor:
    """[blocks, 2, 32/2, 16, 2], see packed_linear.cpp: pairs of blocks of one matrix, or one of
    each of two."""
    out, size = weight.shape
    weight = weight.contiguous()
    second = None if second is None else second.contiguous()
    pairs = -(-out // (_COLUMNS if second is not None else 2 * _COLUMNS))
    packed = weight.new_empty(pairs * (size // _DEPTH), 2, _DEPTH // 2, _COLUMNS, 2)
    _NATIVE.functions.pack(
        weight.data_ptr(),
        None if second is None else second.data_ptr(),
        packed.data_ptr(),
        out,
        size,
    )
    return packed


def _product(
    x: Tensor,
    weight: Tensor,
    out: int,
    then: str,
    other: Tensor | None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    assert x.dtype == torch.bfloat16 and (other is None or other.dtype == torch.bfloat16)
    x = x if x.stride(1) == 1 else x.contiguous()
    if other is not None and other.stride(1) != 1:
        other = other.contiguous()
    y = x.new_empty(x.shape[0], out, dtype=dtype)
    assert (other is not None) == (then in ("mul", "add"))
    _NATIVE.functions.linear(
        x.data_ptr(),
        x.stride(0),
        weight.data_ptr(),
        None if other is None else other.data_ptr(),
        0 if other is None else other.stride(0),
        y.data_ptr(),
        x.shape[0],
        out,
        x.shape[1],
        _THEN[then],
        dtype == torch.float32,
    )
    return y
