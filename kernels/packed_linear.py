"""y = x W^T with the weight laid out once for the processor, and the elementwise step that follows
it fused in.

On a CPU, oneDNN multiplies few rows up to three times faster when the weight is already in its
blocked layout, and applies an activation, a product or a residual sum to the result while it is
still in a register (accumulated in float32). Elsewhere, and for dtypes oneDNN does not pack, the
plain definition runs. Inference only: no gradient.

    none      x W^T
    silu      silu(x W^T)
    mul       (x W^T) * other
    add       (x W^T) + other
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_PACKABLE = (torch.float32, torch.bfloat16)


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


class PackedLinear:
    """A frozen linear map without bias.

    Args:
        weight: [out, in]; packed here into a copy where that pays, kept as it is elsewhere.
    """

    def __init__(self, weight: Tensor) -> None:
        weight = weight.detach()
        self.out_features, self.in_features = weight.shape
        self.packed = can_pack(weight)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self.packed else weight

    def __call__(self, x: Tensor, then: str = "none", other: Tensor | None = None) -> Tensor:
        """x [N, in] (and other [N, out] for mul and add) -> [N, out], see the module's table."""
        if not self.packed:
            return linear_reference(x, self.weight, then, other)
        op = torch.ops.mkldnn._linear_pointwise
        if then == "none":
            return op(x, self.weight, None, "none", [], "")
        if then == "silu":
            return op(x, self.weight, None, "swish", [], "")
        assert then in ("mul", "add") and other is not None
        return op.binary(x, other, self.weight, None, then)
